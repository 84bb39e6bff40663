"""The training loop, the step barrier, and evaluation."""

from pretrain.train.audit_data import ConsumedStep, DataAudit, SourceShare, audit_data
from pretrain.train.replay import ReplayedStep, replay
from pretrain.train.run import prepare, run, verify_data

__all__ = [
    "ConsumedStep",
    "DataAudit",
    "ReplayedStep",
    "SourceShare",
    "audit_data",
    "prepare",
    "replay",
    "run",
    "verify_data",
]
