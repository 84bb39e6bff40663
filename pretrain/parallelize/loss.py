"""The loss of the next token, in few bytes a logit.

Legend: B batch, S tokens of a sequence, T tokens, V vocab, N tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard

from parallel.apply import ExactSequence
from pretrain.parallelize.loss_chunks import CHUNK, CHUNK_OF_DEVICES


def next_token_loss(
    logits_BSV: Tensor, targets_BS: Tensor, sequence: ExactSequence | None = None
) -> Tensor:
    """Summed negative log-likelihood in nats, a float32 scalar; targets of -1 are ignored.

    Besides the logits and their gradient, in the logits' dtype, only a chunk of tokens is in memory
    in float32 at a time. Logits may be a DTensor sharded along the vocabulary; all ranks of its
    mesh get the same sum, and then the logits are in memory in float32. With ``sequence`` the sum
    is that of all its ranks' tokens, with the bits of one rank; the gradient is of this rank's.
    """
    if not isinstance(logits_BSV, DTensor):
        loss: Tensor = _SummedNLL.apply(logits_BSV, targets_BS, sequence)
        return loss
    # flatten() of a DTensor without elements loses the placement.
    local_TV = logits_BSV.to_local().flatten(0, 1)
    logits_TV = DTensor.from_local(local_TV, logits_BSV.device_mesh, (Shard(1),))
    loss = F.cross_entropy(
        logits_TV.float(), targets_BS.flatten(), ignore_index=-1, reduction="sum"
    )
    return loss.to_local() if isinstance(loss, DTensor) else loss


class _SummedNLL(torch.autograd.Function):
    """Cross-entropy that keeps the logits, and computes their softmax again in the backward."""

    @staticmethod
    def forward(
        ctx: Any, logits_BSV: Tensor, targets_BS: Tensor, sequence: ExactSequence | None
    ) -> Tensor:
        logits_TV, targets_T = logits_BSV.flatten(0, 1), targets_BS.flatten()
        ctx.save_for_backward(logits_BSV, targets_T)
        nll_T = logits_TV.new_empty(len(logits_TV), dtype=torch.float32)
        for rows in _chunks(logits_TV):
            logp_NV = F.log_softmax(logits_TV[rows].float(), 1)
            nll_T[rows] = F.nll_loss(logp_NV, targets_T[rows], ignore_index=-1, reduction="none")
            del logp_NV  # before the next chunk takes memory
        if sequence is not None:
            nll_T = sequence.gather_tokens(nll_T.view_as(targets_BS)).flatten()
        return nll_T.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        logits_BSV, targets_T = ctx.saved_tensors
        logits_TV = logits_BSV.flatten(0, 1)
        grad_TV = torch.empty_like(logits_TV)
        scale_T1 = torch.where(targets_T < 0, 0, grads[0]).unsqueeze(1)
        ones_T1 = torch.full_like(scale_T1, -1)
        targets_T1 = targets_T.clamp_min(0).unsqueeze(1)
        for rows in _chunks(logits_TV):
            p_NV = F.softmax(logits_TV[rows].float(), 1)
            p_NV.scatter_add_(1, targets_T1[rows], ones_T1[rows])
            grad_TV[rows] = p_NV.mul_(scale_T1[rows])
            del p_NV  # before the next chunk takes memory
        return grad_TV.view(logits_BSV.shape), None, None


def _chunks(logits_TV: Tensor) -> list[slice]:
    T, V = logits_TV.shape
    numbers = CHUNK if logits_TV.device.type == "cpu" else CHUNK_OF_DEVICES
    size = max(numbers // V, 1)
    return [slice(start, min(start + size, T)) for start in range(0, T, size)]
