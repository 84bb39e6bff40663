"""Which parameters and which experts a step of training has moved, and why others stayed.

Legend: E experts, N rows: the experts of a parameter of experts, and 1 of any other parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.adapters.lora import adapters_of
from moe.adapters.targets import fits_any
from parallel import digest
from parallel.crossing import run_rank
from parallel.dtensor import local_shard
from parallel.expert_parallel import expert_modules
from parallel.placements import MeshLayout, RankMesh

FROZEN = "frozen"
NOT_IN_OPTIMIZER = "not in the optimizer"
NO_GRADIENT = "no gradient"
ZERO_GRADIENT = "zero gradient"
WAITS = "zero gradient until b is not zero"
UNCHANGED = "unchanged by its gradient"
REASONS = {
    FROZEN: "requires_grad is false",
    NOT_IN_OPTIMIZER: "it requires a gradient, and no parameter group has it",
    NO_GRADIENT: "the backward never reached it",
    ZERO_GRADIENT: "as that of an expert that got no token; weight decay may have moved it",
    WAITS: "the gradient of an adapter's a is a product with b, which begins as zero",
    UNCHANGED: "a learning rate of 0, or a step that its dtype cannot hold",
}
"""Why a parameter did not train, the first that applies, and what each means."""


class Unmoved(NamedTuple):
    """A parameter, or some of its experts, that a step did not train."""

    name: str
    """As in ``model.named_parameters()``."""
    reason: str
    """One of :data:`REASONS`."""
    experts: tuple[int, ...] | None
    """The experts, by their numbers over all ranks; None for a parameter of no experts."""

    @property
    def is_silent(self) -> bool:
        """Whether the step cannot have trained it: no gradient led to an update."""
        return self.reason in (FROZEN, NOT_IN_OPTIMIZER, NO_GRADIENT)


@dataclass
class _State:
    """What is known of one parameter, from one rank or from all."""

    is_trainable: bool
    in_optimizer: bool
    waits: bool
    of_experts: str | None
    """The name of the layer's experts; None for other parameters."""
    moved: dict[int, bool] = field(default_factory=dict)
    """By row."""
    has_gradient: bool = False
    trained: dict[int, bool] = field(default_factory=dict)
    """By row: whether the gradient has a number that is not 0."""

    def add(self, other: _State) -> None:
        """Add what another rank knows."""
        self.is_trainable &= other.is_trainable
        self.in_optimizer &= other.in_optimizer
        self.waits &= other.waits
        self.has_gradient |= other.has_gradient
        for mine, theirs in ((self.moved, other.moved), (self.trained, other.trained)):
            for row, value in theirs.items():
                mine[row] = mine.get(row, False) or value


@dataclass(frozen=True)
class MovedReport:
    """What a step has moved, over all ranks; ``str(report)`` is for people."""

    num_parameters: int
    unmoved: tuple[Unmoved, ...]
    """In the order of the model's parameters."""
    experts: dict[str, tuple[int, int]]
    """For each layer's experts, by name: how many were trained, in any of their parameters or
    adapters, and how many there are."""
    has_adapters: bool
    """Whether the model has adapters: what ``add_lora`` has frozen was asked for."""

    def __str__(self) -> str:
        unmoved = self.unmoved
        idle = {entry.name for entry in unmoved}
        trained, total = (sum(counts) for counts in zip(*self.experts.values(), strict=True)) if (
            self.experts
        ) else (0, 0)  # fmt: skip
        lines = [f"{self.num_parameters - len(idle)} of {self.num_parameters} parameters moved"]
        if total:
            lines[0] += f", {trained} of {total} experts"
        for reason in REASONS:
            names = [_named(entry) for entry in unmoved if entry.reason == reason]
            if reason == FROZEN and self.has_adapters:
                asked = [entry for entry in unmoved if _frozen_by_lora(entry)]
                names = [_named(e) for e in unmoved if e.reason == FROZEN and e not in asked]
                lines.append(f"frozen by add_lora: {len(asked)} parameters")
            if names:
                lines.append(f"{reason} ({REASONS[reason]}): {_listed(names, 8)}")
        return "\n".join(lines)

    def check(self, allowed: Sequence[str] = ()) -> None:
        """Refuse a model of which something silently does not train.

        An error is: a parameter that is frozen, not in the optimizer, without a gradient, or
        unchanged; and a layer of whose experts none was trained. Experts that got no token are
        none, nor are an adapter's first matrices in the first step, nor what ``add_lora`` froze.

        Args:
            allowed: patterns of names, as ``*.router.weight``, that may stay.

        Raises ValueError, one line, with the names and the reasons.
        """
        wrong = [
            _described(entry)
            for entry in self.unmoved
            if (entry.is_silent or entry.reason == UNCHANGED)
            and not (self.has_adapters and _frozen_by_lora(entry))
            and not fits_any(entry.name, allowed)
        ]
        wrong += [
            f"{name} (0 of {total} experts trained)"
            for name, (trained, total) in self.experts.items()
            if not trained and not fits_any(name, allowed)
        ]
        if wrong:
            raise ValueError(
                f"{len(wrong)} parameters or layers do not train: {_listed(wrong, 6)}; freeze on "
                f"purpose with check(allowed=[...])"
            )


