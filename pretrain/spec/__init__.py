"""The job spec: one file of settings, and the rules between them."""

from typing import TYPE_CHECKING

from parallel.on_demand import on_demand
from pretrain.spec.renamed import upgraded

if TYPE_CHECKING:
    from pretrain.spec.checkpoint import CheckpointConfig, InitConfig, TiersConfig
    from pretrain.spec.faults import FaultConfig
    from pretrain.spec.job import JobSpec
    from pretrain.spec.learning_rates import is_learning_rate_jump, learning_rate
    from pretrain.spec.precision import PrecisionConfig
    from pretrain.spec.read import load_spec, resolve_spec
    from pretrain.spec.sections import SampleConfig, TrackingConfig
    from pretrain.spec.table import apply_override, read_table
    from pretrain.spec.train import EvalConfig, TrainConfig

__all__ = [
    "CheckpointConfig",
    "EvalConfig",
    "FaultConfig",
    "InitConfig",
    "JobSpec",
    "PrecisionConfig",
    "SampleConfig",
    "TiersConfig",
    "TrackingConfig",
    "TrainConfig",
    "apply_override",
    "is_learning_rate_jump",
    "learning_rate",
    "load_spec",
    "read_table",
    "resolve_spec",
    "upgraded",
]


# On demand: `convoy inspect` compares stored specs without the seconds of torch's import.
__getattr__ = on_demand(
    __name__,
    {
        "CheckpointConfig": "pretrain.spec.checkpoint",
        "EvalConfig": "pretrain.spec.train",
        "FaultConfig": "pretrain.spec.faults",
        "InitConfig": "pretrain.spec.checkpoint",
        "JobSpec": "pretrain.spec.job",
        "PrecisionConfig": "pretrain.spec.precision",
        "SampleConfig": "pretrain.spec.sections",
        "TiersConfig": "pretrain.spec.checkpoint",
        "TrackingConfig": "pretrain.spec.sections",
        "TrainConfig": "pretrain.spec.train",
        "apply_override": "pretrain.spec.table",
        "is_learning_rate_jump": "pretrain.spec.learning_rates",
        "learning_rate": "pretrain.spec.learning_rates",
        "load_spec": "pretrain.spec.read",
        "read_table": "pretrain.spec.table",
        "resolve_spec": "pretrain.spec.read",
    },
)


def __dir__() -> list[str]:
    return __all__
