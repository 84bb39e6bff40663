"""The norm and the scale of gradients whose parameters are sharded over different meshes."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.comm.collectives import all_reduce
from parallel.dtensor import local_shard
from parallel.mesh import ParallelDims


def grad_square_sum(model: nn.Module, dims: ParallelDims | None) -> Tensor:
    """This rank's share of the squared global gradient norm, a float64 scalar.

    The sum over all ranks is the squared global norm: a shard that n ranks hold counts 1/n on each
    of the n ranks. Parameters without a gradient count as zeros. ``dims`` are the meshes that the
    model is parallelized over; None for one process, and a ValueError for a model that is sharded.
    """
    if dims is None and any(num_shards(parameter) > 1 for parameter in model.parameters()):
        raise ValueError(
            "dims (None) must be the model's ParallelDims: its parameters are sharded over ranks"
        )
    ranks = 1 if dims is None else dims.topology.world // dims.topology.pp
    alike: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            replicas, grad = ranks // num_shards(parameter), local_shard(parameter.grad)
            # A norm in float16 is infinite from 65,520 on, and one in bfloat16 has three digits.
            dtype = torch.promote_types(grad.dtype, torch.float32)
            alike.setdefault((replicas, dtype), []).append(grad)
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for (replicas, dtype), grads in alike.items():
        norms = torch.stack(torch._foreach_norm(grads, dtype=dtype)).double()
        total += norms.square().sum() / replicas
    return total


def num_shards(parameter: Tensor) -> int:
    """The number of different shards of a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh, placements = parameter.device_mesh, parameter.placements
    return math.prod(mesh.size(i) for i, p in enumerate(placements) if not p.is_replicate())


def scale_gradients(model: nn.Module, factor: float) -> None:
    """Multiply every gradient by ``factor``, in place; a factor of 1 changes no bit."""
    grads = [local_shard(p.grad) for p in model.parameters() if p.grad is not None]
    if factor != 1.0 and grads:
        torch._foreach_mul_(grads, factor)


def clip_grad_norm(model: nn.Module, dims: ParallelDims | None, max_norm: float) -> float:
    """Scale gradients down to a global norm of at most ``max_norm``; returns the norm before.

    ``torch.nn.utils.clip_grad_norm_`` refuses parameters on different meshes, and experts are on
    another mesh than dense parameters. Every rank must call; the host waits for the device. If the
    norm is not finite, gradients are not changed.
    """
    square = grad_square_sum(model, dims)
    if dims is not None:
        all_reduce(square).wait()
    norm = math.sqrt(float(square))
    if math.isfinite(norm) and norm > max_norm:
        scale_gradients(model, max_norm / norm)
    return norm
