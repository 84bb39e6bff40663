"""Prometheus metrics of one rank, which every rank serves with ``metrics.all_ranks``."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pretrain.observe.event import Event
from pretrain.observe.events import StepCommitted, StepTaken
from pretrain.observe.process import resident_bytes


class RankMetrics:
    """A sink that keeps what one rank measures of itself in an injected registry.

    The rank is the label ``process_rank`` of the target file, see :meth:`Endpoint.announce`.
    """

    def __init__(self, registry: CollectorRegistry, *, rank: int, host: str, device: str) -> None:
        registry.register(_Memory())
        Gauge(
            "convoy_rank_info",
            "The rank and its machine; always 1.",
            ["rank", "host", "device"],
            registry=registry,
        ).labels(str(rank), host, device).set(1)
        self.steps = Counter(
            "convoy_rank_steps_total", "Steps that this rank committed.", registry=registry
        )
        self.seconds = Counter(
            "convoy_rank_step_seconds_total",
            "Wall time of this rank's steps, skipped ones too.",
            registry=registry,
        )
        self.data_wait = Counter(
            "convoy_rank_data_wait_seconds_total",
            "Time this rank waited for its batches.",
            registry=registry,
        )
        self.collective_seconds = Counter(
            "convoy_rank_collective_seconds_total",
            "Seconds of collectives on this rank.",
            ["op", "group"],
            registry=registry,
        )
        self.last_step = Gauge(
            "convoy_rank_last_step_timestamp_seconds",
            "Unix time of this rank's last step; 0 before the first.",
            registry=registry,
        )

    def __call__(self, event: Event) -> None:
        """Publish what one event says of this rank."""
        if not isinstance(event, StepTaken):
            return
        self.seconds.inc(event.seconds)
        self.data_wait.inc(event.rank_0_data_wait_seconds or 0.0)  # each rank's own in its events
        self.last_step.set(time.time())
        for (op, group), seconds in event.collective_seconds.items():
            self.collective_seconds.labels(op, group).inc(seconds)
        if isinstance(event, StepCommitted):
            self.steps.inc()


class _Memory(Collector):
    """The memory of this process, read when it is asked for."""

    def collect(self) -> Iterator[Metric]:
        if (count := resident_bytes()) is not None:
            yield GaugeMetricFamily(
                "convoy_rank_memory_bytes",
                "Resident memory of this rank's process.",
                value=count,
            )
