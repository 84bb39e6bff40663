"""LoRA adapters on the experts, the routers and the linear layers of any model with MoE layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from moe.adapters.matrices import (
    LORA_LINEARS,
    Adapter,
    ExpertsAdapter,
    MatrixAdapter,
    RouterAdapter,
)
from moe.adapters.targets import Target, chosen, fits_any, moe_layers, targets_of
from moe.experts import GroupedExperts
from router import TopKRouter

Model = TypeVar("Model", bound=nn.Module)


def add_lora(
    model: Model,
    rank: int = 8,
    alpha: float = 16,
    on: Sequence[str] = ("experts", "attention"),
    *,
    also_train: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    allow_no_target: bool = False,
) -> Model:
    """Give a model adapters, and freeze all else: only adapters are trained.

    A weight W is computed with as W + (alpha / rank) · B A, with B zero at the start: the model's
    output does not change until a step (LoRA, Hu et al., arXiv 2106.09685, section 4.1). The
    experts of a layer have an A and a B for each expert and matrix, whose products are grouped
    GEMMs like the experts' own: no dense product B A is made, and frozen weights get no memory for
    gradients. The names of the model's own parameters stay; an adapter is the child ``lora`` of the
    module that it adapts.

    Call before ``parallel.apply_expert_parallel``, ``apply_tensor_parallel`` and ``apply_fsdp``:
    adapters are then sharded as the weights. With one seed on all ranks they are equal.

    Args:
        model: a model with ``MoELayer``, as an adopted one, or any model with linear layers. It is
            changed in place; it may be on the meta device, and needs ``reset_parameters`` of its
            adapters after ``to_empty`` then.
        rank: L, the inner size of each product.
        alpha: the product is scaled by alpha / rank.
        on: what gets adapters: ``experts``; ``router``; ``attention``, the linear layers within
            modules that have attention in the name of their class; ``dense``, all other linear
            layers but output heads; or patterns of module names, such as ``*.q_proj``.
        also_train: patterns of names of parameters that are trained whole beside the adapters, such
            as ``*.router.weight`` or ``*norm*``.
        dtype: of the adapters' parameters; None for float32, or the weight's where that is wider.
            Products are in the dtype in which the weight's product is.
        allow_no_target: a word or a pattern may fit nothing, as in a stage of a pipeline.

    Returns:
        The model.

    Raises ValueError, and changes nothing, for a rank or an alpha that is not above 0, for a word
    or a pattern that fits nothing, for modules that are sharded or have an adapter already, and for
    experts that compute with ``megablocks`` or exact sums.

    Example::

        model = moe.add_lora(moe.adopt(model), rank=8, on=("experts", "attention"))
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    """
    if rank < 1:
        raise ValueError(f"rank ({rank}) must be at least 1")
    if not alpha > 0:
        raise ValueError(f"alpha ({alpha}) must be above 0")
    adapted = next(adapters_of(model), None)
    if adapted is not None:
        raise ValueError(
            f"{adapted[0] or 'the module'} must have no adapter: call add_lora once, or merge_lora "
            f"before"
        )
    targets = chosen(targets_of(model), on, allow_no_target)
    for target in targets:
        _check(target)
    names = [name for name, _ in model.named_parameters()]
    for pattern in also_train:
        if not allow_no_target and not any(fits_any(name, [pattern]) for name in names):
            raise ValueError(f"also_train ({pattern}) must be a pattern of a parameter's name")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(fits_any(name, also_train))
    for target in targets:
        _adapt(target.module, rank, alpha, dtype)
    return model


def _check(target: Target) -> None:
    name, module = target.name or "the module", target.module
    for parameter in module.parameters():
        if hasattr(parameter, "to_local") or "forward" in vars(module):
            raise ValueError(
                f"{name} must not be sharded: call add_lora before apply_expert_parallel, "
                f"apply_tensor_parallel and apply_fsdp, which shard adapters as well"
            )
        if not parameter.is_floating_point():
            raise ValueError(
                f"{name} ({parameter.dtype}) must have floating-point parameters: quantized ones "
                f"are adapted by peft"
            )
    if isinstance(module, GroupedExperts):
        exact = module.unit_sums is not None
        if exact or module.backend == "megablocks":
            wrong = "train.exact (true)" if exact else f"moe.backend ({module.backend})"
            raise ValueError(
                f"{name}: {wrong} has no products of adapters: use auto, loop, grouped_mm or "
                f"packed, without exact sums"
            )


def _adapt(module: nn.Module, rank: int, alpha: float, dtype: torch.dtype | None) -> None:
    own = next(module.parameters()).dtype
    dtype = torch.promote_types(torch.float32, own) if dtype is None else dtype
    if isinstance(module, GroupedExperts):
        module.lora = ExpertsAdapter(module, rank, alpha, dtype)
    elif isinstance(module, TopKRouter):
        module.lora = RouterAdapter(module.weight, rank, alpha, dtype)
    else:
        adapter = MatrixAdapter(module.get_parameter("weight"), rank, alpha, dtype)
        module.__class__ = LORA_LINEARS[type(module)]  # type: ignore[index]
        module.lora = adapter
    assert isinstance(module.lora, nn.Module)
    module.lora.train(module.training)


def adapters_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, Adapter]]:
    """Every adapter: the name of the module that has it, the module, and the adapter."""
    for name, module in model.named_modules():
        adapter = getattr(module, "lora", None)
        if isinstance(adapter, Adapter):
            yield name, module, adapter


def merge_lora(model: Model) -> Model:
    """Add every adapter's product to its weight and remove the adapters, in place.

    The model is then one without adapters, whose outputs are equal to rounding, with the parameters
    that it had, still frozen: ``save_pretrained`` writes what ``transformers`` loads. A weight is
    rounded once. Under expert parallelism each rank merges its own experts.

    Raises ValueError, and changes nothing, for a model without adapters, and for parameters that
    FSDP or tensor parallelism has sharded: save :func:`lora_state_dict` with ``full=True``, load it
    into an unsharded model, and merge there.
    """
    adapters = list(adapters_of(model))
    if not adapters:
        raise ValueError(f"{type(model).__name__} must have adapters: call moe.add_lora first")
    for name, module, adapter in adapters:
        adapter.check_views(module)
        for parameter in module.parameters():
            cut = [p for p in getattr(parameter, "placements", ()) if p.is_shard()]
            if any(p.dim for p in cut) or (cut and not isinstance(module, GroupedExperts)):
                raise ValueError(
                    f"{name} must not be sharded by FSDP or tensor parallelism to be merged: load "
                    f"moe.lora_state_dict(model, full=True) into an unsharded model, and merge that"
                )
    for _, module, adapter in adapters:
        adapter.merge(module)
        if isinstance(module, GroupedExperts | TopKRouter):
            del module.lora
            module.lora = None
        else:
            del module.lora
            module.__class__ = next(
                plain for plain, own in LORA_LINEARS.items() if own is type(module)
            )
    return model


def lora_state_dict(model: nn.Module, *, full: bool = False) -> dict[str, Tensor]:
    """What adapters' training changes, by name: adapters, parameters that are trained whole, and
    the balancing biases of routers, which move without gradients.

    The tensors are those of ``model.state_dict()``: DTensors of a sharded model, which
    ``ckpt.save_state_dict`` and ``torch.distributed.checkpoint`` save. With ``full`` every rank
    gets whole plain tensors, and all ranks must call.

    Raises ValueError for a model without adapters.
    """
    names = _names(model)
    state = {name: tensor for name, tensor in model.state_dict().items() if name in names}
    if not full:
        return state
    return {name: _full(tensor) for name, tensor in state.items()}


def _full(tensor: Any) -> Tensor:
    whole_tensor: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole_tensor.detach().clone()


def _names(model: nn.Module) -> set[str]:
    if next(adapters_of(model), None) is None:
        raise ValueError(f"{type(model).__name__} must have adapters: call moe.add_lora first")
    names = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    for name, _, adapter in adapters_of(model):
        prefix = f"{name}." if name else ""
        names |= {f"{prefix}lora.{own}" for own, _ in adapter.named_parameters()}
    for name, layer in moe_layers(model):
        ids = {id(buffer) for buffer in layer.router.buffers()}
        prefix = f"{name}." if name else ""
        names |= {f"{prefix}{own}" for own, b in layer.named_buffers() if id(b) in ids}
    return names


@torch.no_grad()
def load_lora_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load what :func:`lora_state_dict` gave into a model with adapters of equal shapes, in place.

    Values may be whole tensors, of which each rank of a sharded model keeps its part, or DTensors
    that are sharded as the model's.

    Raises ValueError, and changes nothing, for names that are missing or unknown, and for other
    shapes, as those of another rank.
    """
    names = _names(model)
    own = {name: t for name, t in model.state_dict(keep_vars=True).items() if name in names}
    for what, difference in (
        ("lacks", own.keys() - state.keys()),
        ("has unknown", state.keys() - own.keys()),
    ):
        if difference:
            raise ValueError(
                f"the state dict {what} {min(difference)} ({len(difference)} such names): it must "
                f"be of a model with the same adapters, see moe.add_lora's on and also_train"
            )
    for name, tensor in own.items():
        if state[name].shape != tensor.shape:
            raise ValueError(
                f"{name} ({list(state[name].shape)}) must have the model's shape "
                f"({list(tensor.shape)}): is add_lora's rank the same?"
            )
    for name, tensor in own.items():
        value = state[name]
        if hasattr(tensor, "to_local") and not hasattr(value, "to_local"):
            from torch.distributed.tensor import DTensor, distribute_tensor

            assert isinstance(tensor, DTensor)
            value = distribute_tensor(
                value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
            )
        tensor.detach().copy_(value)
