"""The divergence playbook: what is done about a step, decided from numbers that all ranks have.

Every function is pure. The history is a :class:`HealthMemory`, which checkpoints carry, so that a
resumed run decides as an undisturbed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pretrain.parts.playbook import signals
from pretrain.parts.playbook.config import SEVERITY, ActionName, HealthConfig
from pretrain.parts.playbook.memory import HealthMemory, Occurrence, merged
from pretrain.parts.playbook.signals import Seen, Signal

ESCALATION_STEPS = 500
"""An occurrence counts until the run is this many steps further: the next occurrence of its rule in
that time takes the next action. A lowered learning rate stays as long."""


@dataclass(frozen=True)
class Verdict:
    """What is done about a step."""

    signals: tuple[Signal, ...]
    """All signals of the step, in the order of the spec."""
    action: ActionName | None
    """None where no rule acts."""
    memory: HealthMemory
    """With the occurrences of the signals, before the step itself is taken in."""

    @property
    def cause(self) -> Signal:
        """The signal that asked for the action; the first one where several did."""
        return self.signals[0]

    @property
    def lowers_lr(self) -> bool:
        """Whether the learning rate is lower from this step on."""
        return self.action is not None and "lower_lr" in self.action

    @property
    def keeps_update(self) -> bool:
        """Whether the step may be committed."""
        return self.action in (None, "report", "lower_lr")

    @property
    def leaves_out_step(self) -> bool:
        """Whether the step's samples are left out, and the step is taken with the next ones."""
        return self.action is not None and self.action.startswith("skip")

    @property
    def goes_back(self) -> bool:
        """Whether the run goes back to a checkpoint."""
        return self.action is not None and self.action.startswith("go_back")


def judge(config: HealthConfig, memory: HealthMemory, seen: Seen) -> Verdict:
    """What to do about the step that is being taken.

    Where several rules have a signal, the signal whose rule asks for the most severe action is the
    first of the verdict's.
    """
    found = _signals(config, memory, seen)
    if not found:
        return Verdict((), None, memory)
    valid = tuple(o for o in memory.occurrences if seen.step <= o.step + ESCALATION_STEPS)
    chosen: list[tuple[ActionName, Signal]] = []
    for signal in found:
        actions: Sequence[ActionName] = getattr(config, signal.rule).actions
        count = sum(o.rule == signal.rule for o in valid)
        chosen.append((actions[min(count, len(actions) - 1)], signal))
    chosen.sort(key=lambda pair: -SEVERITY.index(pair[0]))  # stable: equal ones in the spec's order
    action = chosen[0][0]
    noted = (*valid, *(Occurrence(signal.rule, seen.step) for signal in found))
    memory = replace(memory, occurrences=noted)
    if "lower_lr" in action:
        memory = replace(
            memory,
            lr_factor=memory.lr_factor_at(seen.step) * config.lr_factor,
            lr_until_step=seen.step + ESCALATION_STEPS - 1,
        )
    return Verdict(tuple(signal for _, signal in chosen), action, memory)


def _signals(config: HealthConfig, memory: HealthMemory, seen: Seen) -> list[Signal]:
    if not seen.finite:
        found = [signals.not_finite(seen)]
    else:
        found = [
            signals.loss_spike(config, memory, seen),
            signals.grad_norm_spike(config, memory, seen),
            signals.slow_divergence(config, memory, seen),
            signals.router_collapse(config.router_collapse, memory, seen),
        ]
    return [s for s in found if s is not None and getattr(config, s.rule).actions]


def after_commit(config: HealthConfig, verdict: Verdict, seen: Seen) -> HealthMemory:
    """The memory after the step was committed."""
    memory, rules = verdict.memory, {signal.rule for signal in verdict.signals}
    block, blocks = signals.with_loss(config, memory, seen.loss)
    if "slow_divergence" in rules:
        blocks = ()  # the next signal needs a window of its own
    checks = memory.collapsed_checks
    if "router_collapse" in rules:
        checks = 0
    elif seen.loads_LE is not None:
        checks = 0 if signals.collapse(config.router_collapse, seen) is None else checks + 1
    return replace(
        memory,
        losses=(*memory.losses, seen.loss)[-config.window_steps :],
        grad_norms=(*memory.grad_norms, seen.grad_norm)[-config.window_steps :],
        block=block,
        blocks=blocks,
        collapsed_checks=checks,
    )


def after_skip(memory: HealthMemory, start: int, stop: int) -> HealthMemory:
    """The memory after the samples from ``start`` up to, and without, ``stop`` were left out."""
    return replace(memory, skipped_samples=merged([*memory.skipped_samples, (start, stop)]))


def after_going_back(now: HealthMemory, then: HealthMemory) -> HealthMemory:
    """The memory after going back: the history of the checkpoint, ``then``, and what was done."""
    return replace(
        then,
        occurrences=now.occurrences,
        skipped_samples=now.skipped_samples,
        lr_factor=now.lr_factor,
        lr_until_step=now.lr_until_step,
        go_backs=now.go_backs + 1,
    )


def routers_are_checked(config: HealthConfig, step: int) -> bool:
    """Whether the rule of the routers looks at the loads of ``step``."""
    rule = config.router_collapse
    return bool(rule.actions) and step % rule.interval_steps == 0
