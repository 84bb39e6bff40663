"""The tokens, targets and weights of multi-token prediction in a step.

Legend: B batch, W tokens of a full sequence, K layers of multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel import Documents


@dataclass(frozen=True)
class MTPLoss:
    """What a step does with the losses of multi-token prediction; equal on all ranks."""

    weights: tuple[float, ...] = ()
    """What each layer's summed loss is multiplied by before all losses are divided by the step's
    divisor."""
    targets: tuple[int, ...] = ()
    """Targets of each layer over all ranks."""

    @classmethod
    def of(cls, loss_weight: float, counts: Sequence[int]) -> MTPLoss:
        """The loss of layer k is the mean over its own targets, and the mean over layers has the
        weight ``loss_weight`` (DeepSeek-V3, arXiv 2412.19437, equation 25).

        Args:
            loss_weight: of the step.
            counts: the step's targets over all ranks: of the next token, then of each layer.
        """
        first, *others = counts
        # All losses are divided by the targets of the next token, at the latest at the commit.
        weights = [loss_weight / len(others) * first / count if count else 0.0 for count in others]
        return cls(tuple(weights), tuple(others))


NO_MTP = MTPLoss()


def shifted(batch: Tensor, by: int, end_token: int | None) -> Tensor:
    """[B, W + 1] tokens of a micro-batch -> the same from token ``by`` on, as inputs and targets of
    a layer of multi-token prediction.

    A negative number is the complement of a token that is no target, as in the micro-batch. The
    target of token i is token i + ``by`` + 1. It is none where the sequence has no such token,
    where the micro-batch says so, and with ``end_token`` where it is of another document than
    token i.
    """
    after = batch.new_full((len(batch), min(by, batch.shape[1])), -1)
    moved = torch.cat((batch[:, by:], after), 1)
    if end_token is None:
        return moved
    tokens = torch.where(batch < -1, ~batch, batch)  # padding stays: it could be the end token
    numbers_BW = Documents.ended_by(end_token, tokens).numbers_BW
    reached = numbers_BW[:, by + 1 :] != numbers_BW[:, : max(numbers_BW.shape[1] - by - 1, 0)]
    elsewhere = torch.zeros_like(moved, dtype=torch.bool)
    elsewhere[:, 1 : 1 + reached.shape[1]] = reached
    return torch.where(elsewhere & (moved >= 0), ~moved, moved)
