"""Copies of experts: balanced ranks, equal numbers, and nothing left behind."""

from __future__ import annotations

import random
import sys
from functools import partial
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe import MoEConfig, MoELayer, add_lora
from moe.copies import CopyPlan, Lending, Loan, plan_copies, slowest
from moe.copies.places import places_of
from moe.copies.plan import LEAST_PART, whole_units
from moe.experts import packed, with_copies
from moe.testing import MAX_TOKENS, D, E, K, make_layer
from parallel import ParallelDims, Topology, apply_expert_parallel, apply_fsdp
from router import UNITS_PER_RANK, CapacityPlan, RouterOutput
from tests.moe.test_dispatch import DispatcherContract, with_stand_in
from tests.support.ranks import run_ranks

STRAGGLER = {"policy": "straggler_aware", "capacity_factor": 1.0}
TOGETHER = torch.tensor([[0, 1, 2]])
"""Experts of the first of two ranks, or of the first two of four."""


def drawn_rows(experts: int, total: int, skew: float, seed: int) -> list[int]:
    rng = random.Random(seed)
    weights = [rng.random() ** -skew for _ in range(experts)]
    return [int(total * weight / sum(weights)) for weight in weights]


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("skew", [0.0, 0.5, 2.0])
def test_a_plan_moves_every_row_once_and_balances_ranks(ranks, skew):
    for seed in range(20):
        rows = drawn_rows(4 * ranks, 4096 * ranks, skew, seed)
        shares = [random.Random(seed).randint(500, 1500) for _ in range(ranks)]
        plan = plan_copies(rows, shares, 4 * ranks)
        loads = plan.loads(rows)
        assert sum(loads) == sum(rows)
        for expert, by_rank in plan.rows.items():
            assert sum(by_rank.values()) == rows[expert]
            assert min(by_rank.values()) >= 0
            assert next(iter(by_rank)) == expert // 4, "the owner comes first"
            takers = [rank for rank, experts in enumerate(plan.copies) if expert in experts]
            assert takers == sorted(set(by_rank) - {expert // 4})
        least = sum(rows) / ranks / LEAST_PART
        beyond = [n - sum(rows) * s / sum(shares) for n, s in zip(loads, shares, strict=True)]
        assert max(beyond) <= least + 1
        assert plan == plan_copies(rows, shares, 4 * ranks)


def test_copies_are_few_and_bounded():
    rows = [700, 20, 20, 20, 20, 20, 100, 100]
    assert plan_copies(rows, [1] * 4, 0).num_copies == 0
    for most in (1, 2):
        plan = plan_copies(rows, [1] * 4, most)
        assert plan.most_copies <= most
        assert plan.loads(rows) == [250] * 4
        # Of the largest expert alone.
        assert plan.rows == {0: {0: 230, 1: 210, 2: 210, 3: 50}}
    assert plan_copies([100] * 8, [1] * 4, 2) == CopyPlan.without(8, 4)
    assert plan_copies([101, 100] * 4, [1] * 4, 2).num_copies == 0, "balanced well enough"
    assert plan_copies([0] * 8, [1] * 4, 2).num_copies == 0
    assert slowest([0, 0], [1, 1]) == 1.0


def test_one_hot_rank_among_even_ones_is_helped():
    rows = [2575, *[975] * 63]
    assert slowest(plan_copies(rows, [1] * 64, 2).loads(rows), [1] * 64) < 1.04


def test_a_slow_rank_gives_rows_away():
    plan = plan_copies([100] * 8, [1, 2, 2, 2], 2)
    loads = plan.loads([100] * 8)
    assert slowest([200] * 4, [1, 2, 2, 2]) == pytest.approx(1.75)
    assert slowest(loads, [1, 2, 2, 2]) < 1.03


def test_ranks_of_a_node_help_first():
    rows = [300, 100, 0, 0, 100, 100, 100, 100]
    assert set(plan_copies(rows, [1] * 4, 2, ranks_per_node=2).rows[0]) == {0, 1}
    # What a node cannot take crosses to another one.
    rows = [700, 100, 0, 0, 0, 0, 0, 0]
    plan = plan_copies(rows, [1] * 4, 2, ranks_per_node=2)
    assert plan.loads(rows) == [200] * 4
    assert set(plan.rows[0]) == {0, 1, 2, 3}


def drawn_counts(ranks: int, experts: int, skew: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    chances = torch.rand(ranks, experts, generator=generator) ** (2 * skew)
    return (1000 * chances / chances.mean()).long()


@pytest.mark.parametrize("in_units", [False, True])
def test_places_are_what_the_plan_says(in_units):
    ranks, experts = 4, 12
    for seed in range(20):
        counts = drawn_counts(ranks, experts, 1.0, seed)
        rows, shares = counts.sum(0).tolist(), [1] * ranks
        plan, units = plan_copies(rows, shares, 3), None
        if in_units:
            before = CopyPlan.without(experts, ranks).loads(rows)
            sizes = {e: counts[:, e].tolist() for e in plan.rows}
            plan, units = whole_units(plan, sizes, rows, shares)
            assert slowest(plan.loads(rows), shares) <= slowest(before, shares)
            if not plan.num_copies:
                continue
        per_rank = experts // ranks + plan.most_copies
        arrived = torch.zeros(ranks * per_rank, dtype=torch.int64)
        for rank in range(ranks):
            places = places_of(plan, counts, rank, units)
            assert torch.equal(places.rows_EP.sum(1), counts[rank])
            assert int(places.rows_EP.min()) >= 0
            if in_units:
                assert ((places.rows_EP > 0).sum(1) <= 1).all()
            arrived.scatter_add_(0, places.place_EP.flatten(), places.rows_EP.flatten())
            for expert in [] if in_units else plan.copies[rank]:
                column = list(plan.rows[expert]).index(rank)
                mine = min(int(counts[rank, expert]), plan.rows[expert][rank])
                assert places.rows_EP[expert, column] == mine, "what need not travel does not"
            check_routing(places, plan, counts[rank], rank)
        assert arrived.view(ranks, -1).sum(1).tolist() == plan.loads(rows)
        for expert, by_rank in plan.rows.items():
            for rank, number in by_rank.items():
                local = experts // ranks + plan.copies[rank].index(expert) if (
                    rank != expert // 3) else expert % 3  # fmt: skip
                assert arrived[rank * per_rank + local] == number


def check_routing(places, plan, counts_E, rank):
    """Every assignment has a place of its own expert, and no expert has none."""
    experts = len(counts_E)
    chosen = torch.repeat_interleave(torch.arange(experts), counts_E)
    chosen = torch.cat([chosen, torch.full((3,), experts)])
    chosen = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(rank))]
    fields = dict.fromkeys(RouterOutput._fields)
    fields |= {"expert_indices_TK": chosen.unsqueeze(1), "rows_per_expert_E": counts_E}
    routed = places.routed(RouterOutput(**fields))
    expert_of = torch.full((places.total + 1,), -1)
    for r, copies in enumerate(plan.copies):
        first = r * places.per_rank
        expert_of[first : first + plan.block] = torch.arange(plan.block) + r * plan.block
        expert_of[first + plan.block : first + plan.block + len(copies)] = torch.tensor(copies)
    expert_of[places.total] = experts
    at = routed.expert_indices_TK.squeeze(1)
    assert torch.equal(expert_of[at], chosen)
    counted = torch.bincount(at, minlength=places.total + 1)[: places.total]
    assert torch.equal(counted, routed.rows_per_expert_E)


class TestCopies(DispatcherContract):
    fields = {"copies": 2, "ffn_bias": True}


class TestCopiesOnFourRanks(DispatcherContract):
    fields = {"copies": 1, "backend": "grouped_mm", "recompute_experts": True}
    world = 4


@pytest.mark.slow
class TestCopiesInEqualSplits(DispatcherContract):
    fields = {
        "copies": 2, "dispatcher": "padded_all_to_all", "max_tokens_per_call": MAX_TOKENS,
        "capacity": {"policy": "fixed", "capacity_factor": 1.0},
    }  # fmt: skip


@pytest.mark.slow
class TestCopiesOfGatheredTokens(DispatcherContract):
    fields = {"copies": 2, "dispatcher": "all_gather", "backend": "loop"}
    world = 4


@pytest.mark.slow
class TestCopiesOnNodes(DispatcherContract):
    fields = {"copies": 2, "dispatcher": "hierarchical", "dispatch_dtype": "float8"}
    world, nodes = 4, 2


@pytest.mark.slow
class TestCopiesWithDeepEP(DispatcherContract):
    prepare = staticmethod(with_stand_in)
    fields = {"copies": 2, "dispatcher": "deep_ep", "max_tokens_per_call": MAX_TOKENS}
    world = 4


def layer_on(rank: int, world: int, **fields) -> MoELayer:
    dims = ParallelDims.build(Topology(dp_shard=world, ep=world), "cpu")
    layer = make_layer(**fields)
    apply_expert_parallel(layer, dims.ep_mesh)
    return layer


def gradients_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}


