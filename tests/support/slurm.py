"""A Slurm cluster on this machine: munge, slurmctld and a slurmd for each node, in one folder."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
"""Programs that are not installed: the packages munge, slurmctld, slurmd and slurm-client."""

_USER = pwd.getpwuid(os.geteuid()).pw_name
_CONF = """\
ClusterName=convoy-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A job that goes back into the queue waits until its old credentials have expired.
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdTimeout=6
SlurmdParameters=config_overrides
EnforcePartLimits=ANY
ReturnToService=2
KillWait=10
MpiDefault=none
FirstJobId={first_job}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP
PartitionName=short Nodes=ALL MaxTime=1 State=UP
"""


class Slurm:
    """A running cluster. ``nodes`` are the names of the nodes.

    Args:
        folder: for state and logs; its path must be short enough for a socket.
        nodes: how many.
    """

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.nodes = [f"n{i}" for i in range(nodes)]
        self.conf = folder / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", "spool"):
            (folder / name).mkdir()
        ports = _free_ports(nodes + 1)
        lines = [
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 "
            f"Port={port} CPUs=2 RealMemory=1000"
            for name, port in zip(self.nodes, ports[1:], strict=True)
        ]
        self.conf.write_text(
            _CONF.format(
                host=socket.gethostname(),
                port=ports[0],
                user=_USER,
                folder=folder,
                nodes="\n".join(lines),
                # The port of a launch comes from the number of its job.
                first_job=1 + secrets.randbelow(9000),
            )
        )

    def start(self) -> None:
        """Start all daemons in the foreground, and wait until the nodes are idle."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        at = self.folder
        self._start("munged", "--foreground", "--force", f"--key-file={key}", "--num-threads=2",
                    f"--socket={at}/munge.sock", f"--pid-file={at}/munge.pid",
                    f"--log-file={at}/munge.log", f"--seed-file={at}/munge.seed")  # fmt: skip
        self.wait(lambda: (at / "munge.sock").exists())
        self._start("slurmctld", "-D", "-c", "-f", str(self.conf))
        for name in self.nodes:
            self.start_node(name)
        self.wait(lambda: self.nodes_in("idle") == self.nodes)

    def start_node(self, name: str) -> None:
        """Start the daemon of a node, also of one that was lost."""
        (self.folder / "spool" / name).mkdir(exist_ok=True)
        self._start("slurmd", "-D", "-N", name, "-f", str(self.conf), key=name)

    def _start(self, program: str, *words: str, key: str | None = None) -> None:
        path = shutil.which(program) or program
        with (self.folder / f"{key or program}.out").open("ab") as out:
            self._processes[key or program] = subprocess.Popen(
                [path, *words], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                env=self.environment, start_new_session=True,
            )  # fmt: skip

    def run(self, *words: str) -> str:
        """Run a command of Slurm; returns what it printed."""
        ended = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    def nodes_in(self, state: str) -> list[str]:
        """The nodes of a state."""
        try:
            found = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %t")
        except AssertionError:
            return []  # slurmctld is starting
        return [line.split()[0] for line in found.splitlines() if line.split()[1] == state]

    def job(self, number: str) -> dict[str, str]:
        """What ``scontrol show job`` says."""
        text = self.run("scontrol", "-o", "show", "job", number)
        return dict(word.partition("=")[::2] for word in text.split())

    def queue(self) -> list[str]:
        """The numbers of all jobs that wait or run."""
        return self.run("squeue", "-h", "-o", "%i").split()

    def wait(self, what: Callable[[], Any], seconds: float = 300.0) -> None:
        """Wait until ``what`` is so; fails with the end of slurmctld's log."""
        until = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < until, self.report()
            time.sleep(0.2)

    def wait_for_state(self, number: str, *states: str) -> dict[str, str]:
        """Wait until a job is in one of ``states``; returns what is known of it."""
        self.wait(lambda: self.job(number)["JobState"] in states)
        return self.job(number)

    def report(self) -> str:
        """The ends of slurmctld's log and of all jobs' output below the folder above."""
        logs = [self.folder / "slurmctld.log", *self.folder.parent.rglob("slurm-*.txt")]
        return "\n".join(f"{p}:\n{p.read_text()[-4000:]}" for p in logs if p.exists())

    def lose(self, name: str) -> None:
        """SIGKILL to the daemon of a node, to its step daemons and to all of its tasks."""
        daemon = self._processes.pop(name)
        daemon.kill()
        for pid in self._processes_of(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait()

    def _processes_of(self, name: str) -> list[int]:
        """Step daemons, by the log that they have open, and tasks, by their environment."""
        found = []
        mark = f"SLURMD_NODENAME={name}\0".encode()
        conf = f"SLURM_CONF={self.conf}\0".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                environment = (entry / "environ").read_bytes()
                if mark in environment and conf in environment:
                    found.append(int(entry.name))
                elif (entry / "comm").read_text().strip() == "slurmstepd":
                    files = [str(fd.readlink()) for fd in (entry / "fd").iterdir()]
                    if str(self.folder / f"slurmd-{name}.log") in files:
                        found.append(int(entry.name))
        return found

    def close(self) -> None:
        """End all jobs and daemons."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--user", _USER, "--signal=KILL", "--full")
        for name in self.nodes:
            for pid in self._processes_of(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()


@contextmanager
def slurm(folder: Path, nodes: int) -> Iterator[Slurm]:
    """A cluster whose daemons, jobs and tasks are ended, however the context ends."""
    cluster = Slurm(folder, nodes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
