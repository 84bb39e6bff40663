"""What every capacity policy must keep to, the straggler-aware plan, and the bound on a rank.

Legend: T tokens, K top_k, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from moe import MoEConfig, MoELayer
from parallel import ParallelDims, Topology, apply_expert_parallel
from router import (
    CapacityPlan,
    FixedCapacityConfig,
    RouterConfig,
    StragglerAwareCapacity,
    StragglerAwareConfig,
    StragglerBalancer,
)
from router.capacity import Assignments, capacity_policy
from router.plan import UNITS_PER_RANK, bounded_shares, largest_remainder
from router.testing import CapacityPolicyContract, draw_choices
from tests.router.test_capacity import literal_place
from tests.support.ranks import run_ranks

E, K = 6, 2


def config(**fields: Any) -> RouterConfig:
    return RouterConfig(**{"num_experts": E, "top_k": K, **fields})


class TestDropless(CapacityPolicyContract):
    reroutes = False

    def test_drops_nothing(self):
        chosen, choice, scores = draw_choices(9, E, K, 0)
        assert self.policy().placed(Assignments(chosen, choice, scores)).dropped_TK is None


class TestDroplessWithABound(CapacityPolicyContract):
    fields = {"capacity": {"max_tokens_per_rank": 48}}


class TestReroute(CapacityPolicyContract):
    fields = {"capacity": {"policy": "fixed", "capacity_factor": 1.0}}


class TestDropByScore(CapacityPolicyContract):
    fields = {"capacity": {"policy": "fixed", "capacity_factor": 1.0, "drop_policy": "probs"}}
    reroutes = False


class TestDropByPosition(CapacityPolicyContract):
    fields = {"capacity": {"policy": "fixed", "capacity_factor": 1.0, "drop_policy": "position"}}
    reroutes = False


@dataclass
class FakeGroup:
    """A process group, of which a policy only asks the number of ranks."""

    ranks: int

    def size(self) -> int:
        return self.ranks


class TestStragglerAware(CapacityPolicyContract):
    fields = {"capacity": {"policy": "straggler_aware", "capacity_factor": 1.5}}

    def policy(self) -> StragglerAwareCapacity:
        policy = capacity_policy(config(**self.fields).capacity, num_experts=E, top_k=K)
        assert isinstance(policy, StragglerAwareCapacity)
        policy.plan = CapacityPlan((1024, 1024))
        return policy

    def test_groups_that_are_given_again_leave_a_plan_for_as_many_ranks(self):
        policy = self.policy()
        policy.plan = CapacityPlan((700, 1348))
        policy.use_expert_group(FakeGroup(2))
        assert policy.plan == CapacityPlan((700, 1348))
        policy.use_expert_group(FakeGroup(3))
        assert policy.plan == CapacityPlan.equal(3)

    @pytest.mark.parametrize("T", [1, 4, 14])
    @pytest.mark.parametrize("seed", range(12))
    @pytest.mark.parametrize("units", [256, 700, 1024, 1500])
    def test_experts_and_ranks_have_room_of_their_own(self, T, seed, units):
        chosen, choice, scores = draw_choices(T, E, K, seed)
        policy = self.policy()
        policy.plan = CapacityPlan((units, 2 * UNITS_PER_RANK - units))
        experts, ranks = policy.capacities(T)
        assert sum(ranks) == T * K
        for expert, room in enumerate(experts):
            share = units if expert < 3 else 2 * UNITS_PER_RANK - units
            assert room == math.ceil(Fraction(T * K * 3, 2) * share / (6 * UNITS_PER_RANK))
        levels = [(list(range(E)), list(experts)), ([0, 0, 0, 1, 1, 1], list(ranks))]
        expected = literal_place(
            chosen.tolist(), choice.tolist(), scores.tolist(), levels, "reroute"
        )
        placed = policy.placed(Assignments(chosen, choice, scores))
        actual = placed.expert_indices_TK.masked_fill(placed.dropped_TK, -1).tolist()
        assert actual == [[-1 if e is None else e for e in row] for row in expected]
        for rank, room in enumerate(ranks):
            assert sum(e // 3 == rank for row in actual for e in row if e >= 0) <= room

    def test_one_token_in_evaluation_gets_the_experts_that_it_chose(self):
        policy = self.policy()
        policy.plan = CapacityPlan((1792, 256))
        scores = torch.tensor([[0.0, 0.1, 0.0, 0.2, 0.6, 0.5]])
        chosen = scores.topk(K, dim=1).indices
        placed = policy.placed(Assignments(chosen, scores, scores, training=False))
        assert torch.equal(placed.expert_indices_TK, chosen)
        assert not placed.dropped_TK.any()
        assert policy.placed(Assignments(chosen, scores, scores)).num_rerouted > 0, (
            "ranks are held to theirs"
        )


@settings(deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(1, 10**6), min_size=1, max_size=20))
def test_largest_remainders_sum_to_the_whole_and_are_within_one(total, weights):
    parts = largest_remainder(total, [Fraction(w) for w in weights])
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        exact = Fraction(total * weight, sum(weights))
        assert math.floor(exact) <= part <= math.ceil(exact)


speeds = st.floats(1e-3, 1e9, allow_nan=False)


@settings(deadline=None)
@given(st.lists(speeds, min_size=1, max_size=12), st.sampled_from([0.1, 0.25, 1.0]),
       st.sampled_from([1.0, 1.3, 2.0, 16.0]))  # fmt: skip
def test_shares_keep_their_sum_their_bounds_and_the_order_of_speeds(speeds, floor, ceiling):
    shares = bounded_shares(speeds, floor, ceiling)
    assert sum(shares) == len(speeds)
    for share, speed in zip(shares, speeds, strict=True):
        assert Fraction(str(floor)) <= share <= Fraction(str(ceiling))
        for other, other_speed in zip(shares, speeds, strict=True):
            assert speed > other_speed or share <= other, "a slower rank gets more"
    free = [
        share / Fraction(speed)
        for share, speed in zip(shares, speeds, strict=True)
        if Fraction(str(floor)) < share < Fraction(str(ceiling))
    ]
    assert len(set(free)) <= 1, "what is within the bounds is in proportion to speed"


@settings(deadline=None)
@given(st.lists(st.lists(speeds, min_size=3, max_size=3), min_size=1, max_size=15))
def test_plans_keep_their_sum_whatever_is_measured(steps):
    c = StragglerAwareConfig()
    balance = StragglerBalancer.start(3)
    for step in steps:
        balance = balance.after(step, [1.0] * 3, c)
        assert sum(balance.plan.units) == 3 * UNITS_PER_RANK
        assert min(balance.plan.units) >= UNITS_PER_RANK // 4
        assert max(balance.plan.units) <= UNITS_PER_RANK * 2


@pytest.mark.parametrize("speed", [1e-3, 7.0, 1e9])
def test_equal_speeds_give_equal_shares(speed):
    c = StragglerAwareConfig(hysteresis=0.0)
    balance = StragglerBalancer.start(5)
    for _ in range(20):
        balance = balance.after([speed] * 5, [1.0] * 5, c)
        assert balance.plan == CapacityPlan.equal(5)


def test_a_plan_follows_speeds_and_small_changes_not_at_all():
    c = StragglerAwareConfig()
    balance = StragglerBalancer.start(2)
    for _ in range(20):
        balance = balance.after([100, 115], [1, 1], c)  # the share would move by 7 %
        assert balance.plan.units == (1024, 1024)
    for _ in range(10):
        balance = balance.after([100, 34], [1, 1], c)
    assert balance.plan.units == (1528, 520)
    assert balance.plan.units[1] == pytest.approx(2048 * 34 / 134, abs=1)
    still = balance.after([0, 0], [0, 0], c)
    assert still == balance, "nothing measured, nothing changed"
    assert balance.after([math.inf, 1], [1, 0], c).speeds == balance.speeds


def test_until_a_rank_is_measured_it_counts_as_the_median():
    c = StragglerAwareConfig()
    balance = StragglerBalancer.start(3)
    for _ in range(10):  # the first two do not count
        balance = balance.after([100, 0, 300], [1, 0, 1], c)
    assert balance.speeds[1] is None
    assert balance.speeds[2] / balance.speeds[0] == pytest.approx(3, rel=1e-3)
    first, middle, last = balance.plan.units
    assert last / first == pytest.approx(3, rel=0.01)
    assert middle / first == pytest.approx(3**0.5, rel=0.01)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"capacity": {"policy": "fixed", "capacity_factor": 0.0}}, "capacity_factor"),
        ({"capacity": {"policy": "fixed", "max_tokens_per_rank": 5}},
         r"capacity.max_tokens_per_rank \(5\) must be left out with capacity.policy "
         r"\(fixed\); policy dropless has it"),
        ({"capacity": {"policy": "straggler_aware", "drop_policy": "probs"}},
         r"drop_policy \(probs\) must be left out .* policy fixed has it"),
        ({"capacity": {"capacity_factor": 2.0}},
         r"policy \(dropless\); policy fixed or straggler_aware has it"),
        ({"capacity": {"policy": "none"}},
         r"policy \(none\) must be dropless, fixed, straggler_aware or package.module:Class"),
        ({"capacity": {"policy": "fixed", "factor": 2.0}}, "factor"),
        ({"capacity": {"policy": "straggler_aware", "capacity_factor": 0.5}},
         r"capacity.capacity_factor \(0.5\)"),
        ({"capacity": {"policy": "straggler_aware", "floor": 0.0001}}, "floor"),
        ({"routing": "expert_choice", "capacity": {"policy": "fixed"}},
         r"\(fixed\) must be dropless"),
        ({"routing": "expert_choice", "capacity": {"max_tokens_per_rank": 3}},
         r"capacity.max_tokens_per_rank \(3\) 0"),
        ({"routing": "expert_choice", "softmax_after_topk": True}, "must be false"),
        ({"routing": "expert_choice", "expert_bias": True}, r"must be top_k"),
    ],
)  # fmt: skip
def test_fields_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        config(**fields)
    assert "\n" not in str(error.value)


def guarded(rank: int, most: int, tokens: list[int]) -> tuple[int, int, int, int]:
    """What a rank computes, and what the guard did, where all want the experts of rank 0."""
    dims = ParallelDims.build(Topology(dp_shard=2, ep=2), "cpu")
    torch.manual_seed(0)
    layer = MoELayer(
        MoEConfig(d_model=8, d_ff=8, num_experts=E, top_k=K, capacity={"max_tokens_per_rank": most})
    )
    apply_expert_parallel(layer, dims.ep_mesh)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:, 0] = torch.tensor([3.0, 2.5, 2.0, -1.0, -2.0, -3.0])
    x = torch.rand(tokens[rank], 8) + 0.5
    out = layer(x)
    out.hidden.sum().backward()
    rows = int(out.aux.stopwatch.rows)
    return rows, tokens[rank] * K, int(out.aux.num_rerouted), int(out.aux.num_dropped)


@pytest.mark.parametrize(
    "tokens",
    [[0, 33], *(pytest.param(each, marks=pytest.mark.slow) for each in ([20, 20], [31, 2]))],
)
def test_a_rank_never_computes_more_than_the_bound(tokens):
    total = sum(tokens) * K
    free = run_ranks(guarded, 2, 0, tokens)
    assert [rows for rows, *_ in free] == [total, 0]
    enough = (total + 1) // 2 + 2
    bounded = run_ranks(guarded, 2, enough, tokens)
    assert all(rows <= enough for rows, *_ in bounded)
    assert sum(rows for rows, *_ in bounded) == total, "nothing is dropped"
    assert sum(moved for _, _, moved, _ in bounded) >= total - enough
    short = run_ranks(guarded, 2, 10, tokens)
    assert all(rows <= 10 for rows, *_ in short)
    assert sum(dropped for *_, dropped in short) == total - sum(rows for rows, *_ in short)


def counted(rank: int) -> tuple[list[int], float, torch.Tensor]:
    """Two micro-batches of a global batch: the counts, the loss and the router's gradient."""
    torch.manual_seed(0)
    layer = MoELayer(
        MoEConfig(d_model=8, d_ff=8, num_experts=E, top_k=K, aux_loss_scope="global_batch",
                  aux_loss_coeff=1.0)
    )  # fmt: skip
    layer.router.balance_group = dist.group.WORLD
    with torch.no_grad():
        layer.router.weight.mul_(30)
    generator = torch.Generator().manual_seed(3)
    batches = torch.randn(2, 2, 10, 8, generator=generator)[:, rank]
    before, losses = None, []
    for x in batches:
        out = layer(x, prior_expert_counts_E=before)
        before = out.aux.expert_counts_E
        losses.append(out.aux.aux_loss)
    losses[-1].backward()
    return before.tolist(), float(losses[-1].detach()), layer.router.weight.grad


