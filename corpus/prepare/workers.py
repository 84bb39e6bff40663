"""Parts and tokenizers made by other processes, or by this one.

The tokenizer's library does not return for a signal: a process that waits for others does.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from corpus.config import DataConfig
from corpus.documents import Unit
from corpus.errors import InputError
from corpus.prepare.parts import PartCounts, PartSettings, PartWriter
from corpus.tokenizer import tokenizer_of_units

Work = Sequence[tuple[int, Unit]]
_ALONE_BYTES = 1 << 20
"""A source that may have more text is read and tokenized by other processes."""
_EXPANSION = {".gz": 200, ".zst": 200, ".parquet": 20}
"""Compressed files seldom have more times their size as text."""


def works_alone(units: Sequence[Unit]) -> bool:
    """Whether the text is so little that a signal may wait until it is tokenized."""
    sizes = (unit.bytes * _EXPANSION.get(Path(unit.files[0].path).suffix, 1) for unit in units)
    return sum(sizes) <= _ALONE_BYTES


def make_tokenizer(units: Sequence[Unit], data: DataConfig, vocab_size: int) -> Tokenizer:
    """Train a tokenizer on the texts of units.

    Raises InputError where a unit cannot be read or the process is lost.
    """
    if works_alone(units):
        return tokenizer_of_units(units, data, vocab_size)
    with _processes(1, None) as pool:
        return Tokenizer.from_str(pool.submit(_train_tokenizer, units, data, vocab_size).result())


def make_parts(
    work: Work, settings: PartSettings, processes: int, done: Callable[[int, PartCounts], None]
) -> None:
    """Make the parts of all units.

    Args:
        work: units with their numbers.
        settings: of the parts.
        processes: how many work at a time; with one, this process does where the text is little.
        done: told of each part, in any order, in this thread.

    Raises InputError where a unit cannot be read or a process is lost, and OSError where a part
    cannot be written.
    """
    processes = min(processes, len(work))
    if processes <= 1 and works_alone([unit for _, unit in work]):
        writer = PartWriter(settings) if work else None
        for number, unit in work:
            assert writer is not None
            done(number, writer.make(number, unit))
        return
    with _processes(processes, settings) as pool:
        numbers = {pool.submit(_make_part, number, unit): number for number, unit in work}
        for future in as_completed(numbers):
            done(numbers.pop(future), future.result())


class _Process(SpawnProcess):
    def start(self) -> None:
        """Start the process. A signal waits until that is done: one that came in between would
        leave a process that nobody knows of, and that ends with a traceback."""
        with _signals_wait():
            super().start()


@contextmanager
def _signals_wait() -> Iterator[None]:
    """SIGINT and SIGTERM that come within are handled at the end."""
    if threading.current_thread() is not threading.main_thread():  # has no signals
        yield
        return
    received: list[int] = []
    former = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            former[number] = signal.signal(number, lambda number, _: received.append(number))
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        for late in received:
            signal.raise_signal(late)


class _Context(SpawnContext):
    """Spawned processes, with a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[SpawnProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:  # type: ignore[override]
        process = _Process(*args, **kwargs)
        self.processes.append(process)
        return process


@contextmanager
def _processes(count: int, settings: PartSettings | None) -> Iterator[Executor]:
    """Processes that an exception kills in the middle of a request: an executor alone would wait
    for what they do. Raises InputError where a process is lost."""
    context = _Context()
    try:
        with ProcessPoolExecutor(count, context, _begin, (count, settings)) as pool:
            try:
                yield pool
            except BrokenProcessPool:
                raise  # the executor ends the other processes, and waits for all
            except BaseException:
                for process in context.processes:
                    if process.pid is not None:  # it was started
                        process.kill()
                raise
    except BrokenProcessPool:
        raise InputError(
            f"a process that prepares the corpus ended with {_exit_code(context.processes)}; the "
            f"same command goes on with the parts that are done"
        ) from None


def _exit_code(processes: Sequence[SpawnProcess]) -> int | None:
    """That of the process that was lost: the executor sends SIGTERM to the others."""
    codes = [process.exitcode for process in processes]
    return next((code for code in codes if code not in (None, 0, -signal.SIGTERM)), codes[0])


# ------------------------------------------------------------------------------------------------
# In the processes.

_writers: list[PartWriter] = []
"""The writer of this process, where it makes parts."""


def _begin(count: int, settings: PartSettings | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the preparation
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if count > 1:  # a process for each core needs no threads
        os.environ.update(TOKENIZERS_PARALLELISM="false")
    if settings is not None:
        _writers.append(PartWriter(settings))


def _end_with_parent() -> None:
    """A process outlives no preparation, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _train_tokenizer(units: Sequence[Unit], data: DataConfig, vocab_size: int) -> str:
    return tokenizer_of_units(units, data, vocab_size).to_str()


def _make_part(number: int, unit: Unit) -> PartCounts:
    return _writers[0].make(number, unit)


def is_full_disk(error: OSError) -> bool:
    """Whether a write failed for lack of room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
