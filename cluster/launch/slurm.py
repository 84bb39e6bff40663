"""Slurm: a job of sbatch, whose step has a torchrun on each node.

How a start ends decides about the next one: 0, 2 and 3 end the job; 75 puts the job back into the
queue; and after a lost rank the job goes back where the start has committed a checkpoint, so that
a run that cannot begin does not begin for ever. torchrun hides the exit code of the run, which
``status.json`` has.

A job of MIN:MAX nodes is told to live on without lost nodes (``--no-kill``): torchrun goes on with
those that are left. A job of a fixed number of nodes is put back into the queue by Slurm when a
node is lost. Both begin only with all of (at least MIN) nodes.
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from cluster.launch.job import EngineJob, one_line
from cluster.launch.node import job_variable, node_script
from cluster.launch.slurm_job import environment_of_others, run_batch, run_node
from cluster.launch.torchrun import first_lines

_TIMEOUT = 60.0


class Slurm:
    """Slurm's batch system; each node is a task of the job's step."""

    brings_spec = False
    tells_end = True
    container_workdir = None

    def render(self, job: EngineJob) -> str:
        """The file that sbatch takes; standard output is in RUN_DIR/launch.

        The batch script runs outside of ``launch.image``: with an image it has the interpreter of
        ``convoy launch``, and no setup.
        """
        inside = job.launch.image is None
        outer = job.launch if inside else job.launch.model_copy(
            update={"python": sys.executable, "setup": []}
        )  # fmt: skip
        parts = [
            "\n".join(
                [
                    "#!/bin/bash",
                    *job.head(),
                    f"# before sbatch   mkdir -p {shlex.quote(job.run_dir)}/launch",
                    *(f"#SBATCH {option}" for option in _options(job)),
                ]
            ),
            "\n".join(first_lines(job)),
            job_variable(job),
            node_script(job.model_copy(update={"launch": outer}), ["slurm", '"$job"', "batch"]),
        ]
        return "\n\n".join(parts) + "\n"

    def check(self, job: EngineJob) -> None:
        """Refuse what Slurm cannot start. Raises ValueError: one line."""
        for program in ("sbatch", "sinfo", "srun"):
            if shutil.which(program) is None:
                raise ValueError(
                    f"--on slurm needs the program {program}, which is not installed on this "
                    f"machine: run convoy launch on a login node"
                )
        launch = job.launch
        if launch.image and "--container-image" not in _run(["srun", "--help"]).stdout:
            raise ValueError(
                f"launch.image ({launch.image}) needs pyxis, which this Slurm lacks: srun has no "
                f"option --container-image"
            )
        # %D nodes, %c CPUs of a node, %G generic resources, %l longest time of the partition.
        words = ["sinfo", "--noheader", "--format=%R|%D|%c|%G"]
        if launch.queue is not None:
            words.append(f"--partition={launch.queue}")
        ended = _run(words)
        if ended.returncode:
            raise ValueError(f"sinfo failed: {one_line(ended.stderr or ended.stdout)}")
        rows = [line.split("|") for line in ended.stdout.splitlines() if line]
        if not rows:
            raise ValueError(f"launch.queue ({launch.queue}): Slurm has no such partition")
        job.check_cpus(max(int(row[2].rstrip("+")) for row in rows), "a node")
        gpus = max((_gpus(row[3]) for row in rows), default=0)
        if launch.gpus_per_node > gpus:
            raise ValueError(
                f"launch.gpus_per_node ({launch.gpus_per_node}) must not be above the {gpus} GPUs "
                f"of a node"
            )

    def submit(self, job: EngineJob, text: str) -> str:
        """Give the file to sbatch; returns the number of the job.

        Raises ValueError where Slurm refuses it; nothing runs then: sbatch takes a job as a
        whole or not at all.
        """
        self.check(job)
        folder = Path(job.run_dir, "launch")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "job.sbatch"
        path.write_text(text)
        asked = _run(["sbatch", "--test-only", str(path)])
        if asked.returncode:
            raise ValueError(f"Slurm refuses the job: {_refusal(asked.stderr)}")
        ended = _run(["sbatch", "--parsable", str(path)])
        if ended.returncode:
            raise ValueError(f"Slurm refuses the job: {_refusal(ended.stderr)}")
        return ended.stdout.strip().partition(";")[0]

    def submitted(self, job: EngineJob, number: str) -> list[str]:
        """Lines for people about a job that waits or runs."""
        return [
            f"submitted job {number}",
            f"output       {job.run_dir}/launch/slurm-{number}.txt",
            f"queue        squeue -j {number}",
            f"stop         scancel {number}",
        ]

    def on_node(self, job: EngineJob, *words: str) -> int:
        """The batch script of the job, or the launcher of one of its nodes."""
        match words:
            case ("batch",):
                return run_batch(job)
            case ("node", endpoint, run_id, mark):
                return run_node(job, endpoint, run_id, Path(mark))
        raise ValueError(f"the words {words} must be batch, or node ENDPOINT RUN_ID MARK")


def _options(job: EngineJob) -> list[str]:
    launch = job.launch
    least, most = job.nodes
    options = [
        f"--job-name={job.name}",
        # Without a number of tasks: Slurm would take it from MIN, and never give more nodes.
        f"--nodes={least}" if least == most else f"--nodes={least}-{most}",
        f"--cpus-per-task={job.cpus_per_node}",
        "--requeue",
        "--open-mode=append",
        f"--output={job.run_dir}/launch/slurm-%j.txt",
    ]
    if launch.gpus_per_node:
        options.append(f"--gpus-per-node={launch.gpus_per_node}")
    if job.is_elastic:
        options.append("--no-kill")
    if launch.walltime_minutes is not None:
        seconds = math.floor(launch.walltime_minutes * 60)
        options.append(f"--time={seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}")
    if launch.queue is not None:
        options.append(f"--partition={launch.queue}")
    if job.excluded:
        options.append("--exclude=" + ",".join(job.excluded))
    return options + list(launch.options)


def _gpus(resources: str) -> int:
    """The GPUs in what sinfo says of a node: ``gpu:h100:8(S:0-1),nic:2``."""
    counts = re.findall(r"gpu(?::[^:,(]+)*?:(\d+)", resources)
    return sum(map(int, counts))


def _refusal(text: str) -> str:
    return one_line(text).removeprefix("sbatch: ").removeprefix("error: ").removeprefix(
        "allocation failure: "
    )  # fmt: skip


def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            env=environment_of_others(),
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"{words[0]} did not answer within {_TIMEOUT:.0f} s: is slurmctld up?"
        ) from None
