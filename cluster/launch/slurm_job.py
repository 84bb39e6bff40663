"""A Slurm job from inside: the batch script, and the launcher of each node.

The batch script runs the burn-in on every node, then one step with the launchers on the nodes that
are not on the exclude list, and decides by how the step and the run have ended.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cluster.launch.job import EXIT_BAD_INPUT, EXIT_HEALTH, EXIT_TRY_AGAIN, EngineJob
from cluster.launch.node import (
    complain,
    excluded_nodes,
    make_mark,
    node_script,
    run_launcher,
    status_since,
    torchrun_words,
)
from cluster.members import EXCLUDE_LIST

_FIRST_PORT, _PORTS = 20000, 10000
"""The rendezvous listens on a port that the number of the job gives."""
_STARTS_IN_A_STORE = 3
"""Further starts of a job whose checkpoints, in an object store, the batch script cannot see."""
_NAMED = "export CONVOY_NODE_NAME=$SLURMD_NODENAME"  # as Slurm and the exclude list name nodes


def environment_of_others() -> dict[str, str]:
    """The environment without the variables of this process's own job: sbatch gives it to the job
    that it makes."""
    own = ("SLURM_", "SBATCH_", "SRUN_", "CONVOY_")
    return {k: v for k, v in os.environ.items() if not k.startswith(own) or k == "SLURM_CONF"}


def run_batch(job: EngineJob) -> int:
    """The batch script; returns the exit code of the job. Raises ValueError for exit code 2."""
    _export_end_time()
    start = _Start.begin(job)
    print(
        f"job {start.number}, start {start.restarts}, on {os.environ['SLURM_JOB_NODELIST']}",
        flush=True,
    )
    if job.launch.burn_in is not None:
        start.burn_in()
    nodes = start.nodes()
    excluded = sorted(set(nodes) & set(excluded_nodes(job)))
    for node in excluded:
        print(f"{node} is on the exclude list {job.run_dir}/{EXCLUDE_LIST}", flush=True)
    if os.environ.get("SLURMD_NODENAME") in excluded:
        return start.again(f"the batch script is on {os.environ['SLURMD_NODENAME']}")
    if len(nodes) - len(excluded) < job.nodes[0]:
        return start.again(f"fewer than {job.nodes[0]} nodes are left")
    return start.ended_with(start.run_step(len(nodes) - len(excluded), excluded))


@dataclass(frozen=True)
class _Start:
    """One start of a job, in its batch script."""

    job: EngineJob
    number: str
    """Of the job."""
    restarts: int
    mark: Path
    newest: str
    """The newest manifest at the begin of the start."""

    @classmethod
    def begin(cls, job: EngineJob) -> _Start:
        """Make the run's folders, and the mark of this start."""
        number = os.environ["SLURM_JOB_ID"]
        restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        mark = make_mark(job, f"{number}-{restarts}")
        if job.has_local_checkpoints:
            try:
                Path(job.checkpoints).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"{job.checkpoints} cannot be made: {error.strerror}") from None
        return cls(job, number, restarts, mark, _newest_manifest(job))

    def nodes(self) -> list[str]:
        """The names of the job's nodes."""
        words = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
        return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False).stdout.split()

    def burn_in(self) -> None:
        """Run ``launch.burn_in`` once on every node; it may put nodes on the exclude list."""
        launch = self.job.launch
        script = "\n".join([_NAMED, *launch.setup, launch.burn_in or ""])
        count = os.environ["SLURM_JOB_NUM_NODES"]
        words = ["srun", f"--ntasks={count}", "--ntasks-per-node=1", *step_flags(self.job)]
        subprocess.run([*words, "bash", "-c", script], check=False)

    def run_step(self, count: int, excluded: list[str]) -> int:
        """Run the launchers of ``count`` nodes; returns the exit code of srun."""
        number = int(self.number)
        endpoint = f"{socket.gethostname()}:{_FIRST_PORT + number % _PORTS}"
        # Ranks are numbered by the place of their nodes in the network.
        named = f"{_NAMED} CONVOY_NODE_ORDER=$SLURM_TOPOLOGY_ADDR"
        words = ["srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
        words += [f"--exclude={','.join(excluded)}"] * bool(excluded)
        words += [*step_flags(self.job), *["--no-kill"] * self.job.is_elastic]
        words += ["bash", "-c", node_script(self.job, ["slurm", '"$@"'], before=[named]), "bash"]
        words += [self.job.for_nodes(), "node", endpoint, f"{number}-{self.restarts}"]
        code = subprocess.run([*words, str(self.mark)], check=False).returncode
        return code if code >= 0 else 128 - code

    def ended_with(self, code: int) -> int:
        """What the end of the step is for the job; returns the exit code of the job."""
        status = status_since(self.job, self.mark)
        if code and status is not None:
            code = 1 if status["exit_code"] is None else status["exit_code"]
        print(f"job {self.number} ends with exit code {code}", flush=True)
        if code in (0, EXIT_BAD_INPUT, EXIT_HEALTH):
            return code
        if code == EXIT_TRY_AGAIN:
            return self.again("the run was stopped and has committed a checkpoint")
        newest = _newest_manifest(self.job)
        if newest != self.newest:
            return self.again(f"a rank or node was lost after {newest}")
        if not self.job.has_local_checkpoints and self.restarts < _STARTS_IN_A_STORE:
            return self.again("a rank or node was lost")
        complain("the start has committed no checkpoint, so the job is not started again")
        return code

    def again(self, reason: str) -> int:
        """Put the job back into the queue, without the nodes of the exclude list."""
        excluded = ",".join(excluded_nodes(self.job))
        without = f"; without {excluded}" if excluded else ""
        print(f"job {self.number} starts again: {reason}{without}", flush=True)
        if excluded and excluded != os.environ.get("CONVOY_EXCLUDED"):
            return self._replaced(excluded)
        if subprocess.run(["scontrol", "requeue", self.number], check=False).returncode == 0:
            time.sleep(300)  # Slurm ends this process
        return 1

    def _replaced(self, excluded: str) -> int:
        """Let another job take this one's place: Slurm takes excluded nodes for waiting jobs
        alone."""
        script = f"{self.mark}.sbatch"
        words = ["scontrol", "write", "batch_script", self.number, script]
        if subprocess.run(words, stdout=subprocess.DEVNULL, check=False).returncode:
            return 1
        environment = environment_of_others() | {"CONVOY_EXCLUDED": excluded}
        words = ["sbatch", f"--exclude={excluded}", script]
        return 1 if subprocess.run(words, env=environment, check=False).returncode else 0


def step_flags(job: EngineJob) -> list[str]:
    """What srun is told for the burn-in and for the run: a step takes no cores from the job."""
    flags = [f"--cpus-per-task={job.cpus_per_node}", "--kill-on-bad-exit=0"]
    if job.launch.image is not None:
        # The scripts' folders are those of the nodes, in the container too.
        folders = {job.workdir, job.run_dir, str(Path(job.config).parent), *job.folders} - {""}
        if job.has_local_checkpoints:
            folders.add(job.checkpoints)
        mounts = [
            folder for folder in sorted(folders)
            if not folders.intersection(map(str, Path(folder).parents))
        ]  # fmt: skip
        flags += [
            f"--container-image={job.launch.image}",
            "--container-mounts=" + ",".join(f"{path}:{path}" for path in mounts),
        ]
    return flags


def _newest_manifest(job: EngineJob) -> str:
    """The name of the newest checkpoint; empty where there is none, or in an object store."""
    if not job.has_local_checkpoints:
        return ""
    manifests = Path(job.checkpoints, "manifests").glob("step-*.json")
    return max((path.name for path in manifests), default="")


def _export_end_time() -> None:
    """Set ``SLURM_JOB_END_TIME``, which Slurm itself sets since some version after 22.05."""
    if os.environ.get("SLURM_JOB_END_TIME"):
        return
    words = ["squeue", "-h", "-j", os.environ["SLURM_JOB_ID"], "-o", "%e"]
    with suppress(ValueError, OSError):  # no time, as in a partition without a limit
        asked = subprocess.run(words, capture_output=True, text=True, check=False)
        end = datetime.fromisoformat(asked.stdout.strip())
        os.environ["SLURM_JOB_END_TIME"] = str(int(end.timestamp()))


def run_node(job: EngineJob, endpoint: str, run_id: str, mark: Path) -> int:
    """The launcher of one node; returns its exit code. Raises ValueError for exit code 2."""
    name = os.environ["SLURMD_NODENAME"]
    if not mark.exists():
        raise ValueError(f"{mark} is not seen here: all nodes must share run_dir")
    is_host = os.environ["SLURM_NODEID"] == "0"
    # Slurm itself signals every process of a step.
    code = run_launcher(torchrun_words(job, endpoint, run_id, is_host=is_host), forward_stop=False)
    # Where the batch script is gone with its node, Slurm lets the other nodes wait for ever.
    if code and not _batch_answers():
        lost = f"node {name}: the node of the batch script is lost"
        print(f"{lost}; the job starts again", flush=True)
        with suppress(OSError):  # an image without scontrol
            subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False)
    return code


def _batch_answers() -> bool:
    """Whether the srun of this step still listens, asked three times."""
    host = os.environ.get("SLURM_SRUN_COMM_HOST", "")
    port = int(os.environ.get("SLURM_SRUN_COMM_PORT") or 0)
    for _ in range(3):
        try:
            socket.create_connection((host, port), timeout=5).close()
        except OSError:
            time.sleep(2)
        else:
            return True
    return False
