"""Saving state dicts in the background."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from ckpt.background import AsyncCheckpointer, SaveEvent, Tier, owned
from ckpt.errors import CheckpointError
from ckpt.format import Compression, check_compression
from ckpt.lifecycle import Retention
from ckpt.state_dict.held import Ranks
from ckpt.state_dict.save import prepared
from ckpt.store import open_store


class AsyncSaver:
    """Saves state dicts while training goes on; every rank makes one, and calls each method.

    :meth:`save` returns as soon as this rank's slices are copied to host memory. A writer process
    beside each rank writes them, and the first one commits. A save that was copied is committed
    even if the training process is killed. See :func:`ckpt.save_state_dict` for what a state may
    have.

    Args:
        root: the checkpoint folder, or the URL of a store, shared by all ranks. It is no
            :class:`ckpt.Store`: the writer process is another process, and opens its own.
        keep: the checkpoints that stay: a number keeps that many of the newest, a
            :class:`ckpt.Retention` has more rules, and None keeps all.
        tiers: other places besides ``root``, such as a folder in each node's memory; a save goes to
            all of them, and :func:`ckpt.load_state_dict` loads from any.
        compression: of the chunks.
        process_group: the ranks that save; None for all. One process needs no process group.
        commit_timeout_seconds: how long a commit waits for the writer processes of other ranks.

    Raises ValueError for arguments that cannot be used, and CheckpointError where a writer process
    does not start, and where another AsyncSaver of this rank saves to ``root`` and is not closed.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        keep: int | Retention | None = None,
        tiers: Sequence[Tier] = (),
        compression: Compression = "none",
        process_group: dist.ProcessGroup | None = None,
        commit_timeout_seconds: float = 1800.0,
    ) -> None:
        if not isinstance(root, str | Path):
            raise ValueError(f"root ({type(root).__name__}) must be a folder or a URL")
        _check_keep(keep)
        check_compression(compression)
        self._ranks, self._compression = Ranks(process_group), compression
        self._failed: list[str] = []
        self._told: set[int] = set()  # steps whose save() has raised an error already
        self._saver: AsyncCheckpointer | None = None
        self._held = contextlib.ExitStack()
        try:
            with self._ranks.together("saves in the background cannot start"):
                where = open_store(root).where()
                lock = _lock(where, self._ranks.rank)
                what = f"an AsyncSaver for rank {self._ranks.rank} of {where}"
                self._held.enter_context(owned(lock.with_suffix(".trainer"), what))
                self._saver = AsyncCheckpointer(
                    [*tiers, Tier(name="shared", location=where, keep=keep)],
                    self._ranks.rank,
                    lock,
                    compression=compression,
                    commit_timeout_seconds=commit_timeout_seconds,
                )
                self._saver.ready()
        except Exception:
            self._end()
            raise

    def save(
        self, state: Mapping[str, Any], *, step: int, validation: float | None = None
    ) -> float:
        """Copy ``state`` to host memory, and save it in the background.

        Waits until the writer process has read the memory of the save before. The state may be
        changed as soon as this method returns.

        Args:
            state: what to save; see :func:`ckpt.save_state_dict`.
            step: the number of the checkpoint, at least 0.
            validation: a validation loss, for ``Retention.keep_best``.

        Returns:
            The seconds that the caller waited.

        Raises:
            CheckpointError: on every rank, where the state cannot be saved, where ranks differ,
                where host memory is short; and where an earlier save has failed on any rank and no
                call has reported it yet: this save was not begun then; after :meth:`close`.
        """
        saver = self._open_saver()
        self._note(saver.poll())
        self._report()
        info, arrays = prepared(self._ranks, state, step, self._compression, validation)
        try:
            with self._ranks.together(f"checkpoint of step {step} is not saved"):
                seconds = saver.save(info, arrays)
        except Exception:
            self._told.add(step)
            raise
        return seconds

    def wait(self) -> None:
        """Wait until all saves are committed.

        Raises CheckpointError on every rank, where a save has failed on any rank.
        """
        self._note(self._open_saver().wait())
        self._report()

    def close(self) -> None:
        """Wait until all saves are written, and end the writer process. A second call does nothing.

        Raises CheckpointError, as :meth:`wait` does, after the writer process has ended.
        """
        if self._saver is None:
            return
        try:
            self.wait()
        finally:
            self._end()

    def _end(self) -> None:
        """Close without the other ranks, which may not come here."""
        saver, self._saver = self._saver, None
        try:
            if saver is not None:
                saver.close()
        finally:
            self._held.close()

    def _open_saver(self) -> AsyncCheckpointer:
        if self._saver is None:
            raise CheckpointError("this saver is closed: make another AsyncSaver")
        return self._saver

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end()

    def _note(self, events: list[SaveEvent]) -> None:
        self._failed += [
            f"checkpoint of step {event.step} is not saved in tier {event.tier}: {event.error}"
            for event in events
            if event.what == "failed" and event.step not in self._told
        ]

    def _report(self) -> None:
        failed, self._failed = self._failed, []
        every = [one for of in self._ranks.gather(failed) for one in of]
        if every:
            own = "another rank could not write its part"
            raise CheckpointError(next((one for one in every if own not in one), every[0]))


def _check_keep(keep: int | Retention | None) -> None:
    if keep is not None and type(keep) is not Retention and not (type(keep) is int and keep >= 1):
        raise ValueError(f"keep ({keep!r}) must be at least 1, a ckpt.Retention, or None for all")


def _lock(where: str, rank: int) -> Path:
    """The file that names the writer process of a rank for a store on this machine."""
    name = hashlib.sha256(os.path.abspath(where).encode()).hexdigest()[:16]  # noqa: PTH100 - or a URL
    return Path(tempfile.gettempdir()) / f"convoy-{os.getuid()}-{name}-{rank}.lock"
