"""Warm restarts: a lost rank starts again from a process that has imported everything.

With ``elastic.recovery`` ``warm``, the process that torchrun starts for a rank imports what
training needs and forks. The child trains. The parent waits; when the child of any rank ends by an
error or a signal, the parents of all ranks end their children, agree in a store of their own, and
fork again. The new children form new process groups and resume from the newest checkpoint, as
after a restart by torchrun. Nothing is imported again, and torchrun notices nothing.

torchrun's own restart follows where the parents do not agree: a machine is gone, a parent was
killed, the exclude list has changed, or the children have failed ``--max-restarts`` times.

A parent has one thread and no process group when it forks, so the child inherits no lock that is
held and no connection that is in use. The stores are served by processes of their own.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType

# Public, documented names that torch.distributed does not mark as exported for type checkers.
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from cluster.members import read_exclusions
from pretrain.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_HEALTH,
    EXIT_INTERRUPTED,
    EXIT_LOST,
    EXIT_TRY_AGAIN,
)
from pretrain.observe import say
from pretrain.runtime import (
    TORCHRUN_PID,
    end_with_parent,
    launched_rank,
    launched_world,
)

FINAL = {EXIT_DONE, EXIT_BAD_INPUT, EXIT_HEALTH, EXIT_TRY_AGAIN, EXIT_INTERRUPTED}
"""Exit codes after which another start would end as this one did."""
_AGREE_SECONDS = 10.0
"""As long as all parents may take to agree on a new start."""
_GRACE_SECONDS = 30.0
"""As long as torchrun waits between its SIGTERM and its SIGKILL."""
POLL_SECONDS = 0.02
_QUESTIONS_PER_SECOND = 20_000
"""Of all parents together, to the store."""


class WarmRank:
    """The parent of one rank's processes.

    Args:
        torchrun: the process id of torchrun.
        exclude_list: the run's exclude list. torchrun's rendezvous obeys it; this class does not.
        join: as long as the parents of a round wait for each other: ranks import at different
            speeds, and a machine may be lost before its rank has joined.
    """

    def __init__(self, torchrun: int, exclude_list: Path, *, join: timedelta) -> None:
        self.torchrun, self.exclude_list, self.join = torchrun, exclude_list, join
        self.rank, self.world = launched_rank(), launched_world()
        self.restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        self.pause = max(5 * POLL_SECONDS, self.world / _QUESTIONS_PER_SECOND)
        """Between two questions to the store."""
        self._excluded = self._read_excluded()
        self._child: int | None = None
        self._stop_at: float | None = None
        """When to kill a child that was asked to stop; None: the child was not asked."""
        self._servers: list[int] = []
        self.prefix = "warm"
        """Of the keys of this round."""

    def run(self) -> int | None:
        """Fork children until one ends for good; None in a child, in parents its exit code."""
        # A child inherits these handlers, and sets its own before it does anything else.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self.forward)
        try:
            store = self.connect()
            for start in range(self.restarts + 1):
                port = self._agree(store, start)
                if not port:
                    return EXIT_LOST
                os.environ["MASTER_PORT"] = str(port)
                if self.fork():
                    return None
                code = self._watch(store, start)
                if code in FINAL or self._stop_at is not None or start == self.restarts:
                    self.wait_for_others(store, start)
                    return code if code >= 0 else 128 - code
                if self.rank == 0:
                    why = store.get(f"{start}/failed").decode()
                    say(f"{why}; all ranks start again ({start + 1} of at most {self.restarts})")
        except RuntimeError:  # of the store: the first parent is gone
            self.end_child()
        finally:
            if self._child != 0:
                self.end_servers()
        return EXIT_LOST

    def end_servers(self) -> None:
        """End the processes that serve this process's stores."""
        for server in self._servers:
            _kill(server)

    def connect(self) -> Store:
        """The store of the parents of one round of torchrun's, in which no child asks anything."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        outlives_round = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        if self.rank == 0 and not outlives_round:
            self._serve(port)
        store = TCPStore(host, port, is_master=False, timeout=self.join)
        # A store that rank 0 serves ends with this round: its keys are of no other round.
        if outlives_round:
            self.prefix = f"warm/{self._name_round(store)}"
        return PrefixStore(self.prefix, store)

    def _name_round(self, store: Store) -> str:
        """A name that the parents of this round agree on, and that no other round has.

        torchrun gives its ranks nothing that is equal on all machines of a round and different
        between rounds: TORCHELASTIC_RESTART_COUNT counts the failures of one torchrun, so that of a
        machine which has joined late is behind, and two rounds have one count where no rank has
        failed. Rank 0 makes the name. The store has what earlier rounds have written, so each rank
        calls with a word of its own, and waits for the answer to this word. Rank 0 answers until
        all ranks are here: the first word that it reads of a rank may be that of an earlier round.
        """
        name = word = uuid.uuid4().hex
        store.set(f"warm/call/{self.rank}", word)
        if self.rank != 0:
            name = store.get(f"warm/answer/{word}").decode()
        here = store.add(f"warm/{name}/here", 1)
        calls, answered = [f"warm/call/{rank}" for rank in range(1, self.world)], set[bytes]()
        until = time.monotonic() + self.join.total_seconds()
        while self.rank == 0 and here < self.world:
            if time.monotonic() > until or self._stop_at is not None:
                raise RuntimeError(f"{here} of {self.world} ranks have joined")
            words = set(store.multi_get(calls)) if store.check(calls) else set()
            for call in words - answered:
                store.set(f"warm/answer/{call.decode()}", name)
            answered |= words
            time.sleep(self.pause)
            here = store.add(f"warm/{name}/here", 0)
        return name

    def _serve(self, port: int) -> int:
        """Fork a process that serves a store while this process lives; returns the port.

        Raises RuntimeError where the port is taken.
        """
        parent, (reads, writes) = os.getpid(), os.pipe()
        server = os.fork()
        if server == 0:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)
            try:
                served = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
                os.write(writes, str(served.port).encode())
                while os.getppid() == parent:
                    time.sleep(POLL_SECONDS)
            finally:
                os._exit(0)
        self._servers.append(server)
        os.close(writes)
        answer = os.read(reads, 8)  # nothing where the server has ended
        os.close(reads)
        if not answer:
            raise RuntimeError(f"no store at port {port}")
        return int(answer)

    def _agree(self, store: Store, start: int) -> int:
        """The port of the store of this start's children; 0 where the parents do not agree."""
        store.set_timeout(self.join if start == 0 else timedelta(seconds=2 * _AGREE_SECONDS))
        store.add(f"{start}/ready", 1)
        if self.rank == 0:
            until = time.monotonic() + _AGREE_SECONDS
            while start and store.add(f"{start}/ready", 0) < self.world:
                if time.monotonic() > until or self._stop_at is not None:
                    break
                time.sleep(POLL_SECONDS)
            all_here = store.add(f"{start}/ready", 0) == self.world
            agreed = (all_here or not start) and self._read_excluded() == self._excluded
            store.set(f"{start}/port", str(self._serve(0) if agreed else 0))
        return int(store.get(f"{start}/port"))

    def _read_excluded(self) -> set[str] | None:
        with suppress(ValueError, OSError):
            return {one.node for one in read_exclusions(self.exclude_list)}
        return None

    def fork(self) -> bool:
        """Fork a child that trains; True in the child."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._child = os.fork()
        if self._child:
            return False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ |= {
            "TORCHELASTIC_USE_AGENT_STORE": str(True),  # every rank is a client of the store
            TORCHRUN_PID: str(self.torchrun),
        }
        end_with_parent()
        return True

    def _watch(self, store: Store, start: int) -> int:
        """Wait until this rank's child has ended, or another rank's child has failed."""
        next_question = time.monotonic()
        while True:
            code = self.exit_code()
            if code is not None:
                if code not in FINAL and self._stop_at is None:
                    how = f"signal {-code}" if code < 0 else f"exit code {code}"
                    # The first word stands: the loss of a rank makes other ranks fail.
                    store.compare_set(f"{start}/failed", "", f"rank {self.rank} ended by {how}")
                return code
            now = time.monotonic()
            if os.getppid() != self.torchrun and self.ends_with_torchrun(now):
                return self.end_child()
            if now >= next_question and self._stop_at is None:
                next_question = now + self.pause
                if store.check([f"{start}/failed"]):
                    return self.end_child()
            time.sleep(POLL_SECONDS)

    def wait_for_others(self, store: Store, start: int | str) -> None:
        """Serve the stores until the children of all ranks have ended: a child that loses its store
        in its last moments would fail."""
        store.add(f"{start}/ended", 1)
        until = time.monotonic() + _GRACE_SECONDS
        while self._servers and time.monotonic() < until:
            if store.add(f"{start}/ended", 0) == self.world or store.check([f"{start}/failed"]):
                return
            time.sleep(POLL_SECONDS)

    def ends_with_torchrun(self, now: float) -> bool:
        """torchrun was killed, and its part is left to do: ask the child to end; True once the
        child has had its time."""
        if self._stop_at is None:
            self.forward(signal.SIGTERM, None)
            return False
        return now > self._stop_at

    @property
    def has_new_exclusions(self) -> bool:
        """Whether the exclude list has changed since the ranks were started."""
        return self._read_excluded() != self._excluded

    @property
    def stops(self) -> bool:
        """Whether the child was asked to end."""
        return self._stop_at is not None

    def child_is_stopped(self) -> bool:
        """Whether a signal has stopped the child, which the system then shows as T."""
        with suppress(OSError, IndexError):
            return (
                Path(f"/proc/{self._child}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
            )
        return False

    def exit_code(self) -> int | None:
        """The child's exit code, below 0 for a signal; None while the child runs."""
        assert self._child is not None
        pid, status = os.waitpid(self._child, os.WNOHANG)
        if not pid:
            return None
        self._child = None
        return os.waitstatus_to_exitcode(status)

    def end_child(self) -> int:
        """SIGKILL to the child, so that it holds no lock and no port when the next one starts."""
        if self._child:
            _kill(self._child)
            self._child = None
        return -signal.SIGKILL

    def forward(self, number: int, frame: FrameType | None) -> None:
        """A signal to this process is meant for the child."""
        if number != signal.SIGUSR1 and self._stop_at is None:
            self._stop_at = time.monotonic() + _GRACE_SECONDS
        if self._child:
            with suppress(ProcessLookupError):
                os.kill(self._child, number)


def _kill(process: int) -> None:
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
