"""The divergence playbook in whole runs on real ranks; causes are injected."""

from __future__ import annotations

import json
import pickle
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckpt
from pretrain.checkpoint.rolling_back import complete_roll_back, roll_back, with_memory_of_roll_back
from pretrain.spec import JobSpec, learning_rate, load_spec
from pretrain.state import read_run_state
from tests.runs.test_runs import fingerprints, launch, losses, on_rank
from tests.support.checkpoints import eventually, manifest_file
from tests.support.jobs import data_of, events, prepare_job, write_spec
from tests.support.ranks import start_ranks

SLOW = pytest.mark.slow
RULES = ("loss_spike", "grad_norm_spike", "slow_divergence", "router_collapse")
OFF: dict[str, Any] = {rule: {"actions": []} for rule in RULES}
SPIKES = [{"kind": "scale_gradient", "rank": 1, "step": step} for step in (5, 8)]
KILL = {"kind": "kill", "rank": 1}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("job"))


def launch_killed(spec: Path, *overrides: str) -> None:
    """Two ranks; rank 1 is killed by a fault of the spec."""
    arguments = [str(spec), *(part for o in overrides for part in ("--set", o))]
    processes, results = start_ranks(on_rank, 2, arguments, None, group=False)
    _, ok, value = results.get(timeout=120)
    assert ok, value
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL]
    assert pickle.loads(value)[0] == 1


def toml(*faults: dict[str, Any]) -> str:
    rows = [", ".join(f"{k} = {json.dumps(v)}" for k, v in fault.items()) for fault in faults]
    return "[" + ", ".join(f"{{{row}}}" for row in rows) + "]"


def run_overrides(run: Path, *faults: dict[str, Any]) -> list[str]:
    memory = f"{{memory = true, memory_path = '{run}-memory'}}"
    return [f"run_dir={run}", f"inject={toml(*faults)}", f"checkpoint.tiers={memory}"]


@pytest.fixture(scope="module")
def gone_back(text, tmp_path_factory) -> tuple[Path, Path, str]:
    """The spec, the folder and the output of a run that skips step 5's samples, and goes back from
    step 8 to step 3."""
    folder = tmp_path_factory.mktemp("gone-back")
    actions = ["skip", "go_back+lower_lr", "stop"]
    spec = write_spec(
        folder, data=data_of(text), train={"steps": 10},
        parallel={"ep": 2}, moe={"expert_bias": True, "input_jitter": 0.01},
        health={
            **OFF, "go_back_checkpoints": 2, "skip_steps": 1, "window_steps": 4,
            "grad_norm_spike": {"actions": actions},
            "router_collapse": {"patience_steps": 3, "min_entropy_ratio": 0.999},
        },
    )  # fmt: skip
    code, out, err = launch(spec, 2, *run_overrides(folder / "straight", *SPIKES))
    assert code == 0, err
    return spec, folder / "straight", out


def test_a_run_skips_samples_and_goes_back_by_itself(gone_back):
    spec, run, out = gone_back
    assert "step 8: going back to step 3; samples 64 to 71 are left out; the learning rate" in out
    check_history(run, load_spec(spec))
    assert [event["step"] for event in events(run, "restored")] == [3]
    assert events(run, "checkpoint_failed") == [], "step 6 is saved twice, under two names"
    fingerprints(run)
    state = ckpt.read_manifest(run / "checkpoints").state
    assert state["health"]["skipped_samples"] == [[32, 40], [64, 72]]
    assert state["health"]["go_backs"] == 1
    assert state["consumed_samples"] == 8 * 10 + 16


@SLOW
def test_such_a_run_that_is_killed_is_bitwise_the_undisturbed_one(gone_back, tmp_path):
    spec, straight, _ = gone_back
    # Killed before step 7: the history of step 6 is in a checkpoint. Killed in step 5 after going
    # back to step 3: no checkpoint knows yet that the run has gone back.
    killed = tmp_path / "killed"
    root = killed / "checkpoints"
    launch_killed(spec, *run_overrides(killed, *SPIKES, KILL | {"step": 7}))
    eventually(lambda: ckpt.committed_steps(root) == [3, 6], "step 6 is committed")
    launch_killed(spec, *run_overrides(killed, *SPIKES, KILL | {"step": 5}))
    assert ckpt.committed_steps(root) == [3]
    code, _, err = launch(spec, 2, *run_overrides(killed, *SPIKES))
    assert code == 0, err
    assert [event["step"] for event in events(killed, "restored")] == [6, 3, 3]

    assert losses(straight) == losses(killed)
    assert fingerprints(straight) == fingerprints(killed)
    check_history(killed, load_spec(spec))
    a, b = (ckpt.read_manifest(run / "checkpoints").state for run in (straight, killed))
    assert a["health"] == b["health"]
    assert a["consumed_samples"] == b["consumed_samples"]


