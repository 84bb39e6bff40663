"""Which source each sample comes from: blends of sources, in phases.

Within a phase the next sample is of the source with the largest deficit: its weight times the
samples of the phase so far, this one included, less the samples that it gave. With whole weights
that sequence repeats after as many samples as the weights add up to, and each period has each
source exactly as often as its weight says. So the source of sample n, and how many samples the
source gave before, follow from n alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

Weights = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Phase:
    """One blend, from a sample on."""

    from_sample: int
    weights: Weights
    """(fingerprint of the source, whole weight), sorted."""

    @classmethod
    def of(cls, from_sample: int, weights: Mapping[str, int]) -> Phase:
        """The phase with the weights of a mapping."""
        return cls(from_sample, tuple(sorted(weights.items())))


@lru_cache(maxsize=64)
def period_of(weights: Weights) -> tuple[np.ndarray, np.ndarray]:
    """One period of a blend: the number of the source of each sample, and how many samples of that
    source come before it in the period; int64 [sum of the weights] each."""
    whole = np.array([weight for _, weight in weights], np.int64)
    length = int(whole.sum())
    sources, before = np.empty(length, np.int64), np.empty(length, np.int64)
    deficits, given = np.zeros_like(whole), np.zeros_like(whole)
    for at in range(length):
        deficits += whole
        chosen = int(np.argmax(deficits))  # of equal deficits the first
        deficits[chosen] -= length
        sources[at], before[at] = chosen, given[chosen]
        given[chosen] += 1
    return sources, before


@dataclass(frozen=True)
class Blend:
    """The blend of a run from its first sample on.

    Args:
        phases: in order; the first begins at sample 0.
    """

    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        starts = [phase.from_sample for phase in self.phases]
        assert starts, "a run has a blend"
        assert starts[0] == 0
        assert starts == sorted(set(starts))

    @property
    def sources(self) -> list[str]:
        """The fingerprints of all sources that any phase draws, sorted."""
        return sorted({name for phase in self.phases for name, _ in phase.weights})

    def drawn(self, stop: int) -> dict[str, int]:
        """How many of the samples before ``stop`` are of each source."""
        counts = dict.fromkeys(self.sources, 0)
        ends = [phase.from_sample for phase in self.phases[1:]] + [stop]
        for phase, end in zip(self.phases, ends, strict=True):
            samples = min(end, stop) - phase.from_sample
            if samples <= 0:
                break
            sources, _ = period_of(phase.weights)
            periods, rest = divmod(samples, len(sources))
            for number, (name, weight) in enumerate(phase.weights):
                counts[name] += periods * weight + int((sources[:rest] == number).sum())
        return counts

    def draw(self, samples: np.ndarray) -> list[tuple[str, np.ndarray, np.ndarray]]:
        """The sources of some samples: for each source the places in ``samples`` that it has, and
        the number of each of these samples among all samples of the source; int64."""
        starts = np.array([phase.from_sample for phase in self.phases])
        of_phase = np.searchsorted(starts, samples, side="right") - 1
        found = []
        for number in np.unique(of_phase):
            phase, places = self.phases[number], np.flatnonzero(of_phase == number)
            sources, before = period_of(phase.weights)
            earlier = self.drawn(phase.from_sample)
            periods, rest = np.divmod(samples[places] - phase.from_sample, len(sources))
            for index, (name, weight) in enumerate(phase.weights):
                mine = np.flatnonzero(sources[rest] == index)
                if len(mine):
                    numbers = earlier[name] + periods[mine] * weight + before[rest[mine]]
                    found.append((name, places[mine], numbers))
        return found

    def continued(self, spec: Blend, cursor: int) -> Blend:
        """The blend of a run that has taken the samples before ``cursor`` of this blend and goes on
        with another spec's: earlier samples stay what they were."""
        phases = [phase for phase in self.phases if phase.from_sample < cursor]
        now = [phase for phase in spec.phases if phase.from_sample <= cursor][-1]
        coming = [phase for phase in spec.phases if phase.from_sample > cursor]
        for phase in (Phase(cursor, now.weights), *coming):
            if not phases or phases[-1].weights != phase.weights:
                phases.append(phase)
        return Blend(tuple(phases))

    def as_json(self) -> list[dict[str, Any]]:
        """Plain JSON."""
        return [
            {"from_sample": phase.from_sample, "weights": dict(phase.weights)}
            for phase in self.phases
        ]

    @classmethod
    def from_json(cls, values: Sequence[Mapping[str, Any]]) -> Blend:
        """The blend of :meth:`as_json`. Raises ValueError where it is none."""
        try:
            phases = tuple(Phase.of(v["from_sample"], v["weights"]) for v in values)
            return cls(phases)
        except (KeyError, TypeError, AttributeError, AssertionError) as error:
            raise ValueError(f"the blend of the run cannot be read: {error}") from None