def run_once(layer, x, again: bool = False):
    """Output and gradients, with ``again`` of a recomputed call."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    replay = TOGETHER.expand(len(x), K).clone()
    call = partial(layer, replay_indices_TK=replay)
    out = checkpoint(call, x, use_reentrant=False) if again else call(x)
    (out.hidden.square().sum() + out.aux.aux_loss).backward()
    return out, x.grad, gradients_of(layer)


class KeptLoan(Loan):
    """A loan whose memory and order can be looked at."""

    buffers: ClassVar[list[torch.Tensor]] = []
    order: ClassVar[list[str]] = []

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.buffers.append(self.buffer)

    def start_back(self, grads, like) -> None:
        self.order.append("gradients of copies are sent")
        super().start_back(grads, like)


def sizes_of_buffers() -> list[int]:
    return [buffer.untyped_storage().nbytes() for buffer in KeptLoan.buffers]


def check_order_and_memory(rank: int, layer: MoELayer, x: torch.Tensor) -> None:
    """Of three layers: parameters of copies have memory only while a layer computes, and gradients
    of copies travel while own experts' gradients are computed."""
    compute = packed.run_backward

    def logged(act, rows, *rest):
        KeptLoan.order.append(f"{len(rows.source_R)} rows")
        return compute(act, rows, *rest)

    replay = TOGETHER.expand(len(x), K).clone()
    with patch.object(with_copies, "Loan", KeptLoan), patch.object(packed, "run_backward", logged):
        hidden = x
        for _ in range(3):
            hidden = layer(hidden, replay).hidden
        assert [buffer.numel() > 0 for buffer in KeptLoan.buffers] == [rank == 1] * 3
        assert sizes_of_buffers() == [0] * 3, "between forward and backward"
        loss = hidden.square().sum()
        loss.backward()
        assert len(KeptLoan.buffers) == 6
        del KeptLoan.buffers[3:]  # the second loans, which fill the first ones' memory
    if rank == 1:
        copied = KeptLoan.order[0]
        assert KeptLoan.order == [copied, "gradients of copies are sent", "0 rows"] * 3
    held = [sys.getrefcount(buffer) for buffer in KeptLoan.buffers]
    assert max(held) <= 3, "after the backward, nothing but this list refers to the memory"
    assert loss.grad_fn is not None


