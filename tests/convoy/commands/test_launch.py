"""``convoy launch``: what it prints, and what it refuses before anything is submitted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.launch import EngineJob
from cluster.launch.slurm_job import step_flags
from convoy.commands.command_line import main
from tests.support.jobs import tiny

CONVOY = "0.1.0"


def write(folder: Path, **sections) -> str:
    sections.setdefault("parallel", {})
    path = folder / "spec.json"
    path.write_text(json.dumps(tiny(folder, **sections)))
    return str(path)


def launch(capsys, *words: str) -> tuple[int, str, str]:
    code = main(arguments=["launch", *words])
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys, *words: str) -> str:
    code, _, err = launch(capsys, *words)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("engine", ["torchrun", "slurm", "ray", "kubernetes"])
def test_a_job_is_printed_and_nothing_is_touched(engine, tmp_path, capsys):
    spec = write(tmp_path, launch={"nodes": 2, "image": f"convoy:{CONVOY}"})
    before = sorted(tmp_path.rglob("*"))
    code, out, err = launch(capsys, spec, "--on", engine)
    assert (code, err) == (0, "")
    assert "tiny: 2 nodes, 2 ranks: dp_shard=2" in out
    assert "run/log.jsonl" in out
    assert sorted(tmp_path.rglob("*")) == before
    assert launch(capsys, spec, "--on", engine, "--output", str(tmp_path / "job")) == (0, "", "")
    assert (tmp_path / "job").read_text() == out


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"launch": {"nodes": "4:2"}}, "launch.nodes (4:2): MIN (4) must not be above MAX (2)"),
        ({"launch": {"nodes": "many"}}, "launch.nodes (many) must be a number, or MIN:MAX"),
        ({"launch": {"nodes": "1:2"}}, "launch.nodes (1:2) needs elastic.enabled = true"),
        ({"launch": {"ranks_per_node": 8, "gpus_per_node": 4}},
         "launch.ranks_per_node (8) must not be above launch.gpus_per_node (4)"),
        ({"launch": {"walltime_minutes": 2.5}},
         "launch.walltime_minutes (2.5) must be at least 3.0: a start takes 120 s"),
        ({"launch": {"image": "registry/convoy:latest"}},
         f"launch.image (registry/convoy:latest) must have the version of Convoy, {CONVOY}, in its "
         f"tag: registry/convoy:{CONVOY}"),
        ({"launch": {"image": f"registry/convoy-{CONVOY}:latest"}}, "in its tag: registry/convoy-"),
        ({"launch": {"image": f"convoy:1{CONVOY}"}}, f"in its tag: convoy:{CONVOY}"),
        ({"launch": {"nodes": 2, "ranks_per_node": 3}, "parallel": {"tp": 2}}, "layouts that work"),
        ({"launch": {"nodes": 4, "ranks_per_node": 1}, "parallel": {"tp": 2}},
         "parallel.tp (2) must divide the ranks of a node (1), or parallel.tp_across_"),
        ({"launch": {"nodes": 3}, "parallel": {"dp_shard": 2}}, "parallel"),
    ],
)  # fmt: skip
def test_a_spec_that_no_engine_can_start_is_refused(sections, message, tmp_path, capsys):
    assert message in refused(capsys, write(tmp_path, **sections), "--on", "slurm")


def test_a_measured_start_and_save_count_for_the_walltime(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    start = {
        "event": "start", "time": 1.0, "log_version": 1, "world_size": 1, "topology": {},
        "parameters": 1, "launch_id": "a", "start_seconds": {"imports": 100.0, "load": 200.0},
        "step": 0,
    }  # fmt: skip
    save = {
        "event": "checkpoint", "time": 2.0, "step": 3, "tier": "shared", "seconds": 240.0,
        "write_seconds": 1.0,
    }  # fmt: skip
    (tmp_path / "run" / "log.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps(save)}\n")
    spec = write(tmp_path, launch={"walltime_minutes": 8.0})
    assert "must be at least 9.0: a start takes 300 s" in refused(capsys, spec, "--on", "slurm")


@pytest.mark.parametrize(
    ("engine", "program"),
    [("slurm", "program sbatch"), ("kubernetes", "program kubectl"), ("ray", "package ray")],
)
def test_an_engine_that_is_not_installed_is_named(engine, program, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", None)
    sections = {"image": f"convoy:{CONVOY}"} if engine == "kubernetes" else {}
    checkpoint = {"path": "s3://bucket/run"} if engine == "kubernetes" else {}
    spec = write(tmp_path, launch=sections, checkpoint=checkpoint)
    message = refused(capsys, spec, "--on", engine, "--submit")
    assert f"--on {engine} needs the {program}" in message
    assert "not installed" in message
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_folder_of_one_machine_is_refused_for_several(tmp_path, capsys, monkeypatch):
    spec = write(tmp_path, launch={"nodes": 2})
    monkeypatch.setattr("convoy.commands.launch.local_file_system", lambda path: "ext4")
    message = refused(capsys, spec, "--on", "slurm", "--submit")
    assert f"run_dir ({tmp_path}/run) is on ext4, a file system of this machine alone" in message
    monkeypatch.setattr(
        "convoy.commands.launch.local_file_system",
        lambda path: "tmpfs" if "checkpoints" in str(path) else None,
    )
    message = refused(capsys, spec, "--on", "slurm", "--submit")
    assert f"checkpoint.path ({tmp_path}/run/checkpoints) is on tmpfs" in message


def test_pods_need_a_shared_place_for_checkpoints(tmp_path, capsys):
    image = {"image": f"convoy:{CONVOY}"}
    spec = write(tmp_path, launch=image)
    message = refused(capsys, spec, "--on", "kubernetes", "--submit")
    assert "is a folder of a pod, which is lost with the pod" in message
    spec = write(tmp_path, launch={**image, "kubernetes": {"volume_claim": "data"}})
    message = refused(capsys, spec, "--on", "kubernetes", "--submit")
    assert "must be below launch.workdir (/data)" in message


def test_torchrun_on_several_machines_needs_an_endpoint(tmp_path, capsys):
    spec = write(tmp_path, launch={"nodes": 2})
    words = [spec, "--on", "torchrun", "--submit", "--shared-folders"]
    message = refused(capsys, *words)
    assert "launch.rendezvous.endpoint (none) must be HOST:PORT" in message


def test_more_ranks_than_this_machine_has_are_refused(tmp_path, capsys):
    cores = os.cpu_count() or 1
    spec = write(tmp_path, launch={"cpus_per_rank": cores + 1})
    message = refused(capsys, spec, "--on", "torchrun", "--submit")
    assert f"must not be above the {cores} CPUs of this machine" in message


def test_the_engine_gives_the_run_its_walltime(tmp_path, capsys):
    walltime = {"walltime_minutes": 30.0}
    spec = write(tmp_path, launch=walltime)
    for engine in ("torchrun", "ray"):
        assert "time_limit_seconds" in launch(capsys, spec, "--on", engine)[1]
    # Slurm's job has an end, of which the job script tells the run.
    assert "time_limit_seconds" not in launch(capsys, spec, "--on", "slurm")[1]
    spec = write(tmp_path, launch=walltime, train={"time_limit_seconds": 60.0})
    assert "1800" not in launch(capsys, spec, "--on", "torchrun")[1]


def test_nodes_of_the_exclude_list_are_not_asked_for(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    listed = {"excluded": [{"node": "bad-1", "reason": "slow"}]}
    (tmp_path / "run" / "exclude.json").write_text(json.dumps(listed))
    spec = write(tmp_path, launch={"nodes": 2})
    assert "#SBATCH --exclude=bad-1\n" in launch(capsys, spec, "--on", "slurm")[1]


KUBECTL = """\
#!/bin/bash
# Takes objects, and refuses those of the kind in REFUSED, as an API server without the CRD does.
kind=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["kind"])')
echo "$@ $kind" >> "$CALLS"
case "$*" in *--dry-run*) exit 0 ;; esac
[ "$1 $kind" = "create $REFUSED" ] && { echo "error: no matches for kind" >&2; exit 1; }
exit 0
"""


@pytest.mark.parametrize("last", ["TrainJob", "TrainingRuntime", "ConfigMap", ""])
def test_a_submit_that_fails_half_way_leaves_nothing_behind(last, tmp_path, capsys, monkeypatch):
    """A program in the place of kubectl: objects that were created are deleted, newest first."""
    program, calls = tmp_path / "bin" / "kubectl", tmp_path / "calls"
    program.parent.mkdir()
    program.write_text(KUBECTL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("REFUSED", last)
    spec = write(
        tmp_path, checkpoint={"path": "s3://bucket/run"}, launch={"image": f"convoy:{CONVOY}"}
    )
    if last:
        message = refused(capsys, spec, "--on", "kubernetes", "--submit")
        assert f"Kubernetes refuses {last} tiny: error: no matches for kind" in message
        assert "nothing is left running" in message
    else:
        code, out, _ = launch(capsys, spec, "--on", "kubernetes", "--submit")
        assert code == 0
        assert "created trainjob/tiny in namespace default" in out
    done = [line.split() for line in calls.read_text().splitlines() if "--dry-run" not in line]
    kinds = ["ConfigMap", "TrainingRuntime", "TrainJob"]
    made = kinds[: kinds.index(last)] if last else kinds
    deleted = [words[-1] for words in done if words[0] == "delete"]
    assert deleted == (list(reversed(made)) if last else [])


@pytest.mark.slow
def test_submit_on_torchrun_trains_on_this_machine(tmp_path):
    from tests.support.jobs import data_of, prepare_job

    (tmp_path / "job").mkdir()
    job = prepare_job(tmp_path / "job")
    spec = write(tmp_path, data=data_of(job), launch={"ranks_per_node": 2, "max_restarts": 0})
    root = Path(__file__).parents[3]
    ended = subprocess.run(
        [sys.executable, "-m", "convoy", "launch", spec, "--on", "torchrun", "--submit"],
        env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["exit_code"], status["world_size"], status["step"]) == (0, 2, 6)


@pytest.mark.parametrize("tag", [CONVOY, f"v{CONVOY}", f"{CONVOY}-cuda13", f"py3-{CONVOY}"])
def test_an_image_has_the_version_in_its_tag(tag, tmp_path, capsys):
    spec = write(tmp_path, launch={"image": f"registry:5000/team/convoy:{tag}"})
    assert launch(capsys, spec, "--on", "slurm")[0] == 0


def test_ranks_read_the_spec_that_was_checked(tmp_path, capsys, monkeypatch):
    """They look for the file below launch.workdir."""
    work, here = tmp_path / "work", tmp_path / "here"
    work.mkdir()
    here.mkdir()
    write(here, launch={"workdir": str(work)})
    monkeypatch.chdir(here)
    words = ["spec.json", "--on", "slurm"]
    expected = f"ranks read {work}/spec.json, which must be the spec {here}/spec.json"
    assert expected in refused(capsys, *words)
    (work / "spec.json").write_text("{}")
    assert expected in refused(capsys, *words)
    (work / "spec.json").write_bytes((here / "spec.json").read_bytes())
    assert launch(capsys, *words)[0] == 0
    (work / "spec.json").unlink()
    assert launch(capsys, "spec.json", "--on", "ray")[0] == 0, "the program has the spec"


def mounts(script: str) -> list[str]:
    """The folders that a container of the job in a script of Slurm gets."""
    text = script.partition("END_OF_JOB'\n")[2].partition("\nEND_OF_JOB")[0]
    flags = step_flags(EngineJob.model_validate_json(text))
    (words,) = [flag for flag in flags if flag.startswith("--container-mounts=")]
    return [word.partition(":")[0] for word in words.partition("=")[2].split(",")]


def test_folders_of_the_corpus_are_told_to_the_engine(tmp_path, capsys):
    (tmp_path / "corpus").mkdir()
    spec = write(tmp_path, launch={"image": f"convoy:{CONVOY}", "workdir": "/"})
    out = launch(capsys, spec, "--on", "slurm")[1]
    assert mounts(out) == ["/"]
    spec = write(tmp_path, launch={"image": f"convoy:{CONVOY}"}, run_dir="/elsewhere/run")
    out = launch(capsys, spec, "--on", "slurm")[1]
    assert {str(tmp_path), str(tmp_path / "corpus")} & set(mounts(out))


def test_a_job_without_a_prepared_corpus_is_not_submitted(tmp_path, capsys):
    spec = write(tmp_path, launch={"ranks_per_node": 2})
    message = refused(capsys, spec, "--on", "torchrun", "--submit")
    assert "has no prepared corpus yet, and ranks prepare none: run convoy prepare" in message
