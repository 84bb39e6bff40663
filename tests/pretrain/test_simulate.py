"""The simulation of failures against closed forms, published runs, and cases worked by hand."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.plan import (
    DEVICE_HOURS_PER_FAILURE,
    Outcome,
    Scenario,
    assess,
    erlang_b,
    expected_run_seconds,
    load_scenario,
    optimal_interval,
    simulate_runs,
    sizes_table,
    young_interval,
)
from pretrain.plan.assessment import best_interval, best_spares, mean_and_half_width
from pretrain.plan.published import LLAMA3, LLAMA3_DAYS, LLAMA3_GPUS, LLAMA3_PLANNED
from pretrain.plan.scenario import ASSUMED_SECONDS_PER_GIB, MEASURED_SECONDS_PER_GIB
from pretrain.plan.simulate import LOST_PARTS, REJOINING

ROOT = Path(__file__).parents[2]
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

        monkeypatch.setattr("pretrain.plan.simulate._Draws", Draws)

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
    import pretrain.plan.simulate as module

    class Small(module._Draws):
        def __init__(self, rates, repetitions, block, seed):
            super().__init__(rates, repetitions, 2, seed)

    monkeypatch.setattr(module, "_Draws", Small)
    scenario = make({"repetitions": 30, "days": 10}, {}, software=(0.2, "restart"))
    outcome = simulate_runs(scenario, [300.0], [0])
    mean = outcome.failures.mean()
    assert abs(mean - 8 * 0.2 * 240) <= 4 * standard_error(outcome.failures)


def test_many_repairs_at_once_keep_their_order(monkeypatch):
    import pretrain.plan.simulate as module

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


# ------------------------------------------------------------------------------------------------
# The searches.


def test_the_best_number_of_spares_is_where_one_more_pays_no_more():
    scenario = make(
        {"gpus": 200, "repetitions": 100, "days": 60},
        {"repair_hours": 24, "interval_seconds": 600.0},
        gpu=(1 / 1000, "replace"),
    )
    found = best_spares(scenario, 600.0)
    assert scenario.nodes_in_repair == pytest.approx(4.8)
    assert 5 <= found.low <= found.value <= found.high <= 16
    assert found.candidates[0] == 0
    assert found.scores[0] < max(found.scores) - 0.1
    given = scenario.model_copy(
        update={"policy": scenario.policy.model_copy(update={"spares": 3, "repair_hours": 24.0})}
    )
    result = assess(given)
    assert result.spares_search is None
    assert (result.spares, result.interval, result.interval_seconds) == (3, None, 600.0)


def test_the_search_follows_the_best_interval_beyond_its_first_grid():
    # One of 400 saves counts: 400 stalls buy one save, so that an interval 20 times shorter than
    # Daly's is the best. The first grid ends at an eighth of Daly's.
    scenario = make(
        {"repetitions": 40, "days": 30},
        {"stall_seconds": 1.0, "tiers": {**ONLY_SHARED, "shared": {**FREE, "every": 400}}},
        software=(1 / 50 / 8, "restart"),
    )
    daly = optimal_interval(1.0, scenario.seconds_between_failures)
    assert daly / 40 < best_interval(scenario, 0).value < daly / 10


def test_nothing_fails_and_nothing_is_searched_in_vain():
    result = assess(make({"repetitions": 2, "days": 3}, {}))
    assert (result.failures, result.hours_between_failures, result.daly_seconds) == (0, None, None)
    assert result.effective == pytest.approx(1, abs=1e-5)
    assert result.spares == 0


# ------------------------------------------------------------------------------------------------
# Published runs.


def test_the_published_table_is_that_of_the_paper():
    assert sum(cause.times for cause in LLAMA3.values()) == 419
    gpus = ("faulty GPU", "GPU HBM3 memory", "GPU SRAM memory", "GPU system processor",
            "silent data corruption", "GPU thermal interface")  # fmt: skip
    # The paper's shares give the first row 126 (30.1 %), but only its count makes the sum 419.
    assert sum(LLAMA3[name].times for name in gpus) == 268
    scenario = Scenario()
    assert (scenario.run.gpus, scenario.run.days) == (LLAMA3_GPUS, LLAMA3_DAYS)
    assert scenario.seconds_between_failures / HOUR == pytest.approx(3.1, abs=0.05)
    hours = scenario.seconds_between_failures / HOUR * LLAMA3_GPUS
    assert hours == pytest.approx(DEVICE_HOURS_PER_FAILURE, rel=0.02)


def test_llama_3_trains_for_more_than_nine_tenths_of_the_time():
    scenario = Scenario.model_validate({"run": {"repetitions": 60}})
    result = assess(scenario)
    # Failures strike the job while it detects and restarts, and not while it waits.
    assert result.failures == pytest.approx(419, rel=0.02)
    # The 47 planned interruptions are further restarts from a save that was just made.
    policy = scenario.policy
    restart = policy.restart_seconds + scenario.tier_seconds("memory", "restore")
    planned = LLAMA3_PLANNED * restart / (LLAMA3_DAYS * DAY)
    assert 0.90 < result.effective - planned < 0.99
    assert result.interval is not None
    assert result.interval.low <= result.daly_seconds <= result.interval.high


def test_bloom_lost_an_hour_and_a_half_to_each_failure():
    # BLOOM: 384 GPUs in 48 nodes, one or two failures in a week, a checkpoint every three hours,
    # "so on average we would lose 1.5 h of training" (huggingface.co/blog/bloom-megatron-deepspeed)
    scenario = make(
        {"gpus": 384, "gpus_per_node": 8, "repetitions": 200, "days": 117},
        {**NOTHING_TAKES_TIME, "stall_seconds": 40.0, "restart_seconds": 600.0},
        gpu=(1.5 / 7 / 24 / 48, "restart"),
    )
    outcome = simulate_runs(scenario, [3 * HOUR], [4])
    rework = outcome.lost_seconds["rework"].sum() / outcome.failures.sum() / HOUR
    assert rework == pytest.approx(1.5, abs=0.05)


# ------------------------------------------------------------------------------------------------
# What is committed.


def test_measured_defaults_are_those_of_the_benchmark():
    rows = json.loads((ROOT / "bench/results/checkpoint.json").read_text())["rows"]

    def seconds(case: str, subject: str) -> float:
        (row,) = [r for r in rows if (r["case"], r["subject"]) == (case, subject)]
        return row["value"]  # of 1 GiB

    for name, case, subject in [
        ("stall", "disk, 1 rank, stall", "convoy async"),
        ("memory durable", "tmpfs, 1 rank, save", "convoy async"),
        ("memory restore", "tmpfs, 1 rank, load warm", "convoy"),
        ("local durable", "disk, 1 rank, save", "convoy async"),
        ("local restore", "disk, 1 rank, load cold", "convoy"),
    ]:
        assert MEASURED_SECONDS_PER_GIB[name] == pytest.approx(seconds(case, subject), abs=5e-4)


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    return json.loads((ROOT / "bench/results/simulate.json").read_text())


def test_the_page_has_the_committed_table(committed):
    assert [row["gpus"] for row in committed["rows"]] == [1000, 4096, 16384, 65536, 100_000]
    assert sizes_table(committed["rows"]) in page()


def page() -> str:
    return (ROOT / "docs/planning.md").read_text()


def test_the_page_has_every_field_and_default():
    rows = re.findall(r"^\| `([a-z_]+)\.([a-z0-9_]+)` \| ([^|]*) \|", page(), re.MULTILINE)
    defaults = Scenario().model_dump()
    assert {(section, field) for section, field, _ in rows} == {
        (section, field) for section, fields in defaults.items() for field in fields
    }
    for section, field, shown in rows:
        value = defaults[section][field]
        if isinstance(value, int | float):
            assert float(shown.partition(",")[0]) == value, field
        elif isinstance(value, str):
            assert shown == f"`{value}`", field
    for name, seconds in (MEASURED_SECONDS_PER_GIB | ASSUMED_SECONDS_PER_GIB).items():
        note = "*measured*" if name in MEASURED_SECONDS_PER_GIB else "*assumed*"
        assert re.search(rf"{seconds:g} s[a-zA-Z ]*, {re.escape(note)}", page()), name


def test_the_example_of_the_page_is_a_scenario():
    (block,) = re.findall(r"^```json\n(.*?)^```$", page(), re.DOTALL | re.MULTILINE)
    scenario = Scenario.model_validate(json.loads(block))
    assert set(scenario.failures.all_causes) == {"GPU", "cable"}
    assert set(scenario.policy.tiers.used) == {"memory", "peer", "local", "shared"}


@pytest.mark.slow
def test_the_policies_of_the_page_have_their_results():
    found = re.findall(
        r"^\| (the defaults|`--set .*?`) \| (\S+) % \| (\S+) % \|$", page(), re.MULTILINE
    )
    assert len(found) == 8
    for words, *results in found:
        overrides = [word for word in words.strip("`").split() if "=" in word]
        for gpus, shown in zip((16_384, 65_536), results, strict=True):
            made = load_scenario(None, [*overrides, f"run.gpus={gpus}", "run.repetitions=50"])
            result = assess(made)
            assert 100 * result.effective == pytest.approx(
                float(shown), abs=0.1 + 200 * result.effective_ci
            )


def check_row(committed: dict[str, Any], gpus: int) -> None:
    (row,) = [row for row in committed["rows"] if row["gpus"] == gpus]
    data = {**committed["scenario"], "run": {**committed["scenario"]["run"], "gpus": gpus}}
    found = asdict(assess(Scenario.model_validate(data)))
    # Another version of numpy may draw other numbers.
    bound = 2 * (found["effective_ci"] + row["effective_ci"])
    assert found["effective"] == pytest.approx(row["effective"], abs=bound)
    assert found["lost"] == pytest.approx(row["lost"], abs=bound)


def test_the_committed_results_are_those_of_the_code(committed):
    check_row(committed, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [4096, 16384, 65536, 100_000])
def test_all_committed_results_are_those_of_the_code(committed, gpus):
    check_row(committed, gpus)


def test_a_simulation_needs_no_torch():
    code = (
        "import sys, pretrain.plan as plan\n"
        "plan.assess(plan.Scenario.model_validate({'run': {'repetitions': 2, 'gpus': 80}}))\n"
        "assert not {'torch', 'matplotlib'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_a_confidence_interval_holds_the_mean_as_often_as_it_says():
    samples = np.random.default_rng(0).normal(3.0, 2.0, (2000, 40))
    mean, half = mean_and_half_width(samples)
    assert np.mean(np.abs(mean - 3.0) <= half) == pytest.approx(0.95, abs=0.02)
