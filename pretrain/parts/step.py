"""A step as all ranks see the step, and the parts that judge a step.

A part is one capability of a step, in one folder of ``pretrain/parts``. A part brings columns to
the step barrier, judges the columns of all ranks, wishes, and has a state that checkpoints carry. A
part knows neither the job nor the trainer nor another part. The trainer alone acts, in one fixed
order.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from enum import Enum
from typing import Any, ClassVar, overload

import numpy as np
import torch

from parallel import Topology
from pretrain.data import Division
from pretrain.errors import InputError
from pretrain.observe import Event

Plans = list[list[int]]
"""For each expert group, in rank order, the units of capacity of each of its ranks."""


@dataclass(frozen=True)
class Report:
    """The vector of one rank. All fields are floats: the vector is float64."""

    loss_sum: float
    """Summed negative log-likelihood of the rank's target tokens, in nats."""
    target_tokens: float
    grad_square_sum: float
    """The rank's share of the squared global gradient norm, without the loss scale; a parameter
    that n ranks hold counts 1/n on each."""
    stop_requested: float
    """Why this rank asks to stop: a number of :class:`pretrain.runtime.StopCause`; 0 for no
    request."""
    save_requested: float
    """Whether a save is due by the clock, or a signal asked for a save."""
    step_seconds: float
    """Seconds from the request for a batch to the barrier, waiting in collectives included."""
    data_wait_seconds: float
    exposed_seconds: float
    """The part of ``step_seconds`` in which the rank waited in collectives and computed nothing."""
    expert_rows: float
    """Routed tokens that the rank's experts computed, in all layers."""
    expert_seconds: float
    """Seconds of the rank's experts in the forward pass, waiting for other ranks excluded."""
    bad_layer: float
    """The first layer whose router logits were not finite; -1 where all were finite."""
    data_checksum: float = 0.0
    """Of the sequences that this rank brought to the step, see
    :func:`pretrain.data.data_checksum`; 0 on all but one of the ranks that read the same."""
    regroup_wanted: float = 0.0
    """Whether a replica waits to be taken in."""


_FIELDS = tuple(entry.name for entry in fields(Report))


class Reports(Sequence[Report]):
    """The reports of all ranks, in rank order: a sequence, and columns without a loop over ranks.

    Args:
        rows: [ranks, fields of :class:`Report`] float64, which nobody may change.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    @classmethod
    def of(cls, reports: Iterable[Report]) -> Reports:
        """Of reports in rank order."""
        return cls(np.array([astuple(report) for report in reports], dtype=np.float64))

    def column(self, name: str) -> np.ndarray:
        """[ranks] float64: one field of every report."""
        column: np.ndarray = self.rows[:, _FIELDS.index(name)]
        return column

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Report: ...
    @overload
    def __getitem__(self, index: slice) -> Reports: ...
    def __getitem__(self, index: int | slice) -> Report | Reports:
        if isinstance(index, slice):
            return Reports(self.rows[index])
        return Report(*self.rows[index].tolist())


class Action(Enum):
    """What every rank does next with the step."""

    COMMIT = "commit"
    SKIP = "skip"


@dataclass(frozen=True)
class SkipReason:
    """Why a finite step is skipped."""

    rule: str
    """The kind, as a label of metrics."""
    text: str
    """For people."""


@dataclass(frozen=True)
class Decision:
    """What all ranks do with the step; every rank computes an equal decision."""

    action: Action
    loss: float
    """Mean over the step's target tokens, in nats."""
    grad_norm: float
    """Norm of the gradient of the mean loss, before clipping."""
    target_tokens: int
    stop: bool
    """Some rank was asked to stop: commit a checkpoint after this step and end."""
    stop_cause: int
    """The largest of the ranks' ``stop_requested``."""
    save: bool
    """Some rank asks for a checkpoint of this step."""
    step_seconds: float
    """Seconds of the slowest rank, from its request for a batch to the barrier."""
    data_wait_seconds: float
    """Seconds that the slowest rank waited for its batch."""
    bad_router: tuple[int, int] | None
    """The first layer, and a rank, whose router logits were not finite."""
    loss_scale: float | None = None
    """What the loss was multiplied by; None but in float16."""
    overflow: bool = False
    """Gradients alone were not finite, and the scale can be halved: a skip that is to be expected.
    Where it is 1 already there is nothing to be halved, and no overflow."""
    data_checksum: int = 0
    """Of the sequences of the step, over all ranks."""
    regroup: bool = False
    """A replica waits to be taken in after this step."""
    skipped_for: SkipReason | None = None
    """Why a finite step is skipped; None where no part asked for that."""

    @property
    def reason(self) -> str:
        """What a skipped step was skipped for: the kind."""
        if self.skipped_for is not None:
            return self.skipped_for.rule
        if self.bad_router is not None:
            return "router_not_finite"
        return "overflow" if self.overflow else "not_finite"

    @property
    def why(self) -> str:
        """What a skipped step was skipped for."""
        if self.skipped_for is not None:
            return self.skipped_for.text
        if self.bad_router is not None:
            layer, rank = self.bad_router
            return f"router logits of layer {layer} are not finite on rank {rank}"
        if self.overflow:
            assert self.loss_scale is not None
            return f"gradients overflow with loss scale {self.loss_scale:.0f}; half of it is next"
        return f"loss {self.loss}, grad norm {self.grad_norm}"


