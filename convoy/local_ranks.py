"""A command on several ranks of this machine, without torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 10.0
"""For which the other ranks may go on where one has failed."""


def run_local_ranks(arguments: Sequence[str], ranks: int) -> int:
    """Run Python with ``arguments`` in ``ranks`` processes that form one run; returns the largest
    exit code, or 1 where a signal ended a rank.

    Where a rank fails, those that do not end soon are killed. A line of stderr that several ranks
    print is shown once.
    """
    # A public, documented name that torch.distributed does not mark as exported for type checkers.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # Served here, so that nobody else can take the port.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    shown: set[str] = set()
    showing = threading.Lock()

    def show(process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                with showing:
                    if line not in shown:
                        shown.add(line)
                        print(line, end="", file=sys.stderr, flush=True)

    try:
        for rank in range(ranks):
            environment = {
                **os.environ,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
            }
            process = subprocess.Popen(
                [sys.executable, *arguments], env=environment, stderr=subprocess.PIPE, text=True
            )
            processes.append(process)
            readers.append(threading.Thread(target=show, args=(process,), daemon=True))
            readers[-1].start()
        return _wait(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for reader in readers:
            reader.join(_GRACE_SECONDS)


def _wait(processes: Sequence[subprocess.Popen[str]]) -> int:
    failed: float | None = None
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes or (failed and time.monotonic() > failed + _GRACE_SECONDS):
            return max(1 if code is None or code < 0 else code for code in codes)
        if failed is None and any(codes):
            failed = time.monotonic()
        time.sleep(_POLL_SECONDS)
