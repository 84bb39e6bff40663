"""The ``[init]`` and ``[checkpoint]`` sections of the spec."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ckpt.lifecycle import Retention
from pretrain.section import OnResume, Section


class InitConfig(Section):
    """The ``[init]`` section: initial weights from another checkpoint."""

    on_resume = OnResume.FREE

    checkpoint: str | None = None
    """A checkpoint folder, ``s3://BUCKET/PREFIX``, or a manifest in one, which names its step. The
    run starts with the weights of that step, or of the newest checkpoint; without this field
    weights are random."""
    state: Literal["weights", "training"] = "weights"
    """What is taken of ``checkpoint``: the weights, for a run that starts at step 0 with a new
    optimizer state; or all of the training, so that the run goes on where the checkpoint is, with
    its moments, its step, and the learning rate and the samples that come next."""
    rename: dict[str, str] = Field(default_factory=dict)
    """Array names in ``checkpoint``, with their names in the model; both may be prefixes that end
    in /."""
    strict: bool = True
    """Refuse a checkpoint that lacks a parameter of the model; with false such a parameter is
    initialized at random."""


class TiersConfig(Section):
    """The ``[checkpoint.tiers]`` section: copies of checkpoints on the nodes themselves.

    The tiers are the memory of the own node, the memory of a peer node, a local disk, and the
    shared store of ``checkpoint.path``.
    """

    on_resume = OnResume.FREE

    memory: bool = False
    """Keep the newest checkpoint in the memory of each node too, where a restarted rank finds the
    checkpoint."""
    memory_path: str = "/dev/shm"
    """The folder in memory for ``memory`` and ``replicate_to_peer``."""
    replicate_to_peer: bool = False
    """Keep the two newest checkpoints of each node in the memory of the next node too, for the loss
    of a whole node; ``memory`` then keeps two as well."""
    local_path: str | None = None
    """A folder on a local disk of each node, where checkpoints are kept too."""
    shared_interval: int = Field(default=1, ge=1)
    """One of this many saves goes to ``checkpoint.path`` too; the last save of a run always does.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        own = self.memory or self.replicate_to_peer or self.local_path
        if self.shared_interval > 1 and not own:
            raise ValueError(
                f"checkpoint.tiers.shared_interval ({self.shared_interval}) must be 1 without "
                f"checkpoint.tiers.memory or checkpoint.tiers.local_path: other saves would go "
                f"nowhere"
            )
        return self


class CheckpointConfig(Section):
    """The ``[checkpoint]`` section: where and when a run saves, and how a run resumes."""

    on_resume = OnResume.FREE

    path: str | None = None
    """A folder that all ranks share, ``s3://BUCKET/PREFIX``, or ``package.module:Class://...`` of a
    store of your own; RUN_DIR/checkpoints by default."""
    interval_steps: Literal["auto"] | int | None = None
    """Steps between two saves; 100 where ``interval_minutes`` is left out too. ``auto`` balances
    the cost of a save against the work that a failure loses (Young, 1974; Daly, 2006)."""
    interval_minutes: float | None = Field(default=None, gt=0)
    """Minutes between two saves; in place of ``interval_steps``."""
    compression: Literal["none", "zstd"] = "none"
    """The compression of stored chunks."""
    reshard_on_load: bool = False
    """Allow a resume with another layout than the layout of the checkpoint."""
    retention: Retention = Retention()
    """Which checkpoints stay in ``path``."""
    tiers: TiersConfig = TiersConfig()
    """Copies of checkpoints on the nodes themselves."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        steps, minutes = self.interval_steps, self.interval_minutes
        if steps is not None and minutes is not None:
            raise ValueError(
                f"checkpoint.interval_minutes ({minutes}) must be left out with "
                f"checkpoint.interval_steps ({steps})"
            )
        if isinstance(steps, int) and steps < 1:
            raise ValueError(f"checkpoint.interval_steps ({steps}) must be at least 1, or auto")
        return self

    @property
    def steps_between(self) -> int | None:
        """Steps between two saves; None where saves are due by the clock."""
        if self.interval_minutes is not None or self.interval_steps == "auto":
            return None
        return 100 if self.interval_steps is None else self.interval_steps
