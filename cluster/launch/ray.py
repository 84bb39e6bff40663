"""Ray: a program that fits a TorchTrainer, whose workers each start one rank of the run.

A rank is a process of its own below its worker: it has a main thread for its signals, and the
kernel kills it with its worker. Ray starts all workers again when one is lost, up to
``max_restarts`` times; with MIN:MAX nodes it starts with the workers that there are, and starts
them again when more can be had. Ray's placement group is all or nothing.

A run that ends with 2 or 3 is not started again: the workers return, and the program ends with the
run's exit code.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

from cluster.launch.job import EXIT_BAD_INPUT, EXIT_HEALTH, PRINT_VERSION, STATUS_FILE, EngineJob
from cluster.members import EXCLUDE_LIST

_PROGRAM = '''\
@HEAD@
"""@NAME@ on Ray: run this where the cluster of RAY_ADDRESS is reached, or with ray job submit."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile

JOB = json.loads(r"""
@JOB@
""")
LAUNCH = os.path.join(JOB["run_dir"], "launch")
REFUSED = os.path.join(LAUNCH, "refused.txt")
BAD_INPUT, HEALTH = @BAD_INPUT@, @HEALTH@  # exit codes that need a person: no other start


def rank() -> None:
    """Start one rank as a process below this worker, and wait for its end."""
    from ray.train import collective

    with socket.socket() as free:
        free.bind(("", 0))
        port = collective.broadcast_from_rank_zero(free.getsockname()[1])
    look = "@PRINT_VERSION@"
    found = subprocess.run([JOB["python"], "-c", look], capture_output=True, text=True).stdout
    if found.strip() != JOB["version"]:
        with open(REFUSED, "w") as file:
            file.write(
                f"{socket.gethostname()} has version {found.strip()!r} of convoy-moe, and the "
                f"launch is of {JOB['version']}"
            )
    collective.barrier()
    if os.path.exists(REFUSED):  # all workers return, and none waits for another one's rank
        return
    with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
        json.dump(JOB["config"], config)
        config.flush()
        libc = ctypes.CDLL(None)
        script = "\\n".join([*JOB["setup"], 'exec "$0" "$@"'])
        process = subprocess.Popen(
            ["bash", "-c", script, JOB["python"], *JOB["program"], config.name],
            env=os.environ | JOB["environment"] | {"MASTER_PORT": str(port)},
            cwd=JOB["workdir"] or None,
            # PR_SET_PDEATHSIG: a worker that Ray kills takes its rank with it.
            preexec_fn=lambda: libc.prctl(1, signal.SIGKILL),
        )
        code = process.wait()
    if code not in (0, BAD_INPUT, HEALTH):
        raise RuntimeError(f"rank {os.environ['RANK']} ended with exit code {code}")


def burn_in(node: str) -> None:
    """Run the burn-in on one node, which may put the node on the exclude list."""
    script = "\\n".join([*JOB["setup"], JOB["burn_in"]])
    environment = os.environ | JOB["environment"] | {"CONVOY_NODE_NAME": node}
    subprocess.run(["bash", "-c", script], env=environment, cwd=JOB["workdir"] or None)


