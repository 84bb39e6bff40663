"""Checkpoints in nodes' memory and on their disks: what a restart takes, and from where."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest

import ckpt
from convoy.commands.prepare import main as prepare
from convoy.commands.pretrain import main
from convoy.preparation import prepare as prepare_run
from parallel import local_shard
from pretrain.checkpoint.failures import DEVICE_HOURS_PER_FAILURE, optimal_interval
from pretrain.checkpoint.interval import SaveClock
from pretrain.observe.jsonl import History
from pretrain.runtime.signals import StopRequest
from pretrain.spec import load_spec
from pretrain.spec.checkpoint import CheckpointConfig
from pretrain.train.trainer import Trainer
from tests.support.checkpoints import objects_folder
from tests.support.commands import pretrain
from tests.support.jobs import data_of, events, prepare_job, write_spec
from tests.support.ranks import run_ranks, start_ranks
from tests.support.s3 import BUCKET, Server, use

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("job"))


def on_node(rank: int, spec: str, kill_at: int, poke_at: int, block: str) -> tuple[int, str, str]:
    """The command on a rank that is a node of its own; before step ``kill_at`` it dies."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    step = Trainer.step

    def step_or_die(self, stop_requested):
        if self.progress.step == kill_at - 1:
            self.checkpointer.writer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.progress.step == poke_at - 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        if self.progress.step == 1 and rank == 0 and block:
            Path(block).write_text("in the way of the first manifest")
        return step(self, stop_requested)

    Trainer.step = step_or_die
    return pretrain([spec])


def run_to_the_end(
    spec: Path, poke_at: int = 0, block: str = "", world: int = 2
) -> tuple[int, str, str]:
    results = run_ranks(on_node, world, str(spec), 0, poke_at, block, group=False)
    return results[0][0], results[0][1], "".join(err for _, _, err in results)


def run_until(spec: Path, step: int, world: int = 2) -> None:
    processes, _ = start_ranks(on_node, world, str(spec), step, 0, "", group=False)
    for process in processes:
        process.join(120)
        assert process.exitcode == -signal.SIGKILL


def losses(run: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(run, "step")}


@pytest.fixture
def spec(text, tmp_path) -> Path:
    checkpoint = {
        "interval_steps": 1,
        "tiers": {
            "memory": True,
            "memory_path": str(tmp_path / "memory"),
            "local_path": str(tmp_path / "disks"),
            "shared_interval": 3,
        },
    }
    parallel = {"ep": 2}
    return write_spec(tmp_path, data=data_of(text), checkpoint=checkpoint, parallel=parallel)


def node(folder: Path, index: int) -> Path:
    (found,) = folder.glob(f"*-node{index}")
    return found


def test_a_restart_takes_the_newest_that_every_rank_can_reach(spec, tmp_path):
    memory, disks, shared = tmp_path / "memory", tmp_path / "disks", tmp_path / "run/checkpoints"
    run_until(spec, 6)  # five steps done
    assert ckpt.committed_steps(shared) == [3]
    assert ckpt.committed_steps(node(memory, 0)) == [5]
    assert ckpt.committed_steps(node(disks, 1)) == [4, 5]
    before = losses(tmp_path / "run")

    # One node's memory is lost, and an object on its disk is damaged: step 4 is next.
    shutil.rmtree(node(memory, 1))
    manifest = ckpt.read_manifest(node(disks, 1), 5)
    objects = objects_folder(node(disks, 1), manifest.save_id)
    victim = max(objects.rglob("c.*"), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 3] ^= 8
    victim.write_bytes(bytes(data))
    code, out, err = run_to_the_end(spec)
    assert code == 0, err
    assert f"rank 1: not from tier local: object {victim} is damaged" in err
    assert "restored step 4 from tier local" in out
    assert "resuming after step 4" in out
    after = losses(tmp_path / "run")
    assert {step: after[step] for step in before} == before, "step 5 again is step 5"
    assert sorted(after) == [1, 2, 3, 4, 5, 6]
    assert ckpt.committed_steps(shared)[-1] == 6
    assert not list(memory.iterdir()), "memory is given back"
    assert ckpt.committed_steps(node(disks, 0)) == [5, 6]


def diverge_on_node(rank: int, spec: str, after: int) -> tuple[int, str]:
    """The command on a rank that is a node; after ``after`` steps its weights are NaN."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    step = Trainer.step

    def step_of_nan(self, stop_requested):
        if self.progress.step == after:
            local_shard(self.job.model.head.weight).detach().fill_(math.nan)
        return step(self, stop_requested)

    Trainer.step = step_of_nan
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        code = main([spec])
    return code, err.getvalue()


def test_a_diverged_run_names_a_committed_checkpoint_and_a_roll_back_passes_over_nodes(
    spec, tmp_path
):
    shared = tmp_path / "run/checkpoints"
    results = run_ranks(diverge_on_node, 2, str(spec), 5, group=False)
    assert [code for code, _ in results] == [3, 3]
    err = "".join(text for _, text in results)
    # Nodes have steps 4 and 5; step 6 is the next that the shared folder would have had.
    assert ckpt.committed_steps(shared) == [3]
    assert ckpt.committed_steps(node(tmp_path / "disks", 0)) == [4, 5]
    assert f"the newest committed checkpoint is step 3 in {shared}" in err
    assert "`convoy prepare SPEC --load-step STEP`" in err

    prepare_run(load_spec(spec), load_step=3)
    code, out, err = run_to_the_end(spec)
    assert code == 0, err
    assert "resuming after step 3" in out, "what nodes have of the time after is not taken"
    (restored,) = events(tmp_path / "run", "restored")
    assert (restored["step"], restored["tier"]) == (3, "shared")


def test_a_lost_node_is_restored_from_its_neighbour(text, tmp_path):
    checkpoint = {
        "interval_steps": 1,
        "tiers": {
            "memory": True,
            "memory_path": str(tmp_path / "memory"),
            "replicate_to_peer": True,
            "shared_interval": 100,
        },
    }
    spec = write_spec(tmp_path, data=data_of(text), checkpoint=checkpoint, parallel={"ep": 2})
    memory = tmp_path / "memory"
    run_until(spec, 5)
    before = losses(tmp_path / "run")
    assert ckpt.committed_steps(tmp_path / "run/checkpoints") == []
    (peers,) = memory.glob("*-node0-peers")
    assert ckpt.committed_steps(peers / "node1") == [3, 4]
    # A machine is gone, with its own part and with what it kept for the other.
    for lost in memory.glob("*-node1*"):
        shutil.rmtree(lost)
    code, out, err = run_to_the_end(spec)
    assert code == 0, err
    assert "restored step 4 from tier memory" in out
    after = losses(tmp_path / "run")
    assert {step: after[step] for step in before} == before
    # What nodes alone had is made safe by the first save, whatever shared_interval says.
    assert ckpt.committed_steps(tmp_path / "run/checkpoints") == [5, 6]
    assert not list(memory.iterdir()), "memory is given back"


@SLOW
def test_without_its_nodes_a_restart_takes_what_all_share(spec, tmp_path):
    run_until(spec, 6)
    shutil.rmtree(node(tmp_path / "memory", 1))
    shutil.rmtree(node(tmp_path / "disks", 1))
    code, out, err = run_to_the_end(spec)
    assert code == 0, err
    assert "resuming after step 3" in out
    # What nodes had of later steps was of a past that is no more.
    assert ckpt.committed_steps(node(tmp_path / "disks", 0)) == [5, 6]
    saves = {m.save_id for s in (5, 6) if (m := ckpt.read_manifest(node(tmp_path / "disks", 0), s))}
    assert len({save.rpartition("-")[2] for save in saves}) == 1, "both are of the second start"


def on_a_full_disk(rank: int, spec: str) -> tuple[int, str]:
    """The command on a rank whose writer process can write files of 100 bytes only."""
    prepare = ckpt.AsyncCheckpointer.prepare

    def prepare_and_fill(self, *arguments):
        count = prepare(self, *arguments)
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (100, 100))
        return count

    ckpt.AsyncCheckpointer.prepare = prepare_and_fill
    code, _, err = pretrain([spec])
    return code, err


def test_a_full_disk_is_told_once_for_each_save(text, tmp_path):
    spec = write_spec(tmp_path, data=data_of(text))
    results = run_ranks(on_a_full_disk, 2, str(spec), group=False)
    assert [code for code, _ in results] == [2, 2]
    lines = [line for _, err in results for line in err.splitlines()]
    assert len(lines) == 2, lines
    assert "rank 0: checkpoint of step 3 is not in tier shared: File too large" in lines[0]
    assert "checkpoint of step 6 in" in lines[1]
    assert "is not saved: File too large" in lines[1]
    failed = events(tmp_path / "run", "checkpoint_failed")
    assert [(event["step"], event["told"]) for event in failed] == [(3, False), (6, True)]


@SLOW
def test_a_shared_folder_that_fails_is_told_and_training_goes_on(spec, tmp_path):
    code, _, err = run_to_the_end(spec, block=str(tmp_path / "run/checkpoints/manifests"))
    assert code == 2
    assert "checkpoint of step 3 is not in tier shared" in err
    assert "checkpoint of step 6 in" in err
    assert "is not saved" in err
    assert len(losses(tmp_path / "run")) == 6
    assert ckpt.committed_steps(node(tmp_path / "disks", 0)) == [5, 6]


@pytest.mark.parametrize(
    "way", ["back", *(pytest.param(way, marks=SLOW) for way in ("fresh", "folder removed"))]
)
def test_nodes_go_back_with_what_all_share(text, tmp_path, way):
    checkpoint = {
        "interval_steps": 1,
        "retention": {"keep": 9},
        "tiers": {
            "shared_interval": 2,
            "memory": True,
            "memory_path": str(tmp_path / "memory"),
        },
    }
    spec = write_spec(tmp_path, data=data_of(text), checkpoint=checkpoint)
    run_until(spec, 6, world=1)
    shared = tmp_path / "run" / "checkpoints"
    assert ckpt.committed_steps(shared) == [2, 4]
    assert ckpt.committed_steps(node(tmp_path / "memory", 0)) == [5]
    if way == "back":
        other = write_spec(
            tmp_path, "other.json", data=data_of(text), checkpoint=checkpoint, train={"seed": 9}
        )
        code, _, err = run_to_the_end(other, world=1)
        assert code == 2, err
        assert "train.seed (9) must be as in" in err
        assert ckpt.committed_steps(node(tmp_path / "memory", 0)) == [5], "a start that was refused"
        assert prepare([str(spec), "--load-step", "3"]) == 2
        assert prepare([str(spec), "--load-step", "2"]) == 0
        assert len(list((shared / "away").rglob("step-00000004.json"))) == 1
    elif way == "fresh":
        assert prepare([str(spec), "--reset"]) == 0
    else:
        shutil.rmtree(tmp_path / "run")
    code, out, err = run_to_the_end(spec, world=1)
    assert code == 0, err
    assert "restored" not in out
    assert ("resuming after step 2" in out) == (way == "back")
    assert "steps [5] in" in out, "what is removed is told"
    assert ckpt.committed_steps(shared) == [2, 4, 6]


def test_signals_are_noted_from_the_first_moment_on():
    before = signal.getsignal(signal.SIGUSR1)
    stop = StopRequest()
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (stop.save_requested, stop.requested) == (True, False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    finally:
        stop.restore()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_auto_saves_and_says_why_and_a_signal_asks_for_a_save_now(text, tmp_path):
    spec = write_spec(tmp_path, data=data_of(text), checkpoint={"interval_steps": "auto"})
    code, _, err = run_to_the_end(spec, poke_at=4)
    assert code == 0, err
    # The best interval is over a minute: step 4 is the signal's.
    assert ckpt.committed_steps(tmp_path / "run" / "checkpoints") == [4, 6]
    event = events(tmp_path / "run", "save_interval")[0]  # before a save has been measured
    assert event["failures"] == 0
    hours = DEVICE_HOURS_PER_FAILURE / 2
    assert event["seconds_between_failures"] == pytest.approx(hours * 3600, rel=0.01)
    assert event["seconds"] > 60


def lost_share(interval: float, cost: float, mean: float) -> float:
    """Of the time, by Daly's exact model without restarts: equation 20's overhead."""
    from math import exp

    return mean * (exp((interval + cost) / mean) - 1) / interval


@pytest.mark.parametrize("mean", [50.0, 1e3, 1e5])
@pytest.mark.parametrize("cost", [0.01, 1.0, 20.0])
def test_the_interval_loses_the_least(cost, mean):
    best = optimal_interval(cost, mean)
    least = min(lost_share(best * f / 100, cost, mean) for f in range(10, 1000))
    assert lost_share(best, cost, mean) <= 1.001 * least
    assert optimal_interval(3 * mean, mean) == mean


def test_the_clock_learns_from_failures_and_stalls():
    clock_time = [0.0]
    config = CheckpointConfig(interval_steps="auto")

    def clock(**values: float) -> SaveClock:
        return SaveClock(config, 1024, History(**values), lambda: clock_time[0])

    calm, stormy = clock(), clock(failures=9, seconds=3600.0)
    assert calm.seconds_between_failures == DEVICE_HOURS_PER_FAILURE * 3600 / 1024
    assert stormy.interval_seconds < calm.interval_seconds / 3
    first = calm.interval_seconds
    calm.saved(stall_seconds=100.0)
    assert calm.interval_seconds > 5 * first
    calm.saved(stall_seconds=0.01)
    assert not calm.is_time()
    clock_time[0] = 2 * calm.interval_seconds
    assert calm.is_time()
    calm.wrote("shared", 1e9)
    calm.wrote("memory", 0.1)
    assert not calm.is_time(), "one that is still being written would be waited for"


def test_minutes_and_steps():
    clock_time = [0.0]
    clock = SaveClock(CheckpointConfig(interval_minutes=2.0), 8, History(), lambda: clock_time[0])
    assert not clock.due(100, asked=False)
    clock_time[0] = 119.0
    assert not clock.is_time()
    clock_time[0] = 121.0
    assert clock.is_time()
    assert clock.due(7, asked=True)
    clock.saved(0.0)
    assert not clock.is_time()
    steps = SaveClock(CheckpointConfig(), 8, History())
    assert [s for s in range(1, 301) if steps.due(s, asked=False)] == [100, 200, 300]
    assert not steps.is_time()


def test_a_log_tells_failures_from_ends(tmp_path):
    log = tmp_path / "log.jsonl"
    start = {"event": "start", "time": 1.0, "step": 0, "world_size": 1, "topology": {},
             "parameters": 1, "launch_id": "a"}  # fmt: skip
    step = {"event": "step", "time": 2.0, "step": 1, "loss": None, "grad_norm": 1.0, "lr": 0.1,
            "tokens_seen": 8, "consumed_samples": 1, "seconds": 2.5, "slowest_rank_seconds": 2.0,
            "tokens_per_second": 3.2, "mfu": 0.1}  # fmt: skip
    stopped = {"event": "stopped", "time": 3.0, "step": 1}
    lines = [json.dumps(line) for line in (start, step)] + ["{torn"]
    lines += [json.dumps(line) for line in (start, stopped, start)] + ["[1]"]
    lines += [json.dumps(step | {"seconds": 1.5})]
    log.write_text("\n".join(lines))
    assert History.read(log) == History(failures=2, seconds=4.0)
    assert History.read(tmp_path / "none") == History()


@SLOW
def test_the_regular_and_the_best_stay(text, tmp_path):
    checkpoint = {"interval_steps": 1, "retention": {"keep": 1, "keep_every": 3, "keep_best": 1}}
    evaluation = {"interval_steps": 2}
    spec = write_spec(tmp_path, data=data_of(text), checkpoint=checkpoint, eval=evaluation)
    code, _, err = run_to_the_end(spec)
    assert code == 0, err
    root = tmp_path / "run" / "checkpoints"
    scores = {e["step"]: e["loss"] for e in events(tmp_path / "run", "eval") if not e["whole"]}
    assert sorted(scores) == [2, 4, 6], "the last step is evaluated before its save"
    best = min(scores, key=lambda step: scores[step])
    assert ckpt.committed_steps(root) == sorted({3, 6, best})
    found = {step: ckpt.read_manifest(root, step).state["validation"] for step in (3, best, 6)}
    assert found == {3: None, best: scores[best], 6: scores[6]}


def on_store(rank: int, spec: str, port: int) -> tuple[int, str]:
    """The command on a rank, with an S3 server."""
    out = io.StringIO()
    with use(port), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main([spec])
        except SystemExit as end:
            code = end.code
    return code, out.getvalue()


@SLOW
def test_a_run_saves_to_an_object_store_and_resumes_from_it(text, tmp_path):
    root = f"s3://{BUCKET}/run/checkpoints"
    server = Server()
    try:
        for steps, kept in ((6, [3, 6]), (8, [6, 8])):
            spec = write_spec(
                tmp_path, data=data_of(text), checkpoint={"interval_steps": 3, "path": root},
                train={"steps": steps}, parallel={"ep": 2},
            )  # fmt: skip
            results = run_ranks(on_store, 2, str(spec), server.port, group=False)
            assert [code for code, _ in results] == [0, 0], results
            assert ("resuming after step 6" in results[0][1]) == (steps == 8)
            with use(server.port):
                assert ckpt.committed_steps(root) == kept
                ckpt.verify(root, ckpt.read_manifest(root))
                assert ckpt.find_garbage(root) == []
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"interval_steps": 5, "interval_minutes": 1.0}, "interval_minutes .* must be left out"),
        ({"interval_steps": 0}, r"interval_steps \(0\) must be at least 1, or auto"),
        ({"tiers": {"shared_interval": 2}}, r"shared_interval \(2\) must be 1 without"),
    ],
)
def test_what_contradicts_itself_is_refused(fields, error):
    with pytest.raises(ValueError, match=error):
        CheckpointConfig(**fields)
