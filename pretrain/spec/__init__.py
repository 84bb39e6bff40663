"""The job spec: one file of settings, and the rules between them."""

from pretrain.spec.checkpoint import CheckpointConfig, InitConfig, TiersConfig
from pretrain.spec.job import JobSpec
from pretrain.spec.precision import PrecisionConfig
from pretrain.spec.read import load_spec, resolve_spec
from pretrain.spec.renamed import upgraded
from pretrain.spec.sections import SampleConfig
from pretrain.spec.train import EvalConfig, TrainConfig

__all__ = [
    "CheckpointConfig",
    "EvalConfig",
    "InitConfig",
    "JobSpec",
    "PrecisionConfig",
    "SampleConfig",
    "TiersConfig",
    "TrainConfig",
    "load_spec",
    "resolve_spec",
    "upgraded",
]
