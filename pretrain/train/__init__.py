"""The training loop, the step barrier, and evaluation."""

from pretrain.train.audit_data import ConsumedStep, DataAudit, SourceShare, audit_data
from pretrain.train.compare_runs import Comparison, compare_runs
from pretrain.train.generate import Generated
from pretrain.train.prepare import prepare, verify_data
from pretrain.train.profile import read_window
from pretrain.train.replay import ReplayedStep, replay
from pretrain.train.run import run
from pretrain.train.sample import sample

__all__ = [
    "Comparison",
    "ConsumedStep",
    "DataAudit",
    "Generated",
    "ReplayedStep",
    "SourceShare",
    "audit_data",
    "compare_runs",
    "prepare",
    "read_window",
    "replay",
    "run",
    "sample",
    "verify_data",
]
