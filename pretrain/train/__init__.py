"""The training loop, the step barrier, and evaluation."""

from pretrain.train.profile import read_window
from pretrain.train.replay import ReplayedStep, replay
from pretrain.train.run import prepare, run

__all__ = [
    "ReplayedStep",
    "prepare",
    "read_window",
    "replay",
    "run",
]
