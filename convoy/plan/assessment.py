"""The best interval and number of spares of a scenario, by search over the simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from convoy.plan.scenario import Scenario
from convoy.plan.simulate import LOST_PARTS, Floats, Outcome, simulate_runs
from pretrain.checkpoint import optimal_interval

Z95 = 1.96
"""A normal variable lies within so many standard deviations of its mean in 95 % of all cases."""
_STEP = 2**0.25  # between two intervals of the search: the loss hardly changes within a fifth
_STEPS = 12  # to each side of Daly's interval: from an eighth to eight times it
_MOST_SPARES = 24  # candidates of a search


@dataclass(frozen=True)
class Choice:
    """One number that a search has chosen.

    The search simulates every candidate under the same failures. ``low`` and ``high`` are the
    nearest candidates that are significantly worse than the best one, by the 95 % confidence
    interval of the paired differences: the best value lies between.
    """

    value: float
    low: float
    high: float
    candidates: list[float]
    scores: list[float]
    """The mean of what the search maximizes, for each candidate."""


@dataclass(frozen=True)
class Assessment:
    """A scenario's result. Shares are of the wall time; each ``_ci`` is the half width of the 95 %
    confidence interval of the mean over repetitions."""

    gpus: int
    nodes: int
    days: float
    repetitions: int
    failures: float
    """The mean number of failures that struck a run."""
    hours_between_failures: float | None
    effective: float
    """The effective training time."""
    effective_ci: float
    interval_seconds: float
    interval: Choice | None
    """The search for the interval; None where the policy gives the interval."""
    daly_seconds: float | None
    """Daly's formula for the best interval; None where nothing fails."""
    spares: int
    spares_search: Choice | None
    """The search for the number of spares; None where the policy gives the number."""
    nodes_in_repair: float
    """Failures that replace a node, in the mean time of a repair."""
    lost: dict[str, float]
    """The share of each part of the lost time."""
    lost_by_cause: dict[str, dict[str, float]]
    """The share of each cause's lost time, in all and by part."""


def assess(scenario: Scenario) -> Assessment:
    """Simulate a scenario, and search for what its policy leaves to be searched."""
    run, policy = scenario.run, scenario.policy
    mean, load = scenario.seconds_between_failures, scenario.nodes_in_repair
    daly = optimal_interval(policy.stall, mean) if math.isfinite(mean) else None
    # A number of spares that seldom runs out: the mean and two standard deviations of a Poisson
    # number. The best interval hardly depends on it.
    spares = math.ceil(load + 2 * math.sqrt(load)) if policy.spares == "best" else policy.spares
    interval: Choice | None = None
    if policy.interval_seconds == "best":
        interval = best_interval(scenario, spares)
        seconds = interval.value
    else:
        seconds = policy.interval_seconds
    spares_search: Choice | None = None
    if policy.spares == "best":
        spares_search = best_spares(scenario, seconds)
        spares = int(spares_search.value)
    outcome = simulate_runs(scenario, [seconds], [spares])
    effective, half = mean_and_half_width(outcome.effective[0])
    wall = outcome.wall_seconds[0]
    by_cause = {
        part: (lost[0] / wall[:, None]).mean(axis=0) for part, lost in outcome.lost_seconds.items()
    }
    lost = {part: float(by_cause[part].sum()) for part in LOST_PARTS}
    lost["stall"] = float((outcome.stall_seconds[0] / wall).mean())
    lost["running smaller"] = float((outcome.smaller_seconds[0] / wall).mean())
    return Assessment(
        gpus=run.gpus,
        nodes=run.nodes,
        days=run.days,
        repetitions=run.repetitions,
        failures=float(outcome.failures.mean()),
        hours_between_failures=mean / 3600 if math.isfinite(mean) else None,
        effective=float(effective),
        effective_ci=float(half),
        interval_seconds=seconds,
        interval=interval,
        daly_seconds=daly,
        spares=spares,
        spares_search=spares_search,
        nodes_in_repair=load,
        lost=lost,
        lost_by_cause={
            cause: {"all": float(sum(each[number] for each in by_cause.values()))}
            | {part: float(by_cause[part][number]) for part in LOST_PARTS}
            for number, cause in enumerate(outcome.causes)
        },
    )


def best_interval(scenario: Scenario, spares: int) -> Choice:
    """The interval with the most effective training time, around Daly's, under ``spares``."""
    mean, horizon = scenario.seconds_between_failures, scenario.run.days * 86_400
    if not math.isfinite(mean):
        # Nothing fails: one interval as long as the run saves least.
        return Choice(horizon, horizon, horizon, [horizon], [1.0])
    centre = min(optimal_interval(scenario.policy.stall, mean), horizon)
    first, last = -_STEPS, _STEPS
    while True:
        candidates = [centre * _STEP**number for number in range(first, last + 1)]
        choice = _choose(
            candidates, simulate_runs(scenario, candidates, [spares] * len(candidates))
        )
        # Tiers that take long to write can move the best interval far from Daly's.
        if choice.value == candidates[-1] and choice.value < horizon:
            first, last = last - 2, last + 2 * _STEPS
        elif choice.value == candidates[0] and choice.value > scenario.policy.stall / 100:
            first, last = first - 2 * _STEPS, first + 2
        else:
            return choice


def best_spares(scenario: Scenario, interval_seconds: float) -> Choice:
    """The number of spares with the most training for each node of the cluster, spares counted.

    More spares always lose less time. A spare pays as long as the time that it saves the others is
    more than its own training would be worth.
    """
    load = scenario.nodes_in_repair
    width = math.sqrt(load)
    last = math.ceil(load + 6 * width + 2)
    numbers = {round(each) for each in np.linspace(max(0.0, load - 4 * width), last, _MOST_SPARES)}
    candidates = sorted({0, *numbers})
    outcome = simulate_runs(scenario, [interval_seconds] * len(candidates), candidates)
    owned = scenario.run.nodes / (scenario.run.nodes + np.array(candidates, np.float64))
    return _choose([*map(float, candidates)], outcome, owned)


def _choose(candidates: Sequence[float], outcome: Outcome, weight: Floats | None = None) -> Choice:
    """The candidate with the largest mean effective time, each times its ``weight``."""
    scores = outcome.effective if weight is None else outcome.effective * weight[:, None]
    means = scores.mean(axis=1)
    best = int(np.argmax(means))
    behind, half = mean_and_half_width(scores[best] - scores)
    near = np.flatnonzero(behind <= half)
    return Choice(
        value=candidates[best],
        low=candidates[max(near[0] - 1, 0)],
        high=candidates[min(near[-1] + 1, len(candidates) - 1)],
        candidates=[*candidates],
        scores=means.tolist(),
    )


def mean_and_half_width(samples: Floats) -> tuple[Floats, Floats]:
    """The mean over the last dim, and the half width of its 95 % confidence interval."""
    count = samples.shape[-1]
    return samples.mean(axis=-1), Z95 * samples.std(axis=-1, ddof=1) / np.sqrt(count)
