"""Failure rates, and the checkpoint interval that loses least time."""

from __future__ import annotations

import math

DEVICE_HOURS_PER_FAILURE = 50_000
"""Mean hours of one device between failures, for a run that has seen no failure yet: Llama 3 (arXiv
2407.21783, section 3.3.4) had 419 unexpected interruptions in 54 days of 16,384 devices."""


def optimal_interval(stall_seconds: float, seconds_between_failures: float) -> float:
    """The time between saves, in seconds, that loses the least time to saves and to redone steps.

    Young's first-order formula with Daly's higher-order terms (Daly, Future Generation Computer
    Systems 22, 2006, equation 37).

    Args:
        stall_seconds: what training waits for one save.
        seconds_between_failures: the mean time between failures of the whole job.
    """
    cost, mean = stall_seconds, seconds_between_failures
    if cost >= 2 * mean:
        return mean
    ratio = cost / (2 * mean)
    return math.sqrt(2 * cost * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost
