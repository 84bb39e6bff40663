"""Which path is chosen, on devices that this machine may not have; how workers share rows."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe import GroupedExperts, MoEConfig, Rows, choose_backend
from moe.experts import megablocks_backend
from moe.experts.packed import _ROWS_OF_AN_EXPERT, BLOCK_ROWS, _shares
from moe.experts.weights import ExpertWeights


@pytest.mark.parametrize(
    ("backend", "sizes", "dtype", "device", "expected"),
    [
        ("auto", (16, 24), torch.float32, "cpu", "packed"),
        ("auto", (16, 24), torch.bfloat16, "cuda", "grouped_mm"),
        ("auto", (16, 24), torch.float32, "cuda", "loop"),
        ("auto", (16, 24), torch.float64, "cpu", "packed"),
        ("auto", (18, 24), torch.float32, "cpu", "packed"),
        ("packed", (18, 7), torch.float32, "cpu", "packed"),
        ("auto", (16, 24), torch.bfloat16, "cpu", "grouped_mm"),
        ("auto", (16, 24), torch.float16, "cpu", "grouped_mm"),
        ("auto", (16, 24), torch.float16, "cuda", "loop"),
        ("auto", (16, 24), torch.bfloat16, "mps", "loop"),
        ("auto", (16, 20), torch.bfloat16, "cpu", "loop"),
        ("loop", (16, 24), torch.float32, "cpu", "loop"),
        ("grouped_mm", (16, 24), torch.float32, "cpu", "grouped_mm"),
    ],
)
def test_the_path_follows_from_shapes_dtype_and_device(backend, sizes, dtype, device, expected):
    assert choose_backend(backend, *sizes, dtype, device) == expected


@pytest.mark.parametrize(
    ("major", "expected"), [(8, "loop"), (9, "grouped_mm"), (10, "grouped_mm"), (12, "loop")]
)
def test_auto_takes_the_grouped_product_where_a_device_has_its_kernel(major, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(major=major)  # of the compute capability
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    assert choose_backend("auto", 16, 24, torch.bfloat16, "cuda") == expected
    assert choose_backend("grouped_mm", 16, 24, torch.bfloat16, "cuda") == "grouped_mm"


def test_a_path_that_was_asked_for_and_cannot_run_is_refused():
    with pytest.raises(ValueError, match=r"a dtype that it takes on cuda \(torch.bfloat16\)"):
        choose_backend("grouped_mm", 16, 24, torch.float32, "cuda")
    with pytest.raises(ValueError, match=r"backend \(packed\) must have float32 or float64"):
        choose_backend("packed", 16, 24, torch.bfloat16, "cpu")
    with pytest.raises(ValueError, match=r"multiples of 2 for torch.float64"):
        choose_backend("grouped_mm", 16, 24, torch.float64, "cpu")


def test_megablocks_says_what_it_needs(monkeypatch):
    with pytest.raises(ValueError, match=r"must have bfloat16 on cuda, not torch.float32 on cpu"):
        choose_backend("megablocks", 16, 24, torch.float32, "cpu")
    monkeypatch.setattr(megablocks_backend, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs megablocks and grouped_gemm: run `make megablo"):
        choose_backend("megablocks", 16, 24, torch.bfloat16, "cuda")
    monkeypatch.setattr(megablocks_backend, "find_spec", lambda name: object())
    assert choose_backend("megablocks", 16, 24, torch.bfloat16, "cuda") == "megablocks"


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_the_megablocks_path_around_its_product_is_the_plain_one(monkeypatch, activation):
    # The product itself runs on CUDA alone; here a loop stands in for it.
    def gmm(a, b, batch_sizes, trans_b):
        assert batch_sizes.device.type == "cpu"
        assert not trans_b
        parts = zip(a.split(batch_sizes.tolist()), b.unbind(0), strict=True)
        return torch.cat([x @ w for x, w in parts])

    ops = types.SimpleNamespace(gmm=gmm)
    monkeypatch.setitem(sys.modules, "grouped_gemm", types.SimpleNamespace(ops=ops))
    torch.manual_seed(0)
    experts = GroupedExperts(
        MoEConfig(num_experts=4, top_k=2, d_model=8, d_ff=12, activation=activation, ffn_bias=True)
    )
    for bias in (experts.b_up, experts.b_down):
        torch.nn.init.normal_(bias)
    x, source = torch.randn(5, 8), torch.tensor([0, 3, 1, 1, 4, 2])
    weights, counts = torch.rand(6), torch.tensor([2, 0, 3, 0])  # the last row is padding
    parameters = (experts.w_gate, experts.w_up, experts.w_down, experts.b_gate, experts.b_up,
                  experts.b_down)  # fmt: skip
    out = megablocks_backend.experts_megablocks(
        Rows(x, source, weights, counts), ExpertWeights(*parameters), activation
    )
    experts.backend = "loop"
    torch.testing.assert_close(out, experts(x, source, weights, counts), rtol=1e-5, atol=1e-6)


@given(
    st.lists(st.sampled_from([0, 0, 1, 5, 40, 700, 3000]), min_size=1, max_size=24),
    st.integers(1, 8),
)
def test_workers_share_out_rows_once_in_order_and_evenly(counts, workers):
    shares = _shares(counts, workers)
    rows = [
        (b.expert, row)
        for share in shares
        for b in share
        for row in range(b.rows.start, b.rows.stop)
    ]
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    assert rows == list(zip(experts, range(len(experts)), strict=True))
    assert all(0 < b.length <= BLOCK_ROWS for share in shares for b in share)
    # What every expert costs counts as rows: else one worker has the few large experts, and another
    # the many small ones, which take it longer.
    work = [
        sum(b.length for b in share) + _ROWS_OF_AN_EXPERT * len({b.expert for b in share})
        for share in shares
    ]
    whole = sum(counts) + _ROWS_OF_AN_EXPERT * sum(count > 0 for count in counts)
    assert max(work) <= whole / workers + 2 * _ROWS_OF_AN_EXPERT
