"""Attention within packed documents: both paths against each document by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel import Documents, ParallelDims, Topology, apply_context_parallel, local_sequence
from parallel.apply.document_mask import (
    _GROUP_TOKENS,
    AttentionCall,
    attend_by_document,
    attend_masked,
    attend_within,
)
from pretrain.model.attention import build_attention
from tests.parallel.test_context_parallel import CONFIGS
from tests.support.ranks import run_ranks

END = 0
SCALE = 0.3
# Of every sequence; in one mix short ones that share a call, and long ones that do not.
LENGTHS = {
    "mixed": [[40, 1, 3, 1, 28, 7, 50, 2, 4], [1, 1, 60, 30, 20, 24], [3, 130, 3]],
    "one": [[136], [136]],
    "tokens": [[1] * 136, [1] * 136],
    "pairs": [[2] * 68, [1, *[2] * 67, 1]],
    "at the limit": [[_GROUP_TOKENS] * 4 + [8], [8, *[_GROUP_TOKENS // 2] * 8]],
}


def tokens_of(lengths: list[list[int]]) -> Tensor:
    """[B, W], every document with its end token but the last of each sequence, which goes on."""
    torch.manual_seed(3)
    rows = []
    for row in lengths:
        tokens = torch.randint(1, 300, (sum(row),))
        tokens[torch.tensor(row).cumsum(0)[:-1] - 1] = END
        rows.append(tokens)
    return torch.stack(rows)


def alone(q: Tensor, k: Tensor, v: Tensor, lengths: list[list[int]]) -> Tensor:
    """Every document by itself; heads repeated, pairs computed one by one."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = torch.empty(*q.shape[:3], v.shape[3])
    for b, row in enumerate(lengths):
        start = 0
        for length in row:
            for t in range(start, start + length):
                logits = q[b, :, t : t + 1] @ k[b, :, start : t + 1].transpose(1, 2) * SCALE
                out[b, :, t] = (logits.softmax(-1) @ v[b, :, start : t + 1])[:, 0]
            start += length
    return out


def inputs(batch: int, width: int, value: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(4)
    sizes = (4, 6), (2, 6), (2, value)
    return tuple(torch.randn(batch, h, width, c).requires_grad_() for h, c in sizes)  # type: ignore[return-value]


@pytest.mark.parametrize("value", [6, 10])
@pytest.mark.parametrize("how", [attend_masked, attend_by_document])
@pytest.mark.parametrize("name", LENGTHS)
def test_both_paths_are_each_document_by_itself(name, how, value):
    lengths = LENGTHS[name]
    q, k, v = inputs(len(lengths), sum(lengths[0]), value)
    grad = torch.randn(*q.shape[:3], value)
    expected = alone(q, k, v, lengths)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    y = how(AttentionCall(q, k, v, SCALE, Documents.ended_by(END, tokens_of(lengths))))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(y, (q, k, v), grad), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", [attend_masked, attend_by_document])
@pytest.mark.parametrize("name", LENGTHS)
def test_a_piece_of_the_queries_is_that_piece_of_the_whole(name, how):
    """From every position on, a document cut by it or not."""
    lengths = LENGTHS[name]
    W = sum(lengths[0])
    q, k, v = inputs(len(lengths), W)
    documents = Documents.ended_by(END, tokens_of(lengths))
    whole = alone(q, k, v, lengths).detach()
    with torch.no_grad():
        for first in (0, 1, 34, 40, 43, 68, 102, W - 1):
            for length in (1, 34, W - first):
                stop = min(first + length, W)
                y = how(AttentionCall(q[:, :, first:stop], k, v, SCALE, documents, first))
                torch.testing.assert_close(y, whole[:, :, first:stop], rtol=1e-5, atol=1e-5)


def test_an_end_token_is_the_last_of_its_document():
    tokens = torch.tensor([[5, END, 6, 7, END, END, 8], [END, 5, 6, 7, 8, 9, END]])
    expected = torch.tensor([[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]])
    assert torch.equal(Documents.ended_by(END, tokens).numbers_BW, expected)


def test_one_document_is_plain_causal_attention_bit_by_bit():
    q, k, v = inputs(2, 136)
    documents = Documents.ended_by(END, torch.ones(2, 136, dtype=torch.int64))
    plain = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=SCALE, enable_gqa=True
    )  # fmt: skip
    assert torch.equal(attend_within(AttentionCall(q, k, v, SCALE, documents)), plain)


def test_few_calls_however_small_documents_are():
    for lengths in LENGTHS.values():
        documents = Documents.ended_by(END, tokens_of(lengths))
        for row, calls in zip(lengths, documents.calls(0, sum(lengths[0])), strict=True):
            assert len(calls.queries) <= 2 * sum(row) / _GROUP_TOKENS + 1
            assert calls.queries == calls.keys
            assert sum(calls.queries) == sum(row)
    assert documents.calls(0, 136) is documents.calls(0, 136), "made once for all layers"
    assert documents.mask(0, 136) is not documents.mask(1, 135)
    assert documents.mask(0, 136).data_ptr() == documents.mask(0, 136).data_ptr()


def test_no_sequences():
    q, k, v = inputs(0, 136)
    documents = Documents.ended_by(END, torch.zeros(0, 136, dtype=torch.int64))
    y = attend_within(AttentionCall(q, k, v, SCALE, documents))
    assert y.shape == (0, 4, 136, 6)
    y.sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape


def attention_pass(name: str, lengths: list[list[int]], mesh: Any) -> dict[str, Tensor]:
    """Output and gradients; with a mesh, of this rank's part."""
    torch.manual_seed(1)
    module = build_attention(CONFIGS[name])
    tokens = tokens_of(lengths) if lengths else torch.zeros(0, 136, dtype=torch.int64)
    x, grad = torch.randn(2, *tokens.shape, 32)
    documents = Documents.ended_by(END, tokens)
    if mesh is not None:
        apply_context_parallel(module, mesh)
        x, grad = local_sequence(x, mesh), local_sequence(grad, mesh)
    x = x.clone().requires_grad_()
    y = module(x, documents)
    y.backward(grad)
    return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in module.named_parameters()}}


def attention_on_rank(rank: int, world: int) -> dict[Any, dict[str, Tensor]]:
    mesh = ParallelDims.build(Topology(cp=world), "cpu").cp_mesh
    where = local_sequence(torch.arange(136).unsqueeze(0), mesh)[0]
    return {
        (kind, name): attention_pass(kind, lengths, mesh) | {"where": where}
        for kind in ("grouped", "latent")
        for name, lengths in [*LENGTHS.items(), ("none", [])]
    }


@pytest.mark.parametrize("world", [2, 4])
def test_attention_over_ranks_is_that_of_whole_sequences(world):
    W = 136  # 2 · 4 pieces of 17: documents are cut at odd places
    results = run_ranks(attention_on_rank, world, world)
    for kind, name in results[0]:
        expected = attention_pass(kind, LENGTHS.get(name, []), None)
        for key, value in expected.items():
            if key in ("x", "y"):
                actual = torch.empty_like(value)
                for result in results:
                    actual[:, result[kind, name]["where"]] = result[kind, name][key]
            else:
                actual = sum(result[kind, name][key] for result in results)
            error = (actual - value).norm()
            # Queries of tokens that see themselves alone have gradients of nothing but noise.
            assert error <= 1e-5 * value.norm() + 1e-5, f"{kind}, {name}: {key}"
        assert len(results[0][kind, name]["where"]) == W // world