def _frozen_by_lora(entry: Unmoved) -> bool:
    return entry.reason == FROZEN and ".lora." not in f".{entry.name}"


def _named(entry: Unmoved) -> str:
    experts = entry.experts
    which = "" if experts is None else f" of experts {_listed([str(e) for e in experts], 8)}"
    return f"{entry.name}{which}"


def _described(entry: Unmoved) -> str:
    return f"{_named(entry)} ({entry.reason})"


def _listed(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class ParameterWatch:
    """Digests of a model's parameters before a step; made by :func:`watch_parameters`."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Any] | None) -> None:
        self.model, self.optimizers = model, optimizers
        self._experts = _expert_names(model)
        self._waiting = _waiting_names(model)
        self._before = dict(self._digests())
        self._gradients: dict[str, list[bool]] | None = None

    def see_gradients(self) -> None:
        """Look at the gradients now, where they are cleared before :meth:`report`."""
        self._gradients = {
            name: _nonzero_rows(parameter.grad, name in self._experts)
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }

    def report(self, group: dist.ProcessGroup | None = None) -> MovedReport:
        """What has moved since, after a step of the optimizer.

        Gradients tell why something stayed: call before ``zero_grad``, or call
        :meth:`see_gradients` before it. Without gradients ``unchanged`` is all that is known.

        Args:
            group: the ranks whose experts and shards make up the model; None for all ranks of a
                sharded model. All of them must call.
        """
        if self._gradients is None:
            self.see_gradients()
        mine = self._states()
        states, shared = [mine], any(
            hasattr(parameter, "to_local") for parameter in self.model.parameters()
        )  # fmt: skip
        if dist.is_initialized() and (shared or group is not None):
            gathered: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(gathered, mine, group=group)
            states = gathered
        self._gradients = None
        return _report_of(states, next(adapters_of(self.model), None) is not None)

    def _states(self) -> dict[str, _State]:
        assert self._gradients is not None
        in_optimizer = self._ids_in_optimizers()
        after, states = dict(self._digests()), {}
        for name, parameter in self.model.named_parameters():
            rows = _global_rows(parameter) if name in self._experts else [0]
            state = _State(
                is_trainable=parameter.requires_grad,
                in_optimizer=in_optimizer is None or id(parameter) in in_optimizer,
                waits=name in self._waiting,
                of_experts=self._experts.get(name),
            )
            pairs = zip(self._before[name], after[name], strict=True)
            state.moved = {row: a != b for row, (a, b) in zip(rows, pairs, strict=True)}
            nonzero = self._gradients.get(name)
            state.has_gradient = nonzero is not None
            state.trained = dict(zip(rows, nonzero or [False] * len(rows), strict=True))
            states[name] = state
        return states

    def _ids_in_optimizers(self) -> set[int] | None:
        if self.optimizers is None:
            return None
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return {id(parameter) for group in groups for parameter in group["params"]}

    def _digests(self) -> Iterator[tuple[str, list[int]]]:
        names, rows, taken = [], [], []
        for name, parameter in self.model.named_parameters():
            local = local_shard(parameter.detach())
            tensors = list(local) if name in self._experts else [local]
            names.append(name)
            rows.append(len(tensors))
            taken += [digest([tensor]) for tensor in tensors]
        # One copy to the host for each device, and not one for each row.
        numbers = iter(torch.stack([t.cpu() for t in taken]).tolist() if taken else [])
        for name, count in zip(names, rows, strict=True):
            yield name, [next(numbers) for _ in range(count)]


def watch_parameters(
    model: nn.Module, optimizer: Any | Sequence[Any] | None = None
) -> ParameterWatch:
    """Take digests of all parameters, each expert's by itself, to see what a step moves.

    A digest is 64 bits; the cost is one pass over this rank's parameters, here and in the report.

    Args:
        model: any model, after ``apply_expert_parallel``, ``apply_fsdp`` and the making of the
            optimizer; its parameters must have values.
        optimizer: what has ``param_groups``, or several of them; None where it is not known.

    Example::

        watch = moe.watch_parameters(model, optimizer)
        loss.backward()
        optimizer.step()
        report = watch.report()
        print(report)
        report.check(allowed=["*.embed.weight"])
    """
    several = isinstance(optimizer, Sequence)
    return ParameterWatch(
        model, None if optimizer is None else list(optimizer) if several else [optimizer]
    )


def _expert_names(model: nn.Module) -> dict[str, str]:
    """The name of each parameter of experts, with the name of its layer's experts."""
    owners = {id(layer.experts) for layer in expert_modules(model)}
    by_id: dict[int, str] = {}
    for name, module in model.named_modules():
        if id(module) in owners:
            by_id |= {id(parameter): name for parameter in module.parameters()}
    return {
        name: by_id[id(parameter)]
        for name, parameter in model.named_parameters()
        if id(parameter) in by_id
    }


@torch.no_grad()
def _waiting_names(model: nn.Module) -> set[str]:
    """The first matrices of adapters whose second ones are zero on this rank."""
    names = set()
    for name, _, adapter in adapters_of(model):
        own = dict(adapter.named_parameters())
        prefix = f"{name}.lora." if name else "lora."
        for short in own:
            if short.endswith("a") and not local_shard(own[f"{short[:-1]}b"]).any():
                names.add(prefix + short)
    return names


@torch.no_grad()
def _nonzero_rows(gradient: Tensor, by_expert: bool) -> list[bool]:
    local = local_shard(gradient)
    rows = local.reshape(len(local), -1) if by_expert else local.reshape(1, -1)
    nonzero: list[bool] = (rows != 0).any(1).tolist()
    return nonzero


def _global_rows(parameter: Tensor) -> list[int]:
    """The numbers over all ranks of the experts of a local shard."""
    if not hasattr(parameter, "to_local"):
        return list(range(len(parameter)))
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh.mesh
    # A strided shard, as of fully_shard on dim 0 over experts, has a factor of its own.
    cuts = tuple(
        (p.dim, getattr(p, "split_factor", 1)) if hasattr(p, "dim") else None
        for p in parameter.placements
    )
    layout = MeshLayout(
        tuple(parameter.shape),
        RankMesh(tuple(mesh.shape), tuple(mesh.flatten().tolist())),
        cuts,
    )
    spans = sorted({box[0] for box in layout.boxes(run_rank())})
    return [row for start, stop in spans for row in range(start, stop)]


def _report_of(states: Sequence[dict[str, _State]], has_adapters: bool) -> MovedReport:
    every: dict[str, _State] = {}
    for of_rank in states:
        for name, state in of_rank.items():
            if name in every:
                every[name].add(state)
            else:
                every[name] = state
    knows_gradients = any(state.has_gradient for state in every.values())
    unmoved: list[Unmoved] = []
    trained: dict[str, dict[int, bool]] = defaultdict(dict)
    for name, state in every.items():
        by_reason: dict[str, list[int]] = defaultdict(list)
        for row in sorted(state.moved):
            reason = _reason(state, row, knows_gradients)
            if reason is not None:
                by_reason[reason].append(row)
            if state.of_experts is not None:
                known = trained[state.of_experts]
                known[row] = known.get(row, False) or reason is None
        for reason, rows in by_reason.items():
            experts = tuple(rows) if state.of_experts is not None else None
            unmoved.append(Unmoved(name, reason, experts))
    counts = {name: (sum(rows.values()), len(rows)) for name, rows in trained.items()}
    return MovedReport(len(every), tuple(unmoved), counts, has_adapters)


def _reason(state: _State, row: int, knows_gradients: bool) -> str | None:
    """Why a row did not train; None where it did."""
    if not state.is_trainable:
        return FROZEN
    if not state.in_optimizer:
        return NOT_IN_OPTIMIZER
    if knows_gradients and not state.has_gradient:
        return NO_GRADIENT
    if knows_gradients and not state.trained[row]:
        return WAITS if state.waits else ZERO_GRADIENT
    return None if state.moved[row] else UNCHANGED
