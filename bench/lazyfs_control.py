"""Files of a plain program on LazyFS: blocks of zeros in what was synced, without a cut of power.

A control for power cuts of checkpoints. The program imports nothing of Convoy. It writes files with
O_DIRECT, one write each, syncs them, reads them back, cuts the power, and reads them again, on
LazyFS with several FUSE threads and with one (``-s``). With several threads LazyFS itself loses
bytes; see docs/checkpoint-format.md#writing.

    python -m bench.lazyfs_control BUILD/lazyfs [--locked BUILD/lazyfs] [--json FILE]

needs /dev/fuse, fusermount3 and a build of LazyFS (github.com/dsrhaslab/lazyfs, commit a47a5ba).
``--locked`` is another build, with ``bench/lazyfs_lock.patch``: a lock for each file around writes.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

BLOCK_BYTES = 4096
FILE_BYTES = 4 << 20
CACHE = "512mb"
"""Larger than all files: LazyFS evicts nothing."""
MOUNT_SECONDS = 120.0


@dataclass(frozen=True)
class Count:
    """What was read back of the files of one mount."""

    files: int
    damaged_files: int
    damaged_blocks: int
    """Blocks of 4 KiB that are not what was written."""
    zero_blocks: int
    """Of them, those of zeros alone."""


@dataclass(frozen=True)
class Mount:
    """LazyFS over a folder."""

    folder: Path
    """Where the files are written."""
    commands: Path
    """LazyFS's fifo."""

    def cut(self) -> None:
        """Drop what was not synced, as a cut of power does."""
        self.commands.write_text("lazyfs::clear-cache\n")
        time.sleep(2)


@contextmanager
def mounted(lazyfs: Path, work: Path, *, one_thread: bool) -> Iterator[Mount]:
    """LazyFS in the foreground over a new folder; raises RuntimeError where it does not mount."""
    root, folder, commands = work / "root", work / "mount", work / "commands.fifo"
    root.mkdir()
    folder.mkdir()
    os.mkfifo(commands)
    config = work / "config.toml"
    config.write_text(
        f'[faults]\nfifo_path="{commands}"\n[cache]\napply_eviction=false\n[cache.simple]\n'
        f'custom_size="{CACHE}"\nblocks_per_page=1\n[filesystem]\nlog_all_operations=false\n'
        f'logfile=""\n'
    )
    options = [
        "-o",
        "modules=subdir",
        "-o",
        f"subdir={root}",
        "-f",
        *(["-s"] if one_thread else []),
    ]
    command = [str(lazyfs), str(folder), "--config-path", str(config), *options]
    with (
        (work / "lazyfs.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        until = time.monotonic() + MOUNT_SECONDS
        while not folder.is_mount():
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                raise RuntimeError(f"LazyFS does not mount: {(work / 'lazyfs.log').read_text()}")
            time.sleep(0.1)
        try:
            yield Mount(folder, commands)
        finally:
            subprocess.run(["fusermount3", "-u", str(folder)], check=False)
            try:
                process.wait(MOUNT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def content(number: int) -> bytes:
    """The bytes of a file; no block is of zeros alone."""
    return random.Random(number).randbytes(FILE_BYTES)


def write_synced(path: Path, data: bytes) -> None:
    """One write with O_DIRECT, then fsync of the file."""
    buffer = mmap.mmap(-1, len(data))  # O_DIRECT needs memory that begins at a page
    buffer[:] = data
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
    try:
        written = os.write(handle, buffer)
        assert written == len(data), written
        os.fsync(handle)
    finally:
        os.close(handle)
        buffer.close()


def read_past_cache(path: Path) -> bytes:
    """The file as LazyFS has it, and not the kernel."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.read()


def count_damage(folder: Path, files: int) -> Count:
    """Read the files back and compare them, block by block."""
    damaged_files = damaged_blocks = zero_blocks = 0
    zeros = bytes(BLOCK_BYTES)
    for number in range(files):
        wanted, got = content(number), read_past_cache(folder / str(number))
        wrong = 0
        for start in range(0, FILE_BYTES, BLOCK_BYTES):
            block = got[start : start + BLOCK_BYTES]
            if block != wanted[start : start + BLOCK_BYTES]:
                wrong += 1
                zero_blocks += block == zeros
        damaged_blocks += wrong
        damaged_files += wrong > 0
    return Count(files, damaged_files, damaged_blocks, zero_blocks)


def measure(lazyfs: Path, files: int, *, one_thread: bool) -> tuple[Count, Count]:
    """Write files on a new mount and read them back, before a cut of power and after it."""
    with (
        tempfile.TemporaryDirectory() as work,
        mounted(lazyfs, Path(work), one_thread=one_thread) as mount,
    ):
        for number in range(files):
            write_synced(mount.folder / str(number), content(number))
        before = count_damage(mount.folder, files)
        mount.cut()
        return before, count_damage(mount.folder, files)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("lazyfs", type=Path, help="the program that LazyFS's build makes")
    parser.add_argument("--locked", type=Path, help="that of LazyFS with the lock")
    parser.add_argument("--files", type=int, default=20, help="of 4 MiB (20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts there as well")
    args = parser.parse_args()
    cases = {"several threads": (args.lazyfs, False), "one thread": (args.lazyfs, True)}
    if args.locked is not None:
        cases["several threads, a lock for each file"] = args.locked, False
    rows = []
    for case, (lazyfs, one_thread) in cases.items():
        counts = measure(lazyfs.resolve(), args.files, one_thread=one_thread)
        for when, count in zip(("before a cut", "after a cut"), counts, strict=True):
            print(
                f"{case}, {when}: {count.damaged_files} of {count.files} files are not what was "
                f"written; {count.damaged_blocks} blocks, {count.zero_blocks} of zeros"
            )
            rows.append({"case": case, "when": when, **asdict(count)})
    if args.json is not None:
        report = {
            "bench": "lazyfs_control",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"Linux {platform.release()}, {os.cpu_count()} processors",
            "versions": {"python": platform.python_version(), "lazyfs": "a47a5ba"},
            "rows": rows,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
