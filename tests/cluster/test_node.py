"""What runs on nodes, as real processes: the node program with stand-ins for torchrun and Slurm."""

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

from cluster.launch import EngineJob, engine_named
from cluster.launch.node import main, make_mark, status_since, torchrun_words
from cluster.launch.slurm_job import _Start
from parallel.version import VERSION
from tests.cluster.test_launch import JOB, changed

pytestmark = pytest.mark.waits

TORCHRUN = """\
#!/bin/bash
# In the place of the interpreter: "torchrun" writes its words, and ends as a run's torchrun does.
case "$*" in
    *torch.distributed.run*) ;;
    *) exec "$REAL" "$@" ;;
esac
printf '%s\\n' "$@" > "$FOLDER/words"
env > "$FOLDER/environment"
[ -z "$SLEEP" ] || {
    trap 'echo TERM >> "$FOLDER/signals"; sleep 0.2; exit 1' TERM
    touch "$FOLDER/ready"
    while :; do sleep 0.05; done
}
[ -z "$WRITTEN" ] || echo "{\\"exit_code\\": $WRITTEN}" > "$FOLDER/run/status.json"
exit "${CODE:-0}"
"""


@pytest.fixture
def job(tmp_path) -> EngineJob:
    """A job in a folder with a stand-in for the interpreter, and a status of a former start."""
    write_program(tmp_path / "python", TORCHRUN)
    (tmp_path / "run").mkdir()
    status = tmp_path / "run" / "status.json"
    status.write_text('{"exit_code": 3}')
    os.utime(status, (1, 1))
    return changed(
        JOB, python=str(tmp_path / "python"), run_dir=str(tmp_path / "run"), setup=[],
        checkpoints=str(tmp_path / "run" / "checkpoints"), workdir=str(tmp_path), burn_in=None,
        image=None, version=VERSION,
    )  # fmt: skip


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def environment(job: EngineJob, **variables: Any) -> dict[str, str]:
    folder = str(Path(job.run_dir).parent)
    return os.environ | {
        "REAL": sys.executable, "FOLDER": folder, "HOSTNAME": "pod-0", "JOB_COMPLETION_INDEX": "0",
        "CONVOY_NODE_NAME": "n0", **{key: str(value) for key, value in variables.items()},
    }  # fmt: skip


