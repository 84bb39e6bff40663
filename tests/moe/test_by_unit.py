"""Experts by unit: rows of several micro-batches in one call have the bits of a call for each."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from moe import MoEConfig
from moe.experts import by_unit, packed
from moe.experts.by_unit import experts_by_unit, fork, single_assignments
from moe.experts.grouped import GroupedExperts
from moe.rows import rows_of, sum_rows, take_rows
from parallel.exact.arithmetic import UnitLimit
from parallel.exact.unit_sums import UnitSums
from router import RouterConfig, TopKRouter

E, K, D, F = 4, 2, 51, 45  # an expert's matrices do not begin at a cache line's start


class Unit(NamedTuple):
    """The rows of a micro-batch: [S, D], [S, K], [S, K], and the gradient of the output."""

    x: Tensor
    indices: Tensor
    weights: Tensor
    dy: Tensor


class Result(NamedTuple):
    """Of all rows in order, and the sums of the parameters' gradients."""

    y: Tensor
    dx: Tensor
    dweights: Tensor
    totals: list[Tensor]


def make_units(sizes: list[int]) -> list[Unit]:
    generator = torch.Generator().manual_seed(3)
    units = []
    for size in sizes:
        indices = torch.rand(size, E, generator=generator).argsort(1)[:, :K]
        draws = [torch.randn(size, n, generator=generator) for n in (D, K, D)]
        units.append(Unit(draws[0], indices, draws[1].sigmoid(), draws[2]))
    return units


def make_experts(bias: bool) -> GroupedExperts:
    torch.manual_seed(5)
    experts = GroupedExperts(MoEConfig(num_experts=E, top_k=2, d_model=D, d_ff=F, ffn_bias=bias))
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.3)
    return experts


def compute(experts: GroupedExperts, units: list[Unit], backend: str, here: range) -> Result:
    """One call with the rows of all units, for the experts ``here``."""
    sums = copy.deepcopy(UnitSums(experts, UnitLimit(8), by_fsdp=False))
    x, indices, weights, dy = (torch.cat(parts) for parts in zip(*units, strict=True))
    x.requires_grad_(), weights.requires_grad_()
    rows = rows_of(x, indices, weights, here, rows_per_unit=[len(unit.x) for unit in units])
    # Copies, as a rank has the experts that are its own: they begin elsewhere in memory.
    local = experts.local_weights().map(lambda p: p[here.start : here.stop].clone())
    y = experts_by_unit(rows, local, "swiglu", backend, sums)
    y.backward(dy)
    totals = sums.take() or [torch.zeros(p.shape, dtype=torch.int64) for p in experts.parameters()]
    return Result(y.detach(), x.grad, weights.grad, totals)


def joined(results: list[Result]) -> Result:
    rows = [torch.cat(parts) for parts in list(zip(*results, strict=True))[:3]]
    return Result(*rows, [sum(parts) for parts in zip(*(r.totals for r in results), strict=True)])


