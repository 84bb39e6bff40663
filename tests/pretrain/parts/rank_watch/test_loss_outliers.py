"""Ranks with odd losses are named, and healthy ranks are not, by made-up losses of many steps."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from parallel import Topology
from pretrain.observe import RankLossOdd
from pretrain.parts.rank_watch import LossOutliers
from pretrain.parts.rank_watch.part import OddLosses
from pretrain.parts.step import Action, Decision, Report, Reports, StepFacts
from pretrain.parts.testing import context_of

TOKENS = 1000.0
DECISION = Decision(
    Action.COMMIT, loss=3.0, grad_norm=1.0, target_tokens=12_000, stop=False, stop_cause=0,
    save=False, step_seconds=1.0, data_wait_seconds=0.0, bad_router=None,
)  # fmt: skip


def losses_of(steps: int, ranks: int, seed: int = 0) -> np.ndarray:
    """Mean losses that fall over the run, with noise of 2 % that has heavy tails."""
    noise = np.random.default_rng(seed).standard_t(4, size=(steps, ranks))
    return np.linspace(6.0, 3.0, steps)[:, None] + 0.05 * noise


def found_in(losses: np.ndarray, tokens: float = TOKENS) -> list[tuple[int, int, int]]:
    """(step, rank, steps seen) of every report."""
    outliers = LossOutliers(range(losses.shape[1]))
    many = [tokens] * losses.shape[1]
    return [
        (step, each.rank, each.steps)
        for step, row in enumerate(losses)
        for each in outliers.after(list(row * tokens), many)
    ]


@pytest.mark.parametrize("ranks", [3, 8, 64])
def test_healthy_ranks_are_never_named(ranks):
    assert found_in(losses_of(1000, ranks, seed=ranks)) == []


@pytest.mark.parametrize("ranks", [3, 8])
def test_a_rank_that_is_a_little_off_in_every_step_is_named_within_a_window(ranks):
    losses = losses_of(200, ranks)
    losses[100:, 1] += 0.15
    found = found_in(losses)
    assert {rank for _, rank, _ in found} == {1}
    step, _, seen = found[0]
    assert 100 < step < 100 + 32
    assert seen == 32
    # Once in a window, and not in every step.
    assert len(found) <= 4


def test_a_rank_that_is_far_off_in_one_step_is_named_at_once():
    losses = losses_of(200, 8)
    losses[150, 6] = 40.0
    assert found_in(losses) == [(150, 6, 1)]


def test_a_loss_that_is_not_finite_is_named_also_of_two_ranks_and_in_the_first_step():
    outliers = LossOutliers([0, 1])
    (found,) = outliers.after([3.0 * TOKENS, math.nan], [TOKENS, TOKENS])
    assert (found.rank, found.usual, found.z) == (1, 3.0, math.inf)
    assert LossOutliers([0, 1]).after([math.nan, math.nan], [TOKENS, TOKENS]) == []


def test_ranks_with_fewer_tokens_may_differ_more():
    losses = losses_of(300, 8)
    few = np.random.default_rng(1).standard_t(4, size=300) * 0.05 * 10
    outliers, tokens = LossOutliers(range(8)), [TOKENS] * 7 + [TOKENS / 100]
    for row, own in zip(losses, few, strict=True):
        row[7] = row[:7].mean() + own
        assert outliers.after(list(row * tokens), tokens) == []


def test_ranks_without_tokens_are_not_compared():
    outliers = LossOutliers(range(4))
    for row in losses_of(100, 4):
        assert outliers.after([*(row[:3] * TOKENS), 0.0], [TOKENS] * 3 + [0.0]) == []


def report(loss: float, tokens: float = TOKENS) -> Report:
    return Report(
        loss_sum=loss * tokens, target_tokens=tokens, grad_square_sum=1.0, stop_requested=0.0,
        save_requested=0.0, step_seconds=1.0, data_wait_seconds=0.0, exposed_seconds=0.0,
        expert_rows=0.0, expert_seconds=0.0, bad_layer=-1.0,
    )  # fmt: skip


def test_places_of_context_parallelism_are_compared_apart():
    """The second rank of each pair scores what is easier, and is not odd."""
    published: list[RankLossOdd] = []
    context = replace(context_of(0, published), topology=Topology(dp_replicate=6, cp=2))
    watch = OddLosses(context)
    for step, row in enumerate(losses_of(80, 12)):
        row[1::2] -= 1.0
        row[4] += 0.3
        reports = Reports.of(report(loss) for loss in row)
        watch.judge(StepFacts(step + 1, reports, DECISION))
    assert {event.rank for event in published} == {4}
    assert published[0].step < 32
    assert published[0].usual_loss < published[0].loss