def check_history(run: Path, spec: JobSpec) -> None:
    """What the events of such a run say."""
    skipped = [(e["step"], e["reason"], e.get("skipped_samples")) for e in events(run, "skip")]
    assert skipped == [(5, "grad_norm_spike", [32, 40]), (8, "grad_norm_spike", None)]
    actions = [event for event in events(run, "health_action") if event["action"] != "report"]
    first, second = actions
    assert (first["step"], first["action"], first["occurrence"]) == (4, "skip", 1)
    assert (second["step"], second["action"], second["occurrence"]) == (7, "go_back+lower_lr", 2)
    assert (second["to_step"], second["skipped_samples"]) == (3, [64, 72])
    assert (second["lr_factor"], second["lr_until_step"]) == (0.5, 507)
    signals = events(run, "health_signal")
    collapses = [signal_ for signal_ in signals if signal_["rule"] == "router_collapse"]
    assert collapses
    assert all(0.5 < signal_["observed"] < 0.999 for signal_ in collapses)
    spikes = [signal_ for signal_ in signals if signal_["rule"] == "grad_norm_spike"]
    assert len(spikes) == 2
    for signal_ in spikes:
        assert signal_["observed"] > signal_["limit"] > signal_["usual"] > 0
    names = [json.loads(line)["event"] for line in (run / "log.jsonl").read_text().splitlines()]
    after = names[names.index("fault") :]
    assert after[:4] == ["fault", "health_signal", "skip", "health_action"]

    steps = {event["step"]: event for event in events(run, "step")}  # the last time of each
    cursors = [steps[step]["consumed_samples"] for step in range(3, 11)]
    assert cursors == [24, 32, 48, 56, 64, 80, 88, 96]
    for step, event in steps.items():
        factor = 0.5 if step >= 4 else 1.0
        assert event["lr"] == factor * learning_rate(spec, step - 1), step
    assert len(list((run / "checkpoints/away").glob("*/step-00000006.json"))) == 1


@SLOW
@pytest.mark.parametrize("world", [1, 2])
def test_rules_that_see_nothing_or_only_report_change_no_bit(text, tmp_path, world):
    parts = {"parallel": {"ep": world}, "moe": {"expert_bias": True}}
    spec = write_spec(tmp_path, data=data_of(text), health=OFF, **parts)
    watched = write_spec(
        tmp_path, "watched.json", data=data_of(text), **parts, run_dir=str(tmp_path / "watched"),
        health={
            "window_steps": 4,
            "router_collapse": {"patience_steps": 2, "min_entropy_ratio": 0.999},
        },
        inject=[{"kind": "nan_gradient", "step": 3, "rank": world - 1}],
    )  # fmt: skip
    assert launch(spec, world)[0] == 0
    code, out, err = launch(watched, world)
    assert code == 0, err
    off, on = tmp_path / "run", tmp_path / "watched"
    assert losses(off) == losses(on)
    assert fingerprints(off) == fingerprints(on)
    assert [(e["step"], e["reason"]) for e in events(on, "skip")] == [(3, "not_finite")]
    assert f"step 3: injected fault: nan_gradient on rank {world - 1}" in out
    assert events(off, "health_signal") == []
    signals = events(on, "health_signal")
    assert {event["rule"] for event in signals} == {"router_collapse"}
    assert [e["action"] for e in events(on, "health_action")] == ["report"] * len(signals)


def test_a_loss_spike_stops_a_run_with_a_report_of_committed_checkpoints(text, tmp_path):
    spec = write_spec(
        tmp_path, data=data_of(text), train={"steps": 40}, optimizer={"lr": 0.02},
        health={**OFF, "window_steps": 8, "loss_spike": {"actions": ["stop"]}},
        checkpoint={"interval_steps": 20},
        inject=[{"kind": "garbage_tokens", "step": 38, "rank": 0}],
    )  # fmt: skip
    code, out, err = launch(spec, 1)
    assert code == 3, out
    run = tmp_path / "run"
    assert err.count("\n") == 1
    assert "step 38 diverges: loss " in err
    assert f"the newest committed checkpoint is step 20 in {run / 'checkpoints'}" in err
    (signal_,), (action,) = events(run, "health_signal"), events(run, "health_action")
    assert (signal_["rule"], action["action"]) == ("loss_spike", "stop")
    report = json.loads((run / "health.json").read_text())
    assert report["step"] == 38
    assert report["committed_steps"] == [20]
    assert report["signals"][0]["observed"] == signal_["observed"]
    assert report["memory"]["losses"] == [e["loss"] for e in events(run, "step")][-8:]


@SLOW
def test_without_a_checkpoint_there_is_no_way_back(text, tmp_path):
    spec = write_spec(
        tmp_path, data=data_of(text), train={"steps": 50},
        health={"not_finite": {"actions": ["go_back", "stop"]}},
        optimizer={"lr": 1e30, "clip_norm": 0.0},
    )  # fmt: skip
    code, _, err = launch(spec, 1)
    assert code == 3
    assert err.count("\n") == 1
    assert "there is no checkpoint to go back to; no checkpoint is committed in" in err


def test_an_interrupted_roll_back_is_completed(gone_back, tmp_path):
    root = tmp_path / "checkpoints"
    shutil.copytree(gone_back[1] / "checkpoints", root)
    *_, step, newest = ckpt.committed_steps(root)
    progress = read_run_state(ckpt.read_manifest(root, step)).progress
    health = replace(progress.health, go_backs=7)

    def die(line: str) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        roll_back(root, step, die, health)
    assert (root / "rolling-back.json").exists()
    # As if the end had come before the manifest was moved.
    (moved,) = (root / "away").glob(f"*/step-{newest:08d}.json")
    moved.rename(manifest_file(root, newest))
    (root / "run.json").unlink()
    complete_roll_back(root, lambda line: None)
    assert ckpt.committed_steps(root)[-1] == step
    assert moved.exists()
    assert not (root / "rolling-back.json").exists()
    assert with_memory_of_roll_back(root, progress).health == health
    other = replace(progress, step=step + 1)
    assert with_memory_of_roll_back(root, other) == other, "of another checkpoint"
    complete_roll_back(root, lambda line: None)  # there is nothing left to do
    assert json.loads((root / "run.json").read_text())["rolled_back_to"] == step
