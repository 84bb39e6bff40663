"""Counters of a run that its checkpoints carry."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pretrain.parts.playbook import HealthMemory

GROWTH_STEPS = 2000
"""Steps in a row without an overflow after which the loss scale of float16 doubles."""


@dataclass(frozen=True)
class Progress:
    """Where training is. The trainer replaces the whole value when the barrier says commit; an
    overflow of float16 changes the loss scale only."""

    step: int = 0
    tokens_seen: int = 0
    consumed_samples: int = 0
    """The index of the next sample: the sequences of all committed steps, and the samples before it
    that ``health.skipped_samples`` leaves out."""
    first_step: int = 0
    """The step that the run began after: that of ``init.checkpoint`` with ``init.state``
    ``training``."""
    first_sample: int = 0
    """The first sample that the run took, likewise."""
    train_loss_first: float | None = None
    train_loss_last: float | None = None
    validation: float | None = None
    """Loss of held-out sequences at this very step; None where it was not evaluated."""
    train_seconds: float = 0.0
    """Seconds spent in committed steps, over all runs of this job."""
    loss_scale: float | None = None
    """What the loss is multiplied by before the next backward, a power of two; None but in float16.

    In float16 small gradients would be zeros; a scaled loss keeps them, and gradients are divided
    by the scale afterwards, in float32 (Micikevicius et al., arXiv 1710.03740, section 3.2).
    """
    steps_at_loss_scale: int = 0
    """Committed in a row since the scale last changed."""
    expert_counts: list[list[int]] | None = None
    """By MoE layer and expert, the assignments of the last committed step over all ranks, where
    ``moe.aux_loss_scope`` is ``previous_step``: the next step's loss counts them."""
    topology_epoch: int = 0
    """How many times the run has resumed with another layout."""
    verified_step: int | None = None
    """The newest step whose gradients a check of ``[verify]`` has found right, or from which the
    run resumed when such checks began; None without such checks."""
    run_id: str = ""
    """Which run this is, see :func:`pretrain.checkpoint.run_id.run_id`."""
    health: HealthMemory = field(default_factory=HealthMemory)
    """What the divergence playbook remembers."""

    def after_overflow(self) -> Progress:
        """Half the scale, for the same samples."""
        assert self.loss_scale is not None
        return replace(self, loss_scale=self.loss_scale / 2, steps_at_loss_scale=0)

    def after_commit(self, growth_steps: int) -> Progress:
        """Double the scale once ``growth_steps`` steps in a row had no overflow, as
        torch.amp.GradScaler does after :data:`GROWTH_STEPS`."""
        if self.loss_scale is None:
            return self
        steps = self.steps_at_loss_scale + 1
        if steps < growth_steps:
            return replace(self, steps_at_loss_scale=steps)
        return replace(self, loss_scale=self.loss_scale * 2, steps_at_loss_scale=0)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)
