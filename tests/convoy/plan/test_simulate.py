"""The simulation of failures against closed forms, and against cases worked by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.plan import Outcome, Scenario, simulate_runs
from convoy.plan.assessment import best_interval
from convoy.plan.simulate import LOST_PARTS, REJOINING
from pretrain.checkpoint import erlang_b, expected_run_seconds, optimal_interval, young_interval

HOUR, DAY = 3600.0, 86_400.0
FREE = {"durable_seconds": 0, "restore_seconds": 0}
OFF = {"enabled": False}
ONLY_SHARED = {"memory": OFF, "peer": OFF, "shared": FREE}
NOTHING_TAKES_TIME = {
    "crash_seconds": 0, "hang_seconds": 0, "silent_seconds": 0, "restart_seconds": 0,
    "reboot_seconds": 0, "stall_seconds": 0, "interval_seconds": 1, "spares": 0,
    "tiers": ONLY_SHARED,
}  # fmt: skip


def make(
    run: dict[str, Any] | None = None, policy: dict[str, Any] | None = None, **causes: Any
) -> Scenario:
    """A scenario of the given causes only; a cause is (failures of a node in an hour, nature)."""
    made = {
        name: {"per_node_hour": rate, "nature": nature, "detection": "crash"}
        for name, (rate, nature) in causes.items()
    }
    return Scenario.model_validate(
        {
            "run": {"gpus": 8, "gpus_per_node": 1, **(run or {})},
            "failures": {"table": "none", "causes": made},
            "policy": policy or {},
        }
    )


def parts_of(outcome: Outcome) -> np.ndarray:
    """[C, R] The sum of all parts of the time."""
    lost = sum(outcome.lost_seconds[part].sum(axis=-1) for part in LOST_PARTS)
    return outcome.productive_seconds + outcome.stall_seconds + outcome.smaller_seconds + lost


def standard_error(samples: np.ndarray) -> float:
    return float(samples.std(ddof=1) / math.sqrt(samples.size))


# ------------------------------------------------------------------------------------------------
# Closed forms. The seeds are fixed, and a bound is four standard errors.


@pytest.mark.parametrize(
    ("mean", "restart", "stall"), [(1800.0, 300.0, 20.0), (7200.0, 60.0, 5.0), (900.0, 900.0, 0.0)]
)
def test_the_run_time_is_dalys(mean, restart, stall):
    interval, work = 400.0, 20_000.0
    scenario = make(
        {"repetitions": 2000, "days": 10},
        {**NOTHING_TAKES_TIME, "stall_seconds": stall, "interval_seconds": interval,
         "crash_seconds": restart / 4, "restart_seconds": restart / 2,
         "tiers": {**ONLY_SHARED, "shared": {**FREE, "restore_seconds": restart / 4}}},
        software=(HOUR / mean / 8, "restart"),
    )  # fmt: skip
    outcome = simulate_runs(scenario, [interval], [0], work_seconds=work)
    np.testing.assert_allclose(outcome.productive_seconds, work)
    expected = expected_run_seconds(
        work, mean, interval_seconds=interval, stall_seconds=stall, restart_seconds=restart
    )
    wall = outcome.wall_seconds[0]
    assert abs(wall.mean() - expected) <= 4 * standard_error(wall)
    assert standard_error(wall) < 0.02 * expected, "a bound that says something"


@pytest.mark.parametrize(("mean", "stall"), [(2 * HOUR, 10.0), (4 * HOUR, 120.0)])
def test_the_best_interval_is_youngs_and_dalys(mean, stall):
    scenario = make(
        {"repetitions": 300, "days": 40},
        {**NOTHING_TAKES_TIME, "stall_seconds": stall, "crash_seconds": 300},
        software=(HOUR / mean / 8, "restart"),
    )
    found = best_interval(scenario, 0)
    for best in (optimal_interval(stall, mean), young_interval(stall, mean)):
        assert found.low <= best <= found.high
    assert found.high / found.low < 3, "an interval that says something"
    # The whole curve is Daly's: M e^(R/M) (e^((t+d)/M) - 1) wall for each interval t.
    for interval, score in zip(found.candidates, found.scores, strict=True):
        cycle = mean * math.exp(300 / mean) * math.expm1((interval + stall) / mean)
        assert score == pytest.approx(interval / cycle, rel=0.01)


@pytest.mark.parametrize("spares", [0, 1, 3])
def test_waiting_for_machines_is_erlangs_loss(spares):
    # A machine in repair is a busy server of spares + 1. When all are busy the job waits, and a
    # job that waits breaks no machine: an arrival that is turned away.
    load, repair_hours = 1.2, 2.0
    scenario = make(
        {"repetitions": 60, "days": 200},
        {**NOTHING_TAKES_TIME, "repair_hours": repair_hours},
        gpu=(load / repair_hours / 8, "replace"),
    )
    outcome = simulate_runs(scenario, [1.0], [spares])
    waiting = (outcome.lost_seconds["waiting"].sum(axis=-1) / outcome.wall_seconds)[0]
    expected = erlang_b(spares + 1, load)
    assert abs(waiting.mean() - expected) <= 4 * standard_error(waiting) + repair_hours / 24 / 200
    assert standard_error(waiting) < 0.03 * expected


def test_erlangs_formula_is_that_of_the_sum():
    for servers, load in ((1, 0.5), (4, 3.0), (12, 20.0)):
        terms = [load**n / math.factorial(n) for n in range(servers + 1)]
        assert erlang_b(servers, load) == pytest.approx(terms[-1] / sum(terms))
    assert erlang_b(0, 2.0) == 1


def test_an_elastic_run_trains_on_the_machines_that_are_up():
    # Each machine is up for an exponential time of mean 1/rate and then in repair: the share of
    # machines that are up is 1 / (1 + rate * repair).
    rate, repair_hours = 0.02, 10.0
    scenario = make(
        {"gpus": 16, "repetitions": 60, "days": 120},
        {**NOTHING_TAKES_TIME, "repair_hours": repair_hours, "when_short": "elastic"},
        gpu=(rate, "replace"),
    )
    outcome = simulate_runs(scenario, [1.0], [0])
    up = outcome.effective[0]
    expected = 1 / (1 + rate * repair_hours)
    assert abs(up.mean() - expected) <= 4 * standard_error(up) + repair_hours / 24 / 120
    assert standard_error(up) < 0.005


def test_without_failures_only_saves_take_time():
    policy = {**NOTHING_TAKES_TIME, "stall_seconds": 7.0}
    scenario = make({"repetitions": 2, "days": 1}, policy)
    outcome = simulate_runs(scenario, [93.0, 1e9], [0, 0])
    np.testing.assert_allclose(outcome.stall_seconds, [[864 * 7.0] * 2, [0.0] * 2])
    np.testing.assert_allclose(outcome.effective, [[0.93] * 2, [1.0] * 2])
    assert not outcome.failures.any()


# ------------------------------------------------------------------------------------------------
# Cases worked by hand: the failures are given.


@pytest.fixture
def failures_at(monkeypatch):
    """Makes failures at given seconds of exposure, each with the number of its cause."""

    def script(*failures: tuple[float, int]) -> None:
        times = [0.0, *(at for at, _ in failures)]
        gaps = [*np.diff(times), math.inf]

        class Draws:
            def __init__(self, *_: Any) -> None:
                self.gaps = np.tile(gaps, (2, 1))
                self.causes = np.tile([*(cause for _, cause in failures), 0], (2, 1))

            def extend(self) -> None:
                raise AssertionError("no further failure was expected")

        monkeypatch.setattr("convoy.plan.simulate._Draws", Draws)

    return script


NATURES = {"restart": (1e-9, "restart"), "reboot": (1e-9, "reboot"), "replace": (1e-9, "replace")}
RESTART, REBOOT, REPLACE = range(3)


def policy_of(**more: Any) -> dict[str, Any]:
    return {
        "interval_seconds": 100, "stall_seconds": 10, "crash_seconds": 5, "restart_seconds": 50,
        "reboot_seconds": 500, "repair_hours": 1, "spares": 1,
        "tiers": {
            "memory": {"durable_seconds": 1, "restore_seconds": 2},
            "peer": {"durable_seconds": 20, "restore_seconds": 4},
            "local": {"durable_seconds": 30, "restore_seconds": 8},
            "shared": {"durable_seconds": 200, "restore_seconds": 16},
        },
        **more,
    }  # fmt: skip


def hand(policy: dict[str, Any], *, spares: int = 1, interval: float = 100) -> dict[str, float]:
    """One run of an hour and 24 minutes; parts in seconds."""
    scenario = make({"repetitions": 2, "days": 5040 / DAY}, policy, **NATURES)
    outcome = simulate_runs(scenario, [interval], [spares])
    np.testing.assert_allclose(parts_of(outcome), 5040)
    found = {part: float(outcome.lost_seconds[part][0, 0].sum()) for part in LOST_PARTS}
    return found | {"smaller": float(outcome.smaller_seconds[0, 0])}


@pytest.mark.parametrize(
    ("cause", "tiers", "rework", "restart"),
    [
        # Saves end at 110, 220, ... 990; the failure is at 1025, after 935 s of training.
        (RESTART, ("memory", "peer", "local", "shared"), 35, 50 + 2),
        (RESTART, ("peer", "shared"), 35, 50 + 4),
        (RESTART, ("local", "shared"), 35, 50 + 8),
        (REBOOT, ("memory", "peer", "local", "shared"), 35, 550 + 4),
        (REBOOT, ("memory", "local", "shared"), 35, 550 + 8),
        (REPLACE, ("memory", "peer", "local", "shared"), 35, 50 + 4),
        # The shared storage writes for 200 s, so that every second save goes there: the save at
        # 660 is durable at 860, the one at 880 is not yet.
        (REPLACE, ("memory", "local", "shared"), 335, 50 + 16),
        (REPLACE, ("shared",), 335, 50 + 16),
    ],
)
def test_what_a_failure_takes_depends_on_the_tiers(failures_at, cause, tiers, rework, restart):
    failures_at((1025.0, cause))
    policy = policy_of()
    policy["tiers"] = {
        name: tier if name in tiers else OFF for name, tier in policy["tiers"].items()
    }
    found = hand(policy)
    assert found["detection"] == 5
    assert found["rework"] == pytest.approx(rework)
    assert found["restart"] == pytest.approx(restart)
    assert found["waiting"] == found["smaller"] == 0


HEALS = {"restart": "heal", "nodes_per_replica": 2, "heal_seconds": 1, "step_seconds": 7,
         "partial_restart_seconds": 60}  # fmt: skip


@pytest.mark.parametrize(
    ("cause", "restart"),
    [
        # All wait for the regroup, the step and the copy from a peer; one replica of four is absent
        # while its processes start, and while its machine boots.
        (RESTART, 1 + 7 + 4 + 60 / 4),
        (REBOOT, 1 + 7 + 4 + (60 + 500) / 4),
        (REPLACE, 1 + 7 + 4 + 60 / 4),
    ],
)
def test_a_failure_that_other_replicas_survive_costs_no_save(failures_at, cause, restart):
    failures_at((1025.0, cause))
    found = hand(policy_of(**HEALS))
    assert found["detection"] == found["rework"] == found["waiting"] == found["smaller"] == 0
    assert found["restart"] == pytest.approx(restart)


def test_without_a_spare_a_run_that_heals_trains_on_fewer_replicas(failures_at):
    failures_at((1025.0, REPLACE))
    found = hand(policy_of(**HEALS, repair_hours=0.5), spares=0)
    # Half an hour on three of four replicas; then the copy to the replica that comes.
    assert found["restart"] == pytest.approx(27 + 4)
    assert found["smaller"] == pytest.approx(1800 / 4 * 100 / 110, rel=0.05)


def test_the_only_replica_starts_again_from_a_save(failures_at):
    failures_at((1025.0, RESTART))
    found = hand(policy_of(**HEALS | {"nodes_per_replica": 8}))
    assert (found["detection"], found["rework"]) == (5, pytest.approx(35))
    assert found["restart"] == pytest.approx(50 + 2)


def test_a_save_that_is_not_durable_yet_is_lost(failures_at):
    failures_at((1000.0, REPLACE))  # 10 s after the save at 990, and a peer needs 20
    assert hand(policy_of())["rework"] == pytest.approx(110)
    failures_at((1011.0, REPLACE))
    assert hand(policy_of())["rework"] == pytest.approx(21)


def test_a_failure_in_a_restart_begins_the_detection_anew(failures_at):
    failures_at((1025.0, RESTART), (1040.0, RESTART))
    found = hand(policy_of())
    assert found["detection"] == 10
    assert found["restart"] == pytest.approx(10 + 52)
    assert found["rework"] == pytest.approx(35)
    # A lost node takes the memory with it; before the next save the peers' copies are the newest.
    failures_at((1025.0, RESTART), (1040.0, REPLACE))
    assert hand(policy_of())["restart"] == pytest.approx(10 + 54)


def test_silent_corruption_leaves_the_shared_storage_alone(failures_at):
    wrong = {"per_node_hour": 1e-9, "nature": "replace", "detection": "silent"}
    scenario = Scenario.model_validate(
        {
            "run": {"gpus": 8, "gpus_per_node": 1, "repetitions": 2, "days": 5040 / DAY},
            "failures": {"table": "none", "causes": {"wrong sums": wrong}},
            "policy": policy_of(silent_seconds=700),
        }
    )
    failures_at((1025.0, 0))
    outcome = simulate_runs(scenario, [100.0], [1])
    assert outcome.lost_seconds["detection"][0, 0].sum() == pytest.approx(700)
    assert outcome.lost_seconds["rework"][0, 0].sum() == pytest.approx(335)
    assert outcome.lost_seconds["restart"][0, 0].sum() == pytest.approx(66)


def test_a_run_without_spares_waits_or_goes_on_smaller(failures_at):
    failures_at((1025.0, REPLACE))
    waited = hand(policy_of(), spares=0)
    assert waited["waiting"] == pytest.approx(3600 - 5), "the repair begins at the failure"
    # The node is back at 4625. Training began again at 1084, on 7 of 8 nodes; the save after 4625
    # ends at 1084 + 33 * 110 = 4714. To rejoin costs 50 + 2 s, and pays.
    smaller = hand(policy_of(when_short="elastic"), spares=0)
    assert smaller["waiting"] == 0
    assert smaller["smaller"] == pytest.approx(3300 / 8)
    assert smaller["restart"] == pytest.approx(54 + 52)
    # With replicas of 4 nodes, half of the nodes train.
    halved = hand(policy_of(when_short="elastic", nodes_per_replica=4), spares=0)
    assert halved["smaller"] == pytest.approx(3300 / 2)


@pytest.mark.parametrize(("mean", "rejoins"), [(420.0, True), (300.0, False)])
def test_nodes_rejoin_only_where_a_restart_pays(failures_at, mean, rejoins):
    # 7 of 8 nodes train. Until the next failure, mean * 8/7 away, the eighth would train an eighth
    # of that time: 60 s or 43 s of the whole job. A restart takes 52 s.
    failures_at((1025.0, 0))
    scenario = make(
        {"repetitions": 2, "days": 5040 / DAY},
        policy_of(when_short="elastic"),
        gpu=(HOUR / mean / 8, "replace"),
    )
    outcome = simulate_runs(scenario, [100.0], [0])
    assert outcome.causes[-1] == REJOINING
    seconds = outcome.lost_seconds["restart"][..., -1]
    np.testing.assert_allclose(seconds, 52.0 if rejoins else 0.0)
    assert (outcome.smaller_seconds > 3300 / 8 + 1).all() != rejoins


# ------------------------------------------------------------------------------------------------
# Properties.

SECONDS = st.sampled_from([0.0, 1.0, 40.0, 900.0])
SCENARIOS = st.builds(
    make,
    st.fixed_dictionaries(
        {
            "gpus": st.sampled_from([4, 12]),
            "days": st.sampled_from([0.5, 6.0]),
            "repetitions": st.just(24),
            "seed": st.integers(0, 1000),
        }
    ),
    st.fixed_dictionaries(
        {
            "stall_seconds": st.sampled_from([0.5, 30.0]),
            "repair_hours": st.sampled_from([0.0, 3.0, 30.0]),
            "crash_seconds": SECONDS,
            "restart_seconds": SECONDS,
            "reboot_seconds": SECONDS,
            "when_short": st.sampled_from(["wait", "elastic"]),
            "nodes_per_replica": st.sampled_from([1, 2, 4]),
            "tiers": st.fixed_dictionaries(
                {
                    "memory": st.sampled_from([OFF, {}, {"every": 3}]),
                    "peer": st.sampled_from([OFF, {"durable_seconds": 500}]),
                    "local": st.sampled_from([OFF, {}]),
                    "shared": st.sampled_from([FREE, {}, {"every": 5}]),
                }
            ),
        }
    ),
    software=st.tuples(st.sampled_from([0.0, 0.03, 1.0]), st.just("restart")),
    boot=st.tuples(st.sampled_from([0.0, 0.03]), st.just("reboot")),
    gpu=st.tuples(st.sampled_from([0.0, 0.01, 0.3]), st.just("replace")),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SCENARIOS, st.sampled_from([20.0, 600.0, 1e7]), st.integers(0, 6))
def test_the_parts_add_up_to_the_wall_time_and_spares_help(scenario, interval, spares):
    outcome = simulate_runs(scenario, [interval, interval], [spares, spares + 1])
    np.testing.assert_allclose(parts_of(outcome), outcome.wall_seconds, rtol=1e-9)
    np.testing.assert_allclose(outcome.wall_seconds, scenario.run.days * DAY, rtol=1e-12)
    for part in LOST_PARTS:
        assert outcome.lost_seconds[part].min() >= 0
    assert min(outcome.productive_seconds.min(), outcome.smaller_seconds.min()) >= 0
    assert outcome.stall_seconds.min() > -1e-6, "but for rounding"
    gain = outcome.effective[1] - outcome.effective[0]
    assert gain.mean() >= -4 * standard_error(gain)


def test_equal_seeds_give_equal_numbers_and_policies_meet_equal_failures():
    scenario = make(
        {"repetitions": 20, "days": 5}, {}, gpu=(0.05, "replace"), software=(0.1, "restart")
    )
    first = simulate_runs(scenario, [300.0], [1])
    again = simulate_runs(scenario, [200.0, 300.0], [1, 1])
    assert np.array_equal(first.effective[0], again.effective[1])
    other = scenario.model_copy(update={"run": scenario.run.model_copy(update={"seed": 1})})
    assert not np.array_equal(first.effective, simulate_runs(other, [300.0], [1]).effective)
    # A candidate of a search is compared under the failures of all others.
    gain = again.effective[0] - again.effective[1]
    assert standard_error(gain) < 0.2 * standard_error(again.effective[0])
    with pytest.raises(ValueError, match="2 intervals must be as many as spares"):
        simulate_runs(scenario, [1.0, 2.0], [0])


def test_more_failures_than_expected_are_drawn_when_needed(monkeypatch):
    import convoy.plan.simulate as module

    class Small(module._Draws):
        def __init__(self, rates, repetitions, block, seed):
            super().__init__(rates, repetitions, 2, seed)

    monkeypatch.setattr(module, "_Draws", Small)
    scenario = make({"repetitions": 30, "days": 10}, {}, software=(0.2, "restart"))
    outcome = simulate_runs(scenario, [300.0], [0])
    mean = outcome.failures.mean()
    assert abs(mean - 8 * 0.2 * 240) <= 4 * standard_error(outcome.failures)


def test_many_repairs_at_once_keep_their_order(monkeypatch):
    import convoy.plan.simulate as module

    class Small(module._Repairs):
        def __init__(self, lanes, room):
            super().__init__(lanes, 1)

    scenario = make(
        {"gpus": 64, "repetitions": 10, "days": 20},
        # Short repairs: the room grows again after nodes have come back, from the middle of a ring.
        {"when_short": "elastic", "repair_hours": 4},
        gpu=(0.01, "replace"),
    )
    expected = simulate_runs(scenario, [300.0], [3])
    monkeypatch.setattr(module, "_Repairs", Small)
    assert np.array_equal(simulate_runs(scenario, [300.0], [3]).effective, expected.effective)
