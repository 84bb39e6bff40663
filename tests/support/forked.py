"""Python programs that fork from a process which has imported what they need.

A new interpreter that imports torch takes three seconds of a core, and a fork of one that has done
so takes 20 ms. A :class:`Server` imports modules once; ``popen`` is called as
:class:`subprocess.Popen` is and returns a :class:`Program` that is used like one. The program has
its own command line, environment, folder, file descriptors and session. It is a child of the
server, and not of the caller; ``/proc`` shows the server's command line.

Programs whose start is what a test is about are started by :mod:`subprocess`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_STANDARD = (0, 1, 2)
_AT_A_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "MKL_")
"""What these variables say is read when an interpreter starts: a fork would not obey."""


class Program:
    """A program that a server has forked, used like :class:`subprocess.Popen`."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection

    def poll(self) -> int | None:
        """The exit code, or None while the program runs; a signal that ended it is negative."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired where the program still runs."""
        if self.returncode is None:
            self._connection.settimeout(timeout if timeout is None else max(timeout, 1e-6))
            try:
                data = self._connection.recv(4)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(f"program {self.pid}", timeout or 0.0) from None
            assert data, f"the server that started program {self.pid} is gone"
            self.returncode = int.from_bytes(data, "big", signed=True)
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the program, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the program now."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask the program to end."""
        self.send_signal(signal.SIGTERM)

    def __del__(self) -> None:
        self._connection.close()


