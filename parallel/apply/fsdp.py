"""Fully sharded data parallelism: FSDP2 over the dense mesh and the expert mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pickle import PicklingError
from typing import Any, NoReturn, cast

import torch
from torch import nn
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
from parallel.apply.gradient_sums import set_sums, sums_of
from parallel.exact import ExactSums
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
            itself. Parameters are sharded over tensor-parallel ranks too. Not with
            ``sum_replicas`` false or ``offload``.

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
    check_equal_weights(model, dims, all_over_tp=exact is not None)
    policy, own_policy = _policies(compute_dtype, exact is not None)
    host = CPUOffloadPolicy(torch.cuda.is_available()) if offload else OffloadPolicy()
    defaults: dict[str, Any] = {
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": policy,
        "offload_policy": host,
    }
    sharded: list[tuple[FSDPModule, DeviceMesh]] = []

    def shard(module: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
        fully_shard(module, mesh=mesh, **defaults | options)
        type(module).__reduce_ex__ = _refuse_pickle  # type: ignore[method-assign, assignment]
        sharded.append((cast(FSDPModule, module), mesh))

    _shard_adapters(model, dims, shard=shard, alone_here=alone_here)
    alone = _shard_moe_layers(
        model, dims, shard=shard, alone_here=alone_here, policy=own_policy, casts=casts
    )
    for block in (*blocks, model):
        shard(
            block,
            dims.fsdp_mesh if exact is None else dims.fsdp_tp_mesh,
            reshard_after_forward=reshard_after_forward and block is not model,
            shard_placement_fn=lambda _: Shard(FSDP_DENSE_DIM),
            ignored_params=alone,
        )
    sums_replicas = sum_replicas and t.dp_replicate > 1
    set_sums(
        model,
        sharded,
        replicas=dims.replicate_group if sums_replicas else None,
        exact=exact,
        keeps_gathered=not reshard_after_forward,
    )
    if prefetch:
        _set_prefetch(blocks, prefetch)
    return model


def _refuse_pickle(module: nn.Module, protocol: int) -> NoReturn:
    """In the place of an error of pickle about a class that FSDP makes for each class of modules.
    A deep copy is refused by FSDP itself."""
    raise PicklingError(
        f"{type(module).__name__} is under FSDP and cannot be pickled: save its state_dict(), as "
        f"with ckpt.save_state_dict"
    )


def _shard_moe_layers(
    model: nn.Module,
    dims: ParallelDims,
    *,
    shard: Callable[..., None],
    alone_here: bool,
    policy: MixedPrecisionPolicy,
    casts: bool,
) -> set[nn.Parameter]:
    """Shard experts over their own mesh, and what of their layers must be sharded by itself.

    Args:
        model: the model.
        dims: the meshes.
        shard: shards a module over a mesh.
        alone_here: whether one rank holds each expert whole.
        policy: of routers.
        casts: whether other parameters are cast to a dtype of compute.

    Returns:
        The parameters of experts that are not sharded.
    """
    alone: set[nn.Parameter] = set()
    tp = dims.topology.tp > 1
    beside = dims.fsdp_tp_mesh if tp else dims.fsdp_mesh
    for layer in expert_modules(model):
        module = cast(nn.Module, layer)
        if alone_here:
            # One rank holds each expert: no gather and no reduction are needed, and FSDP over a
            # mesh of one rank would copy every expert twice a step.
            alone.update(layer.experts.parameters())
        else:
            cut = {"shard_placement_fn": lambda _: Shard(FSDP_EXPERT_DIM)}
            shard(layer.experts, dims.efsdp_mesh, **cut)
        router = getattr(module, "router", None)
        if isinstance(router, nn.Module) and (casts or _differs(router, module)):
            shard(router, beside, mp_policy=policy)
        if tp:
            # A MoE layer's other parameters are replicated over tp, and each tp rank computes on
            # other tokens: FSDP over the mesh of both axes sums the gradients over tp as well.
            shard(module, beside, ignored_params=alone)
    return alone


def _shard_adapters(
    model: nn.Module, dims: ParallelDims, *, shard: Callable[..., None], alone_here: bool
) -> None:
    """Shard adapters by themselves where parameters of other dtypes are trained beside them, as
    norms in bfloat16: FSDP reduces gradients of one dtype together.

    Frozen parameters may have any dtype. Routers are left out: they are sharded by themselves where
    their dtype is another one, and their adapters are in float32 as they are.
    """
    layers = list(expert_modules(model))
    of_experts = {id(layer.experts) for layer in layers}
    routers = {id(getattr(layer, "router", None)) for layer in layers}
    in_moe = {id(m) for layer in layers for m in cast(nn.Module, layer).modules()}
    in_routers = {id(p) for m in model.modules() if id(m) in routers for p in m.parameters()}
    trained = (p for p in model.parameters() if p.requires_grad and id(p) not in in_routers)
    if len({parameter.dtype for parameter in trained}) < 2:
        return
    for module in model.modules():
        adapter = getattr(module, "lora", None)
        if not isinstance(adapter, nn.Module) or id(module) in routers:
            continue
        if id(module) not in of_experts:
            over_tp = dims.topology.tp > 1 and id(module) in in_moe
            shard(adapter, dims.fsdp_tp_mesh if over_tp else dims.fsdp_mesh)
        elif not alone_here:
            cut = {"shard_placement_fn": lambda _: Shard(FSDP_EXPERT_DIM)}
            shard(adapter, dims.efsdp_mesh, **cut)


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


def _differs(router: nn.Module, layer: nn.Module) -> bool:
    """Whether a layer has parameters of another dtype than its router."""
    dtypes = {parameter.dtype for parameter in router.parameters()}
    return any(parameter.dtype not in dtypes for parameter in layer.parameters())


def _set_prefetch(blocks: Sequence[nn.Module], ahead: int) -> None:
    """Gather the parameters of the next ``ahead`` blocks during a block's computation."""

    def fsdp_modules(some: Sequence[nn.Module]) -> list[FSDPModule]:
        return [m for block in some for m in block.modules() if isinstance(m, FSDPModule)]

    for i, block in enumerate(blocks):
        fsdp = cast(FSDPModule, block)
        fsdp.set_modules_to_forward_prefetch(fsdp_modules(blocks[i + 1 : i + 1 + ahead]))
        fsdp.set_modules_to_backward_prefetch(fsdp_modules(blocks[max(i - ahead, 0) : i][::-1]))


def set_gradient_sync(model: nn.Module, *, sync: bool, last: bool) -> None:
    """Set which reductions FSDP does with the gradients of the next backward, and, in a model that
    keeps gathered parameters, that the step's last backward frees them.

    Args:
        model: the model, after :func:`apply_fsdp`; a model without FSDP is not changed.
        sync: reduce-scatter within a replica; until then each rank holds unsharded gradients.
        last: the next backward is the step's last: reduce-scatter, and sum over replicas as well.
    """
    if isinstance(model, FSDPModule):
        sums = sums_of(model)
        model.set_requires_gradient_sync(sync or last or (sums is not None and sums.exact))
        if sums is not None and sums.keeps_gathered:
            model.set_reshard_after_backward(last)
        if sums is not None:
            sums.expect(sync=sync, last=last)


def begin_gradients(model: nn.Module) -> None:
    """Begin a step's backwards: gradients that an abandoned step has left unsummed are forgotten.
    A model without FSDP is not changed."""
    sums = sums_of(model)
    if sums is not None:
        sums.begin()


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
