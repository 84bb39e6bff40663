"""Fully sharded data parallelism: FSDP2 over the dense mesh and the expert mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

from parallel.apply.equal_weights import check_equal_weights
from parallel.comm import all_gather, all_reduce, reduce_scatter
from parallel.exact import ExactSums, FixedPointBuffer, from_fixed
from parallel.expert_parallel import expert_modules
from parallel.layout import FSDP_DENSE_DIM, FSDP_EXPERT_DIM
from parallel.mesh import ParallelDims


def apply_fsdp(
    model: nn.Module,
    dims: ParallelDims,
    *,
    blocks: Sequence[nn.Module],
    reshard_after_forward: bool = True,
    compute_dtype: torch.dtype | None = None,
    sum_replicas: bool = True,
    prefetch: int = 0,
    offload: bool = False,
    exact: ExactSums | None = None,
) -> nn.Module:
    """Shard parameters, gradients and optimizer state with FSDP2, experts over their own mesh.

    Gradients are summed over ranks, never averaged: divide each rank's summed loss by the global
    number of target tokens. A loss that is each rank's own mean must be divided by the number of
    ranks.

    Args:
        model: the model, after :func:`parallel.apply_expert_parallel`.
        dims: the meshes. Parameters that one rank holds alone are not sharded, unless
            ``compute_dtype`` or ``offload`` asks for FSDP.
        blocks: submodules whose parameters are gathered together, in the order of the forward;
            parameters in no block are gathered with ``model`` itself.
        reshard_after_forward: free gathered parameters of each block after the block's forward
            and backward, and those of ``model`` itself after the backward (ZeRO-3), or gather
            parameters once a step and keep them until the backward that
            :func:`set_gradient_sync` calls the last (ZeRO-2).
        compute_dtype: dtype of gathered parameters and of the computation; None for the
            parameters' own. Stored parameters keep their dtype, and gradients are summed in
            float32. Routers are excluded: a rounded logit can change which experts are chosen.
        sum_replicas: sum gradients over replicas (``dp_replicate``) too. With False the caller
            must sum over replicas, as :class:`parallel.CompressedSum` does.
        prefetch: number of blocks ahead whose parameters are gathered, in forward and backward.
            With 0 FSDP decides, and on an accelerator gathers one block during another's
            computation.
        offload: keep local shards of parameters, gradients and optimizer state in host memory; the
            optimizer then runs on the CPU. Parameters must be made on the CPU, buffers on the
            device.
        exact: sum gradients exactly; a backward is then of one micro-batch, and is reduced by
            itself. Not with ``sum_replicas`` false or ``offload``.

    A MoE layer's router in another dtype than the rest of its layer, as after ``model.bfloat16()``,
    is sharded by itself: FSDP gathers parameters of one dtype together.

    Raises ValueError for a model that has FSDP already, and on every rank where ranks have other
    initial values of a parameter: replicas would stay apart, and shards would come from different
    models. A few values of each parameter are compared; parameters on the meta device are not.
    """
    if not isinstance(dims, ParallelDims):
        raise TypeError(f"dims ({type(dims).__name__}) must be a ParallelDims")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError("apply_fsdp must be called once, on a model without fully_shard")
    t = dims.topology
    casts = compute_dtype is not None
    alone_here = t.efsdp * t.dp_replicate == 1 and not casts and not offload
    if exact is not None:
        exact.use_experts(model, lambda _: not alone_here)
    if t.world == t.pp and not casts and not offload:
        if exact is not None:
            exact.use_unsharded(model)
        return model
    check_equal_weights(model, dims)
    policy, own_policy = _policies(compute_dtype, exact is not None)
    host = CPUOffloadPolicy(torch.cuda.is_available()) if offload else OffloadPolicy()
    sharded: list[nn.Module] = []
    meshes: list[DeviceMesh] = []
    alone: set[nn.Parameter] = set()

    def shard(module: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
        defaults: dict[str, Any] = {
            "reshard_after_forward": reshard_after_forward,
            "mp_policy": policy,
            "offload_policy": host,
        }
        fully_shard(module, mesh=mesh, **defaults | options)
        sharded.append(module)
        meshes.append(mesh)

    for module in expert_modules(model):
        if alone_here:
            # One rank holds each expert: no gather and no reduction are needed, and FSDP over a
            # mesh of one rank would copy every expert twice a step.
            alone.update(module.experts.parameters())
        else:
            shard(
                module.experts,
                dims.efsdp_mesh,
                shard_placement_fn=lambda _: Shard(FSDP_EXPERT_DIM),
            )
        beside = dims.fsdp_tp_mesh if t.tp > 1 else dims.fsdp_mesh
        router = getattr(module, "router", None)
        if isinstance(router, nn.Module) and (casts or _differs(router, cast(nn.Module, module))):
            shard(router, beside, mp_policy=own_policy)
        if t.tp > 1:
            # A MoE layer's other parameters are replicated over tp, and each tp rank computes on
            # other tokens: FSDP over the mesh of both axes sums the gradients over tp as well.
            shard(cast(nn.Module, module), beside, ignored_params=alone)
    for block in (*blocks, model):
        shard(
            block,
            dims.fsdp_mesh,
            reshard_after_forward=reshard_after_forward and block is not model,
            shard_placement_fn=lambda _: Shard(FSDP_DENSE_DIM),
            ignored_params=alone,
        )
    group = dims.replicate_mesh.get_group() if sum_replicas and t.dp_replicate > 1 else None
    replicas = _ReplicaSum(group) if group is not None or exact is not None else None
    sums = _set_sums(cast(list[FSDPModule], sharded), replicas)
    if exact is not None and replicas is not None:
        for number, (each, mesh) in enumerate(zip(sharded, meshes, strict=True)):
            buffer = exact.buffer_of(each, mesh.size())
            sums[number].buffer = replicas.buffers[number] = buffer
    # nn.Module.__setattr__ is passed by: the attributes are neither modules nor parameters.
    model.__dict__[_REPLICAS] = replicas
    model.__dict__[_SUMS] = sums
    model.__dict__[_KEEPS_GATHERED] = not reshard_after_forward
    if prefetch:
        _set_prefetch(blocks, prefetch)
    return model


def _policies(
    compute_dtype: torch.dtype | None, exact: bool
) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """For parameters that are cast to ``compute_dtype``, and for routers, which are not cast.

    Exact sums are 64-bit integers, which pass through FSDP's buffers as float64.
    """
    if exact:
        own = MixedPrecisionPolicy(None, torch.float64)
        return MixedPrecisionPolicy(compute_dtype, torch.float64), own
    own = MixedPrecisionPolicy()
    return own if compute_dtype is None else MixedPrecisionPolicy(compute_dtype, torch.float32), own


def _differs(part: nn.Module, whole: nn.Module) -> bool:
    """Whether ``part`` has parameters of another dtype than ``whole``."""
    dtypes = {parameter.dtype for parameter in part.parameters()}
    return any(parameter.dtype not in dtypes for parameter in whole.parameters())


def _set_sums(modules: Sequence[FSDPModule], replicas: _ReplicaSum | None) -> list[_ReduceScatter]:
    """Let FSDP sum instead of average, over replicas too, by monitored collectives.

    Returns each module's sum over the ranks of a replica.
    """
    sums = []
    for number, fsdp in enumerate(modules):
        if replicas is not None:
            fsdp.set_all_reduce_hook(partial(replicas, number))
            # The hook must run for every module in the step's last backward, also for a module
            # that this backward did not use. The setting exists since torch 2.12.
            getattr(fsdp, "set_reduce_scatter_unused_params", lambda _: None)(True)
        fsdp.set_gradient_divide_factor(1.0)
        # Otherwise FSDP asks gloo for a reduction with a divide factor, which gloo lacks.
        fsdp.set_force_sum_reduction_for_comms(True)
        fsdp.set_custom_all_gather(cast(Any, _AllGather()))
        sums.append(_ReduceScatter())
        fsdp.set_custom_reduce_scatter(cast(Any, sums[-1]))
    return sums


def _set_prefetch(blocks: Sequence[nn.Module], ahead: int) -> None:
    """Gather the parameters of the next ``ahead`` blocks during a block's computation."""

    def fsdp_modules(some: Sequence[nn.Module]) -> list[FSDPModule]:
        return [m for block in some for m in block.modules() if isinstance(m, FSDPModule)]

    for i, block in enumerate(blocks):
        fsdp = cast(FSDPModule, block)
        fsdp.set_modules_to_forward_prefetch(fsdp_modules(blocks[i + 1 : i + 1 + ahead]))
        fsdp.set_modules_to_backward_prefetch(fsdp_modules(blocks[max(i - ahead, 0) : i][::-1]))


