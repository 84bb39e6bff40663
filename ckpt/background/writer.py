"""The writer process of a rank: it writes what the trainer has staged, and outlives the trainer.

A trainer that dies after staging a save loses nothing: the writer process still has the staging
memory, writes the objects, and commits once the writer processes of the other ranks have written
theirs. Writer processes see each other only through the receipts in the stores.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from ckpt.background.claim import claim
from ckpt.background.messages import Channel, Hello, Request, SaveEvent, SaveRequest
from ckpt.background.staged import Previous, StagedPart, write_staged
from ckpt.background.staging import Staging
from ckpt.background.tier import Tier
from ckpt.errors import CheckpointError
from ckpt.format import committed_steps, read_manifest
from ckpt.lifecycle import retain
from ckpt.store import PeerServer, Retrying, Store, open_store
from ckpt.write import (
    SaveAbandonedError,
    abandonment_reported,
    begin,
    check_not_abandoned,
    commit,
    discard,
    failure_of_others,
    finished_ranks,
    read_receipts,
    sync,
    write_failure,
    write_metadata,
    write_receipt,
)

_OWNER = ".owner"
_POLL_SECONDS = (0.005, 0.5)  # between two looks at the receipts: the first pause, and the longest
# How long the rank that commits waits for the other ranks' parts of a save that has failed, where
# the others cannot be told.
_UNTOLD_SECONDS = 60.0
# How long to wait for the other ranks' parts once the trainer is gone.
_ORPHANED_SECONDS, _HURRIED_SECONDS = 60.0, 5.0


class WriterProcess:
    """The writer process of one rank.

    Args:
        channel: the connection to the trainer.
        staging: the memory that the trainer fills.
        hello: the trainer's first message.
    """

    def __init__(self, channel: Channel, staging: Staging, hello: Hello) -> None:
        self.channel, self.staging, self.hello = channel, staging, hello
        self.orphaned_at: float | None = None
        """When the trainer died, on the monotonic clock; None while there is a trainer."""
        self.hurry = threading.Event()
        """Set by SIGTERM: a new writer process of this rank waits for the lock."""
        self._sending = threading.Lock()
        self.writers = {tier.name: TierWriter(self, tier) for tier in hello.tiers}

    def publish(self, event: SaveEvent) -> None:
        """Send an event to the trainer; nothing happens where the trainer is gone."""
        with self._sending, contextlib.suppress(OSError):
            self.channel.send(event)

    def run(self) -> None:
        """Serve the trainer's requests until a shutdown, or until the trainer is gone and all
        requested saves are done."""
        server = None
        if self.hello.serves is not None:
            server = PeerServer(Path(self.hello.serves), self.hello.key, self.hello.port)
        for location in self._volatile():
            Path(location).mkdir(parents=True, exist_ok=True)
            Path(location, _OWNER).write_text(str(os.getpid()))
        self.publish(SaveEvent(what="ready", port=0 if server is None else server.port))
        remove = False
        while True:
            try:
                data = self.channel.receive(None)
            except EOFError:
                self.orphaned_at = time.monotonic()
                _close_output()
                break
            request = Request.model_validate_json(data or b"{}")
            if request.shutdown is not None:
                remove = request.shutdown.remove_volatile
                break
            if request.add_tier is not None:
                self.hello.tiers.append(request.add_tier)
                self.writers[request.add_tier.name] = TierWriter(self, request.add_tier)
            if request.save is not None:
                self._accept(request.save)
        for writer in self.writers.values():
            writer.finish()
        own = self._volatile()
        if own and self.orphaned_at is not None:
            remove = not self.hurry.wait(self.hello.memory_retention_seconds)
        for location in own if remove else []:
            # The writer process of a rank with another number may have taken the folder over.
            with contextlib.suppress(OSError):
                if Path(location, _OWNER).read_text() == str(os.getpid()):
                    open_store(location).remove_all("")

    def _volatile(self) -> list[str]:
        """The folders in memory that this writer process removes when the run ends."""
        own = [
            tier.location
            for tier in self.hello.tiers
            if tier.volatile and self.hello.rank == tier.committer
        ]
        return own + ([self.hello.serves] if self.hello.serves is not None else [])

    def _accept(self, request: SaveRequest) -> None:
        memory = self.staging.buffer(request.staged_bytes)
        done = threading.Semaphore(0)
        for name in request.tiers:
            parts = [
                StagedPart.of(request.arrays[one.array], one.coordinates, memory, one.offset)
                for one in request.objects
                if name in one.tiers
            ]
            self.writers[name].accept(request, parts, done)
        threading.Thread(target=self._free, args=(done, len(request.tiers)), daemon=True).start()

    def _free(self, done: threading.Semaphore, count: int) -> None:
        for _ in range(count):
            done.acquire()
        self.publish(SaveEvent(what="free"))

    def others_may_come(self, began: float) -> bool:
        """Whether a save that ``began`` then should still wait for other ranks' receipts."""
        limit = self.hello.commit_timeout_seconds
        if self.orphaned_at is not None:
            # The trainers of the other ranks are gone too, or will be soon.
            began = max(began, self.orphaned_at)
            limit = min(limit, _HURRIED_SECONDS if self.hurry.is_set() else _ORPHANED_SECONDS)
        return time.monotonic() - began < limit