def test_the_loss_over_a_global_batch_counts_all_ranks_and_the_step_so_far():
    results = run_ranks(counted, 2)
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(d_model=8, d_ff=8, num_experts=E, top_k=K))
    with torch.no_grad():
        layer.router.weight.mul_(30)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 2, 10, 8, generator=generator)
    counts = layer.router(x.reshape(40, 8)).tokens_per_expert_E
    assert results[0][0] == results[1][0] == counts.tolist()
    for rank, (_, loss, grad) in enumerate(results):
        probs = (x[1, rank] @ layer.router.weight.T).softmax(-1)
        expected = E * sum(float(counts[e]) / 80 * probs[:, e].mean() for e in range(E))
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
        layer.router.weight.grad = None
        expected.backward()
        torch.testing.assert_close(grad, layer.router.weight.grad, rtol=1e-4, atol=1e-6)
        assert grad.abs().sum() > 0
    local = layer.router(x[1, 0]).load_balance_loss
    assert abs(float(local.detach()) - results[0][1]) > 1e-3, "one call's own loss is another"


def test_a_capacity_is_a_table_or_a_config():
    table = config(capacity={"policy": "fixed", "capacity_factor": 1.5})
    assert table.capacity == FixedCapacityConfig(capacity_factor=1.5)
    assert config(capacity=FixedCapacityConfig(capacity_factor=1.5)) == table
    assert config(capacity={"max_tokens_per_rank": 5}).capacity.policy == "dropless"
    assert config().capacity == config(capacity={}).capacity
