"""Asynchronous saves, the trainer's side: copy the arrays to host memory, and train on."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair

import torch

from ckpt.background.messages import (
    Channel,
    Hello,
    Request,
    SaveEvent,
    SaveRequest,
    Shutdown,
    StagedObject,
)
from ckpt.background.staging import Staging
from ckpt.background.tier import Tier, TierName
from ckpt.errors import CheckpointError
from ckpt.format import ArrayRecord, Compression, ObjectLayout, check_compression
from ckpt.local_array import ArraySpec, LocalArray
from ckpt.store import Bytes, open_store
from ckpt.write import SaveInfo, own_cells, write_failure
from parallel.layout import Topology

_START_SECONDS = 120.0
_START = (
    "import sys; sys.path.insert(0, {!r}); from ckpt.background.writer import main; main({}, {})"
)


@dataclass(frozen=True)
class Staged:
    """Where each object that this rank writes lies in the staging memory.

    Valid as long as the specs, the topology and the tiers stay as they are.
    """

    specs: list[ArraySpec]
    topology: Topology
    compression: Compression
    records: list[ArrayRecord]
    objects: list[StagedObject]
    layouts: list[ObjectLayout]
    bytes: int


class AsyncCheckpointer:
    """Saves of one rank, written in the background by a writer process of its own.

    :meth:`save` returns as soon as the arrays are copied to host memory. :meth:`poll` and
    :meth:`wait` report which saves were committed and which failed; a checkpoint is never committed
    in part. Call :meth:`ready` once, which the first save does otherwise, and :meth:`close` at the
    end.

    Args:
        tiers: the places that every save is written to, unless the save names some of them.
        rank: this rank.
        lock: a file that names this rank's writer process on this machine. A writer process that
            an earlier, dead trainer left behind ends before the new one starts to write.
        compression: the compression of the chunks.
        serves: a folder in memory that the writer process serves to other nodes; see
            :meth:`ready`.
        key: the secret that a client of the served folder must know.
        memory_retention_seconds: how long volatile tiers are kept after the trainer died.
        commit_timeout_seconds: how long a commit waits for the writer processes of other ranks.

    Raises ValueError for another ``compression`` than there is.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        rank: int,
        lock: Path,
        *,
        compression: Compression = "none",
        serves: str | None = None,
        key: str = "",
        memory_retention_seconds: float = 600.0,
        commit_timeout_seconds: float = 1800.0,
    ) -> None:
        check_compression(compression)
        self.tiers, self.rank, self.compression = list(tiers), rank, compression
        self.closed = False
        self._hello = Hello(
            rank=rank,
            tiers=self.tiers,
            lock=str(lock),
            serves=serves,
            key=key,
            memory_retention_seconds=memory_retention_seconds,
            commit_timeout_seconds=commit_timeout_seconds,
        )
        self._staged: Staged | None = None
        self._pinned: tuple[int, int] | None = None
        self._pending: dict[tuple[int, TierName], SaveInfo] = {}
        self._events: list[SaveEvent] = []
        self._abandoned: Counter[tuple[int, TierName]] = Counter()
        """Saves that were given up, whose events are to come."""
        self._start()

    def _start(self) -> None:
        ours, theirs = socketpair()
        self._staging, self._busy, self._is_ready = Staging(), False, False
        # Bytes at the begin of the staging memory that a save may have written to.
        self._filled = 0
        handles = theirs.fileno(), self._staging.handle
        root = str(Path(__file__).resolve().parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START.format(root, *handles), "ckpt.background.writer"],
            stdin=subprocess.DEVNULL,
            pass_fds=handles,
            start_new_session=True,  # a signal to the trainer's process group must not end it
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self._channel = Channel(Connection(ours.detach()))
        with contextlib.suppress(OSError):  # ready() reports a writer process that ended already
            self._channel.send(Request(hello=self._hello.model_copy(update={"tiers": self.tiers})))

    @property
    def writer_process_id(self) -> int:
        """The process that writes this rank's saves."""
        return self._process.pid

    def ready(self) -> int:
        """Wait until the writer process holds this rank's lock; returns the port at which the
        writer process serves its folder, or 0.

        Raises CheckpointError where the writer process does not start.
        """
        try:
            data = self._channel.receive(_START_SECONDS)
        except EOFError:
            data = None
        event = None if data is None else SaveEvent.model_validate_json(data)
        if event is None or event.what != "ready":
            raise CheckpointError(f"the writer process of rank {self.rank} did not start")
        self._is_ready = True
        # A replacement of this writer process serves the folder at the same port.
        self._hello = self._hello.model_copy(update={"port": event.port})
        return event.port

    def add(self, tier: Tier) -> None:
        """Write later saves to one more tier. Raises CheckpointError after :meth:`close`."""
        self._check_open()
        self._send(Request(add_tier=tier))
        self.tiers.append(tier)
        self._staged = None

    def save(
        self, info: SaveInfo, arrays: Sequence[LocalArray], tiers: Sequence[TierName] | None = None
    ) -> float:
        """Copy this rank's objects to host memory and request a save; every rank must call.

        Waits until the writer process has read the staging memory of the save before. The arrays
        may be changed as soon as this method returns.

        Args:
            info: what the manifest holds besides the arrays; ``info.ranks`` and
                ``info.compression`` are ignored: the tiers and this checkpointer have their own.
            arrays: this rank's slices, in the same order on every rank.
            tiers: the names of the tiers to write to; None for all.

        Returns:
            The seconds that the caller waited.

        Raises:
            CheckpointError: where the writer process is gone, or host memory is short; after
                :meth:`close`.
        """
        self._check_open()
        began = time.perf_counter()
        names = [tier.name for tier in self.tiers if tiers is None or tier.name in tiers]
        try:
            self._request(info, arrays, names)
        except BaseException:
            self._report_failure(info, names)
            raise
        self._pending |= {(info.step, name): info for name in names}
        return time.perf_counter() - began

    def _request(self, info: SaveInfo, arrays: Sequence[LocalArray], names: list[TierName]) -> None:
        if not self._is_ready:
            self._ready_late()
        plan, buffer = self._prepare(info.topology, arrays)
        self._filled = max(self._filled, plan.bytes)
        chunks = [
            (layout, one.offset + at * layout.chunk_stride, box, arrays[one.array].read_into)
            for one, layout in zip(plan.objects, plan.layouts, strict=True)
            if set(names) & set(one.tiers)
            for at, (_, box) in enumerate(layout.chunks)
        ]
        # A device copies asynchronously, in the order of this thread's stream: threads do not help.
        threads = 1 if torch.cuda.is_available() else torch.get_num_threads()

        def copy(first: int) -> None:
            for layout, start, box, read in chunks[first::threads]:
                layout.fill(box, buffer[start : start + layout.chunk_stride], read)

        if threads == 1:
            copy(0)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(copy, range(threads)))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        request = SaveRequest(
            info=replace(info, compression=self.compression),
            tiers=names,
            arrays=plan.records,
            objects=plan.objects,
            staged_bytes=plan.bytes,
        )
        # Before the request leaves: after an interrupt the writer process may read the memory.
        self._busy = True
        self._send(Request(save=request))

    def _ready_late(self) -> None:
        try:
            self.ready()
        except CheckpointError:
            if self._process.poll() is None:
                raise
            raise self._replace_writer() from None

    def _report_failure(self, info: SaveInfo, names: Sequence[TierName]) -> None:
        """Tell the other ranks' writer processes that this rank's objects will not come."""
        for tier in self.tiers:
            if tier.name in names:
                with contextlib.suppress(OSError):
                    write_failure(open_store(tier.location), info, self.rank)

    def abandon(self) -> None:
        """Wait no longer for the saves that are not done, which
        :func:`ckpt.lifecycle.remove_uncommitted` makes the writer processes give up. What becomes
        of them is not reported any more."""
        self._abandoned += Counter(self._pending.keys())
        self._pending.clear()

    def prepare(self, topology: Topology, arrays: Sequence[LocalArray]) -> int:
        """Allocate the host memory that saves of such arrays need, before a save needs the memory;
        returns its bytes. Waits until the writer process has read the staging memory of the save
        before. Raises CheckpointError where there is not enough memory, and after :meth:`close`."""
        self._check_open()
        return self._prepare(topology, arrays)[0].bytes

    def _prepare(self, topology: Topology, arrays: Sequence[LocalArray]) -> tuple[Staged, Bytes]:
        while self._busy:
            self._receive_event(None)
        plan = self._plan(topology, arrays)
        if self._pinned is not None and self._pinned[1] < plan.bytes:
            self._unpin()
        try:
            buffer = self._staging.buffer(plan.bytes)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"no host memory to stage {plan.bytes} bytes in: {error}"
            ) from None
        self._pin(buffer.__array_interface__["data"][0], buffer.nbytes)
        return plan, buffer

    def _plan(self, topology: Topology, arrays: Sequence[LocalArray]) -> Staged:
        specs = [array.spec for array in arrays]
        old = self._staged
        if old is not None and (old.specs, old.topology) == (specs, topology):
            return old
        records = [spec.record(topology, self.compression) for spec in specs]
        where: dict[tuple[int, tuple[int, ...]], list[TierName]] = {}
        for tier in self.tiers:
            for index, (spec, record) in enumerate(zip(specs, records, strict=True)):
                layout = spec.layout(topology)
                for coordinates in own_cells(record, layout, self.rank, tier.ranks):
                    where.setdefault((index, coordinates), []).append(tier.name)
        objects, layouts, offset = [], [], 0
        for (index, coordinates), names in where.items():
            one = ObjectLayout(records[index], coordinates)
            objects.append(
                StagedObject(array=index, coordinates=coordinates, offset=offset, tiers=names)
            )
            layouts.append(one)
            offset += one.padded_bytes
        if self._filled:
            self._staging.buffer(self._filled)[:] = 0  # the gaps between chunks must be zeros
            self._filled = 0
        plan = Staged(specs, topology, self.compression, records, objects, layouts, offset)
        self._staged = plan
        return plan

    def _pin(self, address: int, count: int) -> None:
        """Page-lock the memory, for asynchronous copies from a CUDA device."""
        if torch.cuda.is_available() and count and self._pinned is None:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, count, 0)))
            self._pinned = (address, count)

    def _unpin(self) -> None:
        """Undo :meth:`_pin`, before the memory is moved or freed."""
        if self._pinned is not None:
            address, self._pinned = self._pinned[0], None
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))

    def poll(self) -> list[SaveEvent]:
        """The events since the last call, without waiting: one for each save in each tier."""
        while (self._pending or self._busy) and self._receive_event(0):
            pass
        return self._new_events()

    def wait(self, timeout_seconds: float | None = None) -> list[SaveEvent]:
        """Wait until all saves are done, at most ``timeout_seconds``; returns the events since the
        last call of this method or of :meth:`poll`."""
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self._pending:
            if not self._receive_event(None if end is None else max(0.0, end - time.monotonic())):
                break
        return self._new_events()

    def _new_events(self) -> list[SaveEvent]:
        events, self._events = self._events, []
        return events

    def close(self, remove_volatile: bool = True) -> None:
        """Wait until all saves are written, and end the writer process; with ``remove_volatile``
        the volatile tiers are removed. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(OSError):
            self._channel.send(Request(shutdown=Shutdown(remove_volatile=remove_volatile)))
        self._process.wait()
        self._disconnect()

    def leave(self) -> None:
        """Disconnect without a shutdown, as a crash would. The writer process finishes the saves,
        keeps the volatile tiers for the next start, and ends by itself."""
        if self.closed:
            return
        self.closed = True
        self._disconnect()
        self._process.returncode = 0  # this process never waits for the writer process

    def _disconnect(self) -> None:
        self._channel.close()
        self._unpin()
        self._staging.close()

    def _check_open(self) -> None:
        if self.closed:
            raise CheckpointError(f"the checkpointer of rank {self.rank} is closed: make another")

    def _send(self, request: Request) -> None:
        try:
            self._channel.send(request)
        except OSError:
            raise self._replace_writer() from None

    def _receive_event(self, timeout_seconds: float | None) -> bool:
        """Take in one event; False where no event came in time."""
        try:
            data = self._channel.receive(timeout_seconds)
        except EOFError:
            raise self._replace_writer() from None
        if data is None:
            return False
        event = SaveEvent.model_validate_json(data)
        if event.what == "free":
            self._busy = False
        elif event.tier is not None and self._abandoned[event.step, event.tier] > 0:
            self._abandoned[event.step, event.tier] -= 1
        elif event.tier is not None:
            self._pending.pop((event.step, event.tier), None)
            self._events.append(event)
        return True

    def _replace_writer(self) -> CheckpointError:
        """Start another writer process in place of one that ended; returns the error to raise."""
        code = self._process.wait()
        self._abandoned.clear()
        steps = sorted({step for step, _ in self._pending})
        self._disconnect()
        for (_, name), info in self._pending.items():
            self._report_failure(info, [name])
        self._pending.clear()
        self._start()
        self.ready()
        of = f"the saves of steps {', '.join(map(str, steps))} are" if steps else "no save is"
        return CheckpointError(
            f"the writer process of rank {self.rank} ended with {code}: {of} lost; another writer "
            f"process has started for later saves"
        )
