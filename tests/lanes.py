"""``make test``: the suite is collected once, and forked workers run the tests in two lanes.

A worker that starts an interpreter, imports torch and collects 3,800 tests costs 12 s of a core.
Here one process does so, and its forks run the tests: two of them, and two more for the tests with
the marker ``waits``, which mostly wait for a time-out or for machines that are lost, and need a
worker but no core. pytest itself reports, counts failures and gives the exit code.

A worker runs the tests of a file in their order, so that a module's fixtures are made once. Where
each file has been begun, a worker takes tests from the end of another worker's file.
"""

from __future__ import annotations

import gc
import os
import pickle
import selectors
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

WORKERS = {"works": 2, "waits": 2}
"""Workers by lane."""
LAST_FOLDERS = ("router", "moe", "corpus")
"""Folders of many short tests: at the end of the run, no worker is left with a long one."""
_LOST = "the worker process of this test died"
_LENGTH = struct.Struct("!I")


def mark_long(config: pytest.Config, items: Sequence[pytest.Item], list_of_tests: Path) -> None:
    """Mark the listed tests as ``long``.

    The list has one test a line, as pytest names the test, from the list's folder on: with its case
    in brackets, or without for all cases. Lines with ``#`` are comments.

    Raises pytest.UsageError for a line that is no test of a file that was collected whole.
    """
    lines = {line for line in list_of_tests.read_text().splitlines() if line[:1] != "#"}
    unknown, files = set(lines), set()
    folder = list_of_tests.parent
    for item in items:
        if not item.path.is_relative_to(folder):
            continue
        file = item.path.relative_to(folder).as_posix()
        with_case = "::".join((file, *item.nodeid.split("::")[1:]))
        without = with_case.partition("[")[0]
        files.add(file)
        if with_case in lines or without in lines:
            item.add_marker("long")
            unknown -= {with_case, without}
    stale = sorted(line for line in unknown if line.partition("::")[0] in files)
    if stale and not any("::" in word for word in config.args):
        raise pytest.UsageError(f"{list_of_tests.name}: no test is named {', '.join(stale)}")


class Channel:
    """Messages between the process that collects and a worker, as pickles."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def send(self, message: Any) -> None:
        """Send a message, unless the other process is gone."""
        data = pickle.dumps(message)
        try:
            self.end.sendall(_LENGTH.pack(len(data)) + data)
        except BrokenPipeError:
            return

    def receive(self) -> Any:
        """The next message; EOFError where the other process is gone."""
        return pickle.loads(self._read(*_LENGTH.unpack(self._read(_LENGTH.size))))

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                more = self.end.recv(size - len(data))
            except ConnectionResetError:
                more = b""
            if not more:
                raise EOFError
            data += more
        return data


class Lane:
    """The tests of a lane that no worker has yet, by file."""

    def __init__(self, items: Sequence[tuple[int, str]]) -> None:
        """``items``: the index and the file of each test, in the order of collection."""
        self.files: dict[str, deque[int]] = {}
        for index, file in items:
            self.files.setdefault(file, deque()).append(index)
        self.unbegun = deque(sorted(self.files, key=lambda file: self._is_last(file)))

    @staticmethod
    def _is_last(file: str) -> bool:
        return any(f"tests/{folder}/" in file for folder in LAST_FOLDERS)

    def take(self, file: str | None) -> tuple[int, str] | None:
        """The next test for a worker whose last test was of ``file``, with the test's file."""
        if file is not None and self.files[file]:
            return self.files[file].popleft(), file
        if self.unbegun:
            file = self.unbegun.popleft()
            return self.files[file].popleft(), file
        file = max(self.files, key=lambda name: len(self.files[name]), default=None)
        if file is None or not self.files[file]:
            return None
        return self.files[file].pop(), file


@dataclass
class Worker:
    """A forked process, as the process that collects sees the worker."""

    pid: int
    channel: Channel
    lane: Lane
    file: str | None = None
    """Of the last test that the worker took."""
    taken: list[int] = field(default_factory=list)
    """The tests that the worker has taken, in order; the last one has perhaps not begun."""
    finished: set[int] = field(default_factory=set)


