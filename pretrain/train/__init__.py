"""The training loop, the step barrier, and evaluation."""

from pretrain.train.replay import ReplayedStep, replay
from pretrain.train.run import prepare, run, verify_data

__all__ = [
    "ReplayedStep",
    "prepare",
    "replay",
    "run",
    "verify_data",
]
