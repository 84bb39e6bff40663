"""A launch of all ranks of a run by one torchrun, watched by the run's log; Linux only."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHANGES = ("start", "regrouped")
"""The events that say which ranks train from now on."""
_POLL_SECONDS = 0.02
_STOP_SECONDS = 300.0
_GRACE_SECONDS = 20.0


class HangError(Exception):
    """A run ended, or took no step, where it should have gone on."""


class Watched:
    """What the log of a running run has said last."""

    def __init__(self, log: Path) -> None:
        self.path, self._read = log, 0
        self.step, self.step_time = 0, 0.0
        """The newest committed step, and the Unix time of its line."""
        self.world, self.change_time = 0, 0.0
        """How many ranks train, and the Unix time of the line that says so."""

    def look(self) -> None:
        """Read the lines that have come."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as log:
            log.seek(self._read)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"] == "step":
            self.step, self.step_time = event["step"], event["time"]
        elif event["event"] in CHANGES:
            self.world, self.change_time = event["world_size"], event["time"]


class Launch:
    """All ranks of a spec, by one torchrun.

    Args:
        spec: the spec's file.
        run: the run's folder.
        world: the number of ranks.
        output: the file for what the ranks print.
        limit_seconds: as long as the run may go without what is waited for.
    """

    def __init__(
        self, spec: Path, run: Path, *, world: int, output: Path, limit_seconds: float
    ) -> None:
        self.run, self.world, self.output, self.limit_seconds = run, world, output, limit_seconds
        self.watched = Watched(run / "log.jsonl")
        self.id = uuid.uuid4().hex
        with output.open("ab") as said:
            self.torchrun = subprocess.Popen(
                [
                    sys.executable, "-m", "torch.distributed.run", "--nnodes=1",
                    f"--nproc-per-node={world}", "--max-restarts=1000000",
                    "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", f"--rdzv-id={self.id}",
                    "--monitor-interval=0.1", "-m", "convoy", "pretrain", str(spec),
                ],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(_STOP_SECONDS)),
                },
            )  # fmt: skip

    def ranks(self) -> dict[int, tuple[int, int]]:
        """Of each rank the process that torchrun has started, and the process that trains, which
        may be another one: with ``elastic.recovery`` ``warm`` or ``heal`` it is forked."""
        processes = {}
        for parent in children(self.torchrun.pid):
            with contextlib.suppress(OSError, StopIteration):
                words = Path(f"/proc/{parent}/environ").read_bytes().split(b"\0")
                rank = int(next(w for w in words if w.startswith(b"RANK=")).partition(b"=")[2])
                forked = [pid for pid in children(parent) if not _is_helper(pid)]
                processes[rank] = parent, max(forked, key=_started, default=parent)
        return processes

    def wait(self, ready: Callable[[], Any], what: str) -> Any:
        """What ``ready`` returns once it is true.

        Raises HangError where the run ends before, or ``limit_seconds`` pass.
        """
        until = time.monotonic() + self.limit_seconds
        while not (value := ready()):
            if self.torchrun.poll() is not None:
                raise HangError(f"the run ended while it was waited for {what}")
            if time.monotonic() > until:
                raise HangError(f"{self.limit_seconds:.0f} s without {what}")
            time.sleep(_POLL_SECONDS)
            self.watched.look()
        return value

    def wait_for_all(self, since: float) -> None:
        """Wait until all ranks have taken a step together after a moment."""
        seen = self.watched

        def ready() -> bool:
            full = seen.world == self.world and seen.change_time > since
            return full and seen.step_time > seen.change_time

        self.wait(ready, "a step of all ranks")

    def stop(self) -> None:
        """SIGTERM: the run commits a checkpoint and ends. Raises HangError where it does not."""
        self.torchrun.send_signal(signal.SIGTERM)
        try:
            self.torchrun.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise HangError(f"{_STOP_SECONDS:.0f} s after SIGTERM the run has not ended") from None
        self.watched.look()

    def leftover(self) -> list[int]:
        """Processes of the launch that outlive torchrun, each of which has had time to end."""
        until = time.monotonic() + _GRACE_SECONDS
        while (left := self._processes()) and time.monotonic() < until:
            time.sleep(0.1)
        return left

    def _processes(self) -> list[int]:
        """The processes that have the launch's id in their environment."""
        left, word = [], f"TORCHELASTIC_RUN_ID={self.id}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if word in (entry / "environ").read_bytes().split(b"\0"):
                        left.append(int(entry.name))
        return left

    def close(self) -> None:
        """Kill all processes that are left."""
        self.torchrun.kill()
        self.torchrun.wait()
        while left := self._processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)


def children(pid: int) -> list[int]:
    """The processes that a process has started and that have not ended."""
    started: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            started += map(int, (task / "children").read_text().split())
    return [child for child in started if is_running(child)]


def is_running(pid: int) -> bool:
    """Whether a process runs: one that has ended may still wait to be read by its parent."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _is_helper(pid: int) -> bool:
    """Whether a process is a writer of checkpoints, or serves the interpreter."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"ckpt.background" in words or b"multiprocessing" in words
    return True


def _started(pid: int) -> tuple[int, int]:
    """Orders processes by when they were started, also those of one tick of the system's clock: a
    process that serves a store is forked just before the one that trains."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]), pid
    return 0, pid
