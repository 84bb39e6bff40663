"""Lay a model out over meshes, from outside: the modules themselves know no ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from parallel.collectives import all_gather, all_reduce, reduce_scatter
from parallel.expert_parallel import expert_modules
from parallel.layout import FSDP_DENSE_DIM, FSDP_EXPERT_DIM
from parallel.mesh import ParallelDims


def apply_fsdp(
    model: nn.Module,
    dims: ParallelDims,
    blocks: Sequence[nn.Module],
    reshard_after_forward: bool = True,
    compute_dtype: torch.dtype | None = None,
    sum_replicas: bool = True,
    prefetch: int = 0,
    offload: bool = False,
) -> nn.Module:
    """Shard parameters, gradients and optimizer state with FSDP2, experts over their own mesh.

    Gradients are summed over ranks, never averaged: divide each rank's summed loss by the global
    count of target tokens, so that a rank with fewer tokens weighs less. A loss that is each rank's
    own mean must be divided by the number of ranks.

    Args:
        model: after :func:`apply_expert_parallel`.
        dims: the meshes; where a parameter is on one rank alone, keeps its dtype and stays on the
            device, nothing is done.
        blocks: the submodules whose parameters are gathered together, outermost layers first;
            what is in none of them belongs to ``model`` itself.
        reshard_after_forward: free gathered parameters between forward and backward (ZeRO-3), or
            keep them (ZeRO-2).
        compute_dtype: what parameters are gathered and computed with as; None for their own. They
            keep theirs, and gradients are summed in float32. Routers are left out: their choices
            are between close numbers.
        sum_replicas: sum gradients over copies too; where False that is yours to do, as
            :class:`parallel.CompressedSum` does.
        prefetch: how many blocks ahead parameters are gathered, in the forward and the backward; 0
            leaves it to FSDP, which on an accelerator gathers one while another is computed.
        offload: keep parameters' slices, their gradients and so the optimizer's state in host
            memory, and let the optimizer run there. Parameters must be made there, buffers on the
            device.
    """
    t = dims.topology
    casts = compute_dtype is not None
    if t.world == t.pp and not casts and not offload:
        return model
    policy = MixedPrecisionPolicy(compute_dtype, torch.float32) if casts else MixedPrecisionPolicy()
    host = CPUOffloadPolicy(torch.cuda.is_available()) if offload else OffloadPolicy()
    sharded: list[nn.Module] = []
    alone: set[nn.Parameter] = set()

    def shard(module: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
        defaults: dict[str, Any] = {
            "reshard_after_forward": reshard_after_forward,
            "mp_policy": policy,
            "offload_policy": host,
        }
        fully_shard(module, mesh=mesh, **defaults | options)
        sharded.append(module)

    for module in expert_modules(model):
        if t.efsdp * t.dp_replicate == 1 and not casts and not offload:
            # Each expert is on one rank alone: there is nothing to gather and nothing to reduce,
            # and a mesh of one would still copy every expert twice a step.
            alone.update(module.experts.parameters())
        else:
            shard(
                module.experts,
                dims.efsdp_mesh,
                shard_placement_fn=lambda _: Shard(FSDP_EXPERT_DIM),
            )
        beside = dims.fsdp_tp_mesh if t.tp > 1 else dims.fsdp_mesh
        router = getattr(module, "router", None)
        if casts and isinstance(router, nn.Module):
            shard(router, beside, mp_policy=MixedPrecisionPolicy())
        if t.tp > 1:
            # What is beside the experts is whole on all ranks of tp, and each has tokens of its
            # own: its gradients are to be added up over tp too, which FSDP over both does.
            shard(cast(nn.Module, module), beside, ignored_params=alone)
    for block in (*blocks, model):
        shard(
            block,
            dims.fsdp_mesh,
            reshard_after_forward=reshard_after_forward and block is not model,
            shard_placement_fn=lambda _: Shard(FSDP_DENSE_DIM),
            ignored_params=alone,
        )
    replicas = _ReplicaSum(dims.replicate_mesh) if sum_replicas and t.dp_replicate > 1 else None
    _set_sums(cast(list[FSDPModule], sharded), replicas)
    # A plain attribute: modules are what nn.Module registers.
    model.__dict__[_REPLICAS] = replicas
    if prefetch:
        _set_prefetch(blocks, prefetch)
    return model


def _set_sums(modules: Sequence[FSDPModule], replicas: _ReplicaSum | None) -> None:
    """Sums and no means, over copies too, by collectives that are watched."""
    for number, fsdp in enumerate(modules):
        if replicas is not None:
            fsdp.set_all_reduce_hook(partial(replicas, number))
            # The step's last backward must come by all of them, used in it or not (since 2.12).
            getattr(fsdp, "set_reduce_scatter_unused_params", lambda _: None)(True)
        fsdp.set_gradient_divide_factor(1.0)
        # Without this a divide factor asks gloo for a reduction that it does not have.
        fsdp.set_force_sum_reduction_for_comms(True)
        fsdp.set_custom_all_gather(cast(Any, _AllGather()))
        fsdp.set_custom_reduce_scatter(cast(Any, _ReduceScatter()))


def _set_prefetch(blocks: Sequence[nn.Module], ahead: int) -> None:
    """Gather what the next ``ahead`` blocks need beside the block that is computed."""

    def parts(some: Sequence[nn.Module]) -> list[FSDPModule]:
        return [m for block in some for m in block.modules() if isinstance(m, FSDPModule)]

    for i, block in enumerate(blocks):
        fsdp = cast(FSDPModule, block)
        fsdp.set_modules_to_forward_prefetch(parts(blocks[i + 1 : i + 1 + ahead]))
        fsdp.set_modules_to_backward_prefetch(parts(blocks[max(i - ahead, 0) : i][::-1]))


_REPLICAS = "_convoy_replica_sum"


class _ReplicaSum:
    """Sums over copies what FSDP has summed within one, as its last backward goes along.

    FSDP's own hybrid sharding does the same; here it can be watched, and one layout of parameters
    serves compressed sums as well.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group()
        self.last = True
        """Whether the coming backward is the step's last."""
        self._before: dict[int, Tensor] = {}

    def expect(self, last: bool) -> None:
        """Say what the coming backward is."""
        if self.last:
            self._before.clear()  # a step begins; one that was given up leaves nothing
        self.last = last

    def __call__(self, module: int, reduced: Tensor) -> None:
        if reduced.is_cuda:
            # FSDP made it on another stream, and does not hold it until this one has read it.
            reduced.record_stream(torch.cuda.current_stream())
        before = self._before.pop(module, None)
        if before is not None:
            assert before.shape == reduced.shape, "some of its parameters had no gradient"
            reduced += before
        if self.last:
            all_reduce(reduced, self.group, "dp").wait()
        else:
            # FSDP adds what it is left with to the gradient: nothing, until all is there.
            self._before[module] = reduced.clone()
            reduced.zero_()


