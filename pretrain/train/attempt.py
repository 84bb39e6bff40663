"""One try of a step on this rank: what was read, and what the backward gave."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from parallel import CollectiveKind, CommStats
from pretrain.data import Cursor
from pretrain.parallelize import NO_MTP, MTPLoss, StepResult


@dataclass(kw_only=True)
class Attempt:
    """What a rank has of the step that is being taken."""

    batches: list[Tensor]
    """This rank's micro-batches."""
    cursor: Cursor
    """After the step's samples."""
    planned: int
    """Target tokens over all ranks, if all positions have a target."""
    began: float
    """When the batch was asked for, by ``time.perf_counter``."""
    waited: float
    """Seconds until the batch was there."""
    random: dict[str, Tensor] = field(default_factory=dict)
    """Random states before the step; only float16 puts them back, after an overflow."""
    mtp: MTPLoss = NO_MTP
    result: StepResult = field(init=False)
    """Of the backward."""
    traffic: Mapping[CollectiveKind, CommStats] = field(default_factory=dict)
    """Collectives of the step."""
    seconds: float = 0.0
    """Of the whole step."""

    def end(self, traffic: Mapping[CollectiveKind, CommStats]) -> None:
        """The step is decided and its update done."""
        self.traffic, self.seconds = traffic, time.perf_counter() - self.began
