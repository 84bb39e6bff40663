"""A simulated run under failures: many repetitions at once, event by event.

One lane is one repetition under one pair of interval and number of spares. All lanes move on
together, as arrays: in each round, every lane that trains goes on to its next failure, every lane
that waits for a detection goes on to its end, and every lane that restarts too. Saves are no
events: between two failures their number follows by division.

Failures are Poisson processes of the nodes in the job. A lane's next failure is drawn as exposure,
in seconds of the whole job, and a job on fewer nodes is exposed in proportion. So all lanes of one
repetition meet equal failures in equal order (common random numbers), whatever their policy, and
differences between policies are far more certain than the results themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from convoy.plan.scenario import SURVIVES, Scenario

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LOST_PARTS = ("detection", "restart", "rework", "waiting")
"""The parts of lost time that have a cause each; ``restart`` includes booting and loading."""
REJOINING = "nodes that rejoin"
"""The cause of the restarts by which an elastic run takes repaired nodes back."""

_TRAINING, _DETECTING, _RESTARTING, _DONE = range(4)
_ROUNDING = 1e-9  # of a count of saves, which divisions give


@dataclass(frozen=True)
class Outcome:
    """What simulated runs did. Shapes: C candidates (intervals and spares), R repetitions, and K
    causes, the last of which is :data:`REJOINING`."""

    causes: tuple[str, ...]
    wall_seconds: Floats
    """[C, R] The length of each run."""
    productive_seconds: Floats
    """[C, R] Training that counts, in seconds of the whole job."""
    stall_seconds: Floats
    """[C, R] What training waited for saves."""
    smaller_seconds: Floats
    """[C, R] What the missing nodes of an elastic run would have trained."""
    lost_seconds: dict[str, Floats]
    """[C, R, K] for each of :data:`LOST_PARTS`."""
    failures: Ints
    """[C, R] Failures that struck the job."""

    @property
    def effective(self) -> Floats:
        """[C, R] The effective training time: the productive share of the wall time."""
        return self.productive_seconds / self.wall_seconds


class _Draws:
    """Failures of each repetition: exposure in seconds between them, and causes."""

    def __init__(self, rates: Floats, repetitions: int, block: int, seed: int) -> None:
        self.mean = 1 / rates.sum() if rates.sum() else np.inf
        self.edges = np.cumsum(rates)[:-1] / rates.sum() if rates.sum() else np.empty(0)
        self.repetitions, self.block, self.seed, self.blocks = repetitions, block, seed, 0
        self.gaps = np.empty((repetitions, 0))
        self.causes = np.empty((repetitions, 0), np.int64)
        self.extend()

    def extend(self) -> None:
        """Draw another block for every repetition; earlier blocks stay what they are."""
        random = np.random.default_rng([self.seed, self.blocks])
        shape, self.blocks = (self.repetitions, self.block), self.blocks + 1
        unit = random.exponential(size=shape)
        gaps = unit * self.mean if np.isfinite(self.mean) else np.full(shape, np.inf)
        causes = np.searchsorted(self.edges, random.random(shape), side="right")
        self.gaps = np.concatenate([self.gaps, gaps], axis=1)
        self.causes = np.concatenate([self.causes, causes], axis=1)


class _Repairs:
    """Nodes in repair: for each lane the times at which they come back, oldest first."""

    def __init__(self, lanes: int, room: int) -> None:
        self.times = np.zeros((lanes, room))
        self.head, self.tail = np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)

    @property
    def count(self) -> Ints:
        """[lanes] Nodes in repair."""
        return self.tail - self.head

    def push(self, lanes: Ints, times: Floats) -> None:
        """Begin a repair in each of ``lanes``; ``times`` must not be before earlier ones."""
        room = self.times.shape[1]
        if (self.count[lanes] >= room).any():
            order = (self.head[:, None] + np.arange(room)) % room
            self.times = np.pad(np.take_along_axis(self.times, order, 1), ((0, 0), (0, room)))
            self.head, self.tail = np.zeros_like(self.head), self.count
            room *= 2
        self.times[lanes, self.tail[lanes] % room] = times
        self.tail[lanes] += 1

    def nth(self, lanes: Ints, number: Ints) -> Floats:
        """When the ``number``-th node from now on comes back, 1 being the next."""
        times: Floats = self.times[lanes, (self.head[lanes] + number - 1) % self.times.shape[1]]
        return times

    def finish(self, lanes: Ints, now: Floats) -> None:
        """Take out the nodes that are back by ``now``."""
        while len(lanes):
            first = self.times[lanes, self.head[lanes] % self.times.shape[1]]
            back = (self.count[lanes] > 0) & (first <= now)
            lanes, now = lanes[back], now[back]
            self.head[lanes] += 1


class _Lanes:
    """The state of all lanes."""

    def __init__(
        self,
        scenario: Scenario,
        interval: Floats,
        spares: Ints,
        *,
        wall_seconds: float,
        work_seconds: float,
    ) -> None:
        run, policy = scenario.run, scenario.policy
        causes, rates = scenario.failures.all_causes, scenario.failures_per_second
        tiers = list(policy.tiers.used.items())
        self.wall, self.work = wall_seconds, work_seconds
        self.nodes, self.stall, self.repair = run.nodes, policy.stall, policy.repair_hours * 3600
        self.unit = policy.nodes_per_replica if policy.shrinks else run.nodes
        # [K] What each cause needs; the last one is that of rejoining.
        seconds = {"crash": policy.crash_seconds, "hang": policy.hang_seconds,
                   "silent": policy.silent_seconds}  # fmt: skip
        self.causes = (*causes, REJOINING)
        self.detection = np.array([*(seconds[c.detection] for c in causes.values()), 0.0])
        self.crashes = np.array([*(c.detection == "crash" for c in causes.values()), False])
        self.replaces = np.array([*(c.nature == "replace" for c in causes.values()), False])
        boots = np.array([*(c.nature == "reboot" for c in causes.values()), False])
        self.restart = policy.restart_base_seconds + policy.reboot_seconds * boots
        # [K] What a failure costs that other replicas survive: they wait for the regroup, the step
        # and the copy of the state, and one replica is absent while its processes start. The
        # absence counts as the time in which all nodes would have trained as much.
        self.heals = np.array(
            [policy.restart == "heal" and self.detection[k] != seconds["silent"]
             for k in range(len(self.causes))]
        )  # fmt: skip
        self.joins = scenario.tier_seconds("peer", "restore") if policy.restart == "heal" else 0.0
        absent = policy.partial_restart_seconds + policy.reboot_seconds * boots
        pause = policy.heal_seconds + policy.step_seconds + self.joins
        self.heal = pause + absent * self.unit / run.nodes
        # [tiers, K] Whether a tier has the state after a failure. A save of wrong numbers is in
        # every tier that keeps the newest save only.
        self.survives = np.array([
            [*((c.nature in (tier.survives if tier.survives is not None else SURVIVES[name]))
               and (c.detection != "silent" or name == "shared") for c in causes.values()), True]
            for name, tier in tiers
        ])  # fmt: skip
        self.durable = [scenario.tier_seconds(name, "durable") for name, _ in tiers]
        self.restore = [scenario.tier_seconds(name, "restore") for name, _ in tiers]
        # One candidate after another, each with all repetitions.
        self.repetition = np.tile(np.arange(run.repetitions), len(interval))
        self.interval = np.repeat(interval, run.repetitions)
        self.spares = np.repeat(spares, run.repetitions)
        self.period = self.interval + self.stall
        # A save that begins while the tier still writes is left out of the tier.
        self.every = [
            np.maximum(tier.every, np.ceil(durable / self.period - _ROUNDING))
            for (_, tier), durable in zip(tiers, self.durable, strict=True)
        ]
        self.mean = scenario.seconds_between_failures
        longest = min(wall_seconds, 4 * work_seconds)
        block = 32 + int(longest / self.mean + 4 * np.sqrt(longest / self.mean))
        rate = np.array([*rates.values()]) if rates else np.zeros(1)
        self.draws = _Draws(rate, run.repetitions, block, run.seed)
        lanes = len(self.interval)
        load = min(scenario.nodes_in_repair, longest / self.mean)
        self.repairs = _Repairs(lanes, 16 + int(load + 6 * np.sqrt(load)))
        self.active = np.full(lanes, run.nodes)
        self.phase = np.full(lanes, _TRAINING)
        self.clock, self.position = np.zeros(lanes), np.zeros(lanes)
        self.cause, self.left = np.zeros(lanes, np.int64), np.zeros(lanes)
        self.healed = np.zeros(lanes, bool)  # whether the newest failure left the state
        self.failures = np.zeros(lanes, np.int64)
        self.exposure = self.draws.gaps[self.repetition, 0]  # until the next failure
        # The beginning of the run is as good as a save on the shared storage.
        self.saved = [np.full(lanes, 0.0 if name == "shared" else -np.inf) for name, _ in tiers]
        self.stalled, self.smaller = np.zeros(lanes), np.zeros(lanes)
        self.lost = {part: np.zeros((lanes, len(self.causes))) for part in LOST_PARTS}

    def finish(self) -> None:
        """Go on until every lane is done."""
        while (self.phase != _DONE).any():
            self.train(np.flatnonzero(self.phase == _TRAINING))
            self.resume(self.spend(np.flatnonzero(self.phase == _DETECTING), "detection"))
            back = self.spend(np.flatnonzero(self.phase == _RESTARTING), "restart")
            self.phase[back] = _TRAINING

    def train(self, at: Ints) -> None:
        """Train in the lanes ``at`` until a failure, the end, or a save that nodes rejoin after."""
        if not len(at):
            return
        share = self.active[at] / self.nodes
        period, interval, before = self.period[at], self.interval[at], self.position[at]
        to_failure, to_wall = self.exposure[at] / share, self.wall - self.clock[at]
        to_finish = np.full(len(at), np.inf)
        if np.isfinite(self.work):
            remaining = np.maximum(self.work - before, 0) / share
            full = np.maximum(np.ceil(remaining / interval - _ROUNDING) - 1, 0)
            to_finish = remaining + full * self.stall
        to_join = self._seconds_to_join(at, share)
        end = np.minimum(to_wall, to_finish)
        spent = np.minimum(np.minimum(to_failure, to_join), end)
        cycles = np.floor(spent / period + _ROUNDING)
        trained = cycles * interval + np.clip(spent - cycles * period, 0, interval)
        for number, durable in enumerate(self.durable):
            every = self.every[number][at]
            newest = every * np.floor(np.maximum(spent - durable, 0) / (period * every) + _ROUNDING)
            self.saved[number][at] = np.where(
                newest > 0, before + share * interval * newest, self.saved[number][at]
            )
        self.position[at] += share * trained
        self.smaller[at] += (1 - share) * trained
        self.stalled[at] += spent - trained
        self.clock[at] += spent
        self.exposure[at] -= share * spent
        done, failed = spent >= end, spent >= to_failure
        self.phase[at[done]] = _DONE
        self.fail(at[failed & ~done])
        # The others have just saved: they restart with the nodes that are back.
        joined = at[~failed & ~done]
        self.cause[joined] = len(self.causes) - 1
        self.healed[joined] = self.heals[-1]
        self.resume(joined)

    def spend(self, at: Ints, part: str) -> Ints:
        """Let the lanes ``at`` spend what is left of ``part``; a failure begins a new detection.

        Returns the lanes that have come through.
        """
        if not len(at):
            return at
        share, left = self.active[at] / self.nodes, self.left[at]
        to_failure, to_wall = self.exposure[at] / share, self.wall - self.clock[at]
        spent = np.minimum(np.minimum(left, to_failure), to_wall)
        self.lost[part][at, self.cause[at]] += spent
        self.clock[at] += spent
        self.exposure[at] -= share * spent
        done, failed = spent >= to_wall, to_failure < left
        self.phase[at[done]] = _DONE
        self.fail(at[failed & ~done])
        through: Ints = at[~failed & ~done]
        return through

    def fail(self, at: Ints) -> None:
        """A failure strikes the lanes ``at``: what is lost, and how long until it is noticed."""
        if not len(at):
            return
        if self.failures[at].max() + 1 >= self.draws.gaps.shape[1]:
            self.draws.extend()
        repetition, number = self.repetition[at], self.failures[at]
        cause = self.draws.causes[repetition, number]
        self.cause[at] = cause
        self.failures[at] += 1
        self.exposure[at] = self.draws.gaps[repetition, number + 1]
        lost_node = at[self.replaces[cause]]
        self.repairs.push(lost_node, self.clock[lost_node] + self.repair)
        healed = self.heals[cause] & (self.active[at] >= 2 * self.unit)
        self.healed[at] = healed
        newest = np.full(len(at), -np.inf)
        for saved, survives in zip(self.saved, self.survives, strict=True):
            saved[at[~survives[cause]]] = -np.inf
            newest = np.maximum(newest, saved[at])
        newest = np.where(healed, self.position[at], newest)
        self.lost["rework"][at, cause] += self.position[at] - newest
        self.position[at] = newest
        detection = np.where(healed & self.crashes[cause], 0.0, self.detection[cause])
        self.left[at] = detection
        self.phase[at] = _DETECTING

    def resume(self, at: Ints) -> None:
        """Find nodes for the lanes ``at``, wait where there are too few, and begin to restart."""
        if not len(at):
            return
        self.repairs.finish(at, self.clock[at])
        missing = self.repairs.count[at] - self.spares[at] - self.nodes + self.unit
        short = at[missing > 0]
        if len(short):
            until = np.minimum(self.repairs.nth(short, missing[missing > 0]), self.wall)
            self.lost["waiting"][short, self.cause[short]] += until - self.clock[short]
            self.clock[short] = until
            self.repairs.finish(short, until)
            self.phase[short[until >= self.wall]] = _DONE
        at = at[self.phase[at] != _DONE]
        sound = self.nodes + self.spares[at] - self.repairs.count[at]
        self.active[at] = np.minimum(sound // self.unit * self.unit, self.nodes)
        # Of the tiers with the newest state, the quickest.
        restore = np.full(len(at), np.inf)
        for saved, seconds in zip(self.saved, self.restore, strict=True):
            has = saved[at] >= self.position[at]
            restore = np.where(has, np.minimum(restore, seconds), restore)
        # Who rejoins after a save finds its state, however far the tiers have written it.
        restore = np.where(np.isinf(restore), min(self.restore), restore)
        cause, rejoins = self.cause[at], self.cause[at] == len(self.causes) - 1
        heal = np.where(rejoins, self.joins, self.heal[cause])
        self.left[at] = np.where(self.healed[at], heal, self.restart[cause] + restore)
        self.phase[at] = _RESTARTING

    def _seconds_to_join(self, at: Ints, share: Floats) -> Floats:
        """Until the save after which a job on fewer nodes restarts with more; infinite for never.

        A restart must pay: what the joining nodes are expected to train until the next failure,
        which restarts the job anyway, must be more than what the restart costs.
        """
        found = np.full(len(at), np.inf)
        small = np.flatnonzero(self.active[at] < self.nodes)
        if not len(small):
            return found
        lanes, share = at[small], share[small]
        cost = self.joins if self.heals[-1] else self.restart[-1] + min(self.restore)
        gain = self.unit / self.nodes * self.mean / share  # of one unit of nodes
        units = np.maximum(np.floor(cost / gain) + 1, 1)
        pays = units * self.unit <= self.nodes - self.active[lanes]
        small, lanes, units = small[pays], lanes[pays], units[pays]
        idle = self.nodes + self.spares[lanes] - self.repairs.count[lanes] - self.active[lanes]
        needed = (units * self.unit).astype(np.int64) - idle
        back = np.where(
            needed > 0, self.repairs.nth(lanes, np.maximum(needed, 1)), self.clock[lanes]
        )
        period = self.period[lanes]
        saves = np.ceil((back - self.clock[lanes]) / period - _ROUNDING)
        found[small] = np.maximum(saves, 1) * period
        return found


def simulate_runs(
    scenario: Scenario,
    intervals: Sequence[float],
    spares: Sequence[int],
    *,
    work_seconds: float = float("inf"),
) -> Outcome:
    """Simulate ``scenario.run.repetitions`` runs for each pair of interval and spares.

    Args:
        scenario: the cluster, its failures and the policy, whose own interval and spares are not
            read.
        intervals: [C] seconds of training between two saves.
        spares: [C] spare nodes.
        work_seconds: a run ends when it has trained for so long, or after ``scenario.run.days``.
    """
    if len(intervals) != len(spares):
        raise ValueError(f"{len(intervals)} intervals must be as many as spares ({len(spares)})")
    lanes = _Lanes(
        scenario,
        np.array(intervals, np.float64),
        np.array(spares, np.int64),
        wall_seconds=scenario.run.days * 86_400,
        work_seconds=work_seconds,
    )
    lanes.finish()
    shape = (len(intervals), scenario.run.repetitions)
    return Outcome(
        causes=lanes.causes,
        wall_seconds=lanes.clock.reshape(shape),
        productive_seconds=lanes.position.reshape(shape),
        stall_seconds=lanes.stalled.reshape(shape),
        smaller_seconds=lanes.smaller.reshape(shape),
        lost_seconds={part: each.reshape(*shape, -1) for part, each in lanes.lost.items()},
        failures=lanes.failures.reshape(shape),
    )
