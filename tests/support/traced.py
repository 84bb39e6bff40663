"""What processes did to a folder, from their system calls, as operations for a crash.

``strace`` records every call that can write, of a process and of all that it starts: nothing is
taken on trust from the code under test. A call on the folder that the model of
``tests.support.crash`` does not know, such as a write through mapped memory, fails the test.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.crash import Operation

ROOT = Path(__file__).parents[2]
_CALLS = (
    "open,openat,openat2,creat,write,writev,pwrite64,pwritev,pwritev2,fsync,fdatasync,"
    "mkdir,mkdirat,link,linkat,symlink,symlinkat,unlink,unlinkat,rmdir,rename,renameat,renameat2,"
    "truncate,ftruncate,fallocate,copy_file_range,sendfile,splice,mmap,io_uring_setup"
)
_MOST_BYTES = 16 << 20
"""Of one write."""
_LINE = re.compile(r"(?P<process>\d+) +(?P<text>.*)")
_RESUMED = re.compile(r"<\.\.\. \w+ resumed>")
_CALL = re.compile(r"(?P<name>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+)")
_PATH = re.compile(r'[<"]((?:\\x[0-9a-f]{2})+)[">]')
_UNFINISHED = " <unfinished ...>"


def trace(module: str, function: str, room: Path) -> list[str]:
    """Call ``module.function(room)`` in a process of its own; returns the lines of strace.

    Skips the test where there is no strace, or where it may not trace.
    """
    program = shutil.which("strace")
    if program is None:
        pytest.skip("strace is not installed")
    strace = [program, "-f", "--seccomp-bpf"]
    if subprocess.run([*strace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("strace may not trace a process here")
    lines = room / "strace.txt"
    code = f"from pathlib import Path; import {module} as m; m.{function}(Path({str(room)!r}))"
    command = [*strace, "-y", "-xx", "-s", str(_MOST_BYTES), "-e", f"trace={_CALLS}"]
    subprocess.run(
        [*command, "-o", str(lines), sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
    )
    return lines.read_text().splitlines()


def note(room: Path, kind: str, step: int) -> None:
    """In a traced process: put a word of the caller's among the operations."""
    (room / "notes" / f"{kind}-{step}").mkdir(parents=True)


def operations(lines: list[str], room: Path, base: Path) -> list[Operation]:
    """The operations on ``base``, a folder that was empty, and the notes, in their order.

    An operation is listed where its call returned: until then it may or may not have happened, as
    one that was not synced. What a sync makes durable was there when its call began.
    """
    reader = _Reader(room / "notes", base)
    begun: dict[str, str] = {}
    for line in lines:
        match = _LINE.fullmatch(line)
        assert match, line
        process, text = match["process"], match["text"]
        if text.endswith(_UNFINISHED):
            begun[process] = text.removesuffix(_UNFINISHED)
            reader.begin(process, begun[process])
        elif resumed := _RESUMED.match(text):
            reader.end(process, begun.pop(process) + text[resumed.end() :])
        else:
            reader.begin(process, text)
            reader.end(process, text)
    return reader.log


class _Reader:
    def __init__(self, notes: Path, base: Path) -> None:
        self.notes, self.base = notes, base
        self.log: list[Operation] = []
        self._files: dict[Path, int] = {}
        self._lengths: dict[int, int] = {}
        self._syncs: dict[str, tuple[int, int]] = {}
        """For each process within a sync: its number, and the length of the file."""

    def begin(self, process: str, text: str) -> None:
        """A call begins. Only for syncs does it matter when."""
        if not text.startswith(("fsync(", "fdatasync(")):
            return
        path = _paths(text)[0]
        if path in self._files:
            self._syncs[process] = 0, self._lengths[self._files[path]]
        elif path.is_relative_to(self.base):
            self._syncs[process] = len(self.log) + 1, 0
            self.log.append(Operation("begin_sync_folder", path, file=len(self.log) + 1))

    def end(self, process: str, text: str) -> None:
        """A call has returned."""
        number, length = self._syncs.pop(process, (0, 0))
        call = _CALL.match(text)
        if call is None or call["result"] == "-1":
            return
        name, arguments, result = call.groups()
        paths = _paths(arguments.partition('"')[0] if "write" in name else arguments)
        if name == "mkdir" and paths[0].parent == self.notes:
            kind, _, step = paths[0].name.partition("-")
            self.log.append(Operation(kind, file=int(step)))
        if not any(path.is_relative_to(self.base) for path in paths):
            return
        if name in ("open", "openat"):
            self._open(paths[-1], arguments)
        elif name == "write":
            file = self._files[paths[0]]
            data = _decoded(arguments.partition('"')[2].partition('"')[0])[: int(result)]
            assert len(data) == int(result), f"{paths[0]}: a write is longer than strace shows"
            self._lengths[file] += len(data)
            self.log.append(Operation("append", file=file, data=data))
        elif name in ("fsync", "fdatasync"):
            self._sync(paths[0], number, length)
        elif name == "mmap":
            shared = "MAP_SHARED" in arguments and "PROT_WRITE" in arguments
            assert not shared, f"{paths[0]} is written through memory"
        else:
            self._names(name, arguments, paths)

    def _open(self, path: Path, arguments: str) -> None:
        if path in self._files:
            assert "O_TRUNC" not in arguments or not self._lengths[self._files[path]], path
        elif "O_CREAT" in arguments:
            file = self._files[path] = len(self._lengths) + 1
            self._lengths[file] = 0
            self.log.append(Operation("create", path, file=file))

    def _sync(self, path: Path, number: int, length: int) -> None:
        if path in self._files:
            file = self._files[path]
            assert length == self._lengths[file], f"{path} is written during its sync"
            self.log.append(Operation("sync", file=file))
        else:
            self.log.append(Operation("sync_folder", path, file=number))

    def _names(self, name: str, arguments: str, paths: list[Path]) -> None:
        if name == "mkdir":
            self.log.append(Operation("make_folder", paths[0]))
        elif name in ("link", "linkat"):
            old, new = (path for path in paths if path.is_relative_to(self.base))
            self._files[new] = self._files[old]
            self.log.append(Operation("link", old, new))
        elif name in ("rename", "renameat", "renameat2"):
            old, new = (path for path in paths if path.is_relative_to(self.base))
            for path in [path for path in self._files if path.is_relative_to(old)]:
                self._files[new / path.relative_to(old)] = self._files.pop(path)
            self.log.append(Operation("rename", old, new))
        elif name == "rmdir" or (name == "unlinkat" and "AT_REMOVEDIR" in arguments):
            self.log.append(Operation("remove_folder", paths[-1]))
        elif name in ("unlink", "unlinkat"):
            del self._files[paths[-1]]
            self.log.append(Operation("remove", paths[-1]))
        else:
            raise AssertionError(f"the model of a crash does not know {name} of {paths[0]}")


def _decoded(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def _paths(arguments: str) -> list[Path]:
    """Every path of a call, those of handles too, each from the root.

    A name that is relative to a handle, or to the working folder, follows it.
    """
    paths: list[Path] = []
    for text in _PATH.findall(arguments):
        path = Path(os.fsdecode(_decoded(text)))
        paths.append(paths[-1] / path if paths and not path.is_absolute() else path)
    return paths
