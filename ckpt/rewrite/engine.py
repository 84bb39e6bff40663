"""Making one checkpoint of another, part by part: in bounded memory, resumable, by many processes.

A target is cut into parts (objects, files), each written by one process at a time. The first
process keeps a journal of the parts that are durable. After a kill, the same call reads the journal
and every part that the journal lists, compares, and writes the parts that are left.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import threading
import time
from collections.abc import Generator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from ckpt.errors import CheckpointError
from ckpt.rewrite.target import Part, Progress, Receipt, Target, UnfinishedError

LEAST_MEMORY = 32 << 20
"""For each process: some chunks of the source and of the target."""
_JOURNAL_SECONDS = 1.0


def rewrite(
    target: Target, memory: int, workers: int = 1, progress: Progress = lambda _: None
) -> bool:
    """Write what is left of ``target`` and commit it.

    Returns True, or False where an earlier call had committed the target: then nothing is written.

    Args:
        target: what to write; a target knows its source.
        memory: bytes that all processes together may need, besides what Python itself needs.
        workers: processes; with 1 this process does the work.
        progress: called with the bytes that were written since the last call; the bytes of parts
            that an earlier call wrote count too.

    Raises:
        UnfinishedError: where the target cannot be written, or a process was killed; durable parts
            stay for the next call.
        CheckpointError: for any other fault, such as a damaged source; what was written is removed.
    """
    least = workers * LEAST_MEMORY
    if memory < least:
        share = f", {LEAST_MEMORY >> 20} MiB for each of {workers} workers" if workers > 1 else ""
        raise CheckpointError(
            f"memory ({memory >> 20} MiB) must be at least {least >> 20} MiB{share}"
        )
    slab_bytes = memory // workers // 4
    done = target.begin()
    if done is None:
        return False
    try:
        parts = list(target.parts())
        _check_room(target, sum(part.nbytes for part in parts if part.key not in done))
        if workers == 1:
            made = (_one_part(target, p, done.get(p.key), slab_bytes, progress) for p in parts)
        else:
            made = _together(target, parts, done, slab_bytes, workers, progress)
        target.commit(_journaled(target, made))
    except UnfinishedError:
        raise
    except CheckpointError:
        target.discard()
        raise
    finally:
        target.end()
    return True


def _check_room(target: Target, needed: int) -> None:
    try:
        where, free = target.room()
    except OSError:
        return  # the first write will say what is wrong
    if free is not None and needed > free:
        raise UnfinishedError(
            f"{where} must have room for {needed / 1e9:.3g} GB; it has {free / 1e9:.3g} GB"
        )


def _one_part(
    target: Target, part: Part, receipt: Receipt | None, slab_bytes: int, progress: Progress
) -> tuple[str, Receipt, bool]:
    """The part's key and receipt, and whether this call wrote the part."""
    try:
        if receipt is not None and target.check(part.key, receipt):
            progress(part.nbytes)
            return part.key, receipt, False
        return part.key, target.write(part.key, slab_bytes, progress), True
    except OSError as error:
        raise UnfinishedError(
            f"{error.filename or part.key} cannot be written: {error.strerror}; once it can "
            f"be, the same command goes on"
        ) from None


_Made = Generator[tuple[str, Receipt, bool], None, None]
"""What :func:`_one_part` says of each part, in the order in which parts are durable."""


def _journaled(target: Target, made: _Made) -> dict[str, Receipt]:
    """The receipts of all parts; those of new ones go to the journal, about one write a second, and
    the last ones whatever is raised."""
    receipts, waiting, last = dict[str, Receipt](), dict[str, Receipt](), time.monotonic()
    with contextlib.closing(made):
        try:
            for key, receipt, new in made:
                receipts[key] = receipt
                if new:
                    waiting[key] = receipt
                if waiting and time.monotonic() - last >= _JOURNAL_SECONDS:
                    target.journal(waiting)
                    waiting, last = {}, time.monotonic()
        finally:
            if waiting:
                target.journal(waiting)
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
) -> _Made:
    context = mp.get_context("spawn")  # not fork: threads may be running here
    written, reported = context.Value("q", 0), 0
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
                yield future.result()
            now = written.value
            progress(now - reported)
            reported = now
    except BrokenProcessPool:
        raise UnfinishedError(
            "a worker was killed, perhaps for want of memory; run it again"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    progress(written.value - reported)
