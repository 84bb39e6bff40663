"""Warm restarts: forked processes that fail, and the parents that start them again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.utils.distributed import get_free_port

from bench.recovery import first_step_after
from tests.support.agents import agents
from tests.support.jobs import data_of, events, prepare_job, write_spec
from tests.support.processes import (
    descendants,
    is_running,
    kill_with_descendants,
    rank_process,
)

pytestmark = pytest.mark.waits

ROOT = Path(__file__).resolve().parents[3]

# What the children of a rank do, in turn, is argv[2:].
RANK = """
import os, signal, sys, time
from datetime import timedelta
from pathlib import Path
from pretrain.elastic.warm import WarmRank
from pretrain.runtime import torchrun_process

folder, rank, deeds = Path(sys.argv[1]), os.environ["RANK"], sys.argv[2:]
join = timedelta(minutes=10)
code = WarmRank(torchrun_process(), folder / "exclude.json", join=join).run()
if code is not None:
    raise SystemExit(code)
import torch
import torch.distributed as dist
with (folder / f"children-{rank}").open("a") as file:
    file.write(f"{os.getpid()} {os.getppid()} {torchrun_process()}\\n")
dist.init_process_group("gloo")
start = len((folder / f"children-{rank}").read_text().splitlines()) - 1
deed = deeds[start]
if deed == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if deed == "wait":
    Path(folder, f"waits-{rank}").touch()
    time.sleep(600)
total = torch.tensor(1)
dist.all_reduce(total)
(folder / f"total-{rank}").write_text(str(int(total)))
if deed == "late":
    first = (folder / "children-0").read_text().split()[0]
    while os.path.exists(f"/proc/{first}"):
        time.sleep(0.02)
    time.sleep(0.5)  # the parent of rank 0 has seen its child's end
    dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    deed = 0
dist.destroy_process_group()
raise SystemExit(int(deed))
"""


def serve() -> Any:
    """A store such as torchrun serves to its ranks."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        # A torchrun counts its own failures: of the last rank's machine, which has just come, none.
        "TORCHELASTIC_RESTART_COUNT": str(world - 1 - rank),
    }


_started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    while _started:
        process = _started.pop()
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def start(folder: Path, rank: int, world: int, port: int, *deeds: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, str(folder), *deeds],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment(rank, world, port),
    )  # fmt: skip
    _started.append(process)
    return process


def children(folder: Path, rank: int) -> list[list[int]]:
    """Process id, parent and torchrun of each child."""
    lines = (folder / f"children-{rank}").read_text().splitlines()
    return [list(map(int, line.split())) for line in lines]


def test_all_ranks_start_again_when_one_dies(tmp_path):
    store = serve()
    ranks = [
        start(tmp_path, 0, 2, store.port, "wait", "0"),
        start(tmp_path, 1, 2, store.port, "die", "0"),
    ]
    said = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "rank 1 ended by signal 9; all ranks start again (1 of at most 2)" in said[0]
    for number, rank in enumerate(ranks):
        found = children(tmp_path, number)
        assert len(found) == len({pid for pid, _, _ in found}) == 2
        assert all(parent == rank.pid for _, parent, _ in found), "the parents stay"
        assert all(torchrun == os.getpid() for _, _, torchrun in found)
        assert (tmp_path / f"total-{number}").read_text() == "2"
        assert not [pid for pid, _, _ in found if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("kept", [True, False], ids=["of-torchrun", "of-rank-0"])
def test_a_rank_that_ends_first_leaves_the_store_to_the_others(tmp_path, monkeypatch, kept):
    """The store is torchrun's, which an earlier round has used, or one that rank 0 serves."""
    store = serve() if kept else None
    port = store.port if store is not None else get_free_port()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(kept))
    if store is not None:  # what a round leaves whose rank 1 was lost while it joined
        for key in ("warm/call/0", "warm/call/1"):
            store.set(key, "of-an-earlier-round")
    ranks = [
        start(tmp_path, 0, 2, port, "0", "0"),
        start(tmp_path, 1, 2, port, "late", "0"),
    ]
    said = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert [len(children(tmp_path, number)) for number in (0, 1)] == [1, 1]


# One process is the parent of each case in turn. A child writes its number, and does its deed.
CASES = """
import json, os, signal, sys, time
from datetime import timedelta
from pathlib import Path
from cluster.members import exclude
from pretrain.elastic.warm import WarmRank

codes = {}
for name, (deeds, port) in json.loads(sys.argv[2]).items():
    folder = Path(sys.argv[1], name)
    folder.mkdir()
    os.environ["MASTER_PORT"] = str(port)
    join = timedelta(minutes=10)
    codes[name] = WarmRank(os.getppid(), folder / "exclude.json", join=join).run()
    if codes[name] is not None:
        continue
    deed = deeds[len(list(folder.glob("child-*")))]
    (folder / f"child-{os.getpid()}").touch()
    if deed == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "asked":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)
    if deed == "exclude":
        exclude(folder / "exclude.json", "some-machine", "for a test")
        os._exit(1)
    os._exit(deed)
print(json.dumps(codes))
"""


