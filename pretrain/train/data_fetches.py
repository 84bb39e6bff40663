"""What a run tells of the object stores that its data comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple

import torch

from pretrain.data import CacheCounts
from pretrain.job import Job
from pretrain.observe import DataFetched, Notice


def tell_of_failing_stores(job: Job, step: Callable[[], int]) -> None:
    """Let this rank's cache publish a notice when a store fails, and when it answers again."""
    cache = job.corpora.cache
    if cache is not None:
        cache.tell = lambda text, problem: job.events.publish(
            Notice(step=step(), text=text, problem=problem)
        )


def publish_fetches(job: Job, step: int) -> None:
    """Publish what the caches of all ranks did since the last call; every rank must call."""
    cache = job.corpora.cache
    if cache is None:
        return
    mine = torch.tensor(astuple(cache.take_counts()), dtype=torch.int64)
    counts = CacheCounts(*job.runtime.sum_in_training(mine).tolist())
    job.events.publish(
        DataFetched(
            step=step,
            cache_hits=counts.hits,
            cache_misses=counts.misses,
            fetched_bytes=counts.fetched_bytes,
            retries=counts.retries,
        )
    )
