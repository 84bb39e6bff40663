"""Activation memory: recomputation in the backward, or offload to host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from parallel.config import Recompute
from parallel.dtensor import local_shard

_aten = torch.ops.aten
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_mm_v2.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def apply_recompute(blocks: Sequence[nn.Module], how: Recompute, every: int = 1) -> None:
    """Let blocks save their inputs, and run their forward again in the backward.

    Gradients are bitwise equal to those without recomputation. Collectives of the forward run twice
    as well, in equal order on all ranks. A router takes the experts of the first forward again,
    also where a device would break ties of scores otherwise.

    Args:
        blocks: the blocks in the order of the forward; before :func:`parallel.apply_fsdp`.
        how: ``full`` saves inputs only. ``selective`` saves the results of GEMMs and of attention
            as well, and recomputes cheap operations only; experts on the packed path save nothing
            more, because their GEMMs are not torch's. ``none`` changes nothing.
        every: 1 for all blocks, n for the first of every n blocks.

    Raises ValueError for a block that recomputes already, or that has FSDP.
    """
    if how not in get_args(Recompute):
        raise ValueError(f"how ({how}) must be one of {', '.join(get_args(Recompute))}")
    if how == "none":
        return
    if any(_RECOMPUTED in vars(block) for block in blocks):
        raise ValueError("apply_recompute must be called once for a block: a block has it already")
    if any(isinstance(module, FSDPModule) for block in blocks for module in block.modules()):
        raise ValueError("apply_recompute must be called before apply_fsdp or fully_shard")
    contexts = _selective_contexts if how == "selective" else noop_context_fn
    for block in blocks[::every]:
        # forward is replaced: a wrapper module would change the parameters' names.
        # A partial of a bound method, and not a closure: a deep copy of a block must compute with
        # the copy's parameters, and copy.deepcopy looks into the former alone.
        block.forward = partial(_run_recomputed, block, block.forward, contexts)
        vars(block)[_RECOMPUTED] = True


def apply_activation_offload(blocks: Sequence[nn.Module]) -> None:
    """Let blocks save what their backward needs in host memory.

    Call after :func:`apply_recompute`: then a recomputed block offloads its input only. What
    selective recomputation saves stays on the device. On a CPU nothing changes.
    """
    for block in blocks:
        block.forward = partial(_run_on_host, block, block.forward)  # as in apply_recompute


class _OnHost(save_on_cpu):
    """Offloads saved tensors except a block's parameters, which stay on the device anyway."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(pin_memory=torch.cuda.is_available())
        pack, unpack = self.pack_hook, self.unpack_hook

        def send(tensor: Tensor) -> Any:
            # Read at each call: FSDP replaces parameters by gathered ones during the forward.
            owned = {local_shard(p).untyped_storage()._cdata for p in block.parameters()}
            return tensor if tensor.untyped_storage()._cdata in owned else pack(tensor)

        self.pack_hook = send
        self.unpack_hook = lambda kept: kept if isinstance(kept, Tensor) else unpack(kept)


_RECOMPUTED = "_convoy_recomputed"


def _run_on_host(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _OnHost(block):
        return forward(*args, **kwargs)


def _run_recomputed(
    block: nn.Module,
    forward: Callable[..., Any],
    contexts: Callable[[], Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if not torch.compiler.is_compiling():  # torch.compile knows the contexts of torch alone
        contexts = partial(_keeping_choices, block, contexts)
    # early_stop=False: another rank may need more of its forward than this rank, and would then
    # wait for this rank in a collective that this rank skips.
    return checkpoint(
        forward, *args, use_reentrant=False, context_fn=contexts, early_stop=False, **kwargs
    )


class _All:
    """Several contexts in one, which may be entered more than once."""

    def __init__(self, contexts: Sequence[AbstractContextManager[Any]]) -> None:
        self.contexts = contexts

    def __enter__(self) -> None:
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*error)


def _keeping_choices(block: nn.Module, contexts: Callable[[], Any]) -> tuple[Any, Any]:
    """``contexts``, and those in which routers of a block keep their choices and take them again.

    A router is a module with a method ``keeping_choices``, as :class:`router.TopKRouter` has it.
    """
    pairs = [contexts()]
    for module in block.modules():
        keeping = getattr(module, "keeping_choices", None)
        if callable(keeping):
            pairs.append(keeping())
    if len(pairs) == 1:
        return cast(tuple[Any, Any], pairs[0])
    first, again = zip(*pairs, strict=True)
    return _All(first), _All(again)


def _selective_contexts() -> tuple[Any, Any]:
    """The contexts of one forward of a block, and of its recomputation."""
    saving, reusing = create_selective_checkpoint_contexts(_policy)
    if torch.compiler.is_compiling():
        # torch.compile marks every operation of the block by torch's own modes.
        return saving, reusing
    return _KeptOnly(saving), _KeptOnly(reusing)


class _KeptOnly(TorchDispatchMode):
    """Passes the operations in ``_KEPT`` to ``mode``, and runs all others as they are.

    PyTorch's mode counts every operation of a forward, and raises an error for one that the
    recomputation has more often. FSDP's own operations in a block differ between the two: profiler
    regions, for instance, and gathers where the backward has not gathered the parameters yet. None
    of them is kept.
    """

    supports_higher_order_operators = True

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()
        self.mode = mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions of a block stay compiled, as under PyTorch's mode."""
        return True

    def __enter__(self) -> Any:
        with self.mode:
            pass  # the mode counts each recomputation from its beginning
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KEPT:
            return self.mode.__torch_dispatch__(func, types, args, kwargs or {})
        return func(*args, **kwargs or {})


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
