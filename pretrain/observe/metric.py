"""What is measured of an event: declared once, at the event's field, and read by every sink.

    loss: float = metric("convoy_loss", "gauge", "nats per token", "Mean loss of the last step.",
                         tracker="train/loss", short="loss {:.4f}")

Prometheus (:mod:`pretrain.observe.prometheus`), the trackers, the console, the live view and the
table of ``docs/metrics.md`` know no metric by name: each asks :func:`declared` for the metrics of a
class of events, or :func:`measurements` for the values in an event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, NamedTuple

Kind = Literal["gauge", "counter", "histogram", "info"]
Series = Mapping[tuple[str, ...], "float | None"]
"""Values by the values of the labels; None for a series that ends."""


@dataclass(frozen=True)
class Metric:
    """One metric, as Prometheus, trackers and people know it.

    A field may be a number, a text, which counts as 1 with the text as its label, a mapping from
    label values to numbers, or a list, whose label is the index. None is no value.
    """

    name: str = ""
    """In Prometheus, which has none where the name is empty."""
    kind: Kind = "gauge"
    """A gauge takes the field's value, a counter adds it, a histogram observes it."""
    unit: str = ""
    """For people; bytes are shown as ``3.0 MiB``."""
    help: str = ""
    """What Prometheus says of the metric, and the page of metrics too."""
    labels: tuple[str, ...] = ()
    """Names of the label values; a text key of a mapping has several with points between them."""
    note: str = ""
    """What the page of metrics says behind the help, as Markdown."""
    tracker: str = ""
    """The key of trackers, with ``{}`` for a label value; empty where trackers do not get it."""
    short: str = ""
    """What the console's line of an interval says: a format of the value, with ``{key}`` for the
    label value and ``{event}`` for the event."""
    hides_zero: bool = False
    """Whether the console is silent about a value of 0."""
    live: tuple[str, str] = ("", "")
    """The row of the live view that has the value, and the format there."""
    value: Callable[[Any], Any] | None = None
    """Makes the value from the event, where the value is not the field itself."""
    how: Literal["", "add", "total", "time"] = ""
    """Where the kind does not say it. ``add``: a gauge adds the value. ``total``: a counter takes
    the growth of the value since the event before. ``time``: a gauge takes the event's Unix time
    in the place of the value."""
    begin: float = float("nan")
    """A gauge's value before the first event: NaN says that nothing is known yet."""
    label_values: tuple[str, ...] = ()
    """With which a counter is 0 from the start: increase() of Prometheus does not see a counter
    that begins at 1."""
    former: bool = False
    """Whether what an event of a former start said holds on."""
    scope: Literal["run", "rank", "ledger"] = "run"
    """Who exports it: rank 0 for the run, every rank for itself with ``metrics.all_ranks``, or the
    goodput ledger when it is asked."""

    def series(self, value: Any) -> Series:
        """The numbers in a value of the field, by label values."""
        match value:
            case None:
                return {}
            case str():
                return {(value,): 1.0}
            case Mapping():
                return {self._key(key): number for key, number in value.items()}
            case list() | tuple():
                return {(str(index),): number for index, number in enumerate(value)}
        return {(): value}

    def _key(self, key: Any) -> tuple[str, ...]:
        if isinstance(key, tuple):
            return tuple(map(str, key))
        return tuple(key.split(".")) if len(self.labels) > 1 else (str(key),)


class Declared(NamedTuple):
    """A metric, and the attributes that lead from the event to the field that declares it."""

    path: tuple[str, ...]
    metric: Metric


def metric(
    name: str = "",
    kind: Kind = "gauge",
    unit: str = "",
    help: str = "",  # noqa: A002 - Prometheus' name
    *,
    log: bool = True,
    default: Any = MISSING,
    default_factory: Any = MISSING,
    **options: Any,
) -> Any:
    """A field of an event that is a metric.

    Args:
        name: as of :class:`Metric`, like ``kind``, ``unit``, ``help`` and ``options``.
        log: whether the log has the field.
        default: of the field, as ``default_factory``; see :func:`dataclasses.field`.
    """
    declaration = Metric(name, kind, unit, help, **options)
    return measured(declaration, log=log, default=default, default_factory=default_factory)


def measured(
    *metrics: Metric, log: bool = True, default: Any = MISSING, default_factory: Any = MISSING
) -> Any:
    """A field of an event that has these metrics, as :func:`metric`."""
    metadata = {"log": log, "metrics": metrics}
    if default_factory is not MISSING:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def inside(kind: type) -> Any:
    """A field with a dataclass of metrics, or None by default; the log does not have it."""
    return field(default=None, metadata={"log": False, "inside": kind})


_DECLARED: dict[type, tuple[Declared, ...]] = {}
"""What :func:`declared` has said before: it is asked at every event."""


def declared(kind: type) -> tuple[Declared, ...]:
    """The metrics that a class of events declares, in the order of its fields."""
    if kind not in _DECLARED:
        metrics: list[Declared] = []
        for entry in fields(kind):
            name = entry.name
            metrics += [Declared((name,), own) for own in entry.metadata.get("metrics", ())]
            if nested := entry.metadata.get("inside"):
                metrics += [Declared((name, *path), below) for path, below in declared(nested)]
        _DECLARED[kind] = tuple(metrics)
    return _DECLARED[kind]


def measurements(event: Any) -> Iterator[tuple[Metric, Series]]:
    """The metrics that an event declares, with its values."""
    for path, declaration in declared(type(event)):
        owner = event
        for name in path[:-1]:
            owner = getattr(owner, name)
        if owner is not None:
            make = declaration.value
            yield declaration, declaration.series(make(owner) if make else getattr(owner, path[-1]))
