"""Computing activations again in the backward instead of keeping them, or keeping them away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from parallel.dtensor import local_shard

Recompute = Literal["none", "selective", "full"]

_aten = torch.ops.aten
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def apply_recompute(blocks: Sequence[nn.Module], how: Recompute, every: int = 1) -> None:
    """Let some blocks keep their inputs alone, and run their forward again in the backward.

    Gradients have the same bits. Everything that a forward does happens twice, exchanges between
    ranks too, in the same order on all of them.

    Args:
        blocks: in the order in which they run; before :func:`apply_fsdp`.
        how: ``full`` keeps nothing else; ``selective`` keeps the results of products and of
            attention as well (but not those of experts on the packed path, which are its own), so
            that only what is cheap is done again; ``none`` changes nothing.
        every: 1 for all blocks, n for the first of every n.
    """
    if how == "none":
        return
    contexts = noop_context_fn
    if how == "selective":
        contexts = partial(create_selective_checkpoint_contexts, _policy)
    for block in blocks[::every]:
        # Not a wrapper module: the parameters keep their names.
        block.forward = _recomputed(block.forward, contexts)


def apply_activation_offload(blocks: Sequence[nn.Module]) -> None:
    """Let blocks keep what their backward needs in host memory; after :func:`apply_recompute`, so
    that what is kept of a block that is computed again is its input alone.

    What selective recomputation keeps is its own, and stays. On a CPU nothing changes.
    """
    for block in blocks:
        block.forward = _kept_on_host(block)


class _OnHost(save_on_cpu):
    """Everything but a block's parameters, which are kept anyhow."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(pin_memory=torch.cuda.is_available())
        pack, unpack = self.pack_hook, self.unpack_hook

        def send(tensor: Tensor) -> Any:
            # Looked up each time: FSDP gathers some of them within the forward.
            here = {local_shard(p).untyped_storage().data_ptr() for p in block.parameters()}
            return tensor if tensor.untyped_storage().data_ptr() in here else pack(tensor)

        self.pack_hook = send
        self.unpack_hook = lambda kept: kept if isinstance(kept, Tensor) else unpack(kept)


def _kept_on_host(block: nn.Module) -> Callable[..., Any]:
    forward = block.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with _OnHost(block):
            return forward(*args, **kwargs)

    return run


def _recomputed(forward: Callable[..., Any], contexts: Callable[[], Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Not stopped as soon as everything is there: another rank may need more of its forward than
        # this one, and would wait for this one in the next exchange.
        return checkpoint(
            forward, *args, use_reentrant=False, context_fn=contexts, early_stop=False, **kwargs
        )

    return run


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
