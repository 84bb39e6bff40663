"""Parts made by several processes, or by this one."""

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
from typing import Any

from pretrain.data.parts import PartCounts, PartSettings, PartWriter
from pretrain.data.unit import Unit
from pretrain.errors import InputError

Work = Sequence[tuple[int, Unit]]
_ROOT = Path(__file__).resolve().parents[2]


def make_parts(
    work: Work, settings: PartSettings, processes: int, done: Callable[[int, PartCounts], None]
) -> None:
    """Make the parts of all units.

    Args:
        work: units with their numbers.
        settings: of the parts.
        processes: how many work at a time; with one, this process does.
        done: told of each part, in any order, in this thread.

    Raises InputError where a unit cannot be read or a process is lost, and OSError where a part
    cannot be written.
    """
    processes = min(processes, len(work))
    if processes <= 1:
        writer = PartWriter(settings) if work else None
        for number, unit in work:
            assert writer is not None
            done(number, writer.make(number, unit))
        return
    path = Path(settings.folder) / "settings.json"
    path.write_text(json.dumps(asdict(settings)))
    with _Pool(path, processes) as pool:
        for number, answer in pool.answers(work):
            if "error" in answer:
                raise _as_error(answer)
            done(number, PartCounts(**answer))


def _as_error(answer: dict[str, Any]) -> Exception:
    text, number = str(answer["error"]), answer.get("errno")
    if isinstance(number, int) and number:
        return OSError(number, os.strerror(number), text.partition(": ")[2])
    return InputError(text)


class _Pool:
    """Processes of ``pretrain.data.worker``, each with a thread that gives it units."""

    def __init__(self, settings: Path, processes: int) -> None:
        command = [sys.executable, "-m", "pretrain.data.worker", str(settings)]
        env = dict(os.environ)
        env["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [env.get("PYTHONPATH")])])
        env["TOKENIZERS_PARALLELISM"] = "false"  # a process for each core needs no threads
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

    def answers(self, work: Work) -> Iterator[tuple[int, dict[str, Any]]]:
        """The answer for each unit, as they come."""
        waiting: queue.SimpleQueue[tuple[int, Unit]] = queue.SimpleQueue()
        answered: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        for each in work:
            waiting.put(each)

        def feed(worker: subprocess.Popen[str]) -> None:
            assert worker.stdin is not None
            assert worker.stdout is not None
            while True:
                try:
                    number, unit = waiting.get_nowait()
                except queue.Empty:
                    return
                line = ""
                with contextlib.suppress(OSError, ValueError):
                    worker.stdin.write(json.dumps([number, unit.as_json()]) + "\n")
                    worker.stdin.flush()
                    line = worker.stdout.readline()
                if not line:
                    answered.put((number, {"error": _lost(worker)}))
                    return
                answered.put((number, json.loads(line)))

        for worker in self.workers:
            threading.Thread(target=feed, args=(worker,), daemon=True).start()
        for _ in work:
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