@dataclass(frozen=True)
class StepFacts:
    """What every rank knows of a step after the barrier; equal on all ranks."""

    step: int
    """The number of the step, from 1."""
    reports: Reports
    """Of all ranks, in rank order."""
    decision: Decision
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """What parts have brought to the barrier, by ``PART.COLUMN``: [ranks] float64."""
    next_micro_batches: int = 0
    """Micro-batches of the next step, over all ranks; known after a committed step."""
    capacity_changed: bool = False
    """Whether a part before has wished for another plan of capacity."""


@dataclass(frozen=True)
class Wish:
    """What a part asks the trainer for. Every rank's part must wish equally."""

    skip: SkipReason | None = None
    """Do not commit the step, and leave its samples out: the step is taken with the next ones."""
    save: bool = False
    """Save a checkpoint after the step, where the step is committed."""
    stop: bool = False
    """Commit a checkpoint after the step and end, so that the same command goes on."""
    plans: Plans | None = None
    """Capacity of experts from the next step on."""
    division: Division | None = None
    """How coming steps' micro-batches are divided."""
    starts_again: bool = False
    """End after the step, for a start without a machine that was excluded."""


def with_wish(decision: Decision, wish: Wish | None) -> Decision:
    """The decision after a part has judged; an earlier reason to skip stays."""
    if wish is None:
        return decision
    skips = wish.skip is not None and decision.action is Action.COMMIT
    return replace(
        decision,
        action=Action.SKIP if skips else decision.action,
        skipped_for=wish.skip if skips else decision.skipped_for,
        save=decision.save or wish.save,
        stop=decision.stop or wish.stop,
    )


@dataclass(frozen=True)
class PartContext:
    """What a part may know of the run."""

    rank: int
    topology: Topology
    device: torch.device
    publish: Callable[[Event], None]
    """Publishes what happened, on every rank alike."""
    machines: Sequence[str]
    """The machine of each rank, as the exclude list names machines."""
    exclude: Callable[[str, str], bool]
    """``exclude(machine, why)`` puts a machine on the run's exclude list; every rank must call.
    Returns whether the machine is on the list now."""
    goes_on_without: Callable[[int], bool]
    """Whether the launch starts again where this many machines are left; every rank must call."""


class Part:
    """One capability of a step. The methods here do nothing; a part overrides those that it needs.

    All methods are called on every rank, with equal arguments but for :meth:`report`. A part that
    is no part of Convoy is named in the spec, ``train.parts = ["package.module:Class"]``; it is
    made with :class:`PartContext`, and held to :class:`pretrain.parts.testing.PartContract`.
    """

    name: ClassVar[str]
    """The key of the state in checkpoints, and the first word of the columns."""
    of_machines: ClassVar[bool] = False
    """Whether the state is of these machines, and is dropped where ranks are on other ones. Where
    the checkpoint is of another layout, any state is dropped."""

    def report(self, mine: Report) -> Mapping[str, float]:
        """This rank's columns of the barrier's vector; the same names in every step."""
        return {}

    def judge(self, facts: StepFacts) -> Wish | None:
        """Judge a try of a step, before the step is committed; wishes to skip, save and stop count
        here. The rules for numbers that are not finite come first."""
        return None

    def after(self, facts: StepFacts) -> Wish | None:
        """Take in a step that was committed. Wishes for capacity and division hold from the next
        step on; a wish to save or to stop is of this step; a wish to skip comes too late."""
        return None

    def state(self) -> dict[str, Any] | None:
        """Plain JSON for a checkpoint; None for a part without a state."""
        return None

    def load(self, state: dict[str, Any]) -> Wish | None:
        """Restore what :meth:`state` returned; the checkpoint has this run's topology. The wish
        says what holds from the next step on."""
        return None


def named_part(kind: str) -> Callable[[PartContext], Part]:
    """The class of a part by ``package.module:Class``.

    Raises InputError, one line, where there is no such class, or the class is no part.
    """
    try:
        part_class = pkgutil.resolve_name(kind)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"train.parts ({kind}) must be package.module:Class, importable on every rank: {error}"
        ) from None
    if not (isinstance(part_class, type) and issubclass(part_class, Part)):
        raise InputError(f"train.parts ({kind}) must be a subclass of pretrain.parts.step.Part")
    if not str(getattr(part_class, "name", "")).isidentifier():
        raise InputError(f'train.parts ({kind}) must have a name, which is a word: name = "mine"')
    return part_class
