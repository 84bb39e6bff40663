"""Events about what a run is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pretrain.observe.event import Event
from pretrain.observe.metric import Metric, measured, metric


@dataclass(frozen=True, kw_only=True)
class DataOpened(Event):
    """What the samples of this start are drawn from; sample n is a function of these fields and of
    n alone."""

    name: ClassVar[str] = "data"
    sample: int
    """The next sample."""
    seed: int
    seq_len: int
    sources: dict[str, dict[str, Any]]
    """By fingerprint: ``name``, ``path``, ``sequences`` and ``tokens`` of each source."""
    first_step: int = 0
    """The step that the run began after, and ``first_sample`` its first sample: not 0 where the run
    goes on with another run's training."""
    first_sample: int = 0
    blend: list[dict[str, Any]]
    """The phases of the blend in order: ``from_sample``, and ``weights`` by fingerprint."""


@dataclass(frozen=True, kw_only=True)
class DataFetched(Event):
    """What the caches of shards did in a log interval, over all ranks; where data is in an object
    store."""

    name: ClassVar[str] = "data_cache"
    cache_hits: int = measured(
        Metric("convoy_data_cache_hits_total", "counter", "shards",
               "Shards on a node's disk when needed."),
        Metric("convoy_data_cache_hit_ratio", "gauge", "ratio",
               "Share of shards on a node's disk in the last log interval.",
               value=lambda event: event.hit_ratio, begin=0.0))  # fmt: skip
    cache_misses: int = metric(
        "convoy_data_cache_misses_total", "counter", "shards", "Shards that were not.")  # fmt: skip
    fetched_bytes: int = metric(
        "convoy_data_fetched_bytes_total", "counter", "bytes", "Bytes read from object stores."
    )  # fmt: skip
    retries: int = metric("convoy_data_store_retries_total", "counter", "requests",
        "Requests to object stores of data that were repeated.")  # fmt: skip

    @property
    def hit_ratio(self) -> float:
        """The share of shards that were on the node's disk."""
        return self.cache_hits / max(1, self.cache_hits + self.cache_misses)
