"""A trainer's side of saving in the background: copy, and go on."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair

import torch

from ckpt.background.messages import Channel, Close, Event, Order, Request, Setup, StagedObject
from ckpt.background.staging import Staging
from ckpt.background.tier import Tier, TierName
from ckpt.errors import CheckpointError
from ckpt.format import ArrayRecord, Compression, ObjectLayout
from ckpt.local_array import ArraySpec, LocalArray
from ckpt.store import Bytes, open_store
from ckpt.write import SaveInfo, leave_failure, own_cells
from parallel.layout import Topology

_START = (
    "import sys; sys.path.insert(0, {!r}); from ckpt.background.writer import main; main({}, {})"
)


@dataclass(frozen=True)
class Staged:
    """Where what this rank writes is staged; worked out once, as long as the arrays stay."""

    specs: list[ArraySpec]
    topology: Topology
    compression: Compression
    records: list[ArrayRecord]
    objects: list[StagedObject]
    layouts: list[ObjectLayout]
    bytes: int


class Saver:
    """Saves of one rank, written by a keeper process of its own.

    ``save`` returns as soon as the numbers are copied to host memory. Whether they were committed
    is told by :meth:`poll` and :meth:`wait`; nothing is ever committed in part.

    Args:
        tiers: where to; in all tiers alike at each save that names no others.
        rank: this rank.
        lock: a file by which this rank's keepers on this machine know each other: an earlier one,
            of a trainer that died, ends before this one begins.
        compression: of the chunks.
        serves: a folder in memory that the keeper lends to other nodes; see :meth:`ready`.
        key: what those must know.
        linger_seconds: how long volatile tiers outlive a trainer that died.
        commit_timeout_seconds: how long a commit waits for other ranks.
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
        linger_seconds: float = 600.0,
        commit_timeout_seconds: float = 1800.0,
    ) -> None:
        self.tiers, self.rank, self.compression = list(tiers), rank, compression
        self._setup = Setup(
            rank=rank,
            tiers=self.tiers,
            lock=str(lock),
            serves=serves,
            key=key,
            linger_seconds=linger_seconds,
            commit_timeout_seconds=commit_timeout_seconds,
        )
        self._staged: Staged | None = None
        self._pinned: tuple[int, int] | None = None
        self._pending: dict[tuple[int, TierName], SaveInfo] = {}
        self._events: list[Event] = []
        self._busy = False
        self._start()

    def _start(self) -> None:
        ours, theirs = socketpair()
        self._staging, self._busy = Staging(), False
        handles = theirs.fileno(), self._staging.handle
        root = str(Path(__file__).resolve().parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START.format(root, *handles), "ckpt.background.writer"],
            stdin=subprocess.DEVNULL,
            pass_fds=handles,
            start_new_session=True,  # what ends the trainer's group does not end the keeper
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self._channel = Channel(Connection(ours.detach()))
        with contextlib.suppress(OSError):  # one that has ended already is told of by ready
            self._channel.send(Request(setup=self._setup.model_copy(update={"tiers": self.tiers})))

    def ready(self, timeout_seconds: float = 120.0) -> int:
        """Wait until the keeper is this rank's only one; returns the port of what it serves, or 0.

        Raises CheckpointError where it does not start.
        """
        try:
            data = self._channel.receive(timeout_seconds)
        except EOFError:
            data = None
        event = None if data is None else Event.model_validate_json(data)
        if event is None or event.what != "ready":
            raise CheckpointError(f"the keeper of rank {self.rank} did not start")
        # One that takes this one's place is found where this one was.
        self._setup = self._setup.model_copy(update={"port": event.port})
        return event.port

    def add(self, tier: Tier) -> None:
        """One more tier, for the saves to come."""
        self._send(Request(tier=tier))
        self.tiers.append(tier)
        self._staged = None

    def save(
        self, info: SaveInfo, arrays: Sequence[LocalArray], tiers: Sequence[TierName] | None = None
    ) -> float:
        """Copy this rank's part to host memory and have it written; every rank must call.

        Waits for the save before to leave the memory, if it has not. Arrays may be changed as soon
        as this returns. ``info.ranks`` and its compression are the tiers' own matter.

        Returns the seconds that the caller was kept.

        Raises CheckpointError where the keeper is gone or memory is short.
        """
        began = time.perf_counter()
        names = [tier.name for tier in self.tiers if tiers is None or tier.name in tiers]
        try:
            self._order(info, arrays, names)
        except BaseException:
            self._give_up(info, names)
            raise
        self._pending |= {(info.step, name): info for name in names}
        self._busy = True
        return time.perf_counter() - began

    def _order(self, info: SaveInfo, arrays: Sequence[LocalArray], names: list[TierName]) -> None:
        while self._busy:
            self._take(None)
        plan, room = self._prepare(info.topology, arrays)
        chunks = [
            (layout, one.offset + at * layout.stride, box, arrays[one.array].read_into)
            for one, layout in zip(plan.objects, plan.layouts, strict=True)
            if set(names) & set(one.tiers)
            for at, (_, box) in enumerate(layout.chunks)
        ]
        # A device copies by itself, in the order of the stream that this thread is on.
        threads = 1 if torch.cuda.is_available() else torch.get_num_threads()

        def copy(first: int) -> None:
            for layout, start, box, read in chunks[first::threads]:
                layout.fill(box, room[start : start + layout.stride], read)

        if threads == 1:
            copy(0)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(copy, range(threads)))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        order = Order(
            save_id=info.save_id,
            step=info.step,
            topology=info.topology.as_dict(),
            state=info.state,
            spec=info.spec,
            spec_hash=info.spec_hash,
            compression=self.compression,
            tiers=names,
            arrays=plan.records,
            objects=plan.objects,
            staged_bytes=plan.bytes,
        )
        self._send(Request(order=order))

    def _give_up(self, info: SaveInfo, names: Sequence[TierName]) -> None:
        """Tell the other ranks' keepers that this rank's part will not come."""
        for tier in self.tiers:
            if tier.name in names:
                with contextlib.suppress(OSError):
                    leave_failure(open_store(tier.location), info, self.rank)

    def prepare(self, topology: Topology, arrays: Sequence[LocalArray]) -> int:
        """Take the host memory that saves of such arrays need, so that the first one need not wait
        for it; returns its bytes. Raises CheckpointError where there is not enough."""
        return self._prepare(topology, arrays)[0].bytes

    def _prepare(self, topology: Topology, arrays: Sequence[LocalArray]) -> tuple[Staged, Bytes]:
        plan = self._plan(topology, arrays)
        if self._pinned is not None and self._pinned[1] < plan.bytes:
            self._unpin()
        try:
            room = self._staging.room(plan.bytes)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"no host memory to stage {plan.bytes} bytes in: {error}"
            ) from None
        self._pin(room.__array_interface__["data"][0], room.nbytes)
        return plan, room

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
            offset += one.page_room
        if old is not None:
            self._staging.room(old.bytes)[:] = 0  # what is between chunks is zeros
        plan = Staged(specs, topology, self.compression, records, objects, layouts, offset)
        self._staged = plan
        return plan

    def _pin(self, address: int, count: int) -> None:
        """Let a CUDA device copy into the memory by itself."""
        if torch.cuda.is_available() and count and self._pinned is None:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, count, 0)))
            self._pinned = (address, count)

    def _unpin(self) -> None:
        """Before the memory moves, or goes."""
        if self._pinned is not None:
            address, self._pinned = self._pinned[0], None
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))

    def poll(self) -> list[Event]:
        """What has become of saves since the last look: an event for each tier."""
        while (self._pending or self._busy) and self._take(0):
            pass
        return self._told()

    def wait(self, timeout_seconds: float | None = None) -> list[Event]:
        """The same, once all saves are done; or what there is when the time is over."""
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self._pending:
            if not self._take(None if end is None else max(0.0, end - time.monotonic())):
                break
        return self._told()

    def _told(self) -> list[Event]:
        told, self._events = self._events, []
        return told

    def close(self, forget: bool = True) -> None:
        """Wait for what is being written, and end the keeper; with ``forget``, remove what is in
        memory."""
        with contextlib.suppress(OSError):
            self._channel.send(Request(close=Close(forget=forget)))
        self._process.wait()
        self._channel.close()
        self._unpin()
        self._staging.close()

    def leave(self) -> None:
        """End without a word, as a crash would: the keeper writes what it has, keeps what is in
        memory for the next start, and ends by itself."""
        self._channel.close()
        self._unpin()
        self._staging.close()
        self._process.returncode = 0  # nobody waits for it

    def _send(self, request: Request) -> None:
        try:
            self._channel.send(request)
        except OSError:
            raise self._lost() from None

    def _receive(self, timeout_seconds: float | None) -> Event | None:
        try:
            data = self._channel.receive(timeout_seconds)
        except EOFError:
            raise self._lost() from None
        return None if data is None else Event.model_validate_json(data)

    def _take(self, timeout_seconds: float | None) -> bool:
        """Whether there was an event in time."""
        event = self._receive(timeout_seconds)
        if event is None:
            return False
        if event.what == "free":
            self._busy = False
        elif event.tier is not None:
            self._pending.pop((event.step, event.tier), None)
            self._events.append(event)
        return True

    def _lost(self) -> CheckpointError:
        """The keeper is gone; another takes its place for the saves to come."""
        code = self._process.wait()
        steps = sorted({step for step, _ in self._pending})
        self._channel.close()
        self._unpin()
        self._staging.close()
        for (_, name), info in self._pending.items():
            self._give_up(info, [name])
        self._pending.clear()
        self._start()
        self.ready()
        return CheckpointError(
            f"the keeper of rank {self.rank} ended with {code}; saves {steps} are lost, later ones "
            f"have another keeper"
        )
