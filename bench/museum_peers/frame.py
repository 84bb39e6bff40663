"""What a case of the museum of peers is: a thread, two versions of a peer, and a claim.

A module ``bench/museum_peers/NAME_cases.py`` declares cases with :func:`peer_case`. A case imports
its peer inside its function: only the interpreter that has the peer's folder runs the function.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import re
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_THREAD = re.compile(r"[\w.-]+/[\w.-]+#\d+")
_REQUIREMENT = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+]+")


@dataclass(frozen=True)
class Answer:
    """What a version of a peer answered."""

    right: bool
    seen: str
    """The numbers that were seen, in a few words."""


@dataclass(frozen=True)
class Case:
    """One published silent defect, and the adapter that shows it."""

    thread: str
    """``owner/repository#number`` of a public issue or pull request."""
    went_wrong: str
    wrong: tuple[str, ...]
    """Requirements ``name==version`` of the release with the defect, each installed without its own
    requirements. The running environment has torch, which is compared and not installed."""
    fixed: tuple[str, ...] | None
    """Requirements of a release without the defect; None where ``no_fix`` says why."""
    no_fix: str
    timeout_seconds: float
    ask: Callable[[], Answer]

    @property
    def claim(self) -> str:
        """The function's name in words."""
        return self.ask.__name__.replace("_", " ")

    @property
    def adapter(self) -> str:
        """A digest of the adapter's module: a row of another text does not stand."""
        text = Path(self.ask.__code__.co_filename).read_bytes()
        return hashlib.sha256(text).hexdigest()[:16]


_declared: dict[str, Case] = {}


def peer_case(
    thread: str,
    *,
    went_wrong: str,
    wrong: tuple[str, ...],
    fixed: tuple[str, ...] | None,
    no_fix: str = "",
    timeout_seconds: float = 600.0,
) -> Callable[[Callable[[], Answer]], Callable[[], Answer]]:
    """Declare a function as a case.

    Raises:
        ValueError: a malformed thread or requirement, a thread that is declared twice, or a case
            that has both or neither of ``fixed`` and ``no_fix``.
    """
    if not _THREAD.fullmatch(thread):
        raise ValueError(f"thread ({thread}) must be owner/repository#number")
    for requirement in (*wrong, *(fixed or ())):
        if not _REQUIREMENT.fullmatch(requirement):
            raise ValueError(f"{thread}: requirement ({requirement}) must be name==version")
    if not wrong or (fixed is None) != bool(no_fix):
        raise ValueError(f"{thread}: a case names a wrong version, and a fixed one or no_fix")

    def declare(ask: Callable[[], Answer]) -> Callable[[], Answer]:
        key = f"{ask.__module__}.{ask.__name__}"
        for other, case in _declared.items():
            if case.thread == thread and other != key:
                raise ValueError(f"thread {thread} is declared twice: {other} and {key}")
        _declared[key] = Case(thread, went_wrong, wrong, fixed, no_fix, timeout_seconds, ask)
        return ask

    return declare


def all_cases() -> list[Case]:
    """The cases of every module ``*_cases.py`` of this folder, by module and in order."""
    for path in sorted(Path(__file__).parent.glob("*_cases.py")):
        importlib.import_module(f"{__package__}.{path.stem}")
    prefix = f"{__package__}."
    return [case for key, case in _declared.items() if key.startswith(prefix)]


def run_gloo(function: Callable[[int], Any], world: int, *, group: bool = True) -> list[Any]:
    """``function(rank)`` in ``world`` processes on gloo; what each rank returned, by rank.

    ``function`` must be a function of a module, and what it returns must be picklable. The ranks
    have the environment that torchrun would set. With ``group=False`` they form no process group:
    the peer does that.

    Raises:
        ProcessRaisedException: a rank raised; the other ranks are ended.
    """
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        if world == 1:  # this interpreter is for one case alone, and has imported the peer
            _one_rank(0, function, 1, group, port, folder)
        else:
            spawn(_one_rank, args=(function, world, group, port, folder), nprocs=world, join=True)
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world)]


def _one_rank(
    rank: int, function: Callable[[int], Any], world: int, group: bool, port: int, folder: str
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    if group:
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    answer = function(rank)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(answer))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
