"""Prometheus metrics of a corpus in an object store and its shards on nodes."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from pretrain.observe.data_events import DataFetched


class DataMetrics:
    """Keeps what ranks fetched, and what they found on their nodes, in an injected registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"convoy_data_{name}", text, registry=registry)

        self.hits = counter("cache_hits_total", "Shards on a node's disk when needed.")
        self.misses = counter("cache_misses_total", "Shards that were not.")
        self.fetched = counter("fetched_bytes_total", "Bytes read from object stores.")
        self.retries = counter(
            "store_retries_total", "Requests to object stores of data that were repeated."
        )
        self.ratio = Gauge(
            "convoy_data_cache_hit_ratio",
            "Share of shards on a node's disk in the last log interval.",
            registry=registry,
        )

    def __call__(self, event: DataFetched) -> None:
        """Publish one log interval's reads."""
        self.hits.inc(event.cache_hits)
        self.misses.inc(event.cache_misses)
        self.ratio.set(event.hit_ratio)
        self.fetched.inc(event.fetched_bytes)
        self.retries.inc(event.retries)
