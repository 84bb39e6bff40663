"""The last measured steps of many ranks, and how many of them are beyond a rank's level.

Legend: R ranks, N steps that are kept, W windows, S sides: above the level, below the level, and
both again by at least a smallest change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class SpeedWindows(NamedTuple):
    """What is known of each rank, without a loop over ranks. Nothing is changed in place."""

    level_R: Tensor
    """int64: the level that residuals are differences from."""
    steps_R: Tensor
    """int64: the measured steps since the level holds, at most ``kept_R``."""
    kept_R: Tensor
    """int64: how many of the last ``rows`` are the rank's; at most N."""
    rows: tuple[Tensor, ...]
    """[R] int32 for each of N: values of the last measured steps, the newest last. In separate
    tensors, because a step then copies none of them."""
    beyond_SWR: Tensor
    """int8: of the last steps of each window, as far as the level holds, those beyond it."""
    lengths: tuple[int, ...]
    """Of the windows."""
    least: float
    """The smallest change."""

    @staticmethod
    def of(
        levels: Sequence[int],
        steps: Sequence[int],
        recent: Sequence[Sequence[int]],
        lengths: tuple[int, ...],
    ) -> SpeedWindows:
        """Of numbers of each rank; ``recent`` has the newest value last."""
        kept, most = [len(values) for values in recent], max(lengths)
        rows = torch.zeros(most, len(kept), dtype=torch.int32)
        if measured := [rank for rank, count in enumerate(kept) if count]:
            padded = [[0] * (most - kept[rank]) + list(recent[rank]) for rank in measured]
            rows[:, measured] = torch.tensor(padded, dtype=torch.int32).t()
        windows = SpeedWindows(
            level_R=torch.tensor(levels),
            steps_R=torch.tensor(steps),
            kept_R=torch.tensor(kept),
            rows=tuple(rows),
            beyond_SWR=torch.empty(0, dtype=torch.int8),
            lengths=lengths,
            least=0.0,
        )
        return windows.with_least(0.0)

    def with_least(self, least: float) -> SpeedWindows:
        """With another smallest change."""
        rows_NR = torch.stack(self.rows)
        counts = _counts(rows_NR, self.level_R, self.steps_R, self.lengths, least)
        return self._replace(beyond_SWR=counts, least=least)

    def seen(self, values_R: Tensor, measured_R: Tensor) -> SpeedWindows:
        """With one more step of the ranks that were measured."""
        rows = (*self.rows[1:], values_R.int())
        came_SR = _sides(values_R - self.level_R, self.least).to(torch.int8)
        beyond = [
            counts_SR + came_SR - (_sides(self.rows[-n] - self.level_R, self.least)
                                   & (self.steps_R >= n)).to(torch.int8)
            for n, counts_SR in zip(self.lengths, self.beyond_SWR.unbind(1), strict=True)
        ]  # fmt: skip
        beyond_SWR = torch.stack(beyond, 1)
        if not bool(measured_R.all()):
            pairs = zip(rows, self.rows, strict=True)
            rows = tuple(after.where(measured_R, before) for after, before in pairs)
            beyond_SWR = beyond_SWR.where(measured_R, self.beyond_SWR)
        kept_R = (self.kept_R + measured_R).clamp(max=len(rows))
        steps_R = torch.minimum(self.steps_R + measured_R, kept_R)
        return self._replace(rows=rows, beyond_SWR=beyond_SWR, kept_R=kept_R, steps_R=steps_R)

    def at(self, ranks: Sequence[int], levels: Sequence[int], steps: Sequence[int]) -> SpeedWindows:
        """With other levels of some ranks, which hold for their last steps."""
        index, new_levels, new_steps = (
            torch.tensor(numbers, dtype=torch.int64) for numbers in (ranks, levels, steps)
        )
        level_R = self.level_R.index_copy(0, index, new_levels)
        steps_R = self.steps_R.index_copy(0, index, new_steps)
        rows = self._rows_of(index)
        counts = _counts(rows, level_R[index], steps_R[index], self.lengths, self.least)
        beyond_SWR = self.beyond_SWR.index_copy(2, index, counts)
        return self._replace(level_R=level_R, steps_R=steps_R, beyond_SWR=beyond_SWR)

    def far_ones(self, least_counts: Sequence[int]) -> Tensor:
        """[R] bool: in some window so many steps as the window needs are on one side of the level,
        and half of the window by at least the smallest change."""
        needed_W1 = torch.tensor(least_counts, dtype=torch.int8).unsqueeze(1)
        halves_W1 = torch.tensor([(n + 1) // 2 for n in self.lengths]).to(torch.int8).unsqueeze(1)
        one_sided, far = self.beyond_SWR[:2] >= needed_W1, self.beyond_SWR[2:] >= halves_W1
        return (one_sided & far).flatten(0, 1).any(0)

    def recent_of(self, ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """The values of some ranks, the newest last."""
        index = torch.tensor(ranks, dtype=torch.int64)
        values, kept = self._rows_of(index).t().tolist(), self.kept_R[index].tolist()
        return [tuple(v[len(v) - count :]) for v, count in zip(values, kept, strict=True)]

    def _rows_of(self, index: Tensor) -> Tensor:
        return torch.stack([row[index] for row in self.rows])


def _sides(residuals: Tensor, least: float) -> Tensor:
    """[S, ...] bool."""
    return torch.stack([residuals > 0, residuals < 0, residuals >= least, residuals <= -least])


def _counts(
    rows_NR: Tensor, level_R: Tensor, steps_R: Tensor, lengths: Sequence[int], least: float
) -> Tensor:
    """[S, W, R] int8, from all values."""
    N = len(rows_NR)
    ages_N1 = torch.arange(N - 1, -1, -1).unsqueeze(1)
    sides_SNR = _sides(rows_NR - level_R, least) & (ages_N1 < steps_R)
    return torch.stack([sides_SNR[:, N - n :].sum(1) for n in lengths], 1).to(torch.int8)
