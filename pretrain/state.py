"""The logical training state as arrays and JSON: what a checkpoint holds, by its logical names."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ckpt import ArraySpec, LocalArray
from parallel import (
    ShardLayout,
    Topology,
    expert_parameter_names,
    local_shard,
    moe_parameter_names,
)
from parallel.layout import dense_splits, expert_splits, spread_splits
from pretrain.optim import moments

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Progress:
    """Where training is. Replaced as a whole, when the barrier says commit; an overflow changes the
    loss scale, and nothing else."""

    step: int = 0
    tokens_seen: int = 0
    cursor: int = 0
    """The next sample index."""
    train_loss_first: float | None = None
    train_loss_last: float | None = None
    validation: float | None = None
    """Loss of held-out sequences at this very step; None where it was not evaluated."""
    train_seconds: float = 0.0
    """Seconds spent in committed steps, over all runs of this job."""
    loss_scale: float | None = None
    """What the loss is multiplied by before the next backward, a power of two; None but in float16.

    In float16 small gradients would be zeros; a scaled loss keeps them, and gradients are divided
    by the scale afterwards, in float32 (Micikevicius et al., arXiv 1710.03740, section 3.2).
    """
    steps_at_loss_scale: int = 0
    """Committed in a row since the scale last changed."""
    run_id: str = ""
    """Which run this is, see :func:`pretrain.nodes.name_run`."""

    def after_overflow(self) -> Progress:
        """Half the scale, for the same samples."""
        assert self.loss_scale is not None
        return replace(self, loss_scale=self.loss_scale / 2, steps_at_loss_scale=0)

    def after_commit(self, growth_steps: int) -> Progress:
        """Double the scale once ``growth_steps`` steps in a row had no overflow, as
        torch.amp.GradScaler does."""
        if self.loss_scale is None:
            return self
        steps = self.steps_at_loss_scale + 1
        if steps < growth_steps:
            return replace(self, steps_at_loss_scale=steps)
        return replace(self, loss_scale=self.loss_scale * 2, steps_at_loss_scale=0)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def parameter_layouts(
    whole: nn.Module,
    topology: Topology,
    tp_dim: Callable[[str], int | None] = lambda _: None,
    stage: Callable[[str], int] = lambda _: 0,
) -> dict[str, ShardLayout]:
    """Who holds which slice of every parameter and buffer, by name; nobody cuts buffers.

    Args:
        whole: the model as one process would have it, on any device.
        topology: the degrees.
        tp_dim: by name, the dim of a dense parameter that tensor parallelism cuts.
        stage: by name, the place along pp that has a parameter or buffer.
    """
    experts, of_moe = expert_parameter_names(whole), moe_parameter_names(whole)

    def splits(name: str, parameter: Tensor) -> tuple[tuple[str, ...], ...]:
        if not isinstance(parameter, nn.Parameter):
            return ((),) * parameter.ndim
        if name in experts:
            return expert_splits(parameter.ndim)
        if topology.tp > 1 and name in of_moe:
            return spread_splits(parameter.ndim)
        return dense_splits(parameter.ndim, tp_dim(name) if topology.tp > 1 else None)

    return {
        name: ShardLayout(
            tuple(tensor.shape),
            splits(name, tensor),
            topology,
            (stage(name),) if topology.pp > 1 else (),
        )
        for name, tensor in _tensors(whole).items()
    }


def model_arrays(
    whole: nn.Module, model: nn.Module, layouts: Mapping[str, ShardLayout], rank: int
) -> list[LocalArray]:
    """Parameters and buffers as stacked arrays, the same list on every rank.

    ``layers.3.moe.experts.w_gate`` is index 3 of ``model/layers/moe/experts/w_gate``, counting only
    the layers that have one; the attribute ``layers`` names them. ``whole`` is the model as one
    process would have it, on any device, and ``model`` what of it is here.
    """
    return list(_stack("model", _tensors(whole), _tensors(model), layouts, rank))


def training_arrays(
    whole: nn.Module,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    layouts: Mapping[str, ShardLayout],
    rank: int,
) -> list[LocalArray]:
    """Parameters, buffers and moments as stacked arrays, the same list on every rank.

    Moments mirror the tree of :func:`model_arrays` under ``optimizer/NAME``, as AdamW's under
    ``optimizer/exp_avg`` and ``optimizer/exp_avg_sq``.
    """
    arrays = model_arrays(whole, model, layouts, rank)
    parameters = dict(whole.named_parameters())
    for key, here in moments(optimizer, model).items():
        arrays += _stack(f"optimizer/{key}", parameters, here, layouts, rank)
    return arrays


def residual_arrays(
    whole: nn.Module,
    residuals: Mapping[str, Tensor],
    layouts: Mapping[str, ShardLayout],
    rank: int,
) -> list[LocalArray]:
    """What every copy of the model owes to its gradients, see :class:`parallel.CompressedSum`.

    ``residual/NAME`` mirrors ``model/NAME``, with a dim for the copies before the parameter's own.
    """
    if not residuals:
        return []
    names = dict(whole.named_parameters())
    copies = {
        name: ShardLayout(
            (layout.topology.dp_replicate, *layout.shape),
            (("dp_replicate",), *layout.splits),
            layout.topology,
            layout.stages,
        )
        for name, layout in layouts.items()
        if name in names
    }
    here = {name: residual.unsqueeze(0) for name, residual in residuals.items()}
    return list(_stack("residual", names, here, copies, rank))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(chain(model.named_parameters(), model.named_buffers()))


def _stack(
    prefix: str,
    whole: Mapping[str, Tensor],
    here: Mapping[str, Tensor],
    layouts: Mapping[str, ShardLayout],
    rank: int,
) -> Iterator[LocalArray]:
    stacks: dict[str, list[tuple[int, str]]] = {}
    for name in whole:
        match = _LAYER.fullmatch(name)
        if match is not None:
            stacks.setdefault(match[2], []).append((int(match[1]), name))
            continue
        layout = layouts[name]
        spec = ArraySpec(
            _path(prefix, name), layout.shape, whole[name].dtype, layout.splits, {}, layout.stages
        )
        yield LocalArray(spec, layout.boxes(rank), _pieces([name], here))
    for suffix, members in stacks.items():
        layout = layouts[members[0][1]]
        names = [name for _, name in members]
        spec = ArraySpec(
            name=_path(prefix, f"layers.{suffix}"),
            shape=(len(members), *layout.shape),
            dtype=whole[names[0]].dtype,
            splits=((), *layout.splits),
            attributes={"layers": [index for index, _ in members]},
            stages=tuple(stage for name in names for stage in layouts[name].stages),
        )
        boxes = spec.layout(layout.topology).boxes(rank)
        yield LocalArray(spec, boxes, _pieces(names, here), stacked=True)


def _pieces(names: Iterable[str], here: Mapping[str, Tensor]) -> list[Tensor]:
    return [local_shard(here[name]).detach() for name in names if name in here]


def _path(prefix: str, name: str) -> str:
    return f"{prefix}/{name.replace('.', '/')}"


def rng_arrays(
    topology: Topology, rank: int, device: torch.device, states: dict[str, Tensor] | None = None
) -> list[LocalArray]:
    """Every rank's random states, one row each, read from torch or, with ``states``, held there."""
    if states is None:
        states = rng_states(device)
    arrays = []
    for name, state in states.items():
        spec = ArraySpec(
            f"rng/{name}", (topology.world, state.numel()), torch.uint8, (("world",), ())
        )
        arrays.append(LocalArray(spec, spec.layout(topology).boxes(rank), [state.unsqueeze(0)]))
    return arrays


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """This rank's random states, by the name of their array."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_states(states: dict[str, Tensor], device: torch.device) -> None:
    """The inverse."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def seed_rng(seed: int, step: int, rank: int) -> None:
    """Random states for a rank that has none of its own: at the start, or after a reshard."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
