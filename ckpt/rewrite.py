"""Making one checkpoint of another, part by part: in bounded memory, resumable, by many processes.

A target is cut into parts (objects, files), each written by one process at a time. The first
process keeps a journal of the parts that are durable. After a kill, the same call reads the
journal, reads every part that it lists again and compares, and writes what is left.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import product
from typing import Any, NamedTuple, Protocol

import numpy as np

from ckpt.format import CheckpointError
from parallel.layout import Box

Progress = Callable[[int], None]
"""Called with the count of bytes that have been written since the last call."""
Receipt = dict[str, Any]
"""What is known of a part that is durable, as JSON."""
LEAST_MEMORY = 32 << 20
"""For each process: some chunks of the source and of the target."""
_JOURNAL_SECONDS = 1.0


class Part(NamedTuple):
    """A piece of work: one object or file."""

    key: str
    nbytes: int


class Target(Protocol):
    """What is written. It is pickled to reach other processes."""

    def begin(self) -> dict[str, Receipt]:
        """Make ready, alone; returns the receipts of the parts that an earlier call wrote.

        Raises CheckpointError where the target is there already, or somebody is writing it.
        """
        ...

    def parts(self) -> Sequence[Part]:
        """Every part, in the order in which they are best written."""
        ...

    def check(self, key: str, receipt: Receipt) -> bool:
        """Read a part; whether it is what the receipt says."""
        ...

    def write(self, key: str, slab_bytes: int, progress: Progress) -> Receipt:
        """Write a part, in the place of what an earlier call may have left of it, and make it
        durable. At most a few times ``slab_bytes`` are in memory."""
        ...

    def journal(self, receipts: dict[str, Receipt]) -> None:
        """Add receipts to the journal, durably."""
        ...

    def commit(self, receipts: dict[str, Receipt]) -> None:
        """All parts are durable: make them a whole that others see."""
        ...

    def discard(self) -> None:
        """Remove what was written."""
        ...

    def end(self) -> None:
        """Let others begin."""
        ...


class UnfinishedError(CheckpointError):
    """What is durable is kept: the same call goes on from there."""


def rewrite(
    target: Target, memory: int, workers: int = 1, progress: Progress = lambda _: None
) -> dict[str, Receipt]:
    """Write what is left of ``target`` and commit it; returns the receipts of all parts.

    Args:
        target: what to write; it knows its source.
        memory: bytes that the processes may need together, besides those of their start.
        workers: processes; with 1 the work is done in this one.
        progress: is told of every byte once, also of those that were there already.

    Raises:
        UnfinishedError: where the target cannot be written, or a process was killed; what is
            durable stays for the next call.
        CheckpointError: for anything else, the source's faults among it; what was written is
            removed.
    """
    if memory < workers * LEAST_MEMORY:
        raise CheckpointError(
            f"memory ({memory >> 20} MiB) must be at least {LEAST_MEMORY >> 20} MiB for each of "
            f"{workers} workers"
        )
    slab_bytes = memory // workers // 4
    done = target.begin()
    try:
        parts = list(target.parts())
        if workers == 1:
            receipts = _alone(target, parts, done, slab_bytes, progress)
        else:
            receipts = _together(target, parts, done, slab_bytes, workers, progress)
        target.commit(receipts)
    except UnfinishedError:
        raise
    except CheckpointError:
        target.discard()
        raise
    finally:
        target.end()
    return receipts


def _one_part(
    target: Target, part: Part, receipt: Receipt | None, slab_bytes: int, progress: Progress
) -> tuple[str, Receipt, bool]:
    """Its receipt, and whether it was written now."""
    try:
        if receipt is not None and target.check(part.key, receipt):
            progress(part.nbytes)
            return part.key, receipt, False
        return part.key, target.write(part.key, slab_bytes, progress), True
    except OSError as error:
        raise UnfinishedError(
            f"{error.filename or part.key} cannot be written: {error.strerror}; run it again to "
            f"go on"
        ) from None


class _Journal:
    """Receipts on their way to the target's journal, about one write a second."""

    def __init__(self, target: Target) -> None:
        self.target, self.waiting, self.last = target, dict[str, Receipt](), time.monotonic()

    def add(self, key: str, receipt: Receipt) -> None:
        self.waiting[key] = receipt
        if time.monotonic() - self.last >= _JOURNAL_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self.waiting:
            self.target.journal(self.waiting)
        self.waiting, self.last = {}, time.monotonic()


def _alone(
    target: Target,
    parts: list[Part],
    done: dict[str, Receipt],
    slab_bytes: int,
    progress: Progress,
) -> dict[str, Receipt]:
    receipts, journal = {}, _Journal(target)
    try:
        for part in parts:
            made = _one_part(target, part, done.get(part.key), slab_bytes, progress)
            receipts[part.key] = made[1]
            if made[2]:
                journal.add(*made[:2])
    finally:
        journal.flush()
    return receipts


