"""Ranks whose loss differs from that of other ranks: a sign of damaged data, memory or arithmetic.

In each step the ranks of a group score different samples of one order, drawn at random, with one
model. So the loss of a rank is the median over ranks plus noise, and the noise of a mean over n
target tokens falls with the square root of n. A rank is odd where

- its loss is not finite while other ranks have finite losses,
- its loss in one step is more than ``SUDDEN`` standard deviations from the median over ranks, or
- the median of its differences over a window is more standard errors from 0 than chance brings once
  in 1/``FALSE_ALARMS`` steps, and more than ``LEAST_CHANGE`` of the loss.

The standard deviation is 1.4826 times the median absolute difference over all ranks and steps of
the window, which an odd rank does not move (Rousseeuw and Croux, JASA 88, 1993); the standard error
of a median is 1.2533 standard deviations over the square root of the number of steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from cluster.detect import MAD_TO_SIGMA

WINDOW = 32
"""Steps."""
SUDDEN = 30.0
"""Single samples are far from normal: texts of one kind may move a step by ten deviations."""
FALSE_ALARMS = 1e-6
"""Of the test on a window, per step of all ranks together, where all ranks are healthy."""
LEAST_CHANGE = 0.01
_EVERY = 8
"""Steps between two tests on a window: medians over thousands of ranks take milliseconds."""
_FEWEST_RANKS = 3
"""With two ranks nothing tells which of them is the odd one."""
_MEDIAN_ERROR = 1.2533


@dataclass(frozen=True)
class LossOutlier:
    """A rank with an odd loss."""

    rank: int
    loss: float
    """Of the rank in the last step, in nats per token."""
    usual: float
    """The median over the ranks that are compared, in the last step."""
    z: float
    """The difference in standard deviations or standard errors; infinite where the loss is not
    finite."""
    steps: int
    """Over which the difference was seen: 1 or :data:`WINDOW`."""


class LossOutliers:
    """Finds ranks of one group that have odd losses. Each is reported once in a window of steps.

    The window begins anew with each start of a run: it leads to no action, so a resumed run takes
    the steps that it would have taken.

    Args:
        ranks: that score like pieces of samples: with context parallelism, of one place in it.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = np.array(ranks)
        self._window: deque[np.ndarray] = deque(maxlen=WINDOW)
        self._quiet_until: dict[int, int] = {}
        self._step = 0
        self._sigma = 0.0

    def after(self, loss_sums: ArrayLike, target_tokens: ArrayLike) -> list[LossOutlier]:
        """Take in a step; returns the ranks that are odd and were not reported lately.

        Args:
            loss_sums: [ranks of the run], in nats.
            target_tokens: [ranks of the run]; a rank without any is not compared.
        """
        self._step += 1
        sums, tokens = (np.asarray(x)[self.ranks] for x in (loss_sums, target_tokens))
        there = tokens > 0
        losses = np.where(there, sums / np.maximum(tokens, 1.0), np.nan)
        finite = np.isfinite(losses)
        if not finite.any():
            return []
        usual = float(np.median(losses[finite]))
        found = {
            at: LossOutlier(int(self.ranks[at]), float(losses[at]), usual, math.inf, 1)
            for at in map(int, np.flatnonzero(there & ~finite))
        }
        if finite.sum() >= _FEWEST_RANKS:
            scale = np.sqrt(tokens / tokens[finite].mean())
            residuals = np.where(finite, (losses - usual) * scale, np.nan)
            self._window.append(residuals)
            for at, z, steps in self._odd(usual):
                found[at] = LossOutlier(int(self.ranks[at]), float(losses[at]), usual, z, steps)
        return [each for at, each in found.items() if self._is_new(at)]

    def _odd(self, usual: float) -> list[tuple[int, float, int]]:
        """(place, z, steps) of odd ranks, from the window, whose last step is this one."""
        if len(self._window) < WINDOW:
            return []
        tested = self._step % _EVERY == 0
        if tested or not self._sigma:
            rows = np.stack(self._window)
            known = rows[np.isfinite(rows)]
            # Ranks that agree in every bit, as on one and the same data, have no noise to go by.
            self._sigma = max(MAD_TO_SIGMA * float(np.median(np.abs(known))), 1e-6 * abs(usual))
        residuals = self._window[-1]
        sigma = max(self._sigma, 1e-12)
        found = [
            (int(at), float(residuals[at]) / sigma, 1)
            for at in np.flatnonzero(np.abs(np.nan_to_num(residuals)) > SUDDEN * sigma)
        ]
        if tested:
            found += self._odd_for_long(rows, usual)
        return found

    def _odd_for_long(self, rows: np.ndarray, usual: float) -> list[tuple[int, float, int]]:
        sigma = max(self._sigma, 1e-12)
        whole = np.flatnonzero(np.isfinite(rows).all(axis=0))
        medians = np.median(rows[:, whole], axis=0)
        z = medians / (_MEDIAN_ERROR * sigma / math.sqrt(len(rows)))
        limit = NormalDist().inv_cdf(1 - FALSE_ALARMS / (2 * len(self.ranks)))
        least = LEAST_CHANGE * abs(usual)
        return [
            (int(whole[index]), float(z[index]), len(rows))
            for index in np.flatnonzero((np.abs(z) > limit) & (np.abs(medians) > least))
        ]

    def _is_new(self, at: int) -> bool:
        if self._step < self._quiet_until.get(at, 0):
            return False
        self._quiet_until[at] = self._step + WINDOW
        return True