_REPLICAS = "_convoy_replica_sum"
_SUMS = "_convoy_shard_sums"
_KEEPS_GATHERED = "_convoy_keeps_gathered"

Seen = Callable[[Tensor], None]
"""Gets gradients that are about to be summed, and must not change or keep them."""


@contextmanager
def gradients_seen(
    model: nn.Module,
    *,
    within: Seen,
    over: Seen,
    sum_replicas: bool,
    first_unit: bool = False,
    experts: bool = True,
) -> Iterator[None]:
    """Inside the ``with`` block, see gradients before they are summed over other ranks.

    Calls come in the order of the backward, on the stream that reduces. Of a model without FSDP
    nothing is seen.

    Args:
        model: the model, after :func:`apply_fsdp`.
        within: gets what this rank adds to each sum within its replica.
        over: gets what this rank's replica adds to each sum over replicas, where FSDP does that
            sum.
        sum_replicas: with False gradients are not summed over replicas. Every replica must choose
            alike.
        first_unit: of each sum within a replica ``within`` gets the first micro-batch alone.
        experts: whether ``within`` gets exact sums of experts' gradients, which have rows of other
            ranks.
    """
    sums: Sequence[_ReduceScatter] = model.__dict__.get(_SUMS, ())
    replicas: _ReplicaSum | None = model.__dict__.get(_REPLICAS)
    try:
        for one in sums:
            if experts or one.buffer is None or one.buffer.experts is None:
                one.seen = partial(_first_alone, one, within) if first_unit else within
        if replicas is not None:
            replicas.seen, replicas.sums = over, sum_replicas
        yield
    finally:
        for one in sums:
            one.seen = None
        if replicas is not None:
            replicas.seen, replicas.sums = None, True


