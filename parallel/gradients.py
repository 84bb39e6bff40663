"""Gradients of parameters that are on whatever meshes: one norm over all of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.collectives import all_reduce
from parallel.dtensor import local_shard
from parallel.mesh import ParallelDims


def grad_square_sum(model: nn.Module, dims: ParallelDims | None) -> Tensor:
    """This rank's share of the squared global gradient norm, a float64 scalar.

    Summed over all ranks it is the whole, experts counted once: a slice that n ranks hold counts
    1/n on each. ``dims`` are the meshes that the model is laid out over; None in one process.
    Parameters without a gradient have none.
    """
    ranks = 1 if dims is None else dims.topology.world // dims.topology.pp
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            copies = ranks // _parts(parameter)
            by_copies.setdefault(copies, []).append(local_shard(parameter.grad))
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for copies, grads in by_copies.items():
        norms = torch.stack(torch._foreach_norm(grads)).double()
        total += norms.square().sum() / copies
    return total


def _parts(parameter: Tensor) -> int:
    """In how many slices it is cut."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh, placements = parameter.device_mesh, parameter.placements
    return math.prod(mesh.size(i) for i, p in enumerate(placements) if not p.is_replicate())


def scale_gradients(model: nn.Module, factor: float) -> None:
    """Multiply every gradient in place; exactly nothing for a factor of 1."""
    grads = [local_shard(p.grad) for p in model.parameters() if p.grad is not None]
    if factor != 1.0 and grads:
        torch._foreach_mul_(grads, factor)


def clip_grad_norm(model: nn.Module, dims: ParallelDims | None, max_norm: float) -> float:
    """Scale gradients down to a global norm of ``max_norm``; returns what it was.

    ``torch.nn.utils.clip_grad_norm_`` does not take parameters of different meshes, as experts and
    the rest are. Every rank must call; each waits for its device. A norm that is not finite leaves
    the gradients as they are.
    """
    square = grad_square_sum(model, dims)
    if dims is not None:
        all_reduce(square).wait()
    norm = math.sqrt(float(square))
    if math.isfinite(norm) and norm > max_norm:
        scale_gradients(model, max_norm / norm)
    return norm
