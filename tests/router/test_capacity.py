"""Capacity: room is kept to, ties are exact, and nothing is dropped that could go elsewhere.

Legend: T tokens, K top_k, E experts.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe import MoEConfig, MoELayer
from router import Dropless, DroplessConfig, FixedCapacity, FixedCapacityConfig
from router.capacity import Assignments, expert_capacity
from router.config import DropPolicy
from router.testing import draw_choices

DROP_POLICIES = ["reroute", "probs", "position"]


def fixed(E: int, K: int, factor: float, drop_policy: DropPolicy = "reroute") -> FixedCapacity:
    config = FixedCapacityConfig(capacity_factor=factor, drop_policy=drop_policy)
    return FixedCapacity(config, num_experts=E, top_k=K)


Level = tuple[list[int], list[int]]
"""The bin of each expert, and the room of each bin."""


def literal_keep(asks: list[tuple[int, float]], levels: list[Level]) -> list[bool]:
    """(expert, priority) in order of position -> who has room on every level; rooms shrink."""
    kept = [True] * len(asks)
    for bin_of, room in levels:
        left = list(room)
        for n in sorted(range(len(asks)), key=lambda n: (-asks[n][1], n)):
            if kept[n]:
                kept[n] = left[bin_of[asks[n][0]]] > 0
                left[bin_of[asks[n][0]]] -= kept[n]
    for (expert, _), ok in zip(asks, kept, strict=True):
        for bin_of, room in levels:
            room[bin_of[expert]] -= ok
    return kept


def literal_place(chosen, choice, scores, levels, drop_policy):
    """The policy in words, with loops: returns [T][K] experts, None where dropped."""
    T, K, E = len(chosen), len(chosen[0]), len(choice[0])
    order = [(t, k) for t in range(T) for k in range(K)]
    by_score = drop_policy != "position"
    asks = [(chosen[t][k], scores[t][chosen[t][k]] if by_score else 0.0) for t, k in order]
    kept = literal_keep(asks, levels)
    placed = [[None] * K for _ in range(T)]
    for (t, k), ok in zip(order, kept, strict=True):
        placed[t][k] = chosen[t][k] if ok else None
    if drop_policy != "reroute":
        return placed
    waiting = {t: [k for k in range(K) if placed[t][k] is None] for t in range(T)}
    while any(waiting.values()):
        asks, who = [], []
        for t in range(T):
            if not waiting[t]:
                continue
            reach = [
                e for e in range(E)
                if all(room[bin_of[e]] > 0 for bin_of, room in levels)
                and e not in placed[t] and choice[t][e] > -math.inf
            ]  # fmt: skip
            if not reach:
                waiting[t] = []
                continue
            best = max(reach, key=lambda e: (choice[t][e], -e))
            asks.append((best, scores[t][best]))
            who.append((t, waiting[t][0]))
        for (t, k), (expert, _), ok in zip(who, asks, literal_keep(asks, levels), strict=True):
            if ok:
                placed[t][k] = expert
                waiting[t].remove(k)
    return placed


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 12), st.integers(1, 6), st.data(), st.sampled_from(DROP_POLICIES),
    st.sampled_from([0.3, 0.5, 1.0, 1.1, 2.0]),
)  # fmt: skip
def test_placement_is_the_literal_one(T, E, data, drop_policy, factor):
    K = data.draw(st.integers(1, E))
    chosen, choice, scores = draw_choices(T, E, K, data.draw(st.integers(0, 10**6)))

    placed = fixed(E, K, factor, drop_policy).placed(Assignments(chosen, choice, scores))

    capacity = expert_capacity(T, K, E, factor)
    expected = []
    if T:
        expected = literal_place(
            chosen.tolist(), choice.tolist(), scores.tolist(),
            [(list(range(E)), [capacity] * E)], drop_policy,
        )  # fmt: skip
    actual = placed.expert_indices_TK.masked_fill(placed.dropped_TK, -1).tolist()
    assert actual == [[-1 if e is None else e for e in row] for row in expected]

    moved = (placed.expert_indices_TK != chosen) & ~placed.dropped_TK
    assert int(placed.num_rerouted) == int(moved.sum())
    loads = [sum(row.count(e) for row in actual) for e in range(E)]
    assert max(loads, default=0) <= capacity
    for t, row in enumerate(actual):
        there = [e for e in row if e >= 0]
        assert len(set(there)) == len(there), "an expert twice for one token"
        if drop_policy == "reroute" and len(there) < K:
            free = [e for e in range(E) if loads[e] < capacity and choice[t, e] > -math.inf]
            assert set(free) <= set(there), "dropped although an expert had room"


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 5000), st.integers(1, 16), st.integers(1, 64), st.integers(1, 400))
def test_capacity_is_exact(T, K, E, hundredths):
    exact = Fraction(T * K * hundredths, E * 100)
    assert expert_capacity(T, K, E, hundredths / 100) == math.ceil(exact)


def test_a_factor_that_binary_cannot_hold_is_not_rounded_up():
    assert math.ceil(100 * 2 / 2 * 1.1) == 111, "what floats say"
    assert expert_capacity(100, 2, 2, 1.1) == 110


@pytest.mark.parametrize("drop_policy", DROP_POLICIES)
def test_with_room_for_all_nothing_changes(drop_policy):
    scores = torch.rand(20, 4)
    chosen = scores.topk(2, dim=1).indices
    placed = fixed(4, 2, 4.0, drop_policy).placed(Assignments(chosen, scores, scores))
    assert torch.equal(placed.expert_indices_TK, chosen)
    assert not placed.dropped_TK.any()
    assert placed.num_rerouted == 0
    plain = Dropless(DroplessConfig()).placed(Assignments(chosen, scores, scores))
    assert plain.expert_indices_TK is chosen
    assert plain.dropped_TK is None


def test_with_room_for_just_all_rerouting_drops_none_of_a_top_1_choice():
    scores = torch.rand(40, 4) + torch.tensor([3.0, 0.0, 0.0, 0.0])
    chosen = scores.topk(1, dim=1).indices
    placed = fixed(4, 1, 1.0).placed(Assignments(chosen, scores, scores))
    assert not placed.dropped_TK.any()
    assert torch.bincount(placed.expert_indices_TK.flatten()).tolist() == [10] * 4
    assert placed.num_rerouted == 30


@pytest.mark.parametrize("drop_policy", DROP_POLICIES)
@pytest.mark.parametrize("backend", ["loop", "grouped_mm"])
def test_the_layer_computes_what_was_placed(drop_policy, backend):
    torch.manual_seed(3)
    layer = MoELayer(
        MoEConfig(
            d_model=16, d_ff=24, num_experts=6, top_k=2, backend=backend,
            capacity=FixedCapacityConfig(capacity_factor=0.9, drop_policy=drop_policy),
        )
    )  # fmt: skip
    with torch.no_grad():
        layer.router.weight.mul_(30)
    x = torch.randn(30, 16)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    out = layer(inputs[0])
    grad_y = torch.randn(30, 16)
    (out.hidden * grad_y).sum().backward()
    actual = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()

    routed = layer.router(inputs[1])
    e, rows = layer.experts, []
    for t in range(30):
        y = torch.zeros(16)
        for k in range(2):
            if routed.dropped_TK[t, k]:
                continue
            i = int(routed.expert_indices_TK[t, k])
            row = inputs[1][t]
            h = torch.nn.functional.silu(row @ e.w_gate[i]) * (row @ e.w_up[i])
            y = y + routed.expert_weights_TK[t, k] * (h @ e.w_down[i])
        rows.append(y)
    (torch.stack(rows) * grad_y).sum().backward()
    torch.testing.assert_close(out.hidden, torch.stack(rows), rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=2e-5, atol=2e-6)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(actual[name], parameter.grad, rtol=2e-5, atol=2e-6)
    dropped = int(routed.dropped_TK.sum())
    assert out.aux.num_dropped == dropped
    assert dropped >= 60 - 6 * expert_capacity(30, 2, 6, 0.9) > 0
    assert out.aux.tokens_per_expert_E.sum() == 60, "losses see what was chosen"
    assert (out.aux.num_rerouted > 0) == (drop_policy == "reroute")


def test_no_room_at_all_and_no_tokens():
    fields = {"d_model": 16, "d_ff": 24, "num_experts": 6, "top_k": 2}
    layer = MoELayer(MoEConfig(**fields))
    out = layer(torch.randn(0, 16, requires_grad=True))
    assert out.aux.num_dropped == 0
    out.hidden.sum().backward()
    with pytest.raises(ValueError, match="capacity_factor"):
        MoEConfig(**fields, capacity={"policy": "fixed", "capacity_factor": 0.0})
