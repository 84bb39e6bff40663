"""A campaign: random faults against a live run, and what became of the run.

The run is on machines of this computer, see :class:`convoy.chaos.Machines`. Another run of the
same spec, to which nothing happens, says what samples and losses there must be.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from convoy.audit import Audit, arrays_that_differ, audit
from convoy.chaos.machines import Machines
from pretrain.errors import InputError
from pretrain.observe import StepCommitted, last_event, read_log
from pretrain.spec import JobSpec

_WEIGHTS = {
    "kill": 8, "machine_lost": 6, "drop_network": 4, "nan_gradient": 4, "slow": 3, "disk_full": 3,
    "hang": 2,
}  # fmt: skip
"""How often each kind is drawn. What changes numbers without a sign is left out: no run is exact
after that."""
_LASTING: dict[str, dict[str, Any]] = {
    "slow": {"factor": 3.0, "duration_steps": 2},
    "disk_full": {"duration_steps": 3},
}
_STEPS_APART = 3
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class DrawnFault:
    """One fault of a campaign."""

    kind: str
    step: int
    rank: int

    def table(self) -> dict[str, Any]:
        """The fault as a table of ``[[inject]]``."""
        lasting = _LASTING.get(self.kind, {})
        return {"kind": self.kind, "step": self.step, "rank": self.rank, **lasting}


def draw_faults(seed: int, count: int, steps: int, ranks: int) -> list[DrawnFault]:
    """Faults at different steps, in order, of ranks that train; the last steps have none.

    Raises InputError where ``steps`` are too few for ``count`` faults.
    """
    first, last = 2, steps - 2 * _STEPS_APART
    places = range(first, last + 1, _STEPS_APART)
    if len(places) < count:
        least = first + _STEPS_APART * (count + 1)
        raise InputError(
            f"train.steps ({steps}) must be at least {least} for {count} faults: they are "
            f"{_STEPS_APART} steps apart"
        )
    draw = random.Random(seed)
    kinds = draw.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=count)
    return [
        DrawnFault(kind, step, draw.randrange(ranks))
        for kind, step in zip(kinds, sorted(draw.sample(places, count)), strict=True)
    ]


def run_campaign(
    spec: JobSpec,
    faults: list[DrawnFault],
    folder: Path,
    *,
    machines: int,
    limit_seconds: float,
    say: Callable[[str], None],
) -> Audit:
    """Run a spec undisturbed and under faults, and compare the two runs.

    Args:
        spec: the run; its corpus must be prepared.
        faults: from :func:`draw_faults`.
        folder: for both runs and the machines' output; must be empty or missing.
        machines: how many machines train; one rank each.
        limit_seconds: as long as a run may take.
        say: takes lines for people.

    Raises InputError where ``folder`` has files, or a run does not end in time or as it should.
    """
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"OUT ({folder}) must be empty or missing")
    folder.mkdir(parents=True, exist_ok=True)
    say(f"the undisturbed run of {spec.train.steps} steps on {machines} machines")
    calm = _Launch(spec, folder / "undisturbed", None, machines, limit_seconds)
    calm.run(say)
    say(f"the run under {len(faults)} faults")
    disturbed = _Launch(spec, folder / "faults", faults, machines, limit_seconds)
    disturbed.run(say)
    result = audit(
        read_log(disturbed.log).lines,
        read_log(calm.log).lines,
        disturbed.machines_lost,
        disturbed.ended,
        is_exact=spec.train.exact,
    )
    if not spec.train.exact or not result.samples_exact:
        return result
    differ = arrays_that_differ(disturbed.checkpoints, calm.checkpoints, spec.train.steps)
    return replace(result, arrays=tuple(differ))


def sections_of_run(spec: JobSpec, faults: list[DrawnFault] | None, folder: Path) -> dict[str, Any]:
    """The spec of one run of a campaign, as tables.

    A campaign changes only what it must: where the run writes, that the run goes on with fewer
    machines, and the faults.

    Args:
        spec: the spec of the campaign.
        faults: those that were drawn, which come with the spec's own; None for the undisturbed run,
            which has neither.
        folder: of the run.
    """
    sections = spec.as_dict()
    sections["run_dir"] = str(folder / "run")
    sections["checkpoint"]["path"] = None
    sections["elastic"]["enabled"] = True
    if faults is None:
        sections["inject"] = []
    else:
        own = {(fault.kind, fault.step, fault.rank) for fault in spec.inject}
        sections["inject"] += [
            fault.table()
            for fault in faults
            if fault.kind != "machine_lost" and (fault.kind, fault.step, fault.rank) not in own
        ]
    return sections


class _Launch:
    """One run of a campaign on machines."""

    def __init__(
        self,
        spec: JobSpec,
        folder: Path,
        faults: list[DrawnFault] | None,
        machines: int,
        limit_seconds: float,
    ) -> None:
        self.folder, self.machines, self.limit_seconds = folder, machines, limit_seconds
        folder.mkdir(parents=True)
        self.log = folder / "run" / "log.jsonl"
        self.checkpoints = folder / "run" / "checkpoints"
        sections = sections_of_run(spec, faults, folder)
        self.spec_path = folder / "spec.json"
        self.spec_path.write_text(json.dumps(sections, indent=1))
        self.to_lose = [f for f in faults or [] if f.kind == "machine_lost"]
        self.machines_lost: list[tuple[int, int, float]] = []
        self.ended = 0.0

    def run(self, say: Callable[[str], None]) -> None:
        command = ["-m", "convoy", "pretrain", str(self.spec_path)]
        launch = Machines(
            command, self.folder / "machines", least=max(1, self.machines - 1), most=self.machines
        )
        until = time.monotonic() + self.limit_seconds
        with closing(launch):
            for _ in range(self.machines):
                launch.start()
            while launch.running:
                if time.monotonic() > until:
                    raise InputError(
                        f"the run in {self.folder} did not end within {self.limit_seconds:.0f} s; "
                        f"{self.folder / 'machines'} has what the machines printed"
                    )
                self._lose_machines(launch, say)
                time.sleep(_POLL_SECONDS)
            self.ended = self.log.stat().st_mtime
            if any(launch.exit_codes()):
                raise InputError(
                    f"the run in {self.folder} ended with exit codes {launch.exit_codes()}; "
                    f"{self.folder / 'machines'} has what the machines printed"
                )

    def _lose_machines(self, launch: Machines, say: Callable[[str], None]) -> None:
        """Lose the machine that is due, and let another one come in its place."""
        if not self.to_lose:
            return
        fault, newest = self.to_lose[0], last_event(self.log, StepCommitted)
        if newest is None or newest.step < fault.step:
            return
        running = sorted(launch.processes)
        lost = running[fault.rank % len(running)]
        if not launch.ranks(lost):
            return  # the machine's rank is being started again: the loss waits until the rank runs
        self.to_lose.pop(0)
        launch.lose(lost)
        self.machines_lost.append((newest.step + 1, lost, time.time()))
        say(f"machine {lost} is lost after step {newest.step}")
        launch.start()
