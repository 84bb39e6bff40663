"""Plan changes of straggler-aware capacity in simulated runs: healthy ranks, and one slow rank.

    python -m bench.straggler --simulate

Times are drawn for each rank and step; the plans are those of ``router.StragglerBalancer`` with its
defaults. ``exponential mean`` is what the policy did before its test: exponential means of speeds
with weight 0.3, and a new plan where a share moves by more than 5 %.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from router import CapacityPlan, StragglerAwareConfig, StragglerBalancer
from router.plan import UNITS_PER_RANK, bounded_shares, largest_remainder

CONFIG = StragglerAwareConfig()
STEPS = 300
ROWS = 1000.0

Noise = Callable[[random.Random, float], float]


def gaussian(draw: random.Random, noise: float) -> float:
    """1 with a standard deviation of ``noise``; a time is at least a tenth of the mean."""
    return max(0.1, draw.gauss(1.0, noise))


def lognormal(draw: random.Random, noise: float) -> float:
    """Logarithms with a standard deviation of ``noise``."""
    return math.exp(draw.gauss(0.0, noise))


def spikes(draw: random.Random, noise: float) -> float:
    """Log-normal, and three times as long in 3 of 100 steps."""
    return lognormal(draw, noise) * (3.0 if draw.random() < 0.03 else 1.0)


NOISES: dict[str, Noise] = {"gaussian": gaussian, "lognormal": lognormal, "spikes": spikes}


@dataclass(frozen=True)
class ExponentialMean:
    """The policy before the test."""

    speeds: tuple[float | None, ...]
    plan: CapacityPlan

    @staticmethod
    def start(ranks: int) -> ExponentialMean:
        """Equal shares, before any measurement."""
        return ExponentialMean((None,) * ranks, CapacityPlan.equal(ranks))

    def after(
        self, rows: list[float], seconds: list[float], config: StragglerAwareConfig
    ) -> ExponentialMean:
        """Speeds and plan after a step."""
        new = [n / s for n, s in zip(rows, seconds, strict=True)]
        speeds = [
            b if a is None else a + 0.3 * (b - a) for a, b in zip(self.speeds, new, strict=True)
        ]
        shares = bounded_shares(speeds, config.floor, config.ceiling)
        units = largest_remainder(UNITS_PER_RANK * len(shares), shares)
        moved = max(abs(u - v) / v for u, v in zip(units, self.plan.units, strict=True))
        plan = CapacityPlan(tuple(units)) if moved > 0.05 else self.plan
        return ExponentialMean(tuple(speeds), plan)


Policy = StragglerBalancer | ExponentialMean


def seconds_of_step(
    draw: random.Random, ranks: int, noise: Noise, scale: float, slow: float
) -> list[float]:
    """Times of one step. Rank 0 takes ``slow`` times as long; all ranks move together by 20 %."""
    common = math.exp(draw.gauss(0.0, 0.2))
    return [common * noise(draw, scale) * (slow if rank == 0 else 1.0) for rank in range(ranks)]


def healthy_changes(start: Policy, noise: Noise, scale: float, seed: int) -> int:
    """The plan changes in STEPS steps of healthy ranks."""
    draw, policy, changes = random.Random(seed), start, 0
    ranks = len(start.plan.units)
    for _ in range(STEPS):
        before = policy.plan
        times = seconds_of_step(draw, ranks, noise, scale, 1.0)
        policy = policy.after([ROWS] * ranks, times, CONFIG)
        changes += policy.plan != before
    return changes


@dataclass(frozen=True)
class Followed:
    """How a slowdown by 2 was followed."""

    steps: int | None
    """From the first slow step until the slow rank's share was below 0.8 of the others' mean share;
    None where the share never was."""
    share: float
    """The slow rank's share after the last step, over the ideal share."""
    changes: int
    """Plan changes from the first slow step on."""


def follow(
    ranks: int, noise: Noise, scale: float, seed: int, *, healthy: int = 100, slow: int = 200
) -> Followed:
    """Rank 0 becomes half as fast after ``healthy`` steps, and stays so for ``slow`` steps."""
    draw, policy = random.Random(seed), StragglerBalancer.start(ranks)
    first, changes = None, 0
    ideal = 0.5 * ranks / (ranks - 0.5)
    for step in range(-healthy, slow):
        before = policy.plan
        times = seconds_of_step(draw, ranks, noise, scale, 1.0 if step < 0 else 2.0)
        policy = policy.after([ROWS] * ranks, times, CONFIG)
        changes += step >= 0 and policy.plan != before
        share, *others = policy.plan.shares
        if step >= 0 and first is None and share < 0.8 * statistics.mean(others):
            first = step + 1
    return Followed(first, policy.plan.shares[0] / ideal, changes)


def simulate(seeds: int) -> None:
    """Print both tables."""
    print(
        f"Plan changes in {STEPS} healthy steps: one run with the exponential mean, and the sum of"
    )
    print(f"{seeds} runs with the test.\n")
    print(f"| noise | ranks | exponential mean, one run | test, {seeds} runs |")
    print("|---|---|---|---|")
    for name, noise in NOISES.items():
        for scale in (0.05, 0.1, 0.2, 0.3):
            for ranks in (2, 8, 64):
                old = healthy_changes(ExponentialMean.start(ranks), noise, scale, 0)
                new = [
                    healthy_changes(StragglerBalancer.start(ranks), noise, scale, seed)
                    for seed in range(seeds)
                ]
                print(f"| {name} {scale:.0%} | {ranks} | {old} | {sum(new)} |", flush=True)
    print(f"\nSteps until a rank that became half as fast has a smaller share ({seeds} seeds), its")
    print("final share over the ideal share, and plan changes in 200 slow steps.\n")
    print("| noise | ranks | steps, median | steps, most | share / ideal | changes |")
    print("|---|---|---|---|---|---|")
    for name, noise in NOISES.items():
        for scale in (0.05, 0.1, 0.2, 0.3):
            for ranks in (2, 8, 64):
                runs = [follow(ranks, noise, scale, seed) for seed in range(seeds)]
                found = [run.steps for run in runs if run.steps is not None]
                never = len(runs) - len(found)
                shares = [run.share for run in runs]
                most = f"{max(found)}" + (f" ({never} never)" if never else "")
                print(
                    f"| {name} {scale:.0%} | {ranks} | {statistics.median(found):.0f} | {most} | "
                    f"{min(shares):.2f} to {max(shares):.2f} | "
                    f"{statistics.mean(run.changes for run in runs):.1f} |",
                    flush=True,
                )
