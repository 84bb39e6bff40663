"""``convoy simulate``: its tables and files, and one line for what cannot be simulated."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from convoy.commands.command_line import main
from convoy.plan import Scenario, load_scenario

QUICK = ["--set", "run.repetitions=4", "--set", "run.days=4"]


def shown(capsys: pytest.CaptureFixture, *words: str) -> str:
    assert main("simulate", [*words]) == 0, capsys.readouterr().err
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_one_size_is_shown_by_cause(capsys):
    out = shown(capsys, *QUICK, "--gpus", "8192", "--set", "run.days=54")
    assert out.startswith("8,192 GPUs in 1,024 nodes for 54 days, 4 repetitions\n")
    for word in ("effective training time", "best interval", "best spares", "Daly's formula"):
        assert word in out
    assert "\n| cause | lost | detection | restart | rework | waiting |\n" in out
    assert "| faulty GPU |" in out
    assert "further causes |" in out
    fixed = ["--set", "policy.spares=3", "--set", "policy.interval_seconds=600"]
    out = shown(capsys, *QUICK, *fixed)
    assert "  interval                 10 min; Daly's" in out
    assert "  spares                   3; " in out


def test_several_sizes_are_one_table_and_one_file(capsys, tmp_path):
    file = tmp_path / "found.json"
    out = shown(capsys, *QUICK, "--gpus", "1000,4_096", "--json", str(file))
    assert [line.split("|")[1].strip() for line in out.splitlines()[2:]] == ["1,000", "4,096"]
    found = json.loads(file.read_text())
    assert set(found) == {"bench", "date", "versions", "scenario", "rows"}
    assert [row["gpus"] for row in found["rows"]] == [1000, 4096]
    assert set(found["versions"]) == {"python", "numpy", "convoy-moe"}
    for row in found["rows"]:
        assert row["effective"] + sum(row["lost"].values()) == pytest.approx(1)
        assert sum(lost["all"] for lost in row["lost_by_cause"].values()) == pytest.approx(
            sum(row["lost"][part] for part in ("detection", "restart", "rework", "waiting"))
        )
        assert row["interval"]["low"] <= row["interval_seconds"] <= row["interval"]["high"]
    # Equal seeds give equal results.
    again = tmp_path / "again.json"
    assert shown(capsys, *QUICK, "--gpus", "1000,4096", "--json", str(again)) == out
    assert json.loads(again.read_text())["rows"] == found["rows"]


def test_a_scenario_is_printed_read_and_overridden(capsys, tmp_path):
    printed = shown(capsys, "--print-scenario", "--set", "policy.restart=partial")
    file = tmp_path / "scenario.json"
    file.write_text(printed)
    assert load_scenario(file) == load_scenario(None, ["policy.restart=partial"])
    assert load_scenario(None) == Scenario()
    toml = tmp_path / "scenario.toml"
    toml.write_text(
        "[failures]\ntable = 'none'\n[failures.causes.fan]\nper_node_hour = 0.001\n"
        "nature = 'replace'\ndetection = 'hang'\n[policy.tiers.local]\nevery = 2\n"
    )
    scenario = load_scenario(toml, ["run.gpus=80"])
    assert scenario.seconds_between_failures == pytest.approx(3600 * 100)
    assert set(scenario.policy.tiers.used) == {"memory", "peer", "local", "shared"}
    assert "| fan |" in shown(capsys, str(toml), *QUICK, "--gpus", "8000")


WRONG = [
    ("--gpus 1001", "run.gpus (1001) must be a multiple of run.gpus_per_node (8), 1000 for exa"),
    ("--gpus ten", "--gpus (ten) must be numbers with commas between: 4096,16384"),
    ("--gpus 8,", "--gpus (8,) must be numbers"),
    ("--gpus 0", "run.gpus (0): Input should be greater than or equal to 1"),
    ("--set policy.interval_seconds=0", "policy.interval_seconds (0.0) must be above 0, or best"),
    ("--set policy.interval_seconds=soon", "policy.interval_seconds ('soon'): Input should be 'b"),
    ("--set policy.spares=-1", "policy.spares (-1) must be at least 0, or best"),
    ("--set policy.spares=1.5", "policy.spares (1.5): Input should be 'best' or a valid in"),
    ("--set policy.stall_seconds=0", "must be above 0 with policy.interval_seconds = best"),
    ("--set policy.repair_hours=-1", "policy.repair_hours (-1): Input should be greater"),
    ("--set policy.repair=1", "policy.repair: no such field; did you mean policy.repair_hours?"),
    ("--set policy.tiers.shared.enabled=false", "policy.tiers.shared (disabled) must be enabled"),
    ("--set policy.tiers.disk.every=1", "policy.tiers.disk: no such field; there are memory"),
    ("--set policy.when_short=elastic --set policy.nodes_per_replica=3 --gpus 80",
     "run.gpus (80), 10 nodes, must be whole replicas of policy.nodes_per_replica (3)"),
    ("--set failures.causes.fan.nature=restart", "failures.causes.fan.detection: required"),
    ("--set failures.table=alpaca", "failures.table ('alpaca'): Input should be 'llama3' or 'no"),
    ("--set run.seed=x", "run.seed ('x'): Input should be a valid integer"),
    ("--set failures.scale=900", "run.repetitions (200) must be at most 26, or run.days (54)"),
    ("--set run", "--set (run) must be SECTION.FIELD=VALUE"),
    ("no/such.toml", "scenario no/such.toml cannot be read: No such file"),
    ("scenario.yaml", "scenario scenario.yaml: a scenario is TOML or JSON"),
    ("--json no/such/file.json", "--json (no/such/file.json): its folder does not exist"),
    ("--plot found.gif", "--plot (found.gif) must be a file named *.svg, *.png or *.pdf"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_what_cannot_be_simulated_ends_with_2_and_one_line(words, message, capsys):
    assert main("simulate", words.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert out == ""


def test_a_cause_has_one_rate(capsys):
    words = ["--set", "failures.causes.fan.nature=restart", "--set",
             "failures.causes.fan.detection=crash"]  # fmt: skip
    assert main("simulate", words) == 2
    assert "failures.causes.fan: a cause has one rate" in capsys.readouterr().err


def test_a_plot_is_drawn_where_matplotlib_is_installed(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "one.svg", tmp_path / "two.svg"
    for file in (first, second):
        shown(capsys, *QUICK, "--gpus", "4096,8192", "--plot", str(file))
    text = first.read_text()
    for word in ("4,096 GPUs", "rework", "minutes between saves"):
        assert word in text
    assert second.read_text() == text
    fixed = ["--set", "policy.interval_seconds=600", "--plot", str(tmp_path / "bars.png")]
    shown(capsys, *QUICK, *fixed)
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_the_simulation(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("convoy.plan.assess", None)
    assert main("simulate", ["--plot", str(tmp_path / "found.svg")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "needs matplotlib: pip install -e '.[plot]'" in err
    assert not list(Path(tmp_path).iterdir())
