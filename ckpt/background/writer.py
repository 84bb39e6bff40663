"""A rank's keeper: the process that writes what its trainer has staged, and outlives it.

A trainer that dies after it has staged a save loses nothing: the keeper has the memory, writes it,
and commits where the other ranks' keepers have done their part. Keepers know each other only by
the receipts that they leave in the stores.
"""

from __future__ import annotations

import contextlib
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
from ckpt.background.messages import Channel, Event, Order, Request, Setup
from ckpt.background.staged import Previous, StagedPart, write_staged
from ckpt.background.staging import Staging
from ckpt.background.tier import Tier
from ckpt.errors import CheckpointError
from ckpt.format import committed_steps, read_manifest
from ckpt.lifecycle import retain
from ckpt.store import PeerServer, Retrying, Store, open_store
from ckpt.write import (
    GivenUpError,
    Receipt,
    begin,
    commit,
    discard,
    giving_up_is_told,
    leave_failure,
    leave_receipt,
    read_receipts,
    see_that_it_goes_on,
    settle,
    settled_ranks,
    write_metadata,
)

_OWNER = ".owner"
_POLL_SECONDS = (0.005, 0.5)  # between looks at receipts: at first, and at most
_ALONE_SECONDS, _HURRIED_SECONDS = 60.0, 5.0  # for the others' parts, when the trainers are gone


class Keeper:
    """The keeper of one rank."""

    def __init__(self, channel: Channel, staging: Staging, setup: Setup) -> None:
        self.channel, self.staging, self.setup = channel, staging, setup
        self.alone_since: float | None = None
        """When the trainer was lost."""
        self.hurry = threading.Event()
        """Another keeper wants this one's place: wait for nobody any more."""
        self._sending = threading.Lock()
        self.writers = {tier.name: TierWriter(self, tier) for tier in setup.tiers}

    def tell(self, event: Event) -> None:
        """Let the trainer know, if there is still one."""
        with self._sending, contextlib.suppress(OSError):
            self.channel.send(event)

    def run(self) -> None:
        """Serve until the trainer is done, or long gone."""
        server = None
        if self.setup.serves is not None:
            server = PeerServer(Path(self.setup.serves), self.setup.key, self.setup.port)
        for location in self._volatile():
            Path(location).mkdir(parents=True, exist_ok=True)
            Path(location, _OWNER).write_text(str(os.getpid()))
        self.tell(Event(what="ready", port=0 if server is None else server.port))
        forget = False
        while True:
            try:
                data = self.channel.receive(None)
            except EOFError:
                self.alone_since = time.monotonic()
                _let_go_of_output()
                break
            request = Request.model_validate_json(data or b"{}")
            if request.close is not None:
                forget = request.close.forget
                break
            if request.tier is not None:
                self.setup.tiers.append(request.tier)
                self.writers[request.tier.name] = TierWriter(self, request.tier)
            if request.order is not None:
                self._accept(request.order)
        for writer in self.writers.values():
            writer.finish()
        own = self._volatile()
        if own and self.alone_since is not None:
            forget = not self.hurry.wait(self.setup.linger_seconds)
        for location in own if forget else []:
            # Another keeper may have taken it over, of a rank by another number.
            with contextlib.suppress(OSError):
                if Path(location, _OWNER).read_text() == str(os.getpid()):
                    open_store(location).remove_all("")

    def _volatile(self) -> list[str]:
        """The folders in memory that are this keeper's to remove."""
        own = [
            tier.location
            for tier in self.setup.tiers
            if tier.volatile and self.setup.rank == tier.writers[0]
        ]
        return own + ([self.setup.serves] if self.setup.serves is not None else [])

    def _accept(self, order: Order) -> None:
        memory = self.staging.room(order.staged_bytes)
        left = threading.Semaphore(0)
        for name in order.tiers:
            parts = [
                StagedPart.of(order.arrays[one.array], one.coordinates, memory, one.offset)
                for one in order.objects
                if name in one.tiers
            ]
            self.writers[name].accept(order, parts, left)
        threading.Thread(target=self._free, args=(left, len(order.tiers)), daemon=True).start()

    def _free(self, left: threading.Semaphore, count: int) -> None:
        for _ in range(count):
            left.acquire()
        self.tell(Event(what="free"))

    def others_may_come(self, began: float) -> bool:
        """Whether to go on waiting for other ranks."""
        limit = self.setup.commit_timeout_seconds
        if self.alone_since is not None:
            # The others' trainers are gone too, or soon will be.
            began = max(began, self.alone_since)
            limit = min(limit, _HURRIED_SECONDS if self.hurry.is_set() else _ALONE_SECONDS)
        return time.monotonic() - began < limit