def assert_equal(found: Result, expected: Result) -> None:
    for name, a, b in zip(found._fields, found[:3], expected[:3], strict=False):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32)), name
    assert all(map(torch.equal, found.totals, expected.totals))
    assert any(total.any() for total in found.totals)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("backend", ["packed", "loop"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_call_has_the_bits_of_a_call_for_each_unit(
    bias: bool, backend: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_unit, "BLOCK_ROWS", 7)  # a unit has several blocks
    experts, units = make_experts(bias), make_units([20, 0, 1, 33, 2])
    apart = joined([compute(experts, [unit], backend, range(E)) for unit in units])
    monkeypatch.setattr(by_unit, "num_workers", lambda *_: workers)
    assert_equal(compute(experts, units, backend, range(E)), apart)


def test_the_threads_of_a_product_do_not_depend_on_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With few rows a product in several threads has other bits than in one."""
    experts, units = make_experts(bias=True), make_units(list(range(2, 20)))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        found = []
        for workers in (1, 2, 4):
            monkeypatch.setattr(by_unit, "num_workers", lambda *_, n=workers: n)
            found.append(compute(experts, units, "packed", range(E)))
        assert_equal(found[1], found[0])
        assert_equal(found[2], found[0])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", ["packed", "loop"])
@pytest.mark.parametrize("bias", [False, True])
def test_an_expert_has_the_same_bits_wherever_it_is(backend: str, bias: bool) -> None:
    """With few rows a product depends on where in memory its matrix or its vector begins."""
    experts, units = make_experts(bias), make_units([1, 2, 3, 9, 1, 17])
    everywhere = compute(experts, units, backend, range(E))
    for expert in range(E):
        alone = compute(experts, units, backend, range(expert, expert + 1))
        for total, part in zip(everywhere.totals, alone.totals, strict=True):
            assert torch.equal(total[expert], part[0])


def test_the_gradients_are_those_of_autograd() -> None:
    experts, (unit,) = make_experts(bias=True), make_units([40])
    x = unit.x.clone().requires_grad_()
    rows = rows_of(x, unit.indices, unit.weights, range(E))
    experts(*rows).backward(unit.dy)
    found = compute(experts, [unit], "packed", range(E))
    torch.testing.assert_close(found.dx, x.grad, rtol=1e-5, atol=1e-6)
    for total, parameter in zip(found.totals, experts.parameters(), strict=True):
        torch.testing.assert_close(
            (total.double() * 2.0**-54).float(), parameter.grad, rtol=1e-5, atol=1e-6
        )


def test_all_rows_of_an_expert_are_one_workers() -> None:
    counts = [[3, 0, 2000], [0, 0, 0], [5, 5, 5], [1, 900, 1]]
    for workers in (1, 2, 3, 8):
        shares = by_unit._shares_by_unit(counts, workers)
        experts = [{block.expert for block in share} for share in shares]
        assert sum(map(len, experts)) == len(set().union(*experts)) == 3
        blocks = sorted((b for share in shares for b in share), key=lambda b: b.rows.start)
        assert [b.rows.stop for b in blocks][-1] == sum(map(sum, counts))
        assert sum(b.last for b in blocks) == sum(n > 0 for row in counts for n in row)
        assert all(b.length <= packed.BLOCK_ROWS for b in blocks)


def test_a_fork_adds_gradients_in_its_own_order() -> None:
    factors = (1e8, -1e8, 1.0)

    def gradient(x: Tensor, parts: tuple[Tensor, ...]) -> float:
        sum(part * factor for part, factor in zip(parts, factors, strict=True)).sum().backward()
        return x.grad.item()

    x = torch.zeros(1, requires_grad=True)
    assert gradient(x, fork(x, 3)) == 1.0
    y = torch.zeros(1, requires_grad=True)
    assert gradient(y, (y,) * 3) == 0.0, "autograd alone adds from the last user to the first"


def test_single_assignments_are_the_routing_in_the_order_of_choices() -> None:
    torch.manual_seed(0)
    config = RouterConfig(num_experts=6, top_k=4, capacity={"policy": "fixed",
                          "capacity_factor": 0.6, "drop_policy": "probs"})  # fmt: skip
    x = torch.randn(12, 8)
    routed = TopKRouter(8, config)(x)
    assert routed.dropped_TK is not None
    assert routed.dropped_TK.any()
    single, to_tokens = single_assignments(routed)
    real = routed.expert_indices_TK < 6
    assert torch.equal(single.expert_indices_TK.flatten(), routed.expert_indices_TK[real])
    assert torch.equal(single.expert_weights_TK.flatten(), routed.expert_weights_TK[real])
    assert torch.equal(take_rows(x, to_tokens), x[real.nonzero()[:, 0]])
    ones = torch.ones(int(real.sum()), 1)
    assert torch.equal(sum_rows(ones, to_tokens).flatten(), real.sum(1).float())
