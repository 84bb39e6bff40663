"""The logical training state as arrays and JSON: what a checkpoint holds, by its logical names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from ckpt import ArraySpec, LocalArray
from parallel import (
    ShardLayout,
    local_shard,
)
from pretrain.optim import moment_names, moments
from pretrain.state.names import array_path, split_layer


def model_arrays(
    whole: nn.Module, model: nn.Module, layouts: Mapping[str, ShardLayout], rank: int
) -> list[LocalArray]:
    """Parameters and buffers as stacked arrays, the same list on every rank.

    ``layers.3.moe.experts.w_gate`` is index 3 of ``model/layers/moe/experts/w_gate``, counting only
    the layers that have one; the attribute ``layers`` names them. ``whole`` is the model as one
    process would have it, on any device, and ``model`` what of it is here.
    """
    return list(_stack("model", tensors(whole), tensors(model), layouts, rank))


def training_arrays(
    whole: nn.Module,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    layouts: Mapping[str, ShardLayout],
    rank: int,
) -> list[LocalArray]:
    """Parameters, buffers and moments as stacked arrays, the same list on every rank.

    Moments mirror the tree of :func:`model_arrays` under ``optimizer/NAME``, as AdamW's under
    ``optimizer/exp_avg`` and ``optimizer/exp_avg_sq``. A moment has arrays of the parameters that
    have the moment.
    """
    arrays = model_arrays(whole, model, layouts, rank)
    parameters, here = dict(whole.named_parameters()), moments(optimizer, model)
    for key, names in moment_names(optimizer, model, whole).items():
        of_key = {name: parameters[name] for name in names}
        arrays += _stack(f"optimizer/{key}", of_key, here.get(key, {}), layouts, rank)
    return arrays


def residual_arrays(
    whole: nn.Module,
    residuals: Mapping[str, Tensor],
    layouts: Mapping[str, ShardLayout],
    rank: int,
) -> list[LocalArray]:
    """What gradient compression left out of the sums, see :class:`parallel.CompressedSum`.

    ``residual/NAME`` mirrors ``model/NAME``, with a dim of replicas before the parameter's own.
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


def _stack(
    prefix: str,
    whole: Mapping[str, Tensor],
    here: Mapping[str, Tensor],
    layouts: Mapping[str, ShardLayout],
    rank: int,
) -> Iterator[LocalArray]:
    stacks: dict[str, list[tuple[int, str]]] = {}
    for name in whole:
        path, index = split_layer(array_path(name))
        if index is not None:
            stacks.setdefault(path, []).append((index, name))
            continue
        layout = layouts[name]
        spec = ArraySpec(
            f"{prefix}/{path}", layout.shape, whole[name].dtype, layout.splits, {}, layout.stages
        )
        yield LocalArray(spec, layout.boxes(rank), _pieces([name], here))
    for path, members in stacks.items():
        layout = layouts[members[0][1]]
        names = [name for _, name in members]
        spec = ArraySpec(
            name=f"{prefix}/{path}",
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


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module by name."""
    return dict(chain(model.named_parameters(), model.named_buffers()))