def node(job: EngineJob, engine: str, *words: str, **variables: Any) -> subprocess.Popen[str]:
    """The node program as a process."""
    return subprocess.Popen(
        [sys.executable, "-m", "cluster.launch.node", engine, job.for_nodes(), *words],
        env=environment(job, **variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.02)


def test_the_node_program_needs_no_torch():
    source = (
        "import sys, cluster.launch.node, cluster.launch.slurm, cluster.launch.kubernetes\n"
        "import cluster.launch.ray, cluster.launch.torchrun\n"
        "assert not {'torch', 'ray', 'pretrain'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60)


def test_nodes_get_the_job_as_it_is_without_what_is_rendered():
    job = EngineJob.model_validate_json(JOB.for_nodes())
    assert job.launch == JOB.launch
    assert torchrun_words(job, "a:1", "b") == torchrun_words(JOB, "a:1", "b")
    assert (job.excluded, job.notes, job.config_text) == ((), (), "")


@pytest.mark.parametrize("engine", ["torchrun", "slurm", "ray", "kubernetes"])
def test_another_version_is_refused_in_one_line(engine, job, capsys):
    other = json.loads(job.for_nodes()) | {"version": "9.9", "a_field_of_9.9": 1}
    assert main([engine, json.dumps(other), "batch"]) == 2
    err = capsys.readouterr().err
    assert f"has version {VERSION} of convoy-moe, and the launch is of 9.9" in err
    assert err.count("\n") == 1


def test_a_job_is_text_or_a_file(job, tmp_path):
    """A program for Ray has line breaks around the text."""
    (tmp_path / "job.json").write_text(job.for_nodes())
    assert main(["ray", f"\n{job.for_nodes()}\n"]) == 0
    assert main(["ray", str(tmp_path / "job.json")]) == 0


def test_a_node_without_convoy_is_refused_by_the_script(job, tmp_path):
    write_program(tmp_path / "python", "#!/bin/bash\nexit 1\n")
    ended = subprocess.run(
        ["bash", "-c", engine_named("torchrun").render(job)], capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert f"has no convoy-moe {VERSION} for {tmp_path}/python" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_script_for_torchrun_becomes_torchrun_after_setup_and_burn_in(job, tmp_path):
    job = changed(
        job, setup=["export FROM_SETUP=yes"], burn_in='echo $FROM_SETUP > "$FOLDER/burned"',
        environment={"TEXT": "a 'b' $c"}, nodes="1:2", rendezvous={"endpoint": "n1:29400"},
    )  # fmt: skip
    script = engine_named("torchrun").render(job)
    ended = subprocess.run(["bash", "-c", script], env=environment(job, CODE=7), timeout=60)
    assert ended.returncode == 7
    words = (tmp_path / "words").read_text().splitlines()
    assert words == torchrun_words(job, "n1:29400", job.name)[1:]
    assert (tmp_path / "burned").read_text() == "yes\n"
    variables = (tmp_path / "environment").read_text().splitlines()
    assert {"TEXT=a 'b' $c", "FROM_SETUP=yes", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"} <= set(
        variables
    )


@pytest.mark.parametrize(
    ("code", "written", "expected"),
    [
        (0, "0", 0), (1, "75", 75), (1, "2", 2), (1, "3", 3), (0, "", 0),
        # Rank 0 may be on another node: these wait 5 s for what it writes.
        pytest.param(1, "", 1, marks=pytest.mark.slow),
        pytest.param(1, "null", 1, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_pod_ends_with_the_exit_code_of_the_run(code, written, expected, job, tmp_path):
    """By the script of its container, with the files of its ConfigMap."""
    from cluster.launch.kubernetes import _script

    (tmp_path / "job.json").write_text(job.for_nodes())
    script = _script(job).replace("/etc/convoy/job.json", str(tmp_path / "job.json"))
    ended = subprocess.run(
        ["bash", "-c", script], env=environment(job, CODE=code, WRITTEN=written),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == expected, ended.stderr
    words = (tmp_path / "words").read_text().splitlines()
    assert words[-1] == "/etc/convoy/spec.json"
    assert any(word.startswith("--rdzv-conf=is_host=1,") for word in words)
    assert "CONVOY_NODE_ORDER=0" in (tmp_path / "environment").read_text().splitlines()


def test_a_stop_of_a_pod_reaches_torchrun_once_and_the_pod_waits_for_it(job, tmp_path):
    process = node(job, "kubernetes", SLEEP=1)
    wait_for(tmp_path / "ready")
    (tmp_path / "run" / "status.json").write_text('{"exit_code": 75}')
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 75
    assert (tmp_path / "signals").read_text() == "TERM\n"


def test_a_stop_of_a_node_of_slurm_is_left_to_slurm(job, tmp_path):
    """Slurm signals every process of a step, and torchrun must not be told twice."""
    mark = tmp_path / "mark"
    mark.touch()
    process = node(
        job, "slurm", "node", "n0:1", "17-0", str(mark), SLEEP=1, SLURM_NODEID=1,
        SLURMD_NODENAME="n1", SLURM_JOB_ID=17,
    )  # fmt: skip
    wait_for(tmp_path / "ready")
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    assert not (tmp_path / "signals").exists()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGTERM)
    code, _, _ = ended(process)
    assert code == 1
    assert (tmp_path / "signals").read_text() == "TERM\n"


def test_a_pod_on_an_excluded_node_waits_for_the_end_of_the_run(job, tmp_path):
    """A pod that failed there would come back there, until the job has failed too often."""
    excluded = {"excluded": [{"node": "bad-1", "reason": "slow", "time": ""}]}
    (tmp_path / "run" / "exclude.json").write_text(json.dumps(excluded))
    process = node(job, "kubernetes", CONVOY_NODE_NAME="bad-1")
    assert process.stdout is not None
    assert "bad-1 is on the exclude list" in process.stdout.readline()
    (tmp_path / "run" / "status.json").write_text('{"exit_code": 0}')
    assert ended(process)[0] == 0
    assert not (tmp_path / "words").exists()


def test_a_broken_exclude_list_is_bad_input(job, tmp_path):
    (tmp_path / "run" / "exclude.json").write_text("{}")
    code, _, err = ended(node(job, "kubernetes"))
    assert code == 2
    assert "must be an exclude list" in err
    assert err.count("\n") == 1


def write_status(job, code: int) -> Path:
    """As the run does: another file takes the place of the one that was there."""
    status = Path(job.run_dir) / "status.json"
    status.with_suffix(".new").write_text(json.dumps({"exit_code": code}))
    status.with_suffix(".new").replace(status)
    return status


def test_a_status_counts_from_the_mark_on(job):
    mark = make_mark(job, "first")
    assert status_since(job, mark) is None, "there is none"
    write_status(job, 0)
    assert status_since(job, mark) == {"exit_code": 0}
    mark = make_mark(job, "second")
    assert status_since(job, mark) is None, "of a former start"
    write_status(job, 75).unlink()
    assert status_since(job, mark) is None


@pytest.mark.parametrize("hours", [-5, 0, 5])
def test_a_status_counts_where_the_clock_was_set_meanwhile(job, hours):
    write_status(job, 0)
    mark = make_mark(job, "mark")
    status = write_status(job, 75)
    os.utime(status, (mark.stat().st_mtime + 3600 * hours,) * 2)
    assert status_since(job, mark) == {"exit_code": 75}


# ------------------------------------------------------------------------------------------------
# Slurm.

PROGRAM = """\
#!/bin/bash
# In the place of Slurm's programs: each call is a line of FOLDER/calls.
echo "$(basename "$0") $*" | head -n 1 >> "$FOLDER/calls"
case "$(basename "$0") $*" in
    "scontrol show"*) printf '%s\\n' n0 n1 n2 ;;
    "scontrol write"*) echo "#!/bin/bash" > "${!#}" ;;
    scontrol*) exit 1 ;;  # so that nothing waits for the end of a job that was put back
    squeue*) echo 2030-01-01T00:00:00 ;;
    srun*) eval "$SRUN" ;;
    sbatch*) env > "$FOLDER/environment" ;;
esac
"""


def batch(job: EngineJob, folder: Path, srun: str = "", **variables: Any) -> tuple[int, str, str]:
    """The batch script of a job on n0, n1 and n2; returns exit code, output and errors."""
    for name in ("scontrol", "squeue", "srun", "sbatch"):
        write_program(folder / "bin" / name, PROGRAM)
    variables = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": 17,
        "SLURM_JOB_NODELIST": "n[0-2]", "SLURM_JOB_NUM_NODES": 3, "SLURMD_NODENAME": "n0",
        "SRUN": srun, **variables,
    }  # fmt: skip
    return ended(node(job, "slurm", "batch", **variables))


def calls(folder: Path, program: str) -> list[str]:
    lines = (folder / "calls").read_text().splitlines()
    return [line for line in lines if line.startswith(program)]


COMMIT = 'mkdir -p "$FOLDER/run/checkpoints/manifests"; touch "$_/step-00000003.json"; '
STATUS = 'echo "{\\"exit_code\\": %s}" > "$FOLDER/run/status.json"; '


@pytest.mark.parametrize(
    ("srun", "code", "again"),
    [
        ("exit 0", 0, None),
        (STATUS % 0 + "exit 1", 0, None),  # a node was lost, and the run is done
        (STATUS % 2 + "exit 1", 2, None),
        (STATUS % 3 + "exit 1", 3, None),
        ("exit 2", 2, None),  # a node was refused before there was a run
        (STATUS % 75 + "exit 1", 1, "the run was stopped and has committed a checkpoint"),
        (COMMIT + "exit 1", 1, "a rank or node was lost after step-00000003.json"),
        (STATUS % "null" + COMMIT + "exit 2", 1, "a rank or node was lost after step-"),
        ("exit 1", 1, None),  # no checkpoint: it would not begin the next time either
    ],
)
def test_how_a_start_ends_decides_about_the_next_one(srun, code, again, job, tmp_path):
    found, out, err = batch(job, tmp_path, srun)
    assert found == code, err
    requeued = calls(tmp_path, "scontrol requeue 17")
    assert bool(requeued) == (again is not None)
    if again:
        assert f"job 17 starts again: {again}" in out
    elif code == 1:
        assert "the start has committed no checkpoint" in err


def test_a_job_with_checkpoints_in_a_store_starts_again_three_times(job, tmp_path):
    job = changed(job, checkpoints="s3://bucket/run")
    assert "starts again: a rank or node was lost" in batch(job, tmp_path, "exit 1")[1]
    last = batch(job, tmp_path, "exit 1", SLURM_RESTART_COUNT=3)
    assert "starts again" not in last[1]
    assert not Path("s3:").exists()


def test_a_step_has_the_nodes_that_are_not_excluded(job, tmp_path):
    """After the burn-in of all nodes, which may exclude some."""
    bad = json.dumps({"excluded": [{"node": "n1", "reason": "slow"}]})
    job = changed(job, burn_in=f"echo '{bad}' > {tmp_path}/run/exclude.json")
    srun = """case "$*" in --ntasks=3*) bash -c "${!#}" ;; esac"""
    code, out, err = batch(job, tmp_path, srun)
    assert code == 0, err
    assert "n1 is on the exclude list" in out
    first, second = calls(tmp_path, "srun")
    assert first.startswith("srun --ntasks=3 --ntasks-per-node=1 --cpus-per-task=8 ")
    assert second.startswith(
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --exclude=n1 --cpus-per-task=8 "
        "--kill-on-bad-exit=0 --no-kill bash -c export CONVOY_NODE_NAME=$SLURMD_NODENAME "
    )


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [(["n1", "n2"], "fewer than 2 nodes are left"), (["n0"], "the batch script is on n0")],
)
def test_another_job_takes_the_place_of_one_with_too_few_nodes(nodes, reason, job, tmp_path):
    listed = {"excluded": [{"node": name, "reason": "slow"} for name in nodes]}
    (tmp_path / "run" / "exclude.json").write_text(json.dumps(listed))
    code, out, err = batch(job, tmp_path)
    assert code == 0, err
    assert f"job 17 starts again: {reason}; without {','.join(nodes)}" in out
    assert not calls(tmp_path, "srun")
    (line,) = calls(tmp_path, "sbatch")
    script = tmp_path / "run" / "launch" / "start-17-0.sbatch"
    assert line == f"sbatch --exclude={','.join(nodes)} {script}"
    assert script.exists()
    variables = (tmp_path / "environment").read_text().splitlines()
    assert f"CONVOY_EXCLUDED={','.join(nodes)}" in variables
    assert not [name for name in variables if name.startswith("SLURM_")]
    # Such a job has been asked for without these nodes already: it waits for others.
    batch(job, tmp_path, CONVOY_EXCLUDED=",".join(nodes))
    assert calls(tmp_path, "scontrol requeue 17")


def test_nodes_are_told_when_the_job_ends(job, tmp_path):
    batch(job, tmp_path, 'echo "$SLURM_JOB_END_TIME" > "$FOLDER/end"; exit 0', TZ="UTC")
    assert (tmp_path / "end").read_text() == "1893456000\n"
    batch(job, tmp_path, 'echo "$SLURM_JOB_END_TIME" > "$FOLDER/end"; exit 0', SLURM_JOB_END_TIME=5)
    assert (tmp_path / "end").read_text() == "5\n"


def test_a_folder_that_cannot_be_made_ends_the_job(job, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = batch(changed(job, run_dir=str(tmp_path / "file" / "run")), tmp_path)
    assert code == 2
    assert "cannot be written: Not a directory" in err


NODE = {"SLURM_NODEID": 0, "SLURMD_NODENAME": "n0", "SLURM_JOB_ID": 17}


def test_a_node_that_does_not_share_the_folder_is_refused(job, tmp_path):
    code, _, err = ended(node(job, "slurm", "node", "n0:1", "17-0", "/no/mark", **NODE))
    assert code == 2
    assert "/no/mark is not seen here: all nodes must share run_dir" in err


@pytest.mark.parametrize("listens", [True, False])
def test_a_node_starts_the_job_again_where_the_batch_script_is_lost(listens, job, tmp_path):
    import socket

    write_program(tmp_path / "bin" / "scontrol", PROGRAM)
    (tmp_path / "mark").touch()
    with socket.socket() as srun:
        srun.bind(("127.0.0.1", 0))
        if listens:
            srun.listen()
        process = node(
            job, "slurm", "node", "n0:1", "17-0", str(tmp_path / "mark"), CODE=4, **NODE,
            PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", SLURM_SRUN_COMM_HOST="127.0.0.1",
            SLURM_SRUN_COMM_PORT=srun.getsockname()[1],
        )  # fmt: skip
        code, out, _ = ended(process)
    assert code == 4
    assert ("the node of the batch script is lost" in out) == (not listens)
    assert (tmp_path / "calls").exists() == (not listens)
    assert "--rdzv-id=17-0" in (tmp_path / "words").read_text()


def test_the_rendered_batch_script_becomes_the_program(job, tmp_path):
    """With its setup; in front of an image, with the interpreter of convoy launch and no setup."""
    for name in ("scontrol", "squeue", "srun", "sbatch"):
        write_program(tmp_path / "bin" / name, PROGRAM)
    variables = environment(
        job, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", SLURM_JOB_ID=17, SRUN="exit 3",
        SLURM_JOB_NODELIST="n[0-2]", SLURM_JOB_NUM_NODES=3, SLURMD_NODENAME="n0",
    )  # fmt: skip
    job = changed(job, setup=['echo "$CONVOY_NODE_NAME" > "$FOLDER/setup"'])
    for image in (None, "convoy:0.1.0"):
        (tmp_path / "setup").unlink(missing_ok=True)
        script = engine_named("slurm").render(changed(job, image=image))
        assert subprocess.run(["bash", "-c", script], env=variables, timeout=60).returncode == 3
        assert (tmp_path / "setup").exists() == (image is None)
        assert (f"exec {sys.executable}" in script) == (image is not None)


def test_a_start_is_measured_by_the_newest_checkpoint(job, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    manifests = tmp_path / "run" / "checkpoints" / "manifests"
    manifests.mkdir(parents=True)
    for name in ("step-00000009.json", "step-00000010.json", "other.json"):
        (manifests / name).touch()
    start = _Start.begin(job)
    assert start.newest == "step-00000010.json"
    assert start.mark == tmp_path / "run" / "launch" / "start-17-2"
