"""Saving and loading a training state: Convoy, its peers, and the disk's and the memory's limits.

    python -m bench.checkpoint [--quick] [--json FILE] [--planning]

The state is a MoE model of 24 layers of 8 experts with AdamW's moments, 1 GiB in float32 (64 MiB
with --quick), whole on 1 rank or cut in half over 2, which are processes on gloo. In the cases
named ``mixed`` it is 10 layers of 20 tensors, half of them small (0.44 GiB; 3 layers with --quick).
``convoy`` stacks the layers, and ``convoy state dict`` has each tensor by its own name. The places
are a folder on the disk (CONVOY_BENCH_DIR, build/bench otherwise) and one on tmpfs.

- ``save_seconds``: from a barrier until everything of the last rank is durable. ``limit`` is the
  faster of ``raw buffered`` and ``raw direct``: one file a rank of the same bytes, written in one
  go from memory that is laid out already, past the page cache or not, and synced.
- ``load_seconds``: until the numbers are in the job's own tensors, ``warm`` from the page cache and
  ``cold`` without it. ``limit`` is the fastest raw read of the same bytes into memory that is there
  already: by 1 and 2 threads, and past the page cache where it is cold.
- ``stall_seconds``: how long an async save keeps a training step from changing the state. ``limit``
  is one copy of the same bytes into memory that is there already.

Before anything is timed each subject loads what it saved into tensors of zeros, and every bit must
be right, or the bench stops. With ``--planning`` it is bench/planning.py that runs.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from bench import planning
from bench.harness import Row, arguments, finish
from bench.savers import Background, Subject, empty, installed_subjects, sync
from bench.state import Sizes, State

ROOT = Path(__file__).resolve().parent.parent
SIZES = Sizes(layers=24, d_model=256, d_ff=512, experts=8, vocab=16384)
MIXED, QUICK_MIXED = 10, 3  # layers
QUICK = Sizes(layers=4, d_model=128, d_ff=384, experts=8, vocab=2048)
BLOCK = 4 << 20
HUGE = 2 << 20
Times = dict[tuple[str, str], list[float]]
"""By metric and subject."""
Acts = dict[str, Callable[[Path], object]]
"""By subject; each is given its folder."""


@dataclass(frozen=True)
class Case:
    """Where, and on how many ranks."""

    place: str
    folder: Path
    ranks: int
    mixed: bool = False

    @property
    def name(self) -> str:
        """For the table."""
        name = f"{self.place}, {self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return f"mixed, {name}" if self.mixed else name


def huge(count: int) -> np.ndarray[Any, Any]:
    """Memory of its own in pages of 2 MiB where the system has them: what a device likes best."""
    memory = mmap.mmap(-1, count + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    found = np.frombuffer(memory, np.uint8)
    start = -found.ctypes.data % HUGE
    found = found[start : start + count]
    found[:] = 1
    return found


class Raw:
    """The limits: one file of a rank's bytes, and one copy of them."""

    def __init__(self, state: State) -> None:
        self.rank, self.bytes = state.rank, -(-state.bytes // 4096) * 4096
        self.memory, self.copied = huge(self.bytes), huge(self.bytes)
        self.memory[:] = np.random.default_rng(state.rank).integers(0, 256, self.bytes, np.uint8)

    def write(self, folder: Path, flags: int) -> None:
        """In one go, and synced."""
        handle = os.open(folder / f"raw-{self.rank}", os.O_WRONLY | os.O_CREAT | flags, 0o644)
        rest = self.memory.data
        while rest:  # a write is of 2 GiB at most
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
        os.close(handle)
        sync(folder)

    def read(self, folder: Path, threads: int, flags: int) -> None:
        """Into memory that is there already."""
        handle = os.open(folder / f"raw-{self.rank}", os.O_RDONLY | flags)
        rest, block = self.copied.data, 64 << 20 if flags else BLOCK

        def part(number: int) -> None:
            # Threads have a stretch each, as those that read files of their own have.
            share = -(-self.bytes // threads // block) * block
            for at in range(number * share, min((number + 1) * share, self.bytes), block):
                stop = min(at + block, (number + 1) * share, self.bytes)
                while at < stop:
                    at += os.preadv(handle, [rest[at:stop]], at)

        if threads == 1:
            part(0)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(part, range(threads)))
        os.close(handle)

    def copy(self) -> None:
        """In memory, with torch's threads."""
        torch.from_numpy(self.copied).copy_(torch.from_numpy(self.memory))


def files_below(folder: Path) -> list[Path]:
    return [Path(where, name) for where, _, files in os.walk(folder) for name in files]


def warm_up(folder: Path) -> None:
    """Have all of a subject's files in the page cache."""
    room = bytearray(BLOCK)
    for path in files_below(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(room):
                pass


def cool_down(folder: Path) -> bool:
    """Have none of them there; False where the system keeps them or does not say."""
    handles = [os.open(path, os.O_RDONLY) for path in files_below(folder)]
    try:
        for _ in range(3):  # pages that were touched a moment ago may need asking twice
            for handle in handles:
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            if not any(map(_in_memory, handles)):
                return True
        return False
    finally:
        for handle in handles:
            os.close(handle)


def _in_memory(handle: int) -> bool:
    """Whether some of a file is, or may be, in the page cache."""
    size = os.fstat(handle).st_size
    for at in range(0, size, max(1, size // 8)):
        try:  # only what is in memory is read so
            os.preadv(handle, [bytearray(1)], at, os.RWF_NOWAIT)
        except BlockingIOError:
            continue
        except OSError:
            pass
        return True
    return False


class Rank:
    """One process of a case: takes every subject's turn, in the same order as the others."""

    def __init__(self, case: Case, rank: int, sizes: Sizes) -> None:
        self.case, self.rank = case, rank
        layers = MIXED if sizes == SIZES else QUICK_MIXED
        self.state = (
            State.mixed(layers, rank, case.ranks)
            if case.mixed
            else State.random(sizes, rank, case.ranks)
        )
        self.subjects: dict[str, Subject] = installed_subjects(self.state)
        self.raw, self.times = Raw(self.state), Times()
        self.kept: set[str] = set()

    def folder(self, name: str) -> Path:
        """Of one subject."""
        return self.case.folder / name.replace(" ", "-")

    def check(self, name: str, subject: Subject) -> None:
        """Raises RuntimeError where a subject does not read what it wrote, bit by bit."""
        wanted = {key: tensor.clone() for key, tensor in self.state.tensors.items()}
        self._anew(name)
        subject.save(self.folder(name))
        dist.barrier()
        for tensor in self.state.tensors.values():
            tensor.zero_()
        subject.load(self.folder(name))
        for key, tensor in self.state.tensors.items():
            if not torch.equal(tensor.view(torch.int32), wanted[key].view(torch.int32)):
                raise RuntimeError(f"{name} does not read what it wrote: {key} differs")

    def run(self, samples: int) -> None:
        """All rounds; the first does not count."""
        for name, subject in self.subjects.items():
            self.check(name, subject)
            if isinstance(subject, Background):
                self._anew(name)  # nothing is loaded from there, and tmpfs is memory
        # On tmpfs there is nothing but the page cache: nothing to go past, and nothing cold.
        on_disk = self.case.place == "disk"
        ways = {"raw buffered": 0} | ({"raw direct": os.O_DIRECT} if on_disk else {})
        saves: Acts = {name: partial(self.raw.write, flags=flags) for name, flags in ways.items()}
        loads: Acts = {
            f"raw {threads} threads": partial(self.raw.read, threads=threads, flags=0)
            for threads in (1, 2)
        }
        cold: Acts = {
            f"raw direct {threads} threads": partial(
                self.raw.read, threads=threads, flags=os.O_DIRECT
            )
            for threads in (1, 2)
        }
        # An async save is timed with its stall, and its files are as those of its sync one.
        sync_ones = {n: s for n, s in self.subjects.items() if not isinstance(s, Background)}
        saves |= {name: subject.save for name, subject in sync_ones.items()}
        loads |= {name: subject.load for name, subject in sync_ones.items()}
        for turn in range(samples + 1):
            self._saves(turn, saves)
            self._loads(turn, "load_seconds warm", loads)
            if on_disk:
                self._loads(turn, "load_seconds cold", loads | cold)
            self._stalls(turn)

    def _saves(self, turn: int, saves: Acts) -> None:
        for name in _shuffled(turn, saves):
            self._anew(name)
            self._time(turn, "save_seconds", name, partial(saves[name], self.folder(name)))

    def _loads(self, turn: int, metric: str, loads: Acts) -> None:
        for name in _shuffled(turn, loads):
            folder = self.folder("raw buffered" if name.startswith("raw") else name)
            if self.rank == 0 and metric.endswith("cold"):
                if not cool_down(folder):
                    self.kept.add(name)
            elif self.rank == 0:
                warm_up(folder)
            self._time(turn, metric, name, partial(loads[name], folder))

    def _stalls(self, turn: int) -> None:
        stalls: dict[str, Callable[[], Any]] = {"limit": self.raw.copy} | {
            name: partial(subject.begin, self.folder(name))
            for name, subject in self.subjects.items()
            if isinstance(subject, Background)
        }
        for name in _shuffled(turn, stalls):
            self._anew(name)
            began = time.perf_counter()
            finish_it = self._time(turn, "stall_seconds", name, stalls[name])
            if finish_it is not None:
                finish_it()
                dist.barrier()
                if turn:
                    self._note("save_seconds", name, time.perf_counter() - began)
                self._anew(name)

    def _time(self, turn: int, metric: str, name: str, act: Callable[[], Any]) -> Any:
        dist.barrier()
        began = time.perf_counter()
        result = act()
        dist.barrier()
        if turn:
            self._note(metric, name, time.perf_counter() - began)
        return result

    def _note(self, metric: str, name: str, seconds: float) -> None:
        self.times.setdefault((metric, name), []).append(seconds)

    def _anew(self, name: str) -> None:
        """An empty folder, and nothing left to write from what was there before."""
        dist.barrier()
        if self.rank == 0:
            empty(self.folder(name))
            os.sync()
        dist.barrier()


def _shuffled(turn: int, subjects: dict[str, Any]) -> list[str]:
    return random.Random(turn).sample(list(subjects), len(subjects))  # alike on every rank


def on_rank(case: Case, rank: int, port: int, sizes: Sizes, samples: int, out: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank),
                      WORLD_SIZE=str(case.ranks), TORCHELASTIC_USE_AGENT_STORE="True")  # fmt: skip
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // case.ranks))
    dist.init_process_group("gloo", rank=rank, world_size=case.ranks)
    mine = Rank(case, rank, sizes)
    mine.run(samples)
    if rank == 0:
        out.put((mine.times, mine.kept))
    dist.barrier()
    dist.destroy_process_group()


def measure(case: Case, sizes: Sizes, samples: int) -> tuple[Times, set[str]]:
    """Times of every subject, and those whose files the page cache did not let go of."""
    context = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    out = context.Queue()
    given = store.port, sizes, samples, out
    ranks = [context.Process(target=on_rank, args=(case, r, *given)) for r in range(case.ranks)]
    empty(case.folder)
    for process in ranks:
        process.start()
    try:
        while out.empty():
            if codes := [process.exitcode for process in ranks if process.exitcode]:
                raise SystemExit(f"{case.name}: a rank ended with exit code {codes[0]}")
            time.sleep(0.1)
        found: tuple[Times, set[str]] = out.get()
        return found
    finally:
        for process in ranks:
            process.join(timeout=30)
            process.kill()
        empty(case.folder)
        case.folder.rmdir()


def rows_of(case: Case, times: Times) -> list[Row]:
    """Shares of the limit: the fastest raw way of each metric."""
    medians = {key: statistics.median(values) for key, values in times.items()}
    rows = []
    for metric in dict.fromkeys(metric for metric, _ in medians):
        raw = [name for m, name in medians if m == metric and name.startswith(("raw", "limit"))]
        best = min(raw, key=lambda name: medians[metric, name])
        limit = medians[metric, best]
        field, _, how = metric.partition(" ")
        label = f"{case.name}, {how or field.removesuffix('_seconds')}".replace(
            ", warm", ", load warm").replace(", cold", ", load cold")  # fmt: skip
        if best != "limit":
            rows.append(Row(label, "limit", field, limit, "s", 1.0, times[metric, best]))
        rows += [
            Row(label, name, field, value, "s", limit / value, times[metric, name])
            for (m, name), value in medians.items()
            if m == metric
        ]
    return rows


def cases(only: str, most_ranks: int) -> Sequence[Case]:
    disk = Path(os.environ.get("CONVOY_BENCH_DIR", ROOT / "build" / "bench"))
    places = {"disk": disk, "tmpfs": Path("/dev/shm")}
    found = [
        Case(place, folder / f"convoy-bench-{os.getpid()}", ranks, mixed)
        for mixed in (False, True)
        for ranks in range(1, most_ranks + 1)
        for place, folder in places.items()
    ]
    return [case for case in found if only in case.name]


def main() -> None:
    plan = "--planning" in sys.argv
    sys.argv = [a for a in sys.argv if a != "--planning"]
    args = arguments(__doc__ or "")
    if plan:
        planning.run(args)
        return
    sizes, samples = (QUICK, 7) if args.quick else (SIZES, args.samples)
    rows = []
    for case in cases(args.only, 1 if args.quick else 2):
        times, kept = measure(case, sizes, samples)
        if kept:
            names = ", ".join(sorted(kept))
            print(f"{case.name}: the page cache kept some of the files of {names}: not quite cold")
        rows += rows_of(case, times)
    packages = ["torch", "numpy", "crc32c", "safetensors", "tensorstore", "orbax-checkpoint", "jax"]
    finish("checkpoint", rows, packages, args.json)


if __name__ == "__main__":
    main()
