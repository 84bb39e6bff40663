"""Prometheus metrics: those that events declare, those of the goodput ledger, and what is said of a
run and a rank once."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from parallel import Topology
from pretrain.observe.event import Event
from pretrain.observe.events import EVENTS, LedgerSummed
from pretrain.observe.jsonl import LoggedEvent
from pretrain.observe.ledger import Ledger, ledger_of
from pretrain.observe.metric import Metric, declared, measurements
from pretrain.observe.step_events import StepCommitted
from pretrain.spec import JobSpec

_BUCKETS = [0.01 * 2**i for i in range(16)]
BUILD = Metric("convoy_build_info", "info", "", "Versions; always 1.", ("version", "torch_version"))
JOB = Metric("convoy_job_info", "info", "", "The job; always 1.", ("name", "spec_hash"))
PARALLELISM = Metric(
    "convoy_parallelism_info", "info", "", "Degrees of the parallel axes; always 1.",
    tuple(Topology().as_dict()))  # fmt: skip
TARGET_STEPS = Metric("convoy_target_steps", "gauge", "steps", "Steps that the spec asks for.")
RANK = Metric("convoy_rank_info", "info", "", "The rank and its machine; always 1.",
    ("rank", "host", "device"), scope="rank")  # fmt: skip
RANK_MEMORY = Metric(
    "convoy_rank_memory_bytes", "gauge", "bytes", "Resident memory of this rank's process.",
    scope="rank")  # fmt: skip
COST = Metric("convoy_cost_dollars_total", "counter", "dollars",
    "Price of the ranks for the run's wall time without idle, over all starts.",
    note="only with `metrics.dollars_per_rank_hour`: that price for all ranks and spares",
    scope="ledger")  # fmt: skip
COST_PER_TOKENS = Metric("convoy_cost_per_billion_tokens_dollars", "gauge", "dollars",
    "Cost so far over the target tokens of all committed steps.", scope="ledger")  # fmt: skip
WITHOUT_EVENT = (
    BUILD, JOB, PARALLELISM, TARGET_STEPS, RANK, RANK_MEMORY, COST, COST_PER_TOKENS,
)  # fmt: skip
"""The metrics that no field of an event declares."""


def all_metrics() -> list[Metric]:
    """Every metric that Prometheus gets, once, those of the run first."""
    metrics = list(WITHOUT_EVENT)
    for kind in EVENTS.values():
        metrics += [declaration for _, declaration in declared(kind) if declaration.name]
    return list({declaration.name: declaration for declaration in reversed(metrics)}.values())[::-1]


class EventMetrics:
    """Keeps the metrics of one scope that events declare in an injected registry."""

    def __init__(self, registry: CollectorRegistry, scope: str) -> None:
        self._families = {
            declaration.name: _family(declaration, registry)
            for declaration in all_metrics()
            if declaration.scope == scope and declaration not in WITHOUT_EVENT
        }
        self._totals: dict[tuple[str, ...], float] = {}
        """The newest value of every series whose counter takes the growth of a value."""

    def take(self, event: Event, now: float, *, former: bool = False) -> None:
        """Let the metrics have what one event says.

        Args:
            event: of this start, or of a former one.
            now: Unix time of the event.
            former: take only what holds on from a former start.
        """
        for declaration, series in measurements(event):
            family = self._families.get(declaration.name)
            if family is None or (former and not declaration.former):
                continue
            for labels, value in series.items():
                if value is None:
                    with contextlib.suppress(KeyError):  # the series began before this start
                        family.remove(*labels)
                    continue
                if declaration.how == "total":
                    key = (declaration.name, *labels)
                    value, self._totals[key] = value - self._totals.get(key, 0.0), value
                    value = max(0.0, value)
                elif declaration.how == "time":
                    value = now
                child = family.labels(*labels) if labels else family
                if isinstance(child, Histogram):
                    child.observe(value)
                elif isinstance(child, Counter) or declaration.how == "add":
                    child.inc(value)
                else:
                    child.set(value)


def _family(declaration: Metric, registry: CollectorRegistry) -> Gauge | Counter | Histogram:
    name, labels = declaration.name, declaration.labels
    if declaration.kind == "histogram":
        return Histogram(name, declaration.help, labels, buckets=_BUCKETS, registry=registry)
    if declaration.kind == "counter":
        counter = Counter(name, declaration.help, labels, registry=registry)
        for value in declaration.label_values:
            counter.labels(value)
        return counter
    gauge = Gauge(name, declaration.help, labels, registry=registry)
    if not labels:
        gauge.set(declaration.begin)
    return gauge


def _say(registry: CollectorRegistry, declaration: Metric, *labels: str, value: float = 1) -> None:
    """Export a metric that never changes."""
    gauge = Gauge(declaration.name, declaration.help, declaration.labels, registry=registry)
    (gauge.labels(*labels) if labels else gauge).set(value)


class Metrics:
    """A sink that keeps the metrics of one run in an injected registry.

    Args:
        registry: where the metrics are registered.
        spec: of the run.
        topology: the layout.
        version: of this package.
        ledger: the goodput ledger at the time of the call; None for an empty one.
        former: the lines of former starts: what a metric of them still says holds on.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        spec: JobSpec,
        topology: Topology,
        version: str,
        *,
        ledger: Callable[[], Ledger] | None = None,
        former: Sequence[LoggedEvent] = (),
    ) -> None:
        self.tokens_seen = 0
        registry.register(
            LedgerMetrics(
                ledger or (lambda: ledger_of(())),
                dollars_per_rank_hour=spec.metrics.dollars_per_rank_hour,
                tokens_seen=lambda: self.tokens_seen,
            )
        )
        _say(registry, BUILD, version, torch.__version__)
        _say(registry, JOB, spec.name, spec.hash)
        _say(registry, PARALLELISM, *map(str, topology.as_dict().values()))
        _say(registry, TARGET_STEPS, value=spec.train.steps)
        self._events = EventMetrics(registry, "run")
        for line in former:
            self._take(line.event, line.time or 0.0, former=True)

    def __call__(self, event: Event) -> None:
        """Publish what one event says."""
        self._take(event, time.time(), former=False)

    def _take(self, event: Event, now: float, *, former: bool) -> None:
        self._events.take(event, now, former=former)
        if isinstance(event, StepCommitted):
            self.tokens_seen = event.tokens_seen


