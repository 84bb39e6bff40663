"""What a rank does about its torchrun: end with a torchrun that was killed, or end its restarts."""

from __future__ import annotations

import os
import signal
import threading
import time

from pretrain.errors import EXIT_BAD_INPUT, EXIT_HEALTH

_POLL_SECONDS = 1.0
_GRACE_SECONDS = 30.0
"""As long as torchrun itself waits between its SIGTERM and its SIGKILL."""


def torchrun_process() -> int | None:
    """The process id of torchrun, the parent of its ranks; None without torchrun.

    To be asked at the start: the parent of a rank whose torchrun is gone is another process.
    """
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def end_with_torchrun(grace_seconds: float = _GRACE_SECONDS) -> int | None:
    """End this process where torchrun, its parent, is gone; does nothing without torchrun.

    torchrun ends its ranks unless it is killed itself; the ranks would then train on, without
    anybody to watch them. A thread does what torchrun does: it sends SIGTERM, which lets a run
    finish its step and commit a checkpoint, and SIGKILL ``grace_seconds`` later.

    Returns the process id of torchrun; None without torchrun.
    """
    parent = torchrun_process()
    if parent is None:
        return None

    def watch() -> None:
        # Not PR_SET_PDEATHSIG: its signal comes when the thread that started this process ends.
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
    return parent


def stop_torchrun(parent: int | None) -> None:
    """Let torchrun end after a rank that has stopped for good.

    With ``--max-restarts`` torchrun starts its ranks again after every exit code but 0, also on a
    machine that is about to be taken away. SIGTERM from the first rank of each machine prevents
    this.

    Args:
        parent: the process id of torchrun, from :func:`torchrun_process`.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _end_restarts(parent)


def end_torchrun(parent: int | None, exit_code: int) -> None:
    """End this process's torchrun where another start of the ranks would end as this one.

    Bad input (2) and divergence (3) need a person. SIGTERM lets torchrun end its other ranks, which
    commit a checkpoint where they can.
    """
    if exit_code in (EXIT_BAD_INPUT, EXIT_HEALTH):
        _end_restarts(parent)


def _end_restarts(parent: int | None) -> None:
    """SIGTERM to torchrun; nothing where no restart is left: torchrun then ends by itself."""
    left = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) - int(
        os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    )
    if parent is not None and os.getppid() == parent and left > 0:
        os.kill(parent, signal.SIGTERM)
