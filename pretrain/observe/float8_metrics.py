"""Prometheus metrics of products in float8."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from pretrain.observe.events import IntervalEnded


class Float8Metrics:
    """Keeps what float8 lost, by part and operand, in an injected registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("part", "operand")
        self.underflow = Gauge(
            "convoy_float8_underflow_ratio",
            "Share of numbers that became 0 in float8, in the last step of a log interval.",
            labels,
            registry=registry,
        )
        self.overflows = Counter(
            "convoy_float8_overflowed_tiles_total",
            "Tiles of float8 operands with a NaN or an infinity.",
            labels,
            registry=registry,
        )

    def __call__(self, event: IntervalEnded) -> None:
        """Publish one log interval's counts."""
        for name, share in event.float8_underflow.items():
            self.underflow.labels(*name.split(".")).set(share)
        for name, tiles in event.float8_overflow.items():
            self.overflows.labels(*name.split(".")).inc(tiles)
