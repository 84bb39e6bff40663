"""Samples that a run leaves out: ranges of sample indices that no step takes."""

from __future__ import annotations

from collections.abc import Sequence

SampleRanges = Sequence[tuple[int, int]]
"""Ranges from the first index up to, and without, the second; in order, without overlap."""


def first_kept(sample_index: int, skipped: SampleRanges) -> int:
    """The first index from ``sample_index`` on that is in no skipped range."""
    for start, stop in skipped:
        if start <= sample_index < stop:
            sample_index = stop
    return sample_index


def kept_samples(sample_index: int, count: int, skipped: SampleRanges) -> Sequence[int]:
    """The first ``count`` indices from ``sample_index`` on that are in no skipped range."""
    if all(stop <= sample_index or start >= sample_index + count for start, stop in skipped):
        return range(sample_index, sample_index + count)
    found: list[int] = []
    while len(found) < count:
        sample_index = first_kept(sample_index, skipped)
        found.append(sample_index)
        sample_index += 1
    return found
