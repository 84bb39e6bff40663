"""Which path is chosen, on devices that this machine may not have; how workers share rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe import Rows, choose_backend
from moe.experts import megablocks_backend
from moe.experts.megablocks_backend import assignments_of
from moe.experts.packed import _ROWS_OF_AN_EXPERT, BLOCK_ROWS, _shares


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
    with pytest.raises(
        ValueError, match=r"needs megablocks, megablocks_ops, stk.*: run `make megablo"
    ):
        choose_backend("megablocks", 16, 24, torch.bfloat16, "cuda")
    monkeypatch.setattr(
        megablocks_backend, "find_spec", lambda name: None if name == "megablocks_ops" else object()
    )
    with pytest.raises(ValueError, match=r"needs megablocks_ops: run `make megablocks`, or use gr"):
        choose_backend("megablocks", 16, 24, torch.bfloat16, "cuda")
    monkeypatch.setattr(megablocks_backend, "find_spec", lambda name: object())
    assert choose_backend("megablocks", 16, 24, torch.bfloat16, "cuda") == "megablocks"


@pytest.mark.parametrize(
    ("source", "counts", "top_k"),
    [
        ([0, 1, 1, 0, 2, 2], [2, 0, 4], 2),
        ([0, 2, 1, 1], [2, 0, 2], 1),  # a row has two: each is copied for each of its experts
        ([0, 1, 2, 9, 9], [3, 0, 0], 1),  # the last two are padding
        ([], [0, 0, 0], 1),
    ],
)
def test_megablocks_gets_the_assignments_row_after_row(source, counts, top_k):
    # With the package itself: tests/interop/test_megablocks.py.
    R = sum(counts)
    x_SD, weights_R = torch.randn(3, 8), torch.rand(len(source))
    source_R = torch.tensor(source, dtype=torch.int64)
    a = assignments_of(Rows(x_SD, source_R, weights_R, torch.tensor(counts)))
    assert (a.top_k, a.counts) == (top_k, counts)
    got = {
        (expert, weight, row)
        for expert, weight, row in zip(
            a.expert_R.tolist(),
            a.weights_R.tolist(),
            a.x_SD.repeat_interleave(a.top_k, 0)[:, 0].tolist(),
            strict=True,
        )
    }
    expert_R = [expert for expert, count in enumerate(counts) for _ in range(count)]
    rows_R = x_SD[source_R[:R].clamp(max=2), 0].tolist()
    assert got == set(zip(expert_R, weights_R[:R].tolist(), rows_R, strict=True))
    if a.sum_to is not None:
        assert torch.equal(x_SD[a.sum_to.source_R], a.x_SD)


def test_rows_that_megablocks_cannot_address_are_refused():
    x_SD = torch.zeros(1, 1).expand(2**11, 2**20)
    rows = Rows(x_SD, torch.arange(2**11), torch.ones(2**11), torch.tensor([2**11]))
    with pytest.raises(ValueError, match=r"not 2048 rows of 1048576: its kernels count in 32 bits"):
        assignments_of(rows)
    less = Rows(x_SD[1:], torch.arange(2**11 - 1), torch.ones(2**11 - 1), torch.tensor([2**11 - 1]))
    assert assignments_of(less).top_k == 1


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
