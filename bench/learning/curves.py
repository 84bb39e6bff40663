"""What is taken of a run's log: the loss of each step, and held-out bits per byte."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.observe import Evaluated, StepCommitted, Summary, read_log


@dataclass(frozen=True)
class Curve:
    """One run."""

    case: str
    subject: str
    seed: int
    tokens: list[int]
    """Target tokens after each step in ``losses``."""
    losses: list[float]
    """Training loss of the logged steps, in nats per token."""
    held_out_steps: list[int]
    held_out: list[float]
    """Bits per byte of some held-out sequences, during the run."""
    bits_per_byte: float
    """Of held-out text at the end."""
    worst_load: float
    """The largest load of an expert over the mean, on held-out text, of the worst layer; 1 for a
    dense model."""

    def summary(self) -> dict[str, Any]:
        """The figures of the run, without its losses and what was held out during it."""
        return {
            "case": self.case, "subject": self.subject, "seed": self.seed,
            "tokens": self.tokens[-1], "first_loss": self.losses[0], "last_loss": self.losses[-1],
            "bits_per_byte": self.bits_per_byte, "worst_load": self.worst_load,
        }  # fmt: skip


def read_curve(run: Path, case: str, subject: str, seed: int) -> Curve:
    """The curve of a run that has ended. A step that was taken twice counts as it was last."""
    events = read_log(run / "log.jsonl").events
    steps = {e.step: e for e in events if isinstance(e, StepCommitted)}
    scored = {e.step: e.bits_per_byte for e in events if isinstance(e, Evaluated) and not e.whole}
    summary = Summary.read(run / "summary.json")
    if summary is None:
        raise SystemExit(f"{run} has no summary: the run has not ended")
    loads = [max(row) * len(row) / sum(row) for row in summary.tokens_per_expert]
    return Curve(
        case,
        subject,
        seed,
        tokens=[steps[step].tokens_seen for step in sorted(steps)],
        losses=[steps[step].loss for step in sorted(steps)],
        held_out_steps=sorted(scored),
        held_out=[scored[step] for step in sorted(scored)],
        bits_per_byte=summary.val_bits_per_byte,
        worst_load=max(loads, default=1.0),
    )
