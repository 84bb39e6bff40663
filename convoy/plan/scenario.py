"""What ``convoy simulate`` is told: the cluster, its failures, and how the run answers them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from ckpt.background import TierName
from convoy.plan.causes import Cause, Nature, llama3_causes
from corpus.config import Section
from pretrain.errors import InputError
from pretrain.spec import apply_override, one_line, read_table

MEASURED_SECONDS_PER_GIB = {
    "stall": 0.067,
    "memory durable": 0.87,
    "memory restore": 0.103,
    "local durable": 0.676,
    "local restore": 0.583,
}
"""Convoy's own seconds for 1 GiB of one rank, from ``bench/results/checkpoint.json``: the stall of
an asynchronous save, the asynchronous save and the load on tmpfs, and the asynchronous save and the
load with a cold cache on one local disk."""
_MOST_FAILURES = 10_000_000
"""Failures of all repetitions together: a simulation of so many takes minutes."""
ASSUMED_SECONDS_PER_GIB = {
    "peer durable": 1.0,
    "peer restore": 1.0,
    "shared durable": 30.0,
    "shared restore": 30.0,
}
"""Not measured yet: 1 GiB of each GPU takes a second between two nodes, and half a minute to or
from the shared storage, which all GPUs use at once."""

SURVIVES: dict[TierName, tuple[Nature, ...]] = {
    "memory": ("restart",),
    "peer": ("restart", "reboot", "replace"),
    "local": ("restart", "reboot"),
    "shared": ("restart", "reboot", "replace"),
}
"""After which failures a tier still has every node's part of a checkpoint."""


class RunConfig(Section):
    """The ``[run]`` section: the size and the length of the run."""

    gpus: int = Field(default=16_384, ge=1, le=1_000_000)
    """GPUs that train, spares not among them."""
    gpus_per_node: int = Field(default=8, ge=1, le=1024)
    """GPUs of one node."""
    days: float = Field(default=54.0, gt=0, le=3650)
    """Days of wall time."""
    repetitions: int = Field(default=200, ge=2, le=10_000)
    """Simulated runs; averages and confidence intervals are over these."""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """The seed of all random numbers."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gpus % self.gpus_per_node:
            lower = self.gpus // self.gpus_per_node * self.gpus_per_node
            raise ValueError(
                f"run.gpus ({self.gpus}) must be a multiple of run.gpus_per_node "
                f"({self.gpus_per_node}), {lower or self.gpus_per_node} for example"
            )
        return self

    @property
    def nodes(self) -> int:
        """Nodes that train."""
        return self.gpus // self.gpus_per_node


class FailuresConfig(Section):
    """The ``[failures]`` section: what fails, and how often."""

    table: Literal["llama3", "none"] = "llama3"
    """The published failures to begin with: the 419 unexpected interruptions of Llama 3 in 54 days
    on 16,384 GPUs (arXiv 2407.21783, table 5), or none."""
    causes: dict[str, Cause] = Field(default_factory=dict)
    """Further causes by name; one with the name of a published cause replaces that cause."""
    scale: float = Field(default=1.0, ge=0, le=1000)
    """A factor of all rates: 2 for machines that fail twice as often."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, cause in self.causes.items():
            if (cause.per_gpu_hour is None) == (cause.per_node_hour is None):
                raise ValueError(
                    f"failures.causes.{name}: a cause has one rate: per_gpu_hour "
                    f"({cause.per_gpu_hour}) or per_node_hour ({cause.per_node_hour})"
                )
        return self

    @property
    def all_causes(self) -> dict[str, Cause]:
        """The causes of the table and the further ones, before ``scale``."""
        return (llama3_causes() if self.table == "llama3" else {}) | self.causes


