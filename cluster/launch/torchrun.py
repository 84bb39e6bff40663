"""torchrun on machines that a person starts: the same command on each of them."""

from __future__ import annotations

import os
import shlex
import subprocess

from cluster.launch.job import EngineJob
from cluster.launch.node import job_variable, node_script, say_start, torchrun_words
from cluster.members import node_name

_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
"""A program in Python for the interpreter of the ranks."""


def first_lines(job: EngineJob) -> list[str]:
    """Lines of bash that set the environment of every rank, and go to ``launch.workdir``."""
    lines = [f"export {key}={shlex.quote(value)}" for key, value in job.all_environment.items()]
    return lines + [f"cd {shlex.quote(job.workdir)} || exit 2"] * bool(job.workdir)


class Torchrun:
    """An engine without a queue: a script that a person runs on each machine."""

    brings_spec = False
    tells_end = False
    container_workdir = None

    def render(self, job: EngineJob) -> str:
        """A script of bash for every machine. ``CONVOY_NODE_ORDER`` orders ranks by machine."""
        least, most = job.nodes
        lines = [
            "#!/bin/bash",
            *job.head(),
            f"# {job.name}: run this on each machine, from {least} to {most} of them.",
            "# Give machines of one rack numbers in sequence: CONVOY_NODE_ORDER=0, 1, ...",
            *first_lines(job),
            job_variable(job),
            node_script(job, ["torchrun", '"$job"'], burn_in=True),
        ]
        return "\n".join(lines) + "\n"

    def check(self, job: EngineJob) -> None:
        """Refuse what cannot be started here. Raises ValueError."""
        launch = job.launch
        if job.nodes[1] > 1 and "endpoint" not in launch.rendezvous:
            raise ValueError(
                f"launch.rendezvous.endpoint (none) must be HOST:PORT with launch.nodes "
                f"({launch.nodes}): torchrun on several machines has no engine that names the "
                f"first one"
            )
        job.check_cpus(len(os.sched_getaffinity(0)), "this machine")
        if launch.gpus_per_node:
            asked = subprocess.run(
                [job.python, "-c", _COUNT_GPUS], capture_output=True, text=True, check=False
            )
            gpus = int(asked.stdout.strip() or 0)
            if launch.ranks_per_node > gpus:
                raise ValueError(
                    f"launch.ranks_per_node ({launch.ranks_per_node}) must not be above the "
                    f"{gpus} GPUs of this machine"
                )
        name = node_name()
        if name in job.excluded:
            raise ValueError(f"this machine ({name}) is on the exclude list of {job.run_dir}")

    def submit(self, job: EngineJob, text: str) -> str:
        """Become the launcher of this machine; returns only by an error."""
        self.check(job)
        os.execvp("bash", ["bash", "-c", text])

    def submitted(self, job: EngineJob, number: str) -> list[str]:
        """Nothing: the launcher has taken the place of ``convoy launch``."""
        return []

    def on_node(self, job: EngineJob, *words: str) -> int:
        """Become torchrun; returns only by an error."""
        endpoint = job.launch.rendezvous.get("endpoint", "localhost:0")
        command = torchrun_words(job, endpoint, job.name)
        say_start(command)
        os.execvp(command[0], command)