def excluded_nodes(ray) -> list[str]:
    """Ray's names of the nodes on the exclude list, after the burn-in."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]]
    if JOB["burn_in"]:
        task = ray.remote(num_cpus=0)(burn_in)
        ray.get([
            task.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(node["NodeName"])
            for node in nodes
        ])
    try:
        with open(os.path.join(JOB["run_dir"], "@EXCLUDE_LIST@")) as file:
            bad = {one["node"] for one in json.load(file)["excluded"]}
    except FileNotFoundError:
        bad = set()
    return [n["NodeID"] for n in nodes if bad & {n["NodeName"], n["NodeManagerHostname"]}]


def main() -> int:
    """Fit the trainer; returns the exit code of the run."""
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    os.makedirs(LAUNCH, exist_ok=True)
    mark = os.path.join(LAUNCH, "start-ray")
    with open(mark, "w"):
        pass
    if os.path.exists(REFUSED):  # by a launch that was interrupted
        os.remove(REFUSED)
    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"))
    least, most = JOB["workers"]
    bad = excluded_nodes(ray)
    trainer = TorchTrainer(
        rank,
        scaling_config=ScalingConfig(
            num_workers=most if least == most else (least, most),
            use_gpu=JOB["gpu"],
            resources_per_worker=JOB["resources"],
            placement_strategy="PACK",
            label_selector={"ray.io/node-id": f"!in({','.join(bad)})"} if bad else None,
            elastic_resize_monitor_interval_s=JOB["resize_seconds"],
        ),
        # The ranks make process groups of their own; this one only starts them.
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(
            name=JOB["name"],
            storage_path=os.path.join(LAUNCH, "ray"),
            failure_config=FailureConfig(max_failures=JOB["max_restarts"]),
        ),
    )
    failed = None
    try:
        trainer.fit()
    except Exception as error:
        failed = str(error).strip().splitlines()[-1]
    if os.path.exists(REFUSED):
        with open(REFUSED) as file:
            print(f"error: {file.read()}", file=sys.stderr)
        os.remove(REFUSED)
        return BAD_INPUT
    if failed is not None:
        print(f"error: Ray gave up: {failed}", file=sys.stderr)
    path, code = os.path.join(JOB["run_dir"], "@STATUS_FILE@"), None
    if os.path.exists(path) and os.stat(path).st_mtime >= os.stat(mark).st_mtime:
        with open(path) as file:
            code = json.load(file)["exit_code"]
    return 1 if code is None or (failed is not None and code == 0) else code


if __name__ == "__main__":
    sys.exit(main())
'''


def render(job: EngineJob) -> str:
    """The program, in Python. It holds the spec, so that nodes need no file."""
    least, most = job.nodes
    resources = {"CPU": job.launch.cpus_per_rank} | ({"GPU": 1} if job.launch.gpus_per_node else {})
    facts = {
        "name": job.name,
        "version": job.version,
        "workers": [least * job.launch.ranks_per_node, most * job.launch.ranks_per_node],
        "gpu": bool(job.launch.gpus_per_node),
        "resources": resources,
        "python": job.python,
        "program": list(job.program),
        "workdir": job.workdir,
        "run_dir": job.run_dir,
        "environment": job.all_environment,
        "setup": list(job.launch.setup),
        "burn_in": job.launch.burn_in,
        "max_restarts": job.launch.max_restarts,
        "resize_seconds": job.launch.resize_seconds,
        "config": json.loads(job.config_text),
    }
    values = {
        "HEAD": "\n".join(job.head()),
        "NAME": job.name,
        "BAD_INPUT": str(EXIT_BAD_INPUT),
        "HEALTH": str(EXIT_HEALTH),
        "PRINT_VERSION": PRINT_VERSION,
        "EXCLUDE_LIST": EXCLUDE_LIST,
        "STATUS_FILE": STATUS_FILE,
        "JOB": json.dumps(facts, indent=1),
    }
    text = _PROGRAM
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text


def check(job: EngineJob) -> None:
    """Refuse what Ray cannot start. Raises ValueError: one line."""
    if importlib.util.find_spec("ray") is None:
        raise ValueError(
            "--on ray needs the package ray, which is not installed here: pip install -e "
            "'.[ray]' in Convoy's checkout"
        )
    if job.launch.image is not None:
        raise ValueError(
            f"launch.image ({job.launch.image}) must be left out with --on ray: Ray's nodes have "
            f"their own images"
        )


def submit(job: EngineJob, text: str) -> str:
    """Write the program to RUN_DIR/launch and become it; returns only by an error."""
    check(job)
    path = Path(job.run_dir, "launch", "ray_job.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.execv(sys.executable, [sys.executable, str(path)])
