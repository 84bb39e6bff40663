"""The ``[health]`` section of the spec: signals, thresholds, and what is done about each signal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from pretrain.section import OnResume, Section

ActionName = Literal[
    "report", "lower_lr", "skip", "skip+lower_lr", "go_back", "go_back+lower_lr", "stop"
]
LimitedAction = Literal["report", "lower_lr", "go_back", "go_back+lower_lr", "stop"]
UpdateAction = Literal["skip", "skip+lower_lr", "go_back", "go_back+lower_lr", "stop"]

SEVERITY: tuple[ActionName, ...] = (
    "report", "lower_lr", "skip", "skip+lower_lr", "go_back", "go_back+lower_lr", "stop",
)  # fmt: skip
"""All actions. Where several rules act on one step, the last of their actions in this order is
taken."""

SPIKE_ACTIONS: list[ActionName] = [
    "skip", "skip", "skip", "go_back", "go_back+lower_lr", "stop",
]  # fmt: skip
"""Of spikes by default."""

BLOCKS = 8
"""Blocks of steps that ``slow_divergence`` compares."""
CHECKS = 10
"""Checks of the routers over the steps that a collapse must last."""


class _Rule(Section):
    """What all rules share: the check of the last action, which repeats."""

    on_resume = OnResume.FREE
    RULE: ClassVar[str]
    """The name of the table."""
    LAST: ClassVar[tuple[ActionName, ...]] = ("report", "lower_lr", "stop")
    """The actions that may be repeated for ever."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        actions: Sequence[ActionName] = self.actions  # type: ignore[attr-defined]
        if actions and actions[-1] not in self.LAST:
            raise ValueError(
                f"health.{self.RULE}.actions must end with {' or '.join(self.LAST)}, and ends with "
                f"{actions[-1]}: the last action is repeated, and a run must not skip samples or "
                f"go back for ever"
            )
        return self


class NotFiniteRule(_Rule):
    """The ``[health.not_finite]`` section: a loss, a gradient or router logits that are NaN or
    infinite.

    The step changes nothing and is tried again with the samples that it had. The rule acts after
    three tries in a row. Overflows of float16 are not counted.
    """

    RULE = "not_finite"
    LAST = ("stop",)

    actions: list[UpdateAction] = Field(default=["stop"], min_length=1)
    """What is done at the first occurrence, the second, and so on; the last one must be stop."""


class LossSpikeRule(_Rule):
    """The ``[health.loss_spike]`` section: a loss far above those of the last steps.

    The rule compares the step's loss with the median of the last ``health.window_steps`` losses of
    committed steps. The limit is the median plus ``threshold`` robust standard deviations (1.4826
    times the median absolute deviation; Rousseeuw and Croux, 1993), and at least the median plus
    0.5 nats per token. The rule is silent until the window is full. Skipping such a step instead of
    taking its update, with a window of 128 steps, is the practice of OLMo 2 (arXiv 2501.00656).
    """

    RULE = "loss_spike"

    actions: list[ActionName] = Field(default=SPIKE_ACTIONS)
    """What is done at the first occurrence, the second, and so on; the last action repeats. An
    empty list turns the rule off."""
    threshold: float = Field(default=6.0, gt=0)
    """Robust standard deviations above the median."""


class GradNormSpikeRule(_Rule):
    """The ``[health.grad_norm_spike]`` section: a gradient norm far above those of the last steps.

    The rule compares the norm before clipping with the median of the last ``health.window_steps``
    norms of committed steps, as ``loss_spike`` compares losses; the limit is at least ten medians.
    The rule is silent until the window is full.
    """

    RULE = "grad_norm_spike"

    actions: list[ActionName] = Field(default=SPIKE_ACTIONS)
    """What is done at the first occurrence, the second, and so on; the last action repeats. An
    empty list turns the rule off."""
    threshold: float = Field(default=10.0, gt=0)
    """Robust standard deviations above the median."""


class SlowDivergenceRule(_Rule):
    """The ``[health.slow_divergence]`` section: a smoothed loss that rises over many steps.

    A block is ``health.window_steps`` committed steps. At the end of a block, its mean loss is
    compared with the lowest mean of the seven blocks before. The limit is that mean plus 0.1 nats
    per token, and at least plus 5 standard errors of the difference of the two means. After a
    signal, eight new blocks are gathered.
    """

    RULE = "slow_divergence"

    actions: list[LimitedAction] = Field(default=["report"])
    """What is done at the first occurrence, the second, and so on; the last action repeats. An
    empty list turns the rule off."""


class RouterCollapseRule(_Rule):
    """The ``[health.router_collapse]`` section: routers that send most tokens to few experts.

    About ten times in ``patience_steps`` steps the assignments of a step are summed over ranks, and
    each time must find a collapse. A layer has collapsed where the entropy of its experts' loads
    is below ``min_entropy_ratio`` of its largest value, the logarithm of the number of experts, or
    where more than half of its experts have no token. A layer with less than ten assignments for
    each expert is not judged.
    """

    RULE = "router_collapse"

    actions: list[LimitedAction] = Field(default=["report"])
    """What is done at the first occurrence, the second, and so on; the last action repeats. An
    empty list turns the rule off."""
    patience_steps: int = Field(default=100, ge=1)
    """The steps that a collapse must last."""
    min_entropy_ratio: float = Field(default=0.5, gt=0, lt=1)
    """The entropy of the loads over its largest value."""

    @property
    def interval_steps(self) -> int:
        """Steps between two checks."""
        return max(1, self.patience_steps // CHECKS)

    @property
    def checks(self) -> int:
        """Checks in a row that must find a collapse."""
        return math.ceil(self.patience_steps / self.interval_steps)


class HealthConfig(Section):
    """The ``[health]`` section: what a run does about its own health.

    Each table below is a rule: a signal with its thresholds, and ``actions`` that escalate.
    ``report``: an event and a line. ``lower_lr``: the learning rate is lowered for 500 steps.
    ``skip``: the step's samples are left out, and the step is taken with the next samples.
    ``go_back``: the run goes back to a committed checkpoint, and the samples of the last steps are
    left out. ``stop``: the run ends with exit code 3 and a report.
    """

    on_resume = OnResume.FREE

    go_back_checkpoints: int = Field(default=1, ge=1)
    """``go_back``: 1 is the newest committed checkpoint in ``checkpoint.path``, 2 the one before;
    the oldest where there are fewer."""
    skip_steps: int = Field(default=100, ge=1)
    """``go_back``: the samples of at most this many steps are left out, up to the step with the
    signal; earlier steps after the checkpoint are taken again. PaLM left out 200 to 500 (arXiv
    2204.02311, section 5.1)."""
    lr_factor: float = Field(default=0.5, gt=0, lt=1)
    """``lower_lr``: what the learning rate is multiplied by; again where it is lowered already.
    It stays lower for 500 steps."""
    window_steps: int = Field(default=128, ge=4, le=4096)
    """Committed steps that a loss and a gradient norm are compared with, and of a block of
    ``slow_divergence``. A run of few steps needs a smaller window."""
    not_finite: NotFiniteRule = NotFiniteRule()
    """NaN or infinity."""
    loss_spike: LossSpikeRule = LossSpikeRule()
    """A loss far above those before."""
    grad_norm_spike: GradNormSpikeRule = GradNormSpikeRule()
    """A gradient norm far above those before."""
    slow_divergence: SlowDivergenceRule = SlowDivergenceRule()
    """A smoothed loss that rises."""
    router_collapse: RouterCollapseRule = RouterCollapseRule()
    """Routers that use few experts."""