_worker: dict[str, Any] = {}


def _start_worker(target: Target, slab_bytes: int, written: Any) -> None:
    _worker.update(target=target, slab_bytes=slab_bytes, written=written)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would go on writing, and then wait for ever."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _count(count: int) -> None:
    with _worker["written"].get_lock():
        _worker["written"].value += count


def _work(part: Part, receipt: Receipt | None) -> tuple[str, Receipt, bool]:
    return _one_part(_worker["target"], part, receipt, _worker["slab_bytes"], _count)


def _together(
    target: Target,
    parts: list[Part],
    done: dict[str, Receipt],
    slab_bytes: int,
    workers: int,
    progress: Progress,
) -> dict[str, Receipt]:
    context = mp.get_context("spawn")  # not fork: threads may be running here
    written, told = context.Value("q", 0), 0
    receipts, journal = {}, _Journal(target)
    pool = ProcessPoolExecutor(
        workers, context, initializer=_start_worker, initargs=(target, slab_bytes, written)
    )
    try:
        running: set[Future[tuple[str, Receipt, bool]]] = {
            pool.submit(_work, part, done.get(part.key)) for part in parts
        }
        while running:
            finished, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
            for future in finished:
                key, receipt, new = future.result()
                receipts[key] = receipt
                if new:
                    journal.add(key, receipt)
            now = written.value
            progress(now - told)
            told = now
    except BrokenProcessPool:
        raise UnfinishedError(
            "a worker was killed, perhaps for want of memory; run it again to go on"
        ) from None
    finally:
        journal.flush()
        pool.shutdown(wait=True, cancel_futures=True)
    progress(written.value - told)
    return receipts


def row_major_boxes(shape: tuple[int, ...], itemsize: int, most_bytes: int) -> Iterator[Box]:
    """Boxes that lie end to end in row-major order and make up an array, none above
    ``most_bytes`` but single elements. None where the array has no elements."""
    if math.prod(shape) == 0:
        return
    dim, inner = len(shape), itemsize
    while dim > 0 and inner * shape[dim - 1] <= most_bytes:
        dim -= 1
        inner *= shape[dim]
    if dim == 0:
        yield tuple((0, size) for size in shape)
        return
    cut = dim - 1  # the dim that is taken in runs; those after it are whole
    step = max(1, most_bytes // inner)
    rest = tuple((0, size) for size in shape[dim:])
    for outer in product(*map(range, shape[:cut])):
        for start in range(0, shape[cut], step):
            run = (start, min(start + step, shape[cut]))
            yield (*((i, i + 1) for i in outer), run, *rest)


class Slabs:
    """Reads the boxes of an object's chunks, in row-major order of the chunks, by slabs of many.

    A slab is a run of chunks that make up a box: what it takes of the source is read once, however
    the two grids lie.
    """

    def __init__(
        self,
        read: Callable[[Box], np.ndarray[Any, Any]],
        whole: Box,
        chunk_shape: tuple[int, ...],
        itemsize: int,
        slab_bytes: int,
    ) -> None:
        self.read = read
        grid = tuple(
            -(-(stop - start) // size)
            for (start, stop), size in zip(whole, chunk_shape, strict=True)
        )  # fmt: skip
        chunk_bytes = math.prod(chunk_shape) * itemsize
        # No generator of a method: it would hold this object, and with it a slab, in a circle.
        self._boxes = _of_chunks(row_major_boxes(grid, chunk_bytes, slab_bytes), chunk_shape, whole)
        self._slab: tuple[Box, np.ndarray[Any, Any]] | None = None

    def __call__(self, box: Box) -> np.ndarray[Any, Any]:
        """The numbers of one chunk, which is the next one or in the slab of the last."""
        while self._slab is None or not _inside(box, self._slab[0]):
            self._slab = None  # two slabs are never in memory
            slab = next(self._boxes)
            self._slab = slab, self.read(slab)
        base, values = self._slab
        return values[
            tuple(slice(s - b, e - b) for (s, e), (b, _) in zip(box, base, strict=True))
        ]  # fmt: skip


def _of_chunks(runs: Iterator[Box], chunk_shape: tuple[int, ...], whole: Box) -> Iterator[Box]:
    for run in runs:
        yield tuple(
            (base + first * size, min(base + last * size, stop))
            for (first, last), size, (base, stop) in zip(run, chunk_shape, whole, strict=True)
        )


def _inside(box: Box, outer: Box) -> bool:
    return all(b <= s and e <= f for (s, e), (b, f) in zip(box, outer, strict=True))
