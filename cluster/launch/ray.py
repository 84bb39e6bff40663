"""Ray: a program that fits a TorchTrainer, whose workers each start one rank of the run.

A rank is a process of its own below its worker: it has a main thread for its signals, and the
kernel kills it with its worker. Ray starts all workers again when one is lost, up to
``max_restarts`` times; with MIN:MAX nodes it starts with the workers that there are, and starts
them again when more can be had. Ray's placement group is all or nothing.

A run that ends with 2 or 3 is not started again: the workers return, and the program ends with the
run's exit code.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.launch.job import EXIT_BAD_INPUT, EXIT_HEALTH, EngineJob, one_line
from cluster.launch.node import complain, excluded_nodes, make_mark, node_script, status_since

_PROGRAM = '''\
{head}
"""{name} on Ray: run this where the cluster of RAY_ADDRESS is reached, or with ray job submit."""

import sys

from cluster.launch.ray import fit

JOB = r"""
{job}
"""
SPEC = r"""
{spec}
"""

if __name__ == "__main__":
    sys.exit(fit(JOB, SPEC))
'''

_RESIZE_SECONDS = 60.0
"""How often Ray looks for more nodes where a run has MIN:MAX of them. It starts all ranks again."""


class Ray:
    """Ray Train; its workers are the ranks."""

    brings_spec = True
    tells_end = False
    container_workdir = None

    def render(self, job: EngineJob) -> str:
        """The program, in Python. It holds the spec, so that nodes need no file."""
        return _PROGRAM.format(
            head="\n".join(job.head()), name=job.name, job=job.for_nodes(), spec=job.config_text
        )

    def check(self, job: EngineJob) -> None:
        """Refuse what Ray cannot start. Raises ValueError: one line."""
        if importlib.util.find_spec("ray") is None:
            raise ValueError(
                "--on ray needs the package ray, which is not installed here: pip install -e "
                "'.[ray]' in Convoy's checkout"
            )
        if job.launch.image is not None:
            raise ValueError(
                f"launch.image ({job.launch.image}) must be left out with --on ray: Ray's nodes "
                f"have their own images"
            )

    def submit(self, job: EngineJob, text: str) -> str:
        """Write the program to RUN_DIR/launch and become it; returns only by an error."""
        self.check(job)
        path = Path(job.run_dir, "launch", "ray_job.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.execv(sys.executable, [sys.executable, str(path)])

    def submitted(self, job: EngineJob, number: str) -> list[str]:
        """Nothing: the program has taken the place of ``convoy launch``."""
        return []

    def on_node(self, job: EngineJob, *words: str) -> int:
        """Nothing more than to have the job's version: Ray's workers start the ranks."""
        return 0


def fit(job_text: str, spec_text: str) -> int:
    """The program of a job: fit the trainer; returns the exit code of the run.

    Args:
        job_text: the job, as :meth:`EngineJob.for_nodes` gives it.
        spec_text: the resolved spec as JSON.
    """
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    job = EngineJob.model_validate_json(job_text)
    launch = job.launch
    mark = make_mark(job, "ray")
    refused = _refusal_file(job)
    refused.unlink(missing_ok=True)  # of a launch that was interrupted
    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"))
    least, most = (nodes * launch.ranks_per_node for nodes in job.nodes)
    unfit = _excluded_ids(job)
    trainer = TorchTrainer(
        train_rank,
        train_loop_config={"job": job_text, "spec": spec_text},
        scaling_config=ScalingConfig(
            num_workers=most if least == most else (least, most),
            use_gpu=bool(launch.gpus_per_node),
            resources_per_worker={"CPU": launch.cpus_per_rank}
            | ({"GPU": 1} if launch.gpus_per_node else {}),
            placement_strategy="PACK",
            label_selector={"ray.io/node-id": f"!in({','.join(unfit)})"} if unfit else None,
            elastic_resize_monitor_interval_s=_RESIZE_SECONDS,
        ),
        # The ranks make process groups of their own; this one only starts them.
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(
            name=job.name,
            storage_path=str(mark.parent / "ray"),
            failure_config=FailureConfig(max_failures=launch.max_restarts),
        ),
    )
    failure = None
    try:
        trainer.fit()
    except Exception as error:
        failure = str(error).strip().splitlines()[-1]
    if refused.exists():
        print(refused.read_text(), file=sys.stderr)
        refused.unlink()
        return EXIT_BAD_INPUT
    if failure is not None:
        complain(f"Ray gave up: {failure}")
    status = status_since(job, mark)
    code = None if status is None else status["exit_code"]
    return 1 if code is None or (failure is not None and code == 0) else code


def train_rank(config: Mapping[str, str]) -> None:
    """A worker: start one rank as a process below it, and wait for its end.

    Raises RuntimeError where Ray is to start all workers again.
    """
    from ray.train import collective

    job = EngineJob.model_validate_json(config["job"])
    environment = os.environ | job.all_environment
    with socket.socket() as free:
        free.bind(("", 0))
        port = collective.broadcast_from_rank_zero(free.getsockname()[1])
    refused = _refusal_file(job)
    script = node_script(job, ["ray", '"$1"'])
    checked = subprocess.run(
        ["bash", "-c", script, "bash", config["job"]],
        capture_output=True, text=True, env=environment, cwd=job.workdir or None, check=False,
    )  # fmt: skip
    if checked.returncode:
        refused.write_text(one_line(checked.stderr))
    collective.barrier()
    if refused.exists():  # all workers return, and none waits for another one's rank
        return
    code = _run_rank(job, config["spec"], environment | {"MASTER_PORT": str(port)})
    if code not in (0, EXIT_BAD_INPUT, EXIT_HEALTH):
        raise RuntimeError(f"rank {os.environ['RANK']} ended with exit code {code}")


def _run_rank(job: EngineJob, spec_text: str, environment: dict[str, str]) -> int:
    libc = ctypes.CDLL(None)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
        config.write(spec_text)
        config.flush()
        script = "\n".join([*job.launch.setup, 'exec "$0" "$@"'])
        process = subprocess.Popen(
            ["bash", "-c", script, job.python, *job.program, config.name],
            env=environment,
            cwd=job.workdir or None,
            # PR_SET_PDEATHSIG: a worker that Ray kills takes its rank with it.
            preexec_fn=lambda: libc.prctl(1, signal.SIGKILL),
        )
        return process.wait()


def _refusal_file(job: EngineJob) -> Path:
    """Where a worker on a node without the right version says so."""
    return Path(job.run_dir, "launch", "refused.txt")


def burn_in(job_text: str, node: str) -> None:
    """Run the burn-in on one node, which may put the node on the exclude list."""
    job = EngineJob.model_validate_json(job_text)
    script = "\n".join([*job.launch.setup, job.launch.burn_in or ""])
    environment = os.environ | job.all_environment | {"CONVOY_NODE_NAME": node}
    subprocess.run(["bash", "-c", script], env=environment, cwd=job.workdir or None, check=False)


def _excluded_ids(job: EngineJob) -> list[str]:
    """Ray's names of the nodes on the exclude list, after the burn-in."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
    if job.launch.burn_in:
        task = ray.remote(num_cpus=0)(burn_in)
        text = job.for_nodes()
        ray.get([
            task.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(text, node["NodeName"])
            for node in nodes
        ])  # fmt: skip
    excluded = set(excluded_nodes(job))
    return [
        node["NodeID"]
        for node in nodes
        if excluded & {node["NodeName"], node["NodeManagerHostname"]}
    ]
