"""Parts and tokenizers made by other processes, or by this one.

The tokenizer's library does not return for a signal: a process that waits for others does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from corpus.documents import Unit
from corpus.errors import InputError
from corpus.prepare.parts import PartCounts, PartSettings, PartWriter
from corpus.tokenizer import TokenizerSettings, tokenizer_of_units

Work = Sequence[tuple[int, Unit]]
_Answer = dict[str, Any]
_Name = TypeVar("_Name", int, str)
"""What a request begins with: the number of a part, or the path of a tokenizer."""
_ROOT = Path(__file__).resolve().parents[2]
_ALONE_BYTES = 1 << 20
"""A source that may have more text is read and tokenized by other processes."""
_EXPANSION = {".gz": 200, ".zst": 200, ".parquet": 20}
"""Compressed files seldom have more times their size as text."""


def works_alone(units: Sequence[Unit]) -> bool:
    """Whether the text is so little that a signal may wait until it is tokenized."""
    sizes = (unit.bytes * _EXPANSION.get(Path(unit.files[0].path).suffix, 1) for unit in units)
    return sum(sizes) <= _ALONE_BYTES


def make_tokenizer(units: Sequence[Unit], settings: TokenizerSettings, folder: Path) -> Tokenizer:
    """Train a tokenizer on the texts of units, with drafts in ``folder``.

    Raises InputError where a unit cannot be read, and OSError where a draft cannot be written.
    """
    if works_alone(units):
        return tokenizer_of_units(units, settings)
    draft = folder / "tokenizer.draft"
    work = [(str(draft), [unit.as_json() for unit in units])]
    with _Pool({"tokenizer": asdict(settings)}, folder, 1) as pool:
        for _, answer in pool.answers(work):
            if "error" in answer:
                raise _as_error(answer)
    return Tokenizer.from_str(draft.read_text(encoding="utf-8"))


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
    requests = [(number, unit.as_json()) for number, unit in work]
    with _Pool({"parts": asdict(settings)}, Path(settings.folder).parent, processes) as pool:
        for number, answer in pool.answers(requests):
            if "error" in answer:
                raise _as_error(answer)
            done(number, PartCounts(**answer))


def _as_error(answer: dict[str, Any]) -> Exception:
    text, number = str(answer["error"]), answer.get("errno")
    if isinstance(number, int) and number:
        return OSError(number, os.strerror(number), text.partition(": ")[2])
    return InputError(text)


class _Pool:
    """Processes of ``corpus.prepare.worker``, each with a thread that gives it requests."""

    def __init__(self, settings: dict[str, Any], folder: Path, processes: int) -> None:
        path = folder / "settings.json"
        path.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "corpus.prepare.worker", str(path)]
        env = dict(os.environ)
        env["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [env.get("PYTHONPATH")])])
        if processes > 1:  # a process for each core needs no threads
            env["TOKENIZERS_PARALLELISM"] = "false"
        self.workers = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=env,
            )
            for _ in range(processes)
        ]

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.wait()
            for stream in (worker.stdin, worker.stdout):
                assert stream is not None
                with contextlib.suppress(OSError):
                    stream.close()

    def answers(self, requests: Sequence[tuple[_Name, Any]]) -> Iterator[tuple[_Name, _Answer]]:
        """The first value of each request and the answer, as they come."""
        waiting: queue.SimpleQueue[tuple[_Name, Any]] = queue.SimpleQueue()
        answered: queue.SimpleQueue[tuple[_Name, _Answer]] = queue.SimpleQueue()
        for request in requests:
            waiting.put(request)

        def feed(worker: subprocess.Popen[str]) -> None:
            assert worker.stdin is not None
            assert worker.stdout is not None
            while True:
                try:
                    request = waiting.get_nowait()
                except queue.Empty:
                    return
                line = ""
                with contextlib.suppress(OSError, ValueError):
                    worker.stdin.write(json.dumps(request) + "\n")
                    worker.stdin.flush()
                    line = worker.stdout.readline()
                if not line:
                    answered.put((request[0], {"error": _lost(worker)}))
                    return
                answered.put((request[0], json.loads(line)))

        for worker in self.workers:
            threading.Thread(target=feed, args=(worker,), daemon=True).start()
        for _ in requests:
            yield answered.get()


def _lost(worker: subprocess.Popen[str]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.wait(5)
    return (
        f"a process that prepares the corpus ended with {worker.returncode}; the same command goes "
        f"on with the parts that are done"
    )


def is_full_disk(error: OSError) -> bool:
    """Whether a write failed for lack of room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