def _first_alone(reduction: _ReduceScatter, seen: Seen, gradients: Tensor) -> None:
    reduction.seen = None
    seen(gradients)


class _ReplicaSum:
    """Sums gradients over replicas, after FSDP's reduce-scatter within a replica.

    FSDP2 can do this all-reduce itself, given a two-dimensional mesh (HSDP). Convoy keeps its own
    for two reasons. First, the all-reduce goes through the comm monitor: FSDP2 lets a caller
    replace the all-gather and the reduce-scatter, but not the all-reduce, which would then be
    missing from exposed communication and from hang reports. Second, parameters stay sharded over
    one mesh dim, whether this class or :class:`parallel.CompressedSum`, which FSDP cannot replace,
    sums over replicas; a run can change ``gradient_compression`` without another layout.

    Exact sums use this class for one replica too, to hold the sums of micro-batches in 64 bits.

    Args:
        group: the ranks that hold replicas of this rank's shards; None for one replica.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.buffers: dict[int, FixedPointBuffer] = {}
        """Under exact sums, by number of the module."""
        self.last = True
        """Whether the next backward is the step's last."""
        self._unsummed: dict[int, Tensor] = {}
        self.seen: Seen | None = None
        self.sums = True
        """Whether the step's last backward sums over replicas."""

    def expect(self, last: bool) -> None:
        """Set whether the next backward is the step's last."""
        if self.last:
            self._unsummed.clear()  # a new step; an abandoned step must leave no gradients
        self.last = last

    def __call__(self, module: int, reduced: Tensor) -> None:
        if reduced.is_cuda:
            # FSDP allocated the tensor on another stream, and may free it before the current
            # stream has read it.
            reduced.record_stream(torch.cuda.current_stream())
        gradients, buffer = reduced, self.buffers.get(module)
        if buffer is not None:
            # Without other ranks FSDP does no reduce-scatter, which would have converted.
            reduced = reduced.view(torch.int64) if buffer.ranks > 1 else buffer.fixed(reduced)
        before = self._unsummed.pop(module, None)
        if before is not None:
            assert before.shape == reduced.shape, "some of its parameters had no gradient"
            reduced += before
        if self.last:
            if self.seen is not None:
                self.seen(reduced)
            if self.sums and self.group is not None:
                all_reduce(reduced, self.group, "dp").wait()
            if buffer is not None:
                from_fixed(reduced, gradients)
        else:
            # FSDP adds `reduced` to the gradient: zeros until the step's last backward.
            self._unsummed[module] = reduced.clone()
            reduced.zero_()


