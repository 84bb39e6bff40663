"""Signals of a run in trouble: pure functions of the history and of the step that is being taken.

Legend: L MoE layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from cluster.detect import robust_scale
from pretrain.parts.playbook.config import BLOCKS, HealthConfig, RouterCollapseRule
from pretrain.parts.playbook.memory import HealthMemory

MAX_ATTEMPTS = 3
"""Tries in a row of a step that is not finite, after which a rule acts."""
MIN_RISE = 0.5
"""Nats per token above the median: the least rise of the loss that is a spike."""
MIN_RATIO = 10.0
"""The least multiple of the median at which a gradient norm is a spike."""
MIN_SLOW_RISE = 0.1
"""Nats per token above the lowest mean: the least rise that is a slow divergence."""
SLOW_THRESHOLD = 5.0
"""Standard errors of the difference of two means that are a slow divergence."""
MAX_DEAD_SHARE = 0.5
"""Routers with a larger share of experts without a token have collapsed."""
_MIN_ASSIGNMENTS = 10
"""Assignments for each expert, on average, from which on the loads of a layer are judged."""


@dataclass(frozen=True)
class Seen:
    """What every rank knows of the step that is being taken; equal on all ranks."""

    step: int
    """Counts from 1."""
    loss: float
    grad_norm: float
    finite: bool = True
    why_not_finite: str = ""
    attempts: int = 1
    """Tries of the step in a row that were not finite, this one included; 0 where it is finite."""
    loads_LE: Sequence[Sequence[int]] | None = None
    """Assignments of each expert in this step, over all ranks; None where the routers are not
    checked in this step."""


@dataclass(frozen=True)
class Signal:
    """What a rule has seen."""

    rule: str
    observed: float
    usual: float
    """What the history lets expect."""
    limit: float
    """The threshold that ``observed`` has passed."""
    text: str
    """One line for people, without the step."""


def not_finite(seen: Seen) -> Signal | None:
    """The step was not finite :data:`MAX_ATTEMPTS` times in a row."""
    if seen.finite or seen.attempts < MAX_ATTEMPTS:
        return None
    return Signal(
        "not_finite",
        observed=seen.attempts,
        usual=0,
        limit=MAX_ATTEMPTS,
        text=f"was not finite {seen.attempts} times in a row ({seen.why_not_finite})",
    )


def loss_spike(config: HealthConfig, memory: HealthMemory, seen: Seen) -> Signal | None:
    """The loss is above its limit, see ``config.LossSpikeRule``."""
    window = memory.losses[-config.window_steps :]
    if len(window) < config.window_steps:
        return None
    usual, sigma = robust_scale(window)
    limit = usual + max(MIN_RISE, config.loss_spike.threshold * sigma)
    if not seen.loss > limit:
        return None
    text = (
        f"loss {seen.loss:.4f} is above {limit:.4f}; the median of {len(window)} steps is "
        f"{usual:.4f}"
    )
    return Signal("loss_spike", seen.loss, usual, limit, text)


def grad_norm_spike(config: HealthConfig, memory: HealthMemory, seen: Seen) -> Signal | None:
    """The gradient norm is above its limit, see ``config.GradNormSpikeRule``."""
    window = memory.grad_norms[-config.window_steps :]
    if len(window) < config.window_steps:
        return None
    usual, sigma = robust_scale(window)
    limit = max(MIN_RATIO * usual, usual + config.grad_norm_spike.threshold * sigma)
    if not seen.grad_norm > limit:
        return None
    text = (
        f"gradient norm {seen.grad_norm:.4g} is above {limit:.4g}; the median of {len(window)} "
        f"steps is {usual:.4g}"
    )
    return Signal("grad_norm_spike", seen.grad_norm, usual, limit, text)


def slow_divergence(config: HealthConfig, memory: HealthMemory, seen: Seen) -> Signal | None:
    """A block of steps ends here and its mean loss is above its limit, see
    ``config.SlowDivergenceRule``."""
    blocks = with_loss(config, memory, seen.loss)[1]
    if blocks == memory.blocks or len(blocks) < BLOCKS:
        return None
    newest, error = blocks[-1]
    lowest, error_of_lowest = min(blocks[:-1])
    noise = math.sqrt(error + error_of_lowest)
    limit = lowest + max(MIN_SLOW_RISE, SLOW_THRESHOLD * noise)
    if not newest > limit:
        return None
    text = (
        f"mean loss {newest:.4f} of {config.window_steps} steps is above {limit:.4f}; the lowest "
        f"mean of the {BLOCKS - 1} blocks before is {lowest:.4f}"
    )
    return Signal("slow_divergence", newest, lowest, limit, text)


def with_loss(
    config: HealthConfig, memory: HealthMemory, loss: float
) -> tuple[tuple[float, ...], tuple[tuple[float, float], ...]]:
    """The block that is not full yet and the last full blocks, after one more committed loss."""
    block = (*memory.block, loss)
    if len(block) < config.window_steps:
        return block, memory.blocks
    full = fmean(block), variance(block) / len(block)
    return (), (*memory.blocks, full)[-BLOCKS:]


def router_collapse(rule: RouterCollapseRule, memory: HealthMemory, seen: Seen) -> Signal | None:
    """The routers have collapsed in enough checks in a row, see :class:`RouterCollapseRule`."""
    found = collapse(rule, seen)
    return found if found is not None and memory.collapsed_checks + 1 >= rule.checks else None


def collapse(rule: RouterCollapseRule, seen: Seen) -> Signal | None:
    """The first layer whose routers have collapsed in this step, whatever earlier checks found."""
    for row, loads_E in enumerate(seen.loads_LE or ()):
        experts, total = len(loads_E), sum(loads_E)
        if experts < 2 or total < _MIN_ASSIGNMENTS * experts:
            continue
        ratio = entropy(loads_E) / math.log(experts)
        dead = sum(load == 0 for load in loads_E) / experts
        about = f"MoE layer {row + 1} of {len(seen.loads_LE or ())}: "
        if ratio < rule.min_entropy_ratio:
            text = (
                f"{about}the entropy of the experts' loads is {ratio:.2f} of its largest value, "
                f"below {rule.min_entropy_ratio:g}"
            )
            return Signal("router_collapse", ratio, 1.0, rule.min_entropy_ratio, text)
        if dead > MAX_DEAD_SHARE:
            text = f"{about}{dead:.0%} of the experts have no token, above {MAX_DEAD_SHARE:.0%}"
            return Signal("router_collapse", dead, 0.0, MAX_DEAD_SHARE, text)
    return None


def entropy(counts: Sequence[int]) -> float:
    """The entropy in nats of the distribution that the counts are proportional to."""
    total = sum(counts)
    return -sum(n / total * math.log(n / total) for n in counts if n)