def check_hooks_and_nesting(layer: MoELayer, x: torch.Tensor, copied) -> None:
    """Saved tensors may be copied elsewhere, and a layer may be recomputed within a
    recomputation."""
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        check_alike(copied, run_once(layer, x), tolerance=0)
    for backend in ("packed", "loop"):
        inner = layer_on(torch.distributed.get_rank(), 2, copies=2, recompute_experts=True,
                         backend=backend)  # fmt: skip
        check_alike(copied, run_once(inner, x, again=True))


def on_two_ranks(rank: int) -> None:
    x = torch.randn(40 + rank, D, generator=torch.Generator().manual_seed(rank))
    plain = run_once(layer_on(rank, 2), x)
    layer = layer_on(rank, 2, copies=2)
    copied = run_once(layer, x)
    check_order_and_memory(rank, layer, x)
    check_hooks_and_nesting(layer, x, copied)
    assert int(plain[0].aux.num_copied) == 0
    assert int(copied[0].aux.num_copied) > 0
    rows = torch.tensor([int(plain[0].aux.stopwatch.rows), int(copied[0].aux.stopwatch.rows)])
    assert rows[0] == (243 if rank == 0 else 0), "all rows are of the first rank's experts"
    assert abs(int(rows[1]) - 243 / 2) <= 243 / 2 / LEAST_PART
    check_alike(plain, copied)
    check_alike(copied, run_once(layer, x, again=True), tolerance=0)
    # Half the speed: a third of the rows, and none is rerouted or dropped.
    slow = layer_on(rank, 2, copies=3, capacity=STRAGGLER)
    unit = 2 * UNITS_PER_RANK // 3
    slow.router.capacity.plan = CapacityPlan((unit, 2 * UNITS_PER_RANK - unit))
    slowed = run_once(slow, x)
    assert int(slowed[0].aux.num_rerouted) == int(slowed[0].aux.num_dropped) == 0
    share = int(slowed[0].aux.stopwatch.rows) / 243
    assert share == pytest.approx((1 + rank) / 3, abs=0.03)
    check_alike(plain, slowed)
    check_partly_frozen(rank, x)
    check_adapters(rank, x)
    with torch.no_grad():
        hidden = layer(x, TOGETHER.expand(len(x), K).clone()).hidden
    assert torch.equal(hidden, copied[0].hidden)


def check_alike(expected, actual, tolerance=1e-6):
    tensors = {"hidden": (expected[0].hidden, actual[0].hidden), "x": (expected[1], actual[1])}
    assert expected[2].keys() == actual[2].keys()
    for name, grad in expected[2].items():
        tensors[name] = grad, actual[2][name]
    for name, (one_way, other) in tensors.items():
        first, second = (t.full_tensor() if hasattr(t, "full_tensor") else t
                         for t in (one_way, other))  # fmt: skip
        error = (first - second).norm()
        assert error <= tolerance * first.norm() + tolerance * 1e-3, f"{name}: {error}"


