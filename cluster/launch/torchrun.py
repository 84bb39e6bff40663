"""torchrun on machines that a person starts: the same command on each of them."""

from __future__ import annotations

import os
import shlex

from cluster.launch.job import EngineJob
from cluster.members import node_name


def torchrun_words(job: EngineJob, endpoint: str, run_id: str, conf: dict[str, str]) -> list[str]:
    """The words of torchrun on one node, each as bash reads it: words may have variables.

    Args:
        job: what ranks run.
        endpoint: HOST:PORT of the rendezvous.
        run_id: equal on all nodes of one start, and of no other start.
        conf: more keys of ``--rdzv-conf``; those of the job come last.
    """
    least, most = job.nodes
    own = {"run_dir": job.run_dir}
    if job.has_local_checkpoints or job.launch.rendezvous.get("scale_up") == "at_checkpoint":
        own["checkpoints"] = job.checkpoints
    keys = conf | {
        key: shlex.quote(value) for key, value in (own | dict(job.launch.rendezvous)).items()
    }
    return [
        shlex.quote(job.python), "-m", "torch.distributed.run", f"--nnodes={least}:{most}",
        f"--nproc-per-node={job.launch.ranks_per_node}",
        f"--max-restarts={job.launch.max_restarts}",
        "--rdzv-backend=convoy", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={run_id}",
        "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in keys.items()),
        *(shlex.quote(word) for word in job.rank_words),
    ]  # fmt: skip


def exports(job: EngineJob) -> list[str]:
    """Lines of bash that set the environment of every rank."""
    return [f"export {key}={shlex.quote(value)}" for key, value in job.all_environment.items()]


def continued(words: list[str], indent: str = "    ") -> str:
    """A command over several lines of bash."""
    lines, line = [], words[0]
    for word in words[1:]:
        if len(line) + len(word) > 88:
            lines.append(line)
            line = indent + word
        else:
            line += " " + word
    return " \\\n".join([*lines, line])


def render(job: EngineJob) -> str:
    """A script of bash for every machine. ``CONVOY_NODE_ORDER`` orders ranks by machine."""
    endpoint = job.launch.endpoint or "localhost:0"
    lines = [
        "#!/bin/bash",
        *job.head(),
        f"# {job.name}: run this on each machine, from {job.nodes[0]} to {job.nodes[1]} of them.",
        "# Give machines of one rack numbers that follow each other: CONVOY_NODE_ORDER=0, 1, ...",
        *exports(job),
        *([f"cd {shlex.quote(job.workdir)} || exit 2"] if job.workdir else []),
        *job.launch.setup,
        job.version_check,
        *([job.launch.burn_in] if job.launch.burn_in else []),
        continued(["exec", *torchrun_words(job, endpoint, job.name, {})]),
    ]
    return "\n".join(lines) + "\n"


def check(job: EngineJob) -> None:
    """Refuse what cannot be started here. Raises ValueError."""
    if job.nodes[1] > 1 and job.launch.endpoint is None:
        raise ValueError(
            f"launch.endpoint (none) must be HOST:PORT with launch.nodes ({job.nodes[0]}:"
            f"{job.nodes[1]}): torchrun on several machines has no engine that names the first one"
        )
    job.check_cpus(len(os.sched_getaffinity(0)), "this machine")
    if job.launch.gpus_per_node:
        import torch  # here: importing torch takes a second

        found = torch.cuda.device_count()
        if job.launch.ranks_per_node > found:
            raise ValueError(
                f"launch.ranks_per_node ({job.launch.ranks_per_node}) must not be above the "
                f"{found} GPUs of this machine"
            )
    name = node_name()
    if name in job.excluded:
        raise ValueError(f"this machine ({name}) is on the exclude list of {job.run_dir}")


def submit(job: EngineJob, text: str) -> str:
    """Become the launcher of this machine; returns only by an error."""
    check(job)
    os.execvp("bash", ["bash", "-c", text])
