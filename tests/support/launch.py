"""A torchrun on each of several hosts of :mod:`tests.support.netns`, which meet by host name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.agents import ROOT, Watched
from tests.support.netns import Host, Network

_CONF = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=10"


class Launch(Watched):
    """A launch of ``command`` on hosts; the host ``host-a`` serves the rendezvous.

    Args:
        network: the hosts; whoever makes the network ends the processes.
        command: what torchrun starts.
        run_dir: the folder of the run's log; output of torchrun goes to its parent.
        nodes: ``--nnodes``.
        ranks: the ranks of each host.
        environment: of torchrun and the ranks.
    """

    def __init__(
        self,
        network: Network,
        command: Sequence[str],
        run_dir: Path,
        *,
        nodes: str,
        ranks: int = 1,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.network, self.command, self.run_dir = network, list(command), run_dir
        self.nodes, self.ranks = nodes, ranks
        self.environment = {"GLOO_SOCKET_IFNAME": "eth0", **(environment or {})}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def log(self, name: str) -> Path:
        """What a host's torchrun and ranks have printed, over all of their starts."""
        return self.run_dir.parent / f"{name}.txt"

    def start(self, name: str) -> None:
        """Start torchrun on a host."""
        host: Host = self.network.hosts[name]
        self.processes[name] = host.start(
            [
                sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.nodes}",
                f"--nproc-per-node={self.ranks}", "--max-restarts=1000", "--rdzv-backend=c10d",
                "--rdzv-id=hosts", "--rdzv-endpoint=host-a:29400", f"--rdzv-conf={_CONF}",
                "--monitor-interval=0.1", *self.command,
            ],
            self.log(name),
            OMP_NUM_THREADS="1",
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            TORCH_ELASTIC_SHUTDOWN_TIMEOUT="60",
            **self.environment,
        )  # fmt: skip

    @property
    def running(self) -> bool:
        """Whether some host's torchrun runs."""
        return any(process.poll() is None for process in self.processes.values())

    def exit_codes(self) -> list[int]:
        """Of each host's torchrun; waits until they have ended."""
        return [process.wait() for process in self.processes.values()]

    def output(self) -> str:
        """The ends of what all hosts have printed."""
        names = self.network.hosts
        return "\n".join(f"{n}:\n{self.log(n).read_text()[-6000:]}" for n in names)


def pretrain(spec: Path) -> list[str]:
    """The command of a rank of a run."""
    return [str(ROOT / "tools/pretrain.py"), str(spec)]
