"""The logical training state as arrays and JSON: what a checkpoint holds, by its logical names."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ckpt import ArraySpec, LocalArray
from parallel import ShardLayout, Topology, expert_parameter_names, local_shard
from parallel.layout import dense_splits, expert_splits
from pretrain.optim import moments

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Progress:
    """Where training is. Replaced as a whole, and only when the barrier says commit."""

    step: int = 0
    tokens_seen: int = 0
    cursor: int = 0
    """The next sample index."""
    train_loss_first: float | None = None
    train_loss_last: float | None = None
    train_seconds: float = 0.0
    """Seconds spent in committed steps, over all runs of this job."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def parameter_layouts(model: nn.Module, topology: Topology) -> dict[str, ShardLayout]:
    """Who holds which slice of every parameter and buffer, by name; buffers are whole on each."""
    experts = expert_parameter_names(model)
    whole = {
        name: ShardLayout(tuple(buffer.shape), ((),) * buffer.ndim, topology)
        for name, buffer in model.named_buffers()
    }
    return whole | {
        name: ShardLayout(
            tuple(parameter.shape),
            (expert_splits if name in experts else dense_splits)(parameter.ndim),
            topology,
        )
        for name, parameter in model.named_parameters()
    }


def model_arrays(model: nn.Module, layouts: dict[str, ShardLayout], rank: int) -> list[LocalArray]:
    """Parameters and buffers as stacked arrays, the same list on every rank.

    ``layers.3.moe.experts.w_gate`` is index 3 of ``model/layers/moe/experts/w_gate``, counting only
    the layers that have one; the attribute ``layers`` names them.
    """
    tensors = chain(model.named_parameters(), model.named_buffers())
    return list(_stack("model", tensors, layouts, rank))


def training_arrays(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    layouts: dict[str, ShardLayout],
    rank: int,
) -> list[LocalArray]:
    """Parameters, buffers and moments as stacked arrays, the same list on every rank.

    Moments mirror the tree of :func:`model_arrays` under ``optimizer/exp_avg`` and
    ``optimizer/exp_avg_sq``.
    """
    arrays = model_arrays(model, layouts, rank)
    for key in ("exp_avg", "exp_avg_sq"):
        named = ((name, tensor) for k, name, tensor in moments(optimizer, model) if k == key)
        arrays += _stack(f"optimizer/{key}", named, layouts, rank)
    return arrays


def _stack(
    prefix: str, named: Iterable[tuple[str, Tensor]], layouts: dict[str, ShardLayout], rank: int
) -> Iterator[LocalArray]:
    stacks: dict[str, list[tuple[int, str, Tensor]]] = {}
    for name, tensor in named:
        match = _LAYER.fullmatch(name)
        if match is None:
            layout = layouts[name]
            spec = ArraySpec(_path(prefix, name), layout.shape, tensor.dtype, layout.splits)
            yield LocalArray(spec, layout.box(rank), [local_shard(tensor).detach()])
        else:
            stacks.setdefault(match[2], []).append((int(match[1]), name, tensor))
    for suffix, members in stacks.items():
        layout = layouts[members[0][1]]
        spec = ArraySpec(
            name=_path(prefix, f"layers.{suffix}"),
            shape=(len(members), *layout.shape),
            dtype=members[0][2].dtype,
            splits=((), *layout.splits),
            attributes={"layers": [index for index, _, _ in members]},
        )
        pieces = [local_shard(tensor).detach() for _, _, tensor in members]
        yield LocalArray(spec, ((0, len(members)), *layout.box(rank)), pieces, stacked=True)


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
        arrays.append(LocalArray(spec, spec.layout(topology).box(rank), [state.unsqueeze(0)]))
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
