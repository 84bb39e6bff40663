"""A launch of torchrun on this machine, each of whose agents stands for a machine with one rank."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

_RENDEZVOUS = {
    "last_call_timeout": "3",
    "keep_alive_interval": "1",
    "keep_alive_max_attempt": "3",
    "is_host": "0",
}
"""Short times: nothing is far away."""


class Machines:
    """Machines of one launch, by number.

    Args:
        command: what torchrun starts, for example ``["tools/pretrain.py", SPEC]``.
        logs: the folder for the output of each machine, which is made.
        least: the fewest machines that train.
        most: the most machines that train.
    """

    def __init__(self, command: list[str], logs: Path, *, least: int, most: int) -> None:
        # Here: whoever only reads a spec does without torch.distributed.
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.command, self.logs, self.nodes = command, logs, f"{least}:{most}"
        # Whoever serves the rendezvous must outlive every machine.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.backend, self.endpoint = "c10d", f"127.0.0.1:{self._store.port}"
        self.conf = dict(_RENDEZVOUS)
        """Keys of ``--rdzv-conf``."""
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._started = 0
        self._devices: dict[int, str] = {}

    def start(self, name: str | None = None) -> int:
        """Start a machine, which joins the launch; returns its number."""
        device = self._free_device()
        number, self._started = self._started, self._started + 1
        if device is not None:
            self._devices[number] = device
        self.logs.mkdir(parents=True, exist_ok=True)
        conf = ",".join(f"{key}={value}" for key, value in self.conf.items())
        with (self.logs / f"machine-{number}.txt").open("wb") as log:
            self.processes[number] = subprocess.Popen(
                [
                    sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.nodes}",
                    "--nproc-per-node=1", "--max-restarts=1000",
                    f"--rdzv-backend={self.backend}", "--rdzv-id=machines",
                    f"--rdzv-endpoint={self.endpoint}", f"--rdzv-conf={conf}",
                    "--monitor-interval=0.1", *self.command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60",
                    **({} if name is None else {"CONVOY_NODE_NAME": name}),
                    **({} if device is None else {"CUDA_VISIBLE_DEVICES": device}),
                },
            )  # fmt: skip
        return number

    def _free_device(self) -> str | None:
        """A CUDA device that no machine has; None without one, and then machines share them."""
        import torch

        if not torch.cuda.is_available():
            return None
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        every = seen.split(",") if seen else [str(n) for n in range(torch.cuda.device_count())]
        taken = {self._devices.get(n) for n, p in self.processes.items() if p.poll() is None}
        return next((device for device in every if device not in taken), None)

    def ranks(self, number: int) -> list[int]:
        """The processes that a machine's torchrun has started; Linux only."""
        processes = []
        for task in Path(f"/proc/{self.processes[number].pid}/task").iterdir():
            processes += [int(pid) for pid in (task / "children").read_text().split()]
        return processes

    def lose(self, number: int) -> None:
        """SIGKILL to a machine's torchrun and rank at once."""
        ranks, process = self.ranks(number), self.processes.pop(number)
        process.kill()
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    @property
    def running(self) -> bool:
        """Whether some machine's torchrun runs."""
        return any(process.poll() is None for process in self.processes.values())

    def exit_codes(self) -> list[int]:
        """Of each machine's torchrun; waits until they have ended."""
        return [process.wait() for process in self.processes.values()]

    def output(self) -> str:
        """The ends of what all machines have printed, for a report of a failure."""
        logs = sorted(self.logs.glob("machine-*.txt"))
        return "\n".join(f"{log.name}:\n{log.read_text()[-4000:]}" for log in logs)

    def close(self) -> None:
        """Kill all processes that are left."""
        for number in list(self.processes):
            with contextlib.suppress(OSError):
                self.lose(number)
