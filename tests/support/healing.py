"""Runs whose replicas are killed, stopped and cut off, for tests and for ``bench.healing``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt import committed_steps, compare, open_store, read_manifest
from parallel import Topology
from tests.support.jobs import data_of, write_spec
from tests.support.processes import children, kill_with_descendants

CHANGES = ("start", "regrouped")
"""The events that say which ranks train from now on."""
ROOT = Path(__file__).resolve().parents[2]


class LogTail:
    """The events of a run's log as they come."""

    def __init__(self, run: Path) -> None:
        self.path, self.events = run / "log.jsonl", list[dict[str, Any]]()
        self._read = 0

    def look(self) -> list[dict[str, Any]]:
        """All events so far."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as log:
            log.seek(self._read)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                self.events.append(json.loads(line))
        return self.events

    def of(self, kind: str, since: float = 0.0) -> list[dict[str, Any]]:
        """The events of a kind that came after a moment."""
        return [e for e in self.look() if e["event"] == kind and e["time"] > since]


def healing_spec(folder: Path, job: Path, parallel: dict[str, Any], **sections: Any) -> Path:
    """A tiny spec whose replicas heal; its losses and digests are those of any layout."""
    folder.mkdir(parents=True, exist_ok=True)
    train = {"steps": 100_000, "timeout_seconds": 60.0, "log_interval_steps": 1, "exact": True}
    given: dict[str, Any] = {
        "train": train | sections.pop("train", {}),
        "eval": {"sequences": 8, "interval_steps": 5},
        "checkpoint": {"interval_steps": 10, "retention": {"keep": 4, "keep_every": 10}},
        "elastic": {"enabled": True, "recovery": "heal"},
    }
    return write_spec(folder, data=data_of(job), parallel=parallel, **given | sections)


class HealingRun:
    """A launch of all ranks on this machine by torchrun."""

    def __init__(self, folder: Path, spec: Path, topology: Topology) -> None:
        self.topology, self.run = topology, folder / "run"
        self.log = LogTail(self.run)
        self.output, self.struck = folder / "output.txt", 0.0
        with self.output.open("wb") as output:
            self.torchrun = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", "--standalone",
                 f"--nproc-per-node={topology.world}", "--max-restarts=10000",
                 "--monitor-interval=0.1", str(ROOT / "tools/pretrain.py"), str(spec)],
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1",
                     "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            )  # fmt: skip

    def trainers(self) -> dict[int, int]:
        """The process that trains as each rank of the launch: those that have been in an epoch."""
        found = {}
        for parent in children(self.torchrun.pid):
            with contextlib.suppress(OSError, StopIteration):
                words = Path(f"/proc/{parent}/environ").read_bytes().split(b"\0")
                rank = next(w for w in words if w.startswith(b"RANK=")).partition(b"=")[2]
                for child in children(parent):
                    if any(_is_writer(process) for process in children(child)):
                        found[int(rank)] = child
        return found

    def replica_of(self, rank: int) -> int:
        """The replica of a rank of the launch."""
        return self.topology.place(rank).dp_replicate

    def wait(self, ready: Callable[[], Any], what: str, seconds: float = 120.0) -> Any:
        """What ``ready`` returns once it is true."""
        until = time.monotonic() + seconds
        while not (value := ready()):
            problem = None
            if self.torchrun.poll() is not None:
                problem = "the run has ended"
            elif time.monotonic() > until:
                problem = f"waited {seconds:.0f} s"
            if problem is not None:
                tail = self.output.read_text(errors="replace")[-4000:]
                raise AssertionError(f"{what}: {problem}\n{tail}")
            time.sleep(0.01)
        return value

    def wait_for_all(self) -> dict[int, int]:
        """Wait until every replica trains; gives the processes."""

        def all_train() -> dict[int, int]:
            newest = [e for e in self.log.look() if e["event"] in CHANGES][-1:]
            full = bool(newest) and newest[0]["world_size"] == self.topology.world
            full = full and newest[0]["time"] > self.struck
            trainers = self.trainers()
            return trainers if full and len(trainers) == self.topology.world else {}

        return self.wait(all_train, "not every replica trains")

    def strike(self, rank: int, number: int = signal.SIGKILL, process: int | None = None) -> float:
        """A signal to the process that trains as a rank, now or as known before; the moment."""
        process = self.trainers()[rank] if process is None else process
        moment = self.struck = time.time()
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
        return moment

    def first_step_after_regroup(self, moment: float) -> float:
        """Seconds from a fault to the first step that was finished after it without its replica."""

        def changes() -> list[dict[str, Any]]:
            return [e for e in self.log.look() if e["event"] in CHANGES and e["time"] > moment]

        change = self.wait(changes, "no replica has left")[0]
        step = self.wait(lambda: self.log.of("step", change["time"]), "no step")[0]
        return step["time"] - moment

    def train_on(self, steps: int) -> None:
        """Wait until every replica trains, and for more than so many steps after the newest."""
        self.wait_for_all()
        newest = self.log.of("step")[-1]["step"]
        self.wait(lambda: self.log.of("step")[-1]["step"] > newest + steps, "no steps")

    def stop(self) -> None:
        """Let the run commit a checkpoint and end."""
        self.torchrun.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.torchrun.wait(60)

    def close(self) -> None:
        """Leave no process behind."""
        kill_with_descendants(self.torchrun.pid)
        self.torchrun.wait()


def _is_writer(process: int) -> bool:
    with contextlib.suppress(OSError):
        return b"ckpt.background.writer" in Path(f"/proc/{process}/cmdline").read_bytes()
    return False


def differences(run: LogTail, reference: LogTail) -> list[str]:
    """In what the steps of a run differ from those of another, by losses and digests."""
    problems = []
    steps = {e["step"]: e for e in reference.of("step")}
    digests = {e["step"]: e for e in reference.of("digest")}
    for event in run.of("step"):
        other = steps.get(event["step"])
        for field in ("loss", "grad_norm", "consumed_samples", "tokens_seen", "data_checksum"):
            if other is not None and event[field] != other[field]:
                problems.append(f"step {event['step']}: {field} {event[field]} {other[field]}")
    for event in run.of("digest"):
        other = digests.get(event["step"])
        for field in event.keys() - {"event", "time", "step"}:
            if other is not None and event[field] != other[field]:
                problems.append(f"step {event['step']}: {field} differs")
    return problems


def lost_or_repeated(run: LogTail) -> list[int]:
    """Steps that the log lacks, or has twice though no epoch began with a checkpoint between."""
    wrong, expected = [], 1
    for event in run.look():
        if event["event"] == "start":
            expected = event["step"] + 1
        elif event["event"] == "step":
            if event["step"] != expected:
                wrong.append(event["step"])
            expected = event["step"] + 1
    return wrong


def arrays_in_common(run: Path, reference: Path) -> dict[str, str]:
    """How the arrays of the newest checkpoint that two runs have in common compare, by name, those
    of random numbers left out; empty without such a checkpoint."""
    stores = [open_store(folder / "checkpoints") for folder in (run, reference)]
    common = set(committed_steps(stores[0])) & set(committed_steps(stores[1]))
    if not common:
        return {}
    manifests = [read_manifest(store, max(common)) for store in stores]
    arrays = compare(stores[0], manifests[0], stores[1], manifests[1])
    return {array.name: array.what for array in arrays if not array.name.startswith("rng/")}