class Server:
    """A process that imports modules once, and forks programs.

    Args:
        modules: the modules.
        address: where a server listens that another process starts; without it, this object
            starts one with the first program.
        words: further words of the server's command line, which its programs have too.
    """

    def __init__(
        self, modules: Sequence[str], address: str | None = None, words: Sequence[str] = ()
    ) -> None:
        self.modules, self.words = list(modules), list(words)
        self._starts = address is None
        self.address = address or f"{tempfile.mkdtemp(prefix='forked-')}/socket"
        self._environment = _read_at_a_start(os.environ)
        self._limits = _limits()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, unless it runs; it ends with this process."""
        if self._process is not None or not self._starts:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, self.address, ",".join(self.modules), *self.words],
            stdin=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )

    def close(self) -> None:
        """End the server. Its programs go on."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
        if self._starts:
            shutil.rmtree(Path(self.address).parent, ignore_errors=True)

    def forks(self, environment: Mapping[str, str]) -> bool:
        """Whether a program that is forked is as one that is started anew."""
        return _read_at_a_start(environment) == self._environment and _limits() == self._limits

    def popen(
        self,
        arguments: Sequence[str],
        *,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> Program | subprocess.Popen[bytes]:
        """Start a program; ``arguments`` begin with this interpreter.

        A program that must read its environment when its interpreter starts, or that would have
        other limits than the server, gets an interpreter of its own.
        """
        environment = dict(os.environ if env is None else env)
        if not self.forks(environment):
            return subprocess.Popen(
                arguments, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=pass_fds,
                start_new_session=start_new_session, env=environment, cwd=cwd,
            )  # fmt: skip
        assert arguments[0] == sys.executable, arguments
        with contextlib.ExitStack() as opened:
            handles = []
            for number, stream in zip(_STANDARD, (stdin, stdout, stderr), strict=True):
                if stream == subprocess.DEVNULL:
                    stream = opened.enter_context(Path(os.devnull).open("r+b"))
                elif stream == subprocess.STDOUT:
                    stream = handles[1]
                stream = number if stream is None else stream
                handles.append(stream if isinstance(stream, int) else stream.fileno())
            request = {
                "arguments": list(arguments[1:]),
                "environment": environment,
                "cwd": os.fspath(cwd or Path.cwd()),
                "umask": _umask(),
                "session": start_new_session,
                "handles": [*_STANDARD, *pass_fds],
            }
            return self._send(request, [*handles, *pass_fds])

    def _send(self, request: dict[str, Any], handles: list[int]) -> Program:
        self.start()
        connection = socket.socket(socket.AF_UNIX)
        try:
            self._connect(connection)
            data = json.dumps(request).encode()
            socket.send_fds(connection, [len(data).to_bytes(4, "big")], handles)
            connection.sendall(data)
            pid = connection.recv(4)
            assert pid, "the server of programs is gone"
            return Program(int.from_bytes(pid, "big"), connection)
        except BaseException:
            connection.close()
            raise

    def _connect(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + 120
        while True:
            try:
                connection.connect(self.address)
                return
            except (FileNotFoundError, ConnectionRefusedError):
                assert time.monotonic() < deadline, "the server of programs does not start"
                time.sleep(0.01)

    def run(
        self,
        arguments: Sequence[str],
        *,
        timeout: float,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """As :func:`subprocess.run` with ``capture_output`` and ``text``."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            program = self.popen(
                arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=cwd, env=env
            )
            try:
                code = program.wait(timeout)
            finally:
                program.kill()
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


def _read_at_a_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_AT_A_START)}


def _limits() -> list[tuple[int, int]]:
    numbers = {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    return [resource.getrlimit(number) for number in sorted(numbers)]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class _Forks:
    """The server's side."""

    def __init__(self, address: str) -> None:
        self.running: dict[int, socket.socket] = {}
        self.listener = socket.socket(socket.AF_UNIX)
        draft = f"{address}.new"  # nobody connects before the server listens
        self.listener.bind(draft)
        self.listener.listen(128)
        Path(draft).rename(address)
        self.ended, wakes = os.pipe()
        for handle in (self.ended, wakes):
            os.set_blocking(handle, False)
        self.wakes = wakes
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)

    def next_program(self) -> _Request | None:
        """In a child that has been forked: what it is to run. In the server: None, at its end."""
        with selectors.DefaultSelector() as selector:
            for handle in (self.listener.fileno(), self.ended, 0):
                selector.register(handle, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if self.ended in ready:
                    os.read(self.ended, 1000)
                    self._report()
                if 0 in ready:  # the process that has started the server is gone
                    return None
                if self.listener.fileno() in ready and (request := self._accept()) is not None:
                    return request

    def _report(self) -> None:
        for pid in list(self.running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                with self.running.pop(pid) as connection, contextlib.suppress(OSError):
                    connection.sendall(code.to_bytes(4, "big", signed=True))

    def _accept(self) -> _Request | None:
        connection, _ = self.listener.accept()
        data, handles, _, _ = socket.recv_fds(connection, 4, 64)
        text = b""
        while len(text) < int.from_bytes(data, "big"):
            text += connection.recv(1 << 20)
        pid = os.fork()
        if pid:
            for handle in handles:
                os.close(handle)
            self.running[pid] = connection
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        request: dict[str, Any] = json.loads(text)
        if request["session"]:
            os.setsid()
        with contextlib.suppress(OSError):
            connection.sendall(os.getpid().to_bytes(4, "big"))
        for other in (connection, self.listener, *self.running.values()):
            other.close()
        os.close(self.ended)
        os.close(self.wakes)
        return request, handles


_Request = tuple[dict[str, Any], list[int]]
"""What a program is, and the file descriptors that it gets, as the server has received them."""


def _place(handles: list[int], numbers: list[int]) -> None:
    """Give the file descriptors the numbers that the program expects."""
    above = max(*handles, *numbers) + 1
    moved = [fcntl.fcntl(handle, fcntl.F_DUPFD, above) for handle in handles]
    for handle in handles:
        os.close(handle)
    for handle, number in zip(moved, numbers, strict=True):
        os.dup2(handle, number)
    for handle in moved:
        os.close(handle)


def _run(request: dict[str, Any]) -> None:
    """Be the program."""
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    first, *rest = request["arguments"]
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.argv = rest
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


def serve(address: str, modules: str) -> None:
    """Import modules and fork programs, until the end of the standard input."""
    for module in modules.split(","):
        import_module(module)
    program = _Forks(address).next_program()
    if program is None:
        shutil.rmtree(Path(address).parent, ignore_errors=True)
        return
    request, handles = program
    _place(handles, request["handles"])
    _run(request)


if __name__ == "__main__":
    serve(*sys.argv[1:3])
