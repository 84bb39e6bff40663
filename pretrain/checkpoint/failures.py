"""Failure rates, the checkpoint interval that loses least time, and other closed forms."""

from __future__ import annotations

import math

DEVICE_HOURS_PER_FAILURE = 50_000
"""Mean hours of one device between failures, for a run that has seen no failure yet: Llama 3 (arXiv
2407.21783, section 3.3.4) had 419 unexpected interruptions in 54 days of 16,384 devices."""


def young_interval(stall_seconds: float, seconds_between_failures: float) -> float:
    """The best time between saves, in seconds, to first order (Young, CACM 17(9), 1974).

    Args:
        stall_seconds: what training waits for one save.
        seconds_between_failures: the mean time between failures of the whole job.
    """
    return math.sqrt(2 * stall_seconds * seconds_between_failures)


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
    return young_interval(cost, mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def expected_run_seconds(
    work_seconds: float,
    seconds_between_failures: float,
    *,
    interval_seconds: float,
    stall_seconds: float,
    restart_seconds: float,
) -> float:
    """The expected wall time, in seconds, of a run with exponential failures.

    Daly's complete model (Future Generation Computer Systems 22, 2006, equation 20), in which a
    restart can fail too: every interval with its save takes M e^(R/M) (e^((τ+δ)/M) - 1). Daly has
    a save after every interval. Here no save follows the last one.

    Args:
        work_seconds: training without saves and failures.
        seconds_between_failures: M, the mean of the exponential distribution.
        interval_seconds: τ, training between two saves; divides ``work_seconds``.
        stall_seconds: δ, what training waits for one save.
        restart_seconds: R, from a failure until training goes on.
    """
    mean = seconds_between_failures
    scale = mean * math.exp(restart_seconds / mean)
    saves = work_seconds / interval_seconds - 1
    return scale * (
        saves * math.expm1((interval_seconds + stall_seconds) / mean)
        + math.expm1(interval_seconds / mean)
    )


def erlang_b(servers: int, load: float) -> float:
    """The share of time in which all servers are busy, where arrivals then turn away.

    Erlang's loss formula, by its recursion in the number of servers. The share depends on the mean
    service time only, whatever the distribution (Sevastyanov, Theory of Probability 2, 1957).

    Args:
        servers: the number of servers.
        load: arrivals per service time, in Erlangs.
    """
    blocked = 1.0
    for busy in range(1, servers + 1):
        blocked = load * blocked / (busy + load * blocked)
    return blocked