def check_partly_frozen(rank, x):
    results = []
    for fields in ({}, {"copies": 2}):
        layer = layer_on(rank, 2, ffn_bias=True, **fields)
        layer.experts.w_up.requires_grad_(False)
        layer.experts.b_down.requires_grad_(False)
        results.append(run_once(layer, x))
    assert "experts.w_up" not in results[1][2]
    check_alike(*results)
    layer = layer_on(rank, 2, copies=2)
    layer.experts.requires_grad_(False)
    check_alike(run_once(layer_frozen(rank), x), run_once(layer, x))


def layer_frozen(rank):
    layer = layer_on(rank, 2)
    layer.experts.requires_grad_(False)
    return layer


def check_adapters(rank, x):
    results = []
    for fields in ({}, {"copies": 2}):
        dims = ParallelDims.build(Topology(dp_shard=2, ep=2), "cpu")
        layer = make_layer(**fields)
        torch.manual_seed(3)
        add_lora(layer, rank=4, on=["experts"])
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                if "lora" in name:
                    parameter.normal_()
        apply_expert_parallel(layer, dims.ep_mesh)
        results.append(run_once(layer, x))
    assert any("lora" in name for name in results[1][2])
    check_alike(*results)


def test_numbers_are_those_without_copies():
    run_ranks(on_two_ranks, 2)


def under_fsdp(rank: int) -> None:
    """Shards are gathered for the forward and again for the backward; copies need both."""
    results = []
    x = torch.randn(30, D, generator=torch.Generator().manual_seed(rank))
    for fields in ({}, {"copies": 2}):
        dims = ParallelDims.build(Topology(dp_shard=4, ep=2), "cpu")
        layer = make_layer(**fields)
        apply_expert_parallel(layer, dims.ep_mesh)
        apply_fsdp(layer, dims, blocks=[])
        out, dx, _ = run_once(layer, x)
        results.append((out, dx, gradients_of(layer)))
    assert int(results[1][0].aux.num_copied) > 0
    check_alike(*results)


def test_copies_of_sharded_experts():
    run_ranks(under_fsdp, 4)


def lends(rank: int) -> None:
    group = torch.distributed.group.WORLD
    plan = CopyPlan(2, ((), (0,)), {0: {0: 5, 1: 5}})
    lending = Lending.of(plan, [10, 3], 0, group)
    assert lending.own_rows == (5, 3)[rank]
    parameters = [torch.full((1, 2, 3), 1.0 + rank), torch.full((1, 3), 10.0 + rank)]
    loan = Loan(lending, parameters)
    for turn in range(2):  # the forward's, and the backward's
        loan.start()
        loan.wait()
        borrowed = loan.borrowed()
        assert [len(p) for p in borrowed] == [rank] * 2
        assert all(torch.equal(p[0], torch.full_like(p[0], 10.0**i)) for i, p in enumerate(borrowed)
                   if rank), turn  # fmt: skip
        buffer = loan.buffer
        loan.release()
        assert borrowed[0].untyped_storage().nbytes() == 0
        loan = Loan(lending, parameters, buffer) if turn == 0 else loan
    loan.start_back([torch.full((rank, 3), 7.0)], parameters[1:])
    returned = [(expert, *[field.tolist() for field in fields])
                for expert, fields in loan.returned()]  # fmt: skip
    assert returned == ([(0, [7.0] * 3)] if rank == 0 else [])


def test_parameters_travel_twice_and_leave_no_memory():
    run_ranks(lends, 2)


def test_print_shows_copies():
    fields = {"d_model": 8, "d_ff": 8, "num_experts": 4, "top_k": 2}
    assert "copies" not in repr(MoELayer(MoEConfig(**fields)))
    shown = repr(MoELayer(MoEConfig(**fields, copies=3)))
    assert "copies=3, which begin with an expert group" in shown


def test_what_copies_do_not_go_with():
    sizes = {"d_model": D, "d_ff": 8, "num_experts": E, "top_k": K, "copies": 1}
    with pytest.raises(ValueError, match=r"overlap_chunks .2. must be 1 with copies .1."):
        MoEConfig(**sizes, overlap_chunks=2)
    with pytest.raises(ValueError, match=r"max_tokens_per_rank .9. must be 0 with copies .1."):
        MoEConfig(**sizes, capacity={"policy": "dropless", "max_tokens_per_rank": 9})
    assert MoEConfig(**sizes, capacity=STRAGGLER).independent_tokens
    without = {**sizes, "copies": 0}
    assert not MoEConfig(**without, capacity=STRAGGLER).independent_tokens
