"""Spares: ranks that the layout of a start leaves over.

A spare holds no part of the model and is in no process group. The spare's torchrun keeps its place
in the membership of the launch: when a rank is lost, all ranks start again, and the layout takes
the spare in. A spare ends when the run ends, with the run's exit code.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

# Public, documented names that torch.distributed does not mark as exported for type checkers.
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from pretrain.errors import EXIT_LOST, EXIT_TRY_AGAIN
from pretrain.observe import outcome_of
from pretrain.runtime import StopRequest

_JOIN = timedelta(minutes=10)
_POLL_SECONDS = 0.5
_END_SECONDS = 10.0
"""As long as rank 0 waits for spares to learn how the run ended."""


def connect() -> Store:
    """A client of the launch's store, which rank 0 or its torchrun serves.

    Raises RuntimeError where the store does not answer.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore("spares", TCPStore(host, port, is_master=False, timeout=_JOIN))


def stand_by(stop: StopRequest, store: Store | None = None) -> int:
    """Wait until the run ends; returns its exit code.

    Returns 75 where this process is asked to stop, as torchrun does before a new start, and 1 where
    rank 0 is lost.
    """
    try:
        store = connect() if store is None else store
        while not stop.requested:
            if store.check(["run"]):
                run = store.get("run").decode()
                if store.check([f"end/{run}"]):
                    code = int(store.get(f"end/{run}"))
                    store.add(f"told/{run}", 1)
                    return code
            time.sleep(_POLL_SECONDS)
    except RuntimeError:
        return EXIT_LOST
    return EXIT_TRY_AGAIN


@contextmanager
def with_spares(
    spares: int, run: str, store: Store | None = None
) -> Iterator[Callable[[int], None]]:
    """Rank 0's side: the spares learn how the run ends, also where an error ends the run.

    Args:
        spares: the number of spares.
        run: a name of this start that no other start has.
        store: for tests; the launch's by default.

    Yields a function that takes the run's exit code.
    """
    if not spares:
        yield lambda code: None
        return
    launch = connect() if store is None else store
    launch.set("run", run)

    def end(code: int) -> None:
        launch.set(f"end/{run}", str(code))
        until = time.monotonic() + _END_SECONDS
        # add() of 0 reads the counter, and makes it where no spare has come so far.
        while launch.add(f"told/{run}", 0) < spares and time.monotonic() < until:
            time.sleep(0.05)

    try:
        yield end
    except BaseException as error:
        end(outcome_of(error)[1])
        raise