class _Allocate:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Allocate):
    """FSDP's all-gather, monitored. FSDP never passes ``async_op=True``."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        all_gather(output_tensor, input_tensor, group, "dp").wait()


class _ReduceScatter(_Allocate):
    """FSDP's reduce-scatter, monitored. FSDP never passes ``async_op=True``."""

    def __init__(self) -> None:
        self.seen: Seen | None = None
        self.buffer: FixedPointBuffer | None = None
        """Under exact sums."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if self.buffer is not None:
            input_tensor = self.buffer.fixed(input_tensor)
            output_tensor = output_tensor.view(torch.int64)
        if self.seen is not None:
            self.seen(input_tensor)
        reduce_scatter(output_tensor, input_tensor, group, "dp", op).wait()


def set_gradient_sync(model: nn.Module, *, sync: bool, last: bool) -> None:
    """Set which reductions FSDP does with the gradients of the next backward, and, in a model that
    keeps gathered parameters, that the step's last backward frees them.

    Args:
        model: the model, after :func:`apply_fsdp`; a model without FSDP is not changed.
        sync: reduce-scatter within a replica; until then each rank holds unsharded gradients.
        last: the next backward is the step's last: reduce-scatter, and sum over replicas as well.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(sync or last)
        if model.__dict__.get(_KEEPS_GATHERED):
            model.set_reshard_after_backward(last)
        replicas = model.__dict__.get(_REPLICAS)
        if replicas is not None:
            replicas.expect(last)


def finish_backward(model: nn.Module, *, sync: bool, last: bool) -> None:
    """Run FSDP's end of a backward once more, for gradients that came after the backward.

    FSDP accumulates the delayed weight gradients, and reduces as :func:`set_gradient_sync` says of
    ``sync`` and ``last``. A model without FSDP is not changed.
    """
    if not isinstance(model, FSDPModule):
        return
    # FSDP has no public name for this function; PyTorch's own pipelines call it too.
    finish = fully_shard.state(model)._root_post_backward_final_callback  # type: ignore[attr-defined]
    # FSDP reduces gradients of one dtype only, and converts gradients to float32 only when it does
    # not reduce: so the first call converts, and the second reduces.
    set_gradient_sync(model, sync=False, last=False)
    finish()
    if sync or last:
        set_gradient_sync(model, sync=sync, last=last)
        finish()


def free_gathered(model: nn.Module) -> None:
    """Free the parameters that a forward without a backward, or a step that ends before its last
    backward, has left gathered.

    Until then ``model.parameters()`` are the gathered parameters, not the local shards that the
    optimizer updates and a checkpoint stores. After an error inside a forward or a backward call
    ``model.reset_iter_state()`` of FSDP instead, which also forgets what that pass had begun.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