class Lanes:
    """The plugin: forks the workers after the collection, and hands their reports to pytest."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Start what the workers share, on another core than the collection's."""
        for act in BEFORE_COLLECTION:
            act()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run the collected tests in forked workers."""
        config = session.config
        if session.testsfailed or config.option.collectonly:
            return None
        gc.collect()
        gc.freeze()  # a worker's garbage collector would visit, and copy, all that was imported
        workers = self._start(session)
        try:
            self._serve(session, workers)
        finally:
            for worker in workers:
                worker.channel.end.close()
                os.waitpid(worker.pid, 0)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        return True

    def _start(self, session: pytest.Session) -> list[Worker]:
        by_lane: dict[str, list[tuple[int, str]]] = {name: [] for name in WORKERS}
        for index, item in enumerate(session.items):
            name = "waits" if item.get_closest_marker("waits") else "works"
            by_lane[name].append((index, item.location[0]))
        workers: list[Worker] = []
        for name, items in by_lane.items():
            lane = Lane(items)
            for _ in range(min(WORKERS[name], len(items))):
                here, there = socket.socketpair()
                pid = os.fork()
                if pid == 0:
                    here.close()
                    for other in workers:
                        other.channel.end.close()
                    _work(session, Channel(there), len(workers))
                there.close()
                workers.append(Worker(pid, Channel(here), lane))
        return workers

    def _serve(self, session: pytest.Session, workers: list[Worker]) -> None:
        """Give tests to workers and take reports, until all workers are gone."""
        selector = selectors.DefaultSelector()
        for worker in workers:
            selector.register(worker.channel.end, selectors.EVENT_READ, worker)
        while selector.get_map():
            for key, _ in selector.select():
                worker = key.data
                try:
                    message = worker.channel.receive()
                except EOFError:
                    selector.unregister(worker.channel.end)
                    self._tell_of_lost(session, worker)
                    continue
                self._answer(session, worker, message)

    def _answer(self, session: pytest.Session, worker: Worker, message: tuple[str, Any]) -> None:
        what, value = message
        hook = session.config.hook
        if what == "take":
            stops = session.shouldfail or session.shouldstop
            taken = None if stops else worker.lane.take(worker.file)
            if taken is not None:
                worker.file = taken[1]
                worker.taken.append(taken[0])
            worker.channel.send(None if taken is None else taken[0])
        elif what == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=value)
            hook.pytest_runtest_logreport(report=report)
        else:
            assert what == "finished"
            worker.finished.add(value)

    def _tell_of_lost(self, session: pytest.Session, worker: Worker) -> None:
        """Fail the tests that a worker took and did not finish, for instance because it died."""
        lost = [index for index in worker.taken if index not in worker.finished]
        for index in lost:
            item = session.items[index]
            report = pytest.TestReport(
                item.nodeid, item.location, {}, "failed", _LOST, "call", duration=0.0
            )
            session.config.hook.pytest_runtest_logreport(report=report)


class Reports:
    """In a worker: reports go to the process that collects."""

    def __init__(self, config: pytest.Config, channel: Channel) -> None:
        self.config, self.channel = config, channel

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report."""
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.channel.send(("report", data))


def _work(session: pytest.Session, channel: Channel, number: int) -> None:
    """Run tests as a worker, and end the process."""
    code = 1
    try:
        _prepare(session, channel, number)

        def take() -> int | None:
            channel.send(("take", None))
            index: int | None = channel.receive()
            return index

        index, hook = take(), session.config.hook
        while index is not None:
            following = take()
            item = session.items[index]
            after = None if following is None else session.items[following]
            hook.pytest_runtest_protocol(item=item, nextitem=after)
            channel.send(("finished", index))
            index = following
        code = 0
    except EOFError:
        pass  # the process that collects has gone
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _prepare(session: pytest.Session, channel: Channel, number: int) -> None:
    """Make a fork of the process that collects into a worker."""
    plugins, config = session.config.pluginmanager, session.config
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are shared with the other processes
    capture.start_global_capturing()
    plugins.unregister(name="terminalreporter")
    # Counts and exit codes are of the process that collects.
    plugins.register(Reports(config, channel))
    folders = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / f"worker{number}"
    folders._basetemp.mkdir()
    for act in BEFORE_WORK:
        act()


BEFORE_COLLECTION: list[Callable[[], object]] = []
"""Called once, in the process that collects, before it does so."""
BEFORE_WORK: list[Callable[[], object]] = []
"""Called in each worker before its first test."""


def main(arguments: list[str]) -> int:
    """Run the suite; returns the exit code of ``make test``."""
    # The copy that conftest.py imports, and not this script's own.
    from tests.lanes import Lanes

    return int(pytest.main(arguments, plugins=[Lanes()]))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
