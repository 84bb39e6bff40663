"""torchrun agents as real processes on loopback: each stands for a machine with one rank."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Short times: the tests' machine is one machine, and nothing is far away.
_RENDEZVOUS = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,is_host=0"


class Agents:
    """Agents of one launch, by number. The rendezvous store lives in this process."""

    def __init__(self, spec: Path, *, nodes: str, run_dir: Path, backend: str = "c10d") -> None:
        import torch.distributed as dist

        self.spec, self.nodes, self.run_dir, self.backend = spec, nodes, run_dir, backend
        # Whoever serves the rendezvous must outlive the launch.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.conf = ""

    def start(self, number: int) -> None:
        """Start an agent, which joins the launch."""
        log = (self.run_dir.parent / f"agent-{number}-{len(self.processes)}.txt").open("wb")
        with log:
            self.processes[number] = subprocess.Popen(
                [
                    sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.nodes}",
                    "--nproc-per-node=1", "--max-restarts=50", f"--rdzv-backend={self.backend}",
                    f"--rdzv-endpoint=127.0.0.1:{self.store.port}", "--rdzv-id=test",
                    f"--rdzv-conf={_RENDEZVOUS}{self.conf}", "--monitor-interval=0.1",
                    "tools/pretrain.py", str(self.spec),
                ],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60",
                },
            )  # fmt: skip

    def worker(self, number: int) -> int:
        """The process of an agent's rank."""
        children = Path(f"/proc/{self.processes[number].pid}/task")
        found = [
            int(pid)
            for task in children.iterdir()
            for pid in (task / "children").read_text().split()
            if b"pretrain.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        assert len(found) == 1, found
        return found[0]

    def kill_worker(self, number: int) -> None:
        """SIGKILL to an agent's rank."""
        os.kill(self.worker(number), signal.SIGKILL)

    def kill(self, number: int) -> None:
        """SIGKILL to an agent and its rank: a machine is lost."""
        worker, process = self.worker(number), self.processes.pop(number)
        process.kill()
        os.kill(worker, signal.SIGKILL)
        process.wait()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What the log has of one kind of event."""
        try:
            lines = (self.run_dir / "log.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):  # a line that is being written
                event = json.loads(line)
                if event["event"] == kind:
                    found.append(event)
        return found

    def wait(self, what: Callable[[], Any], seconds: float = 300.0) -> Any:
        """Wait until ``what`` gives something; fails with the agents' output."""
        until = time.monotonic() + seconds
        while not (found := what()):
            running = any(process.poll() is None for process in self.processes.values())
            assert running, self.output()
            assert time.monotonic() < until, self.output()
            time.sleep(0.05)
        return found

    def wait_for_step(self, step: int, starts: int) -> None:
        """Wait until the launch has begun ``starts`` times, and has taken ``step`` since."""

        def reached() -> bool:
            began = self.events("start")
            if len(began) < starts:
                return False
            since = [e for e in self.events("step") if e["time"] > began[-1]["time"]]
            return bool(since) and since[-1]["step"] >= step

        self.wait(reached)

    def wait_for_end(self, seconds: float = 400.0) -> list[int]:
        """The exit codes of the agents that were not killed."""
        self.wait(lambda: all(p.poll() is not None for p in self.processes.values()), seconds)
        return [process.returncode for process in self.processes.values()]

    def output(self) -> str:
        """All that the agents have printed."""
        logs = sorted(self.run_dir.parent.glob("agent-*.txt"))
        return "\n".join(f"{log.name}:\n{log.read_text()[-6000:]}" for log in logs)


@contextlib.contextmanager
def agents(spec: Path, *, nodes: str, run_dir: Path, backend: str = "c10d") -> Iterator[Agents]:
    """Agents that are ended with all of their ranks, however the test ends."""
    launch = Agents(spec, nodes=nodes, run_dir=run_dir, backend=backend)
    try:
        yield launch
    finally:
        for number, process in launch.processes.items():
            with contextlib.suppress(OSError, AssertionError):
                os.kill(launch.worker(number), signal.SIGKILL)
            process.kill()
            process.wait()