class TierConfig(Section):
    """One place of checkpoints, ``[policy.tiers.NAME]``."""

    enabled: bool = True
    """Whether saves go to the tier at all."""
    every: int = Field(default=1, ge=1, le=1_000_000)
    """One of this many saves goes to the tier. A save that begins while the tier still writes the
    save before is left out of the tier."""
    durable_seconds: float | None = Field(default=None, ge=0)
    """Seconds from the end of a save's stall until the tier can restore the save. The default
    follows from ``policy.state_gib_per_gpu``: a GiB takes 0.87 s in ``memory`` and 0.676 s on a
    ``local`` disk, as measured, and as assumed 1 s to a ``peer`` and 30 s to ``shared``."""
    restore_seconds: float | None = Field(default=None, ge=0)
    """Seconds to load the state from the tier. A GiB takes 0.103 s from ``memory`` and 0.583 s from
    a ``local`` disk, as measured, and as assumed 1 s from a ``peer`` and 30 s from ``shared``."""
    survives: list[Nature] | None = None
    """After failures of which nature the tier still has the whole state. By default ``memory``:
    restart; ``local``: restart and reboot; ``peer`` and ``shared``: all three. Silent corruption
    leaves nothing but ``shared``, the one tier that keeps older saves."""


class TiersConfig(Section):
    """The places of checkpoints, ``[policy.tiers]``."""

    memory: TierConfig = TierConfig()
    """The memory of the own node."""
    peer: TierConfig = TierConfig()
    """The memory of a peer node."""
    local: TierConfig = TierConfig(enabled=False)
    """A disk of the own node, which all GPUs of the node share."""
    shared: TierConfig = TierConfig()
    """The storage that all nodes share."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        survives = self.shared.survives
        if not self.shared.enabled or (survives and set(survives) != set(SURVIVES["shared"])):
            what = f"survives {', '.join(survives or [])}" if self.shared.enabled else "disabled"
            raise ValueError(
                f"policy.tiers.shared ({what}) must be enabled and survive restart, reboot and "
                f"replace: no other tier is there after every failure"
            )
        return self

    @property
    def used(self) -> dict[TierName, TierConfig]:
        """The tiers that saves go to, by name."""
        return {name: getattr(self, name) for name in SURVIVES if getattr(self, name).enabled}


class PolicyConfig(Section):
    """The ``[policy]`` section: how the run saves, notices failures, and goes on."""

    interval_seconds: Literal["best"] | float = "best"
    """Seconds of training between two saves; ``best`` searches for the best interval."""
    state_gib_per_gpu: float = Field(default=4.0, gt=0, le=1024)
    """GiB of weights and optimizer state that one GPU saves."""
    stall_seconds: float | None = Field(default=None, ge=0)
    """What training waits for one save; by default the measured 0.067 s for each GiB of
    ``state_gib_per_gpu``."""
    tiers: TiersConfig = TiersConfig()
    """The places of checkpoints; ``memory``, ``peer`` and ``shared`` by default."""
    spares: Literal["best"] | int = "best"
    """Nodes that wait to take a lost node's place; ``best`` searches for the number with the most
    training for each node, spares counted."""
    repair_hours: float = Field(default=24.0, ge=0, le=24 * 365)
    """Hours until a replaced node is back as a spare."""
    crash_seconds: float = Field(default=30.0, ge=0)
    """From a failure that ends a process until the other processes are stopped."""
    hang_seconds: float = Field(default=300.0, ge=0)
    """From a failure that hangs a collective until the hang is noticed; the default is that of
    ``train.timeout_seconds``."""
    silent_seconds: float = Field(default=3600.0, ge=0)
    """From the first wrong number until a check notices; the steps in between are worth nothing."""
    restart: Literal["whole", "partial", "heal"] = "whole"
    """``whole``: every process starts anew. ``partial``: the surviving processes stay. ``heal``:
    only the processes of a replica of ``nodes_per_replica`` nodes start anew, as long as others
    are left; these go on with the step."""
    restart_seconds: float = Field(default=300.0, ge=0)
    """A whole restart: scheduler, start of Python, joining the group; loading the state not
    counted."""
    partial_restart_seconds: float = Field(default=60.0, ge=0)
    """A partial restart, and the start of one replica's processes; loading the state not
    counted."""
    heal_seconds: float = Field(default=1.0, ge=0)
    """With ``heal``: from the end of a process until the other replicas train again, the step that
    is taken again not counted."""
    step_seconds: float = Field(default=10.0, ge=0)
    """A step of the run. With ``heal`` a failure costs one."""
    reboot_seconds: float = Field(default=600.0, ge=0)
    """The boot of a node, before the restart."""
    when_short: Literal["wait", "elastic"] = "wait"
    """What the run does when no spare is left: ``wait`` for a repaired node, or ``elastic``: go on
    with fewer nodes at proportional speed."""
    nodes_per_replica: int = Field(default=1, ge=1)
    """With ``elastic`` and ``heal``: the run grows and shrinks by this many nodes, those of one
    replica of the model."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.interval_seconds != "best" and self.interval_seconds <= 0:
            raise ValueError(
                f"policy.interval_seconds ({self.interval_seconds}) must be above 0, or best"
            )
        if self.interval_seconds == "best" and self.stall == 0:
            raise ValueError(
                f"policy.stall_seconds ({self.stall_seconds}) must be above 0 with "
                f"policy.interval_seconds = best: with free saves no interval is too short"
            )
        if self.spares != "best" and self.spares < 0:
            raise ValueError(f"policy.spares ({self.spares}) must be at least 0, or best")
        return self

    @property
    def stall(self) -> float:
        """Seconds of one save's stall."""
        if self.stall_seconds is not None:
            return self.stall_seconds
        return MEASURED_SECONDS_PER_GIB["stall"] * self.state_gib_per_gpu

    @property
    def restart_base_seconds(self) -> float:
        """Seconds of a restart without a boot and without loading the state."""
        return self.partial_restart_seconds if self.restart == "partial" else self.restart_seconds

    @property
    def shrinks(self) -> bool:
        """Whether the run goes on with fewer replicas."""
        return self.when_short == "elastic" or self.restart == "heal"


