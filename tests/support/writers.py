"""Writer processes of checkpoints that fork from one server.

Every rank of every run of the tests has a writer process, and its interpreter would take longer to
start than the run takes to write. :func:`serve_writers` is called in the process of the tests, and
:func:`use_served_writers` by :mod:`tests.support.preload` for their ranks. Runs that ``torchrun``
or a command starts have writer processes as the product starts them, and so have the tests with
:func:`own_writers`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import types
from collections.abc import Iterator

from ckpt.background import checkpointer
from tests.support.forked import Server

_ADDRESS = "CONVOY_TEST_WRITERS"
_MODULE = "ckpt.background.writer"
"""Also a word of the server's command line: only a writer process is asked to leave a lock."""
_server: Server | None = None


def serve_writers() -> Server:
    """In the process of the tests: let its writer processes, and those of its ranks, be forks of
    the server that is returned, which starts with the first rank or writer process."""
    global _server
    _server = _use(Server([_MODULE], words=[_MODULE]))
    os.environ[_ADDRESS] = _server.address
    return _server


def end_serving() -> None:
    """In the process of the tests: end its server."""
    if _server is not None:
        _server.close()


def start_serving() -> None:
    """Before ranks start: start the server of the tests' process, if it has one."""
    if _server is not None:
        _server.start()


def use_served_writers() -> None:
    """In the process that ranks fork from: do the same, with the server of the tests' process."""
    if _ADDRESS in os.environ:
        _use(Server([_MODULE], os.environ[_ADDRESS]))


def _use(server: Server) -> Server:
    stand_in = types.SimpleNamespace(DEVNULL=subprocess.DEVNULL, Popen=server.popen)
    checkpointer.subprocess = stand_in  # type: ignore[assignment]
    return server


@contextlib.contextmanager
def own_writers() -> Iterator[None]:
    """Within: each writer process has an interpreter of its own, as in the product."""
    forked = checkpointer.subprocess
    checkpointer.subprocess = subprocess
    try:
        yield
    finally:
        checkpointer.subprocess = forked