class TierWriter:
    """Writes orders to one tier, one after the other."""

    def __init__(self, keeper: Keeper, tier: Tier) -> None:
        self.keeper, self.tier = keeper, tier
        self.store = Retrying(open_store(tier.location))
        self._previous: Previous | None = None
        self._orders: queue.Queue[tuple[Order, list[StagedPart], threading.Semaphore] | None]
        self._orders = queue.Queue()
        self._thread = threading.Thread(target=self._run, name=tier.name, daemon=True)
        self._thread.start()

    def accept(self, order: Order, parts: list[StagedPart], done: threading.Semaphore) -> None:
        """Write ``parts`` when those before are written; ``done`` is released when they are not
        needed any more."""
        self._orders.put((order, parts, done))

    def finish(self) -> None:
        """Wait until all orders are done."""
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (one := self._orders.get()) is not None:
            began = time.monotonic()
            try:
                event = self._save(*one)
            except Exception as error:
                if not isinstance(error, OSError | CheckpointError):
                    traceback.print_exc()
                event = Event(what="failed", error=_one_line(error))
            seconds = time.monotonic() - began
            about = {"tier": self.tier.name, "step": one[0].step, "seconds": seconds}
            self.keeper.tell(event.model_copy(update=about))

    def _save(self, order: Order, parts: list[StagedPart], done: threading.Semaphore) -> Event:
        info, rank, began = order.info(self.tier), self.keeper.setup.rank, time.monotonic()
        first, retries = rank == info.writers[0], self.store.retries
        try:
            begin(self.store, info, rank)
            with giving_up_is_told(self.store, info, rank):
                receipt: Receipt = write_metadata(self.store, info, order.arrays) if first else {}
                if self._previous is None:
                    self._previous = _newest(self.store)
                written = write_staged(self.store, info, parts, self._previous)
                receipt |= written.receipt
                settle(self.store, info, receipt)
                see_that_it_goes_on(self.store, info, rank)
                leave_receipt(self.store, info, rank, receipt)
            self._previous = Previous(info.save_id, written.receipt)
        except GivenUpError:
            raise
        except BaseException:
            with contextlib.suppress(OSError):
                leave_failure(self.store, info, rank)
            if first:
                with contextlib.suppress(CheckpointError, OSError):  # the first error is the one
                    self._gather(order)
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
        if not first:
            return Event(what="written", **about)
        if self._gather(order, watch=True):
            discard(self.store, info)
            raise CheckpointError("another rank could not write its part")
        with giving_up_is_told(self.store, info, rank):
            commit(self.store, info, order.arrays, read_receipts(self.store, info))
        with contextlib.suppress(OSError, CheckpointError):  # they will be there for the next time
            retain(self.store, self.tier.keep)
        return Event(what="committed", **about)

    def _gather(self, order: Order, watch: bool = False) -> bool:
        """Wait for every rank's receipt; whether one of them has failed. With ``watch``, end where
        the save is given up meanwhile.

        Raises CheckpointError where one does not come: what the others have written stays until the
        next start, for they may be writing still.
        """
        info, began = order.info(self.tier), time.monotonic()
        pause, longest = _POLL_SECONDS
        while True:
            if watch:
                see_that_it_goes_on(self.store, info, self.keeper.setup.rank)
            ended = settled_ranks(self.store, info)
            waiting = [rank for rank in info.writers if rank not in ended]
            if not waiting:
                return not all(ended.values())
            if not self.keeper.others_may_come(began):
                raise CheckpointError(f"rank {waiting[0]} did not finish its part in time")
            time.sleep(pause)
            pause = min(2 * pause, longest)


def _let_go_of_output() -> None:
    # Whoever reads what the trainer printed, through a pipe, would otherwise wait for the keeper.
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
    """Run the keeper whose line and memory were inherited under these numbers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer to answer
    channel = Channel(Connection(connection_handle))
    request = Request.model_validate_json(channel.receive(None) or b"{}")
    setup = request.setup
    assert setup is not None, "the first message sets up"
    staging = Staging(staging_handle)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    with claim(Path(setup.lock), timeout_seconds=60.0):
        keeper = Keeper(channel, staging, setup)
        signal.signal(signal.SIGTERM, lambda *_: keeper.hurry.set())
        if stopping.is_set():
            keeper.hurry.set()
        keeper.run()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
