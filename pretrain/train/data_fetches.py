"""What a run tells of the object stores that its data comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple

import torch

from pretrain.data import CacheCounts, ShardCache
from pretrain.observe import DataFetched, Events
from pretrain.runtime import Runtime


def tell_of_failing_stores(
    cache: ShardCache | None, events: Events, step: Callable[[], int]
) -> None:
    """Let this rank's cache publish when a store fails, and when the store answers again."""
    if cache is not None:
        cache.tell = lambda text, problem: events.note(text, step=step(), problem=problem)


def publish_fetches(cache: ShardCache | None, runtime: Runtime, events: Events, step: int) -> None:
    """Publish what the caches of all ranks did since the last call; every rank must call."""
    if cache is None:
        return
    own = torch.tensor(astuple(cache.take_counts()), dtype=torch.int64)
    counts = CacheCounts(*runtime.sum_in_training(own).tolist())
    events.publish(
        DataFetched(
            step=step,
            cache_hits=counts.hits,
            cache_misses=counts.misses,
            fetched_bytes=counts.fetched_bytes,
            retries=counts.retries,
        )
    )