class Scenario(Section):
    """Everything that a simulation is told."""

    run: RunConfig = RunConfig()
    """The size and the length of the run."""
    failures: FailuresConfig = FailuresConfig()
    """What fails, and how often."""
    policy: PolicyConfig = PolicyConfig()
    """How the run saves, notices failures, and goes on."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        unit, nodes = self.policy.nodes_per_replica, self.run.nodes
        if self.policy.shrinks and nodes % unit:
            raise ValueError(
                f"run.gpus ({self.run.gpus}), {nodes} nodes, must be whole replicas of "
                f"policy.nodes_per_replica ({unit}) nodes"
            )
        failures = self.run.days * 86_400 / self.seconds_between_failures
        if failures * self.run.repetitions > _MOST_FAILURES:
            raise ValueError(
                f"run.repetitions ({self.run.repetitions}) must be at most "
                f"{int(_MOST_FAILURES / failures)}, or run.days ({self.run.days:g}) fewer: "
                f"{failures:,.0f} failures of each run are more than can be simulated"
            )
        return self

    @property
    def failures_per_second(self) -> dict[str, float]:
        """Failures of the whole run in a second, by cause."""
        run, scale = self.run, self.failures.scale / 3600
        return {
            name: scale * cause.per_hour(run.gpus, run.nodes)
            for name, cause in self.failures.all_causes.items()
        }

    @property
    def seconds_between_failures(self) -> float:
        """The mean time between failures of the whole run; infinite where nothing fails."""
        rate = sum(self.failures_per_second.values())
        return 1 / rate if rate else float("inf")

    @property
    def nodes_in_repair(self) -> float:
        """The mean number of nodes in repair while the run trains on all its nodes."""
        rates, causes = self.failures_per_second, self.failures.all_causes
        lost = sum(rate for name, rate in rates.items() if causes[name].nature == "replace")
        return lost * self.policy.repair_hours * 3600

    def tier_seconds(self, name: TierName, what: Literal["durable", "restore"]) -> float:
        """Seconds until a save is durable in a tier, or to load a save from the tier."""
        given: float | None = getattr(self.policy.tiers.used[name], f"{what}_seconds")
        if given is not None:
            return given
        per_gib = MEASURED_SECONDS_PER_GIB | ASSUMED_SECONDS_PER_GIB
        # All GPUs of a node share the node's disk.
        sharing = self.run.gpus_per_node if name == "local" else 1
        return per_gib[f"{name} {what}"] * self.policy.state_gib_per_gpu * sharing


def load_scenario(path: Path | None, overrides: Sequence[str] = ()) -> Scenario:
    """Read a scenario, and apply ``section.field=value`` overrides; without a file, the defaults.

    Raises InputError: one line that names the field, the value and the rule.
    """
    data: dict[str, Any] = {} if path is None else read_table(path, "scenario")
    for override in overrides:
        apply_override(data, override)
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        where = "" if path is None else f"scenario {path}: "
        raise InputError(f"{where}{one_line(error, Scenario)}") from None
