"""Faults of a process: slowness, a lost network, a full disk."""

from __future__ import annotations

import os
import resource
import socket
import stat
import subprocess
import sys
from pathlib import Path

_PERIOD_SECONDS = 0.02

# Stops and continues the process of argv[1]. SIGTERM ends it between two periods, so that the
# process is never left standing still; so does the end of the process. A sleep may last longer than
# asked: the next stop makes up for that, so that the share holds on a busy machine too.
_PACER = """
import os, signal, sys, time
rank, share, period = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
ended, ran, stood = [], 0.0, 0.0
signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
now = time.monotonic()
while not ended and os.getppid() == rank:
    time.sleep(period * (1 - share))
    ran, now = ran + time.monotonic() - now, time.monotonic()
    os.kill(rank, signal.SIGSTOP)
    time.sleep(max(0.0, ran * share / (1 - share) - stood))
    os.kill(rank, signal.SIGCONT)
    stood, now = stood + time.monotonic() - now, time.monotonic()
"""


class Pacer:
    """Lets this process stand still for a share of the time, until :meth:`end`.

    A process of its own sends SIGSTOP and SIGCONT in turn, fifty times a second: all threads of
    this process slow down alike, whatever they compute. A device computes on. A shell whose own job
    this process is would take it for suspended: a run is to be started by torchrun.

    Args:
        factor: work takes this many times as long.
    """

    def __init__(self, factor: float) -> None:
        share = 1 - 1 / factor
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _PACER, str(os.getpid()), str(share),
             str(_PERIOD_SECONDS)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip

    def end(self) -> None:
        """Run at full speed again."""
        self._process.terminate()
        self._process.wait()


def shut_down_connections() -> int:
    """Shut down every TCP connection of this process; returns how many there were.

    Neither side can send any more, as after the loss of a network. Connections through InfiniBand
    or shared memory stay, and so do those of the writer process. Linux only.
    """
    count = 0
    for name in [path.name for path in Path("/proc/self/fd").iterdir()]:
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed since it was listed
        with connection:
            inet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if not inet or connection.type != socket.SOCK_STREAM:
                continue
            try:
                connection.getpeername()  # fails for a listening socket
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
            count += 1
    return count


def set_writable(process_id: int, writable: bool) -> None:
    """Let a process write to files, or write no byte to any file.

    The kernel refuses every write by the limit on the size of files (RLIMIT_FSIZE): as on a full
    disk, empty files can be made. The error is EFBIG in the place of ENOSPC. Linux only.
    """
    if not Path(f"/proc/{process_id}").exists():
        return  # a process that has ended
    _, hard = resource.prlimit(process_id, resource.RLIMIT_FSIZE)
    resource.prlimit(process_id, resource.RLIMIT_FSIZE, (hard if writable else 0, hard))
