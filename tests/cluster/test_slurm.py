"""Runs on a real Slurm of this machine: submitted, killed, put back into the queue, finished.

The nodes are daemons of one host. A node is lost by SIGKILL to its daemon and all it has started.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from convoy.commands.command_line import main
from tests.support.jobs import data_of, events, prepare_job, write_spec
from tests.support.slurm import MISSING, Slurm, slurm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]
BATCH = 4
RENDEZVOUS = {
    "last_call_timeout": "3", "keep_alive_interval": "1", "keep_alive_max_attempt": "3",
}  # fmt: skip


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("job"))


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    folder = tmp_path / "s"
    folder.mkdir()
    with slurm(folder, nodes=3) as found:
        monkeypatch.setenv("SLURM_CONF", str(found.conf))
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        yield found


def make_spec(folder: Path, job: Path, nodes: int | str, *, steps: int = 30, **sections) -> Path:
    launch = {
        "nodes": nodes, "rendezvous": RENDEZVOUS, "walltime_minutes": 10.0,
        "cpus_per_rank": 2,  # a job has its nodes for itself
    } | sections.pop("launch", {})  # fmt: skip
    return write_spec(
        folder,
        data=sections.pop("data", data_of(job)),
        model={"d_model": 48, "first_k_dense": 2},
        moe={"num_experts": 12, "top_k": 2, "d_ff": 48},
        parallel={"ep": 2 if str(nodes) == "2" else 1},
        batch={"global_batch_size": BATCH, "micro_batch_size": 1},
        train={"steps": steps, "timeout_seconds": 30.0, "log_interval_steps": 10}
        | sections.pop("train", {}),
        checkpoint={"interval_steps": 3},
        elastic={"enabled": ":" in str(nodes)} | sections.pop("elastic", {}),
        launch=launch,
        **sections,
    )


def submit(capsys: Any, spec: Path) -> str:
    """Submit as a person does; returns the number of the job."""
    words = ["launch", str(spec), "--on", "slurm", "--submit", "--shared-folders"]
    assert main(arguments=words) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("submitted job ")]
    return line.removeprefix("submitted job ")


def logged(run: Path, kind: str) -> list[dict[str, Any]]:
    return events(run, kind) if (run / "log.jsonl").exists() else []


def wait_for_step(cluster: Slurm, run: Path, step: int, starts: int = 1) -> None:
    """Wait until the run has begun ``starts`` times, and has taken ``step`` since."""

    def reached() -> bool:
        began = logged(run, "start")
        if len(began) < starts:
            return False
        since = [e for e in logged(run, "step") if e["time"] > began[starts - 1]["time"]]
        return bool(since) and since[-1]["step"] >= step

    cluster.wait(reached)


def assert_whole_run(run: Path, steps: int) -> None:
    """Every step took the samples that are its own, however often it was taken."""
    taken = logged(run, "step")
    assert sorted({e["step"] for e in taken}) == list(range(1, steps + 1))
    assert all(e["consumed_samples"] == e["step"] * BATCH for e in taken)
    assert json.loads((run / "status.json").read_text())["exit_code"] == 0


def sizes(run: Path) -> list[int]:
    return [e["world_size"] for e in logged(run, "start")]


def test_a_job_goes_on_without_a_lost_node(cluster, tmp_path, job, capsys):
    run = tmp_path / "run"
    number = submit(capsys, make_spec(tmp_path, job, "2:3"))
    wait_for_step(cluster, run, 5)
    assert sizes(run) == [3]
    batch = cluster.job(number)["BatchHost"]
    cluster.lose(next(name for name in reversed(cluster.nodes) if name != batch))
    found = cluster.wait_for_state(number, "COMPLETED", "FAILED", "NODE_FAIL")
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "0"), cluster.report()
    assert sizes(run)[-1] == 2
    assert_whole_run(run, 30)


def test_a_job_of_fixed_nodes_gets_another_node_for_a_lost_one(cluster, tmp_path, job, capsys):
    run = tmp_path / "run"
    number = submit(capsys, make_spec(tmp_path, job, 2))
    wait_for_step(cluster, run, 5)
    batch, former = cluster.job(number)["BatchHost"], cluster.job(number)["NodeList"]
    lost = next(name for name in cluster.nodes if name != batch and name[1] in former)
    cluster.lose(lost)
    wait_for_step(cluster, run, 6, starts=2)
    found = cluster.wait_for_state(number, "COMPLETED", "FAILED", "NODE_FAIL")
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "1"), cluster.report()
    assert found["NodeList"] != former
    assert sizes(run) == [2, 2]
    assert_whole_run(run, 30)


def test_a_job_starts_again_where_the_node_of_its_batch_script_is_lost(
    cluster, tmp_path, job, capsys
):
    run = tmp_path / "run"
    number = submit(capsys, make_spec(tmp_path, job, "2:3"))
    wait_for_step(cluster, run, 5)
    cluster.lose(cluster.job(number)["BatchHost"])
    found = cluster.wait_for_state(number, "COMPLETED", "FAILED", "NODE_FAIL")
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "1"), cluster.report()
    assert sizes(run)[0] == 3
    assert sizes(run)[-1] == 2
    assert_whole_run(run, 30)


def test_75_starts_the_job_again_on_the_nodes_that_there_are_then(cluster, tmp_path, job, capsys):
    run, notice = tmp_path / "run", tmp_path / "notice"
    cluster.run("scontrol", "update", "NodeName=n1,n2", "State=DRAIN", "Reason=test")
    number = submit(
        capsys,
        make_spec(
            tmp_path, job, "1:3", launch={"environment": {"CONVOY_NOTICE_FILE": str(notice)}}
        ),
    )
    wait_for_step(cluster, run, 4)
    cluster.run("scontrol", "update", "NodeName=n1,n2", "State=RESUME")
    notice.touch()
    cluster.wait(lambda: logged(run, "stopped"))
    found = cluster.wait_for_state(number, "COMPLETED", "FAILED")
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "1"), cluster.report()
    assert sizes(run) == [1, 3]
    assert_whole_run(run, 30)


def test_nodes_are_told_when_the_job_ends(cluster, tmp_path, job, capsys):
    """Slurm 22.05 does not set the variable for which runs look; the batch script does."""
    told = tmp_path / "end.txt"
    burn_in = f"echo $SLURM_JOB_END_TIME > {told}; sleep 60"
    number = submit(capsys, make_spec(tmp_path, job, 1, launch={"burn_in": burn_in}))
    cluster.wait(lambda: told.exists() and told.read_text())
    end = datetime.fromisoformat(cluster.job(number)["EndTime"]).timestamp()
    assert float(told.read_text()) == end
    cluster.run("scancel", number)


def test_2_ends_the_job(cluster, tmp_path, job, capsys):
    corpus = {"source": str(tmp_path / "none"), "path": str(tmp_path / "no-corpus")}
    spec = make_spec(tmp_path, job, 2, data=corpus)
    number = submit(capsys, spec)
    found = cluster.wait_for_state(number, "COMPLETED", "FAILED")
    expected = ("FAILED", "2:0", "0")
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == expected, cluster.report()
    cluster.wait(lambda: not cluster.queue())


def test_a_node_that_fails_the_burn_in_is_replaced(cluster, tmp_path, job, capsys):
    run = tmp_path / "run"
    bad = json.dumps({"excluded": [{"node": "n1", "reason": "slow memory"}]})
    burn_in = f"[ $SLURMD_NODENAME != n1 ] || echo '{bad}' > {run}/exclude.json"
    number = submit(capsys, make_spec(tmp_path, job, 2, steps=6, launch={"burn_in": burn_in}))
    cluster.wait_for_state(number, "COMPLETED")
    # Another job has taken its place.
    cluster.wait(lambda: logged(run, "done") or not cluster.queue())
    cluster.wait(lambda: not cluster.queue())
    assert "without n1" in (run / "launch" / f"slurm-{number}.txt").read_text()
    found = cluster.job(str(int(number) + 1))
    assert found["ExcNodeList"] == "n1"
    assert found["JobState"] == "COMPLETED", cluster.report()
    assert sizes(run) == [2]
    assert_whole_run(run, 6)


REFUSED = [
    ({"queue": "none"}, "launch.queue (none): Slurm has no such partition"),
    ({"queue": "short", "walltime_minutes": 5.0}, "Slurm refuses the job: Requested time limit is "
     "invalid (missing or exceeds some limit)"),
    ({"ranks_per_node": 4}, "launch.ranks_per_node (4) x launch.cpus_per_rank (2) must not be "
     "above the 2 CPUs of a node"),
    ({"gpus_per_node": 8}, "launch.gpus_per_node (8) must not be above the 0 GPUs of a node"),
    ({"image": "convoy:0.1.0"}, "launch.image (convoy:0.1.0) needs pyxis, which this Slurm lacks"),
    ({"options": ["--no-such-option"]}, "Slurm refuses the job: "),
    ({"nodes": 4}, "Slurm refuses the job: "),
]  # fmt: skip


def test_what_slurm_refuses_is_told_in_one_line(cluster, tmp_path, job, capsys):
    for launch, message in REFUSED:
        spec = make_spec(tmp_path, job, launch.get("nodes", 1), launch=launch)
        words = ["launch", str(spec), "--on", "slurm", "--submit", "--shared-folders"]
        assert main(arguments=words) == 2, launch
        err = capsys.readouterr().err
        print(err)
        assert err.startswith(f"error: {message}")
        assert err.count("\n") == 1
        assert cluster.queue() == []