class LedgerMetrics(Collector):
    """The metrics of the goodput ledger, made when they are asked for.

    The counters continue over restarts: the ledger is that of the whole log.

    Args:
        ledger: the ledger now.
        dollars_per_rank_hour: the price of a rank; without it there are no metrics of cost.
        tokens_seen: the target tokens of all committed steps now.
    """

    def __init__(
        self,
        ledger: Callable[[], Ledger],
        *,
        dollars_per_rank_hour: float | None = None,
        tokens_seen: Callable[[], int] = lambda: 0,
    ) -> None:
        self._ledger, self._tokens_seen = ledger, tokens_seen
        self._price = dollars_per_rank_hour

    def collect(self) -> Iterator[Family]:
        """The metrics now."""
        ledger = self._ledger()
        for (name,), declaration in declared(LedgerSummed):
            if declaration.scope == "ledger":
                yield _sampled(declaration, getattr(ledger, name))
        if self._price is None:
            return
        dollars = ledger.rank_seconds / 3600 * self._price
        yield _sampled(COST, dollars)
        if tokens := self._tokens_seen():
            yield _sampled(COST_PER_TOKENS, dollars / tokens * 1e9)


def _sampled(declaration: Metric, value: object) -> Family:
    """A family with the samples of a value; what is not known is 0."""
    kind = CounterMetricFamily if declaration.kind == "counter" else GaugeMetricFamily
    name = declaration.name.removesuffix("_total")
    family = kind(name, declaration.help, labels=declaration.labels)
    for labels, number in declaration.series(0.0 if value is None else value).items():
        family.add_metric(labels, number or 0.0)
    return family


class RankMetrics:
    """A sink that keeps what one rank measures of itself in an injected registry, which every rank
    serves with ``metrics.all_ranks``.

    The rank is the label ``process_rank`` of the target file, see :meth:`Endpoint.announce`.
    """

    def __init__(self, registry: CollectorRegistry, *, rank: int, host: str, device: str) -> None:
        registry.register(_Memory())
        _say(registry, RANK, str(rank), host, device)
        self._events = EventMetrics(registry, "rank")

    def __call__(self, event: Event) -> None:
        """Publish what one event says of this rank."""
        self._events.take(event, time.time())


class _Memory(Collector):
    """The memory of this process, read when it is asked for; absent where the system does not say,
    as on systems other than Linux."""

    def collect(self) -> Iterator[Family]:
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            yield _sampled(RANK_MEMORY, pages * os.sysconf("SC_PAGE_SIZE"))