class _Allocate:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Allocate):
    """FSDP's own, but watched; it never asks for it to go on by itself."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        all_gather(output_tensor, input_tensor, group, "dp").wait()


class _ReduceScatter(_Allocate):
    """The same."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        reduce_scatter(output_tensor, input_tensor, group, "dp", op).wait()


def set_gradient_sync(model: nn.Module, sync: bool, last: bool) -> None:
    """What becomes of the gradients of the coming backward.

    Args:
        model: after :func:`apply_fsdp`; another is left alone.
        sync: sum them over the ranks that share a copy of the model, each keeping its slice; until
            then each rank holds them whole.
        last: this is the step's last: sum over copies as well.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(sync or last)
        replicas = model.__dict__.get(_REPLICAS)
        if replicas is not None:
            replicas.expect(last)


def finish_backward(model: nn.Module, sync: bool, last: bool) -> None:
    """What FSDP does at the end of a backward, once more: gradients that came after it are added
    up, and reduced as :func:`set_gradient_sync` says of ``sync`` and ``last``."""
    if not isinstance(model, FSDPModule):
        return
    # FSDP has no public name for it; PyTorch's own pipelines call this too.
    finish = fully_shard.state(model)._root_post_backward_final_callback  # type: ignore[attr-defined]
    # It reduces gradients of one dtype, and makes float32 of those alone that it does not reduce.
    set_gradient_sync(model, False, last=False)
    finish()
    if sync or last:
        set_gradient_sync(model, sync, last)
        finish()


def free_gathered(model: nn.Module) -> None:
    """Let go of parameters that a forward without a backward has left gathered.

    Until then ``model.parameters()`` are those copies, and not the slices that the optimizer and a
    checkpoint are about.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
