"""The mask of tokens of an adopted layer, from the attention mask of the model that it is in.

A model of ``transformers`` gives its attention mask to the attention of each layer, and not to the
MoE block. A hook on the attention keeps the mask until the MoE layer of the same decoder layer is
called. The hook is inside of what activation checkpointing runs again: a recomputed layer has the
mask too.

Legend: B batch, S tokens of a call, C tokens that attention sees, those of a cache included.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

LastMask = list[Any]
"""The attention mask of the decoder layer's present call; empty where there is none."""


def token_mask(attention_mask: object, x: Tensor) -> Tensor | None:
    """[B, S] bool for an input [B, S, D]: true for a token, false for padding.

    None where the attention mask does not tell: without a mask, and for masks that are no tensors,
    as those of flex attention.

    Args:
        attention_mask: [B, C], 0 for padding; or [B or 1, heads or 1, S, C], bool or added to
            scores, as ``transformers`` makes it from the former.
        x: the input of the MoE layer.
    """
    if not isinstance(attention_mask, Tensor) or x.ndim != 3:
        return None
    B, S = x.shape[:2]
    if attention_mask.ndim == 2 and attention_mask.shape[1] >= S:
        mask_BS = attention_mask[:, attention_mask.shape[1] - S :] != 0
    elif attention_mask.ndim == 4 and attention_mask.shape[2] == S:
        seen_BSC = attention_mask[:, 0]
        if seen_BSC.dtype != torch.bool:
            seen_BSC = seen_BSC > torch.finfo(seen_BSC.dtype).min / 2
        # A token sees itself. With a cache its own column is not known: padding before a text sees
        # nothing at all.
        square = seen_BSC.shape[2] == S
        mask_BS = seen_BSC.diagonal(dim1=1, dim2=2) if square else seen_BSC.any(2)
    else:
        return None
    return mask_BS.expand(B, S)


def watch_attention(decoder_layer: nn.Module, block: nn.Module, last_mask: LastMask) -> None:
    """Put the masks that the attention beside ``block`` is called with into ``last_mask``; those of
    the decoder layer where no attention is beside the block."""
    beside = [module for module in decoder_layer.children() if module is not block]
    if not any(map(_takes_mask, beside)):
        beside = [decoder_layer]
    for module in filter(_takes_mask, beside):
        names = list(inspect.signature(module.forward).parameters)
        # A partial and not a closure: a deep copy of the model must keep its own masks.
        hook = partial(_keep_mask, last_mask, names.index("attention_mask"))
        module.register_forward_pre_hook(hook, with_kwargs=True)


def _takes_mask(module: nn.Module) -> bool:
    return "attention_mask" in inspect.signature(module.forward).parameters


def unwatch_attention(decoder_layer: nn.Module) -> None:
    """Remove the hooks of :func:`watch_attention`."""
    for module in (decoder_layer, *decoder_layer.children()):
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, partial) and hook.func is _keep_mask:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _keep_mask(
    last_mask: LastMask, place: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Keep the mask that a call gives by its name, or at its place among positional arguments."""
    if "attention_mask" in kwargs:
        last_mask[:] = [kwargs["attention_mask"]]
    else:
        last_mask[:] = args[place : place + 1]
