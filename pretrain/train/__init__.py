"""The training loop, the step barrier, and evaluation."""

from pretrain.train.run import prepare, run

__all__ = [
    "prepare",
    "run",
]