class TierWriter:
    """Writes the requested saves to one tier, one after the other, in a thread of its own."""

    def __init__(self, process: WriterProcess, tier: Tier) -> None:
        self.process, self.tier = process, tier
        self.store = Retrying(open_store(tier.location))
        self._previous: Previous | None = None
        self._told = False  # whether the rank that commits reads why this rank's save failed
        self._requests = queue.Queue[
            tuple[SaveRequest, list[StagedPart], threading.Semaphore] | None
        ]()
        self._thread = threading.Thread(target=self._run, name=tier.name, daemon=True)
        self._thread.start()

    def accept(
        self, request: SaveRequest, parts: list[StagedPart], done: threading.Semaphore
    ) -> None:
        """Queue a save of ``parts``; ``done`` is released when ``parts`` may be overwritten."""
        self._requests.put((request, parts, done))

    def finish(self) -> None:
        """Wait until all queued saves are done."""
        self._requests.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (one := self._requests.get()) is not None:
            began, self._told = time.monotonic(), False
            try:
                event = self._save(*one)
            except Exception as error:
                if not isinstance(error, OSError | CheckpointError):
                    traceback.print_exc()
                event = SaveEvent(what="failed", error=_one_line(error), told=self._told)
            seconds = time.monotonic() - began
            about = {"tier": self.tier.name, "step": one[0].info.step, "seconds": seconds}
            self.process.publish(event.model_copy(update=about))

    def _save(
        self, request: SaveRequest, parts: list[StagedPart], done: threading.Semaphore
    ) -> SaveEvent:
        info, rank, began = request.info_in(self.tier), self.process.hello.rank, time.monotonic()
        commits, retries = rank == info.writers[0], self.store.retries
        try:
            begin(self.store, info, rank)
            with abandonment_reported(self.store, info, rank):
                receipt = write_metadata(self.store, info, request.arrays) if commits else {}
                if self._previous is None:
                    self._previous = _newest(self.store)
                written = write_staged(self.store, info, parts, self._previous)
                receipt |= written.receipt
                sync(self.store, info, receipt)
                check_not_abandoned(self.store, info, rank)
                write_receipt(self.store, info, rank, receipt)
            self._previous = Previous(info.save_id, written.receipt)
        except SaveAbandonedError:
            raise
        except BaseException as error:
            number = error.errno if isinstance(error, OSError) else None
            limit = _UNTOLD_SECONDS
            with contextlib.suppress(OSError):
                write_failure(self.store, info, rank, number)
                self._told, limit = number is not None and not commits, math.inf
            if commits:
                with contextlib.suppress(CheckpointError, OSError):  # report the first error
                    self._await_receipts(request, own=False, limit_seconds=limit)
                    discard(self.store, info)
            raise
        finally:
            done.release()
        about = {
            "retries": self.store.retries - retries,
            "write_seconds": time.monotonic() - began,
            "bytes_written": written.bytes_written,
            "bytes_linked": written.bytes_linked,
        }
        if not commits:
            return SaveEvent(what="written", **about)
        if not self._await_receipts(request, check=True):
            reason = failure_of_others(self.store, info)
            discard(self.store, info)
            raise CheckpointError(reason)
        with abandonment_reported(self.store, info, rank):
            commit(self.store, info, request.arrays, read_receipts(self.store, info))
        if self.tier.keep is not None:
            try:
                retain(self.store, self.tier.keep)
            except (OSError, CheckpointError):
                pass  # the next save tries again
            except Exception:  # the checkpoint is committed all the same
                traceback.print_exc()
        return SaveEvent(what="committed", **about)

    def _await_receipts(
        self,
        request: SaveRequest,
        check: bool = False,
        own: bool = True,
        limit_seconds: float = math.inf,
    ) -> bool:
        """Wait until every rank has left a receipt or a failure; whether all left receipts.

        Raises CheckpointError where a rank leaves neither in time. The objects of the other ranks
        then stay until the next start: that rank may still be writing. With ``check``, raises
        SaveAbandonedError where the save is abandoned meanwhile. Without ``own`` this rank is not
        waited for: a disk may be too full for the mark of its failure.
        """
        info, began = request.info_in(self.tier), time.monotonic()
        writers = [rank for rank in info.writers if own or rank != self.process.hello.rank]
        pause, longest = _POLL_SECONDS
        while True:
            if check:
                check_not_abandoned(self.store, info, self.process.hello.rank)
            finished = finished_ranks(self.store, info)
            waiting = [rank for rank in writers if rank not in finished]
            if not waiting:
                return all(finished.values())
            late = time.monotonic() - began > limit_seconds
            if late or not self.process.others_may_come(began):
                raise CheckpointError(f"rank {waiting[0]} did not finish its part in time")
            time.sleep(pause)
            pause = min(2 * pause, longest)


def _close_output() -> None:
    # A process that reads the trainer's output through a pipe waits until all writers have closed
    # the pipe: this process must not be one of them.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
    return str(error) or type(error).__name__


def _newest(store: Store) -> Previous | None:
    for step in reversed(committed_steps(store)):
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(store, step)
            return Previous(manifest.save_id, manifest.objects)
    return None


def main(connection_handle: int, staging_handle: int) -> None:
    """Run the writer process. The arguments are inherited file descriptors: of the connection to
    the trainer, and of the staging memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    channel = Channel(Connection(connection_handle))
    hello = Request.model_validate_json(channel.receive(None) or b"{}").hello
    assert hello is not None, "the first message must be a Hello"
    staging = Staging(staging_handle)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    with claim(Path(hello.lock), timeout_seconds=60.0):
        process = WriterProcess(channel, staging, hello)
        signal.signal(signal.SIGTERM, lambda *_: process.hurry.set())
        if stopping.is_set():
            process.hurry.set()
        process.run()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
