"""The loss that takes a chunk of logits at a time is cross-entropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pretrain.parallelize import loss as module
from pretrain.parallelize import next_token_loss

V = 37


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("tokens_of_a_chunk", [1, 5, 100])
def test_the_loss_and_its_gradient_are_those_of_cross_entropy(
    dtype, tokens_of_a_chunk, monkeypatch
):
    monkeypatch.setattr(module, "CHUNK", tokens_of_a_chunk * V)
    logits_BSV = (5 * torch.randn(3, 7, V)).to(dtype)
    targets_BS = torch.randint(V, (3, 7))
    targets_BS[1, 2:5] = -1
    ours, theirs = (logits_BSV.clone().requires_grad_() for _ in range(2))
    loss = next_token_loss(ours, targets_BS)
    (0.3 * loss).backward()
    expected = F.cross_entropy(
        theirs.flatten(0, 1).float(), targets_BS.flatten(), ignore_index=-1, reduction="sum"
    )
    (0.3 * expected).backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert not ours.grad[1, 2:5].any()


def test_logits_that_are_not_finite_show_in_the_loss_and_in_their_own_gradient_only():
    logits_BSV = torch.randn(1, 4, V)
    logits_BSV[0, 1, 3] = torch.nan
    logits_BSV.requires_grad_()
    loss = next_token_loss(logits_BSV, torch.zeros(1, 4, dtype=torch.int64))
    loss.backward()
    assert loss.isnan()
    bad_T = logits_BSV.grad.isnan().any(-1).flatten()
    assert bad_T.tolist() == [False, True, False, False]
