"""torchrun's rendezvous over etcd, for an etcd that does not answer for some time.

torchrun's own backend ``etcd-v2`` ends the agent at the first question without an answer, though
ranks that train need no etcd. Here:

- Ranks train on, however long etcd is away: nobody can join meanwhile, so nobody waits.
- What cannot go on without etcd waits for etcd: a machine that joins, and a start after a failure.
  It waits for ``join_timeout`` of ``--rdzv-conf``, 600 s by default: as long as a machine waits for
  other machines.
- No member could send a heartbeat meanwhile. Members that were alive when etcd stopped answering
  are taken as alive when it answers again; otherwise all would be dead at once, and a machine that
  comes would begin a run of its own beside theirs.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    Token,
    create_handler,
)
from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore

_PAUSE_SECONDS = 1.0
"""Between two questions to an etcd that does not answer."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


class OutageBackend(RendezvousBackend):
    """The state of a rendezvous in a store that may be away for some time.

    Args:
        inner: torchrun's own backend, which raises RendezvousConnectionError without an answer.
        interval: ``keep_alive_interval``: a store that answers within it was not away.
        expiry: the age of a heartbeat at which its member counts as lost.
        limit: as long as :attr:`waits` has effect.
    """

    def __init__(
        self,
        inner: RendezvousBackend,
        *,
        interval: timedelta,
        expiry: timedelta,
        limit: timedelta,
    ) -> None:
        self.inner, self.interval, self.expiry, self.limit = inner, interval, expiry, limit
        self.waits = False
        """Whether a question without an answer is asked again; otherwise it raises."""
        self._asked: datetime | None = None
        """The time of the first question since the last answer; None: all were answered."""

    @property
    def name(self) -> str:
        """As the inner backend."""
        return self.inner.name

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state and its token; None where there is no state."""
        answer = self._ask(self.inner.get_state)
        began = self._end_of_outage()
        return answer if answer is None or began is None else self._renew(*answer, began)

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Write a state where the token is still that of the state; returns what is there then."""
        answer = self._ask(partial(self.inner.set_state, state, token))
        began = self._end_of_outage()
        if answer is None or began is None:
            return answer
        newest, found_token, is_written = answer
        return *self._renew(newest, found_token, began), is_written

    def _ask(self, question: Callable[[], T]) -> T:
        self._asked = self._asked or datetime.now(UTC)
        return until_answer(question, self.limit if self.waits else timedelta())

    def _end_of_outage(self) -> datetime | None:
        """When the store stopped answering, where it answers again; None where it always did."""
        began = self._asked
        assert began is not None
        away = datetime.now(UTC) - began
        if away <= self.interval:
            self._asked = None
            return None
        _log.warning("%s answers again after %.0f s", self.name, away.total_seconds())
        return began

    def _renew(self, state: bytes, token: Token, began: datetime) -> tuple[bytes, Token]:
        """Write a heartbeat for every member that was alive when the store stopped answering."""
        while True:
            # torchrun itself keeps the state pickled, and reads it so.
            members = pickle.loads(state)
            now = datetime.now(UTC)
            for node, last in members.last_heartbeats.items():
                if last >= began - self.expiry:
                    members.last_heartbeats[node] = now
            write = partial(self.inner.set_state, pickle.dumps(members), token)
            answer = self._ask(write)  # where this fails, the outage goes on since it began
            if answer is not None:
                state, token, is_written = answer
                if not is_written:
                    continue  # another machine has written meanwhile
            self._asked = None
            return state, token


def _asked_again(question: Callable[..., Any]) -> Callable[..., Any]:
    """A method of EtcdStore that asks again while there is no answer."""

    def ask(store: OutageStore, *arguments: Any, **options: Any) -> Any:
        return until_answer(partial(question, store, *arguments, **options), store.limit)

    return ask


class OutageStore(EtcdStore):
    """torchrun's store in etcd; a question without an answer is asked again for ``limit``."""

    def __init__(self, client: Any, prefix: str, limit: timedelta) -> None:
        super().__init__(client, prefix)
        self.limit = limit

    set = _asked_again(EtcdStore.set)
    get = _asked_again(EtcdStore.get)
    add = _asked_again(EtcdStore.add)
    """An answer that was lost counts twice."""
    wait = _asked_again(EtcdStore.wait)
    check = _asked_again(EtcdStore.check)


def until_answer(question: Callable[[], T], limit: timedelta) -> T:
    """Ask again while there is no answer, for ``limit``; then raise what the last question did."""
    until = time.monotonic() + limit.total_seconds()
    while True:
        try:
            return question()
        except Exception as error:
            if not _is_outage(error) or time.monotonic() > until:
                raise
            _log.warning("etcd does not answer: %s", error.__cause__ or error)
        time.sleep(_PAUSE_SECONDS)


def _is_outage(error: Exception) -> bool:
    """Whether etcd did not answer, or has no leader; other errors are its answers."""
    if isinstance(error, RendezvousConnectionError):
        return True
    # Whoever has no etcd need not have its client.
    names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith("etcd")]
    return bool(names) and names[0] in (
        "EtcdConnectionFailed", "EtcdLeaderElectionInProgress", "EtcdException"
    )  # fmt: skip


def etcd_handler(params: RendezvousParameters) -> tuple[DynamicRendezvousHandler, OutageBackend]:
    """torchrun's rendezvous over etcd, and the backend that it asks.

    Raises RendezvousConnectionError where etcd does not answer for ``join_timeout``.
    """
    from torch.distributed.elastic.rendezvous.etcd_rendezvous_backend import create_backend

    limit = timedelta(seconds=_seconds(params, "join_timeout", 600))
    interval = timedelta(seconds=_seconds(params, "keep_alive_interval", 5))
    expiry = interval * _seconds(params, "keep_alive_max_attempt", 3)
    began = time.monotonic()
    inner, its_store = until_answer(lambda: create_backend(params), limit)
    assert isinstance(its_store, EtcdStore)
    if time.monotonic() - began > interval.total_seconds():
        # This machine does not know when etcd stopped answering. The members do: they come first.
        time.sleep(expiry.total_seconds())
    store = OutageStore(its_store.client, its_store.prefix, limit)
    backend = OutageBackend(inner, interval=interval, expiry=expiry, limit=limit)
    return create_handler(store, backend, params), backend


def _seconds(params: RendezvousParameters, key: str, default: int) -> int:
    value = params.get_as_int(key, default)
    return default if value is None else value