def test_what_ends_a_rank_for_good(tmp_path):
    """Exit codes for a person, failures beyond --max-restarts, a stop, and the exclude list."""
    expected = {
        "bad-input": ([2], 2),
        "diverged": ([3], 3),
        "stopped": ([75], 75),
        "mends": (["die", 1, 0], 0),
        "fails": ([1, 1, 1], 1),
        "dies": (["die", "die", "die"], 137),
        "asked": (["asked"], 75),
        "excluded": (["exclude"], 1),
    }
    stores = {name: serve() for name in expected}
    cases = json.dumps({n: (deeds, stores[n].port) for n, (deeds, _) in expected.items()})
    done = subprocess.run(
        [sys.executable, "-c", CASES, str(tmp_path), cases],
        capture_output=True, text=True, env=environment(0, 1, 0), cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        n: code for n, (_, code) in expected.items()
    }
    starts = {name: len(list((tmp_path / name).glob("child-*"))) for name in expected}
    assert starts == {name: len(deeds) for name, (deeds, _) in expected.items()}


@pytest.mark.slow
def test_children_end_with_their_parent(tmp_path):
    store = serve()
    rank = start(tmp_path, 0, 1, store.port, "wait")
    while not (tmp_path / "waits-0").exists():
        assert rank.poll() is None
        time.sleep(0.02)
    below = descendants(rank.pid)
    assert len(below) >= 2  # the child and the servers of the stores
    rank.kill()
    rank.communicate()
    until = time.monotonic() + 60
    while any(is_running(pid) for pid in below) and time.monotonic() < until:
        time.sleep(0.02)
    assert not [pid for pid in below if is_running(pid)]


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("job"))


def _spec(folder: Path, job: Path, *, warm: bool, steps: int = 40) -> Path:
    return write_spec(
        folder,
        data=data_of(job),
        parallel={"dp_shard": 2, "ep": 2},
        train={"steps": steps, "timeout_seconds": 30.0, "log_interval_steps": 1},
        checkpoint={"interval_steps": 4},
        elastic={"enabled": True, "recovery": "warm" if warm else "restart"},
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_whose_ranks_are_killed_has_the_numbers_of_one_that_is_left_in_peace(tmp_path, job):
    found = {}
    for name, kills in (("peace", ()), ("killed", (1, 0, 1))):
        folder = tmp_path / name
        folder.mkdir()
        spec, run = _spec(folder, job, warm=bool(kills)), folder / "run"
        with (folder / "run.txt").open("wb") as log:
            torchrun = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", "--standalone",
                 "--nproc-per-node=2", "--max-restarts=5", "--monitor-interval=0.1",
                 str(ROOT / "tools/pretrain.py"), str(spec)],
                stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1",
                     "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            )  # fmt: skip
        try:
            moment, least = 0.0, 6
            for rank in kills:
                step = first_step_after(torchrun, run, moment, least)
                moment, least = time.time(), step["step"] + 6
                os.kill(rank_process(torchrun.pid, rank), signal.SIGKILL)
            assert torchrun.wait(300) == 0, (folder / "run.txt").read_text()
        finally:
            kill_with_descendants(torchrun.pid)
            torchrun.wait()
        log = (folder / "run.txt").read_text()
        assert log.count("all ranks start again") == len(kills)
        assert "Sending process" not in log, "torchrun has restarted nothing"
        found[name] = {e["step"]: e["loss"] for e in events(run, "step")}
        assert len(events(run, "start")) == len(kills) + 1
    assert found["killed"] == found["peace"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_where_a_machine_is_lost_torchrun_starts_the_others_again(tmp_path, job):
    spec, run = _spec(tmp_path, job, warm=True, steps=60), tmp_path / "run"
    with agents(spec, run, least=1, most=2) as launch:
        launch.start()
        launch.start()
        launch.wait_for_step(6, starts=1)
        launch.lose(1)
        assert launch.wait_for_end() == [0], launch.output()
    sizes = [e["world_size"] for e in launch.events("start")]
    assert sizes == [2, 1], json.dumps(sizes)
    steps = [e["step"] for e in launch.events("step")]
    assert sorted(set(steps)) == list(range(1, 61))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_machines_that_join_after_losses_train(tmp_path, job):
    """A machine is lost, one joins; one is lost while it joins, another joins; and once more.

    The torchrun of machine 0 has counted failures by then, and that of a machine that joins none.
    """
    spec, run = _spec(tmp_path, job, warm=True, steps=100_000), tmp_path / "run"
    with agents(spec, run, least=1, most=2) as launch:
        launch.start()
        launch.start()
        launch.wait_for_step(6, starts=1)
        for number in (1, 3):
            launch.lose(number)
            launch.wait(lambda: launch.events("start")[-1]["world_size"] == 1)
            joins = launch.start()
            launch.wait(lambda joins=joins: launch.ranks(joins))
            launch.lose(joins)  # its rank has been started, and imports
            launch.start()
            launch.wait(lambda: launch.events("start")[-1]["world_size"] == 2)
            starts = len(launch.events("start"))
            step = launch.events("step")[-1]["step"]
            launch.wait_for_step(step + 2, starts=starts)
        steps = {event["step"] for event in launch.events("step")}
    assert steps == set(range(1, max(steps) + 1))
