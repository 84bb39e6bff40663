"""The job spec: one file of settings, and the rules between them."""

from pretrain.spec.checkpoint import CheckpointConfig
from pretrain.spec.job import JobSpec, SampleConfig
from pretrain.spec.read import load_spec, resolve_spec

__all__ = [
    "CheckpointConfig",
    "JobSpec",
    "SampleConfig",
    "load_spec",
    "resolve_spec",
]
