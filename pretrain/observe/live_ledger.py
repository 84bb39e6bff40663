"""The goodput ledger of a run that is running."""

from __future__ import annotations

from collections.abc import Iterable

from pretrain.observe.event import Event, Events
from pretrain.observe.events import RunDone, RunFailed, RunStopped
from pretrain.observe.jsonl import JsonlLog, LoggedEvent
from pretrain.observe.ledger import Ledger, LedgerAccount, summed
from pretrain.observe.step_events import IntervalEnded


class LiveLedger:
    """A sink that continues the ledger of a run's former starts, and publishes the sums.

    An event ``ledger`` follows each log interval and the end of a start. The times are those of the
    log's lines: the live ledger is always equal to :func:`pretrain.observe.ledger_of` of the log.

    Args:
        former: the lines that the log has of former starts.
        log: the log of this start. It must be subscribed before this sink.
        events: where the sums are published. A sink that is subscribed after this one gets the
            sums before the event that they follow.
    """

    def __init__(self, former: Iterable[LoggedEvent], log: JsonlLog, events: Events) -> None:
        self._account = LedgerAccount()
        for line in former:
            self._account.add(line.event, line.time)
        self._log, self._events = log, events

    def __call__(self, event: Event) -> None:
        """Add one event."""
        self._account.add(event, self._log.last_time)
        if isinstance(event, IntervalEnded | RunStopped | RunDone | RunFailed):
            self._events.publish(summed(self.ledger(), event.step))

    def ledger(self) -> Ledger:
        """The ledger up to the newest event."""
        return self._account.ledger()
