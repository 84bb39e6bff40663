"""What a rank does about its torchrun: end with a torchrun that was killed, or end its restarts."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

from pretrain.errors import EXIT_BAD_INPUT, EXIT_HEALTH

_POLL_SECONDS = 1.0
_GRACE_SECONDS = 30.0
"""As long as torchrun itself waits between its SIGTERM and its SIGKILL."""


TORCHRUN_PID = "CONVOY_TORCHRUN_PID"
"""Environment variable of a rank whose parent is not torchrun itself: torchrun's process id."""
_PR_SET_PDEATHSIG = 1


def torchrun_process() -> int | None:
    """The process id of torchrun, which has started this rank; None without torchrun.

    To be asked at the start: the parent of a rank whose torchrun is gone is another process.
    """
    if TORCHRUN_PID in os.environ:
        return int(os.environ[TORCHRUN_PID])
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def starts_again_without_machine(left: int) -> bool:
    """Whether the launch of this rank would start again on ``left`` machines, without a machine of
    the exclude list.

    Only the rendezvous ``convoy`` obeys the list. torchrun starts again on at least MIN of
    ``--nnodes=MIN:MAX`` machines; a job of Slurm gets other machines in the place of excluded ones.
    """
    words = _words_of(torchrun_process())
    nodes = words.get("nnodes", "1").partition(":")[0]
    enough = "SLURM_JOB_ID" in os.environ or (nodes.isdecimal() and left >= int(nodes))
    return words.get("rdzv_backend") == "convoy" and enough


def _words_of(process: int | None) -> dict[str, str]:
    """The options of a process, by name with ``_``; none where the system does not show them."""
    try:
        text = Path(f"/proc/{process}/cmdline").read_text()
    except (OSError, ValueError):
        return {}
    words, found = text.split("\0"), {}
    for at, word in enumerate(words):
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            found[name.replace("-", "_")] = value if equals else "".join(words[at + 1 : at + 2])
    return found


def end_with_parent() -> None:
    """Let the kernel send SIGKILL to this process when the thread that forked it ends.

    Linux only; does nothing elsewhere, where :func:`end_with_torchrun` ends this process later.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_torchrun() -> int | None:
    """End this process where its parent, torchrun, is gone; does nothing without torchrun.

    torchrun ends its ranks unless it is killed itself; the ranks would then train on, without
    anybody to watch them. A thread does what torchrun does: it sends SIGTERM, which lets a run
    finish its step and commit a checkpoint, and SIGKILL after the time that torchrun gives.

    Returns the process id of torchrun; None without torchrun.
    """
    torchrun, parent = torchrun_process(), os.getppid()
    if torchrun is None:
        return None

    def watch() -> None:
        # Not PR_SET_PDEATHSIG: its signal comes when the thread that started this process ends.
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
    return torchrun


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
    is_there = os.getppid() == parent or TORCHRUN_PID in os.environ
    if parent is not None and is_there and left > 0:
        os.kill(parent, signal.SIGTERM)


def launched_rank() -> int:
    """The rank that a launcher gave this process; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def launched_world() -> int:
    """The number of ranks that a launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))
