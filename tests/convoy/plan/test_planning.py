"""The searches over the simulation, published runs, and the committed results and their page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convoy.plan import Scenario, assess, load_scenario, simulate_runs, sizes_table
from convoy.plan.assessment import best_interval, best_spares, mean_and_half_width
from convoy.plan.causes import LLAMA3, LLAMA3_DAYS, LLAMA3_GPUS, LLAMA3_PLANNED
from convoy.plan.scenario import ASSUMED_SECONDS_PER_GIB, MEASURED_SECONDS_PER_GIB
from pretrain.checkpoint import DEVICE_HOURS_PER_FAILURE, optimal_interval
from tests.convoy.plan.test_simulate import DAY, FREE, HOUR, NOTHING_TAKES_TIME, ONLY_SHARED, make

ROOT = Path(__file__).parents[3]


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
        "import sys, convoy.plan as plan\n"
        "plan.assess(plan.Scenario.model_validate({'run': {'repetitions': 2, 'gpus': 80}}))\n"
        "assert not {'torch', 'matplotlib'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_a_confidence_interval_holds_the_mean_as_often_as_it_says():
    samples = np.random.default_rng(0).normal(3.0, 2.0, (2000, 40))
    mean, half = mean_and_half_width(samples)
    assert np.mean(np.abs(mean - 3.0) <= half) == pytest.approx(0.95, abs=0.02)
