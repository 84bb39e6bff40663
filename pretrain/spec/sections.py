"""The tables of a job spec, each with the config of one part."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator

from cluster.launch import LaunchConfig
from corpus.config import DataConfig
from moe import MoEConfig
from parallel import ParallelConfig
from pretrain.data import BatchConfig
from pretrain.model import ModelConfig, MTPConfig
from pretrain.optim import OptimizerConfig, ScheduleConfig, with_kind
from pretrain.parts.faults.config import FaultConfig
from pretrain.parts.playbook.config import HealthConfig
from pretrain.parts.rank_watch.config import DetectionConfig
from pretrain.parts.stragglers.config import StragglersConfig
from pretrain.parts.verify.config import VerifyConfig
from pretrain.section import OnResume, Section
from pretrain.spec.checkpoint import CheckpointConfig, InitConfig
from pretrain.spec.elastic import ElasticConfig
from pretrain.spec.plan import PlanConfig
from pretrain.spec.precision import PrecisionConfig
from pretrain.spec.train import EvalConfig, TrainConfig
from pretrain.tune.config import TuneConfig


class MetricsConfig(Section):
    """The ``[metrics]`` section: the Prometheus endpoint."""

    on_resume = OnResume.FREE

    port: int = Field(default=-1, ge=-1, le=65535)
    """The port of the Prometheus endpoint on rank 0; 0 takes a free port, -1 makes no endpoint."""
    host: str = "127.0.0.1"
    """The address that the endpoint listens on: by default only this machine can reach it."""
    all_ranks: bool = False
    """Let every rank serve its own metrics, on ``port`` plus its number on its machine; rank 0
    also has the run's. Without it only rank 0 serves metrics."""
    targets_dir: str | None = None
    """The folder of NAME-rank-N.json, the target files for Prometheus; RUN_DIR/metrics by default.
    Runs may share a folder."""
    dollars_per_rank_hour: float | None = Field(default=None, ge=0)
    """The price of one rank for an hour, for the run's cost in metrics and report; None: there is
    no cost."""


class TrackingConfig(Section):
    """The ``[tracking]`` section: experiment trackers, which get the values of log intervals."""

    on_resume = OnResume.FREE

    CLASSES: ClassVar[dict[str, str]] = {
        "tensorboard": "pretrain.observe.trackers:TensorBoard",
        "wandb": "pretrain.observe.trackers:WandB",
        "mlflow": "pretrain.observe.trackers:MLflow",
        "trackio": "pretrain.observe.trackers:Trackio",
    }
    """Where the class of each tracker with a name of its own is."""

    to: list[str] = Field(default_factory=list)
    """Trackers that rank 0 writes to: ``tensorboard``, ``wandb``, ``mlflow`` and ``trackio``, each
    with the extra of its name, or a class of your own as ``package.module:Class``."""
    project: str = Field(default="convoy", min_length=1)
    """The project, or MLflow's experiment, that the run is in."""

    @field_validator("to")
    @classmethod
    def _check_trackers(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in cls.CLASSES and not re.fullmatch(r"[\w.]+:[\w.]+", name):
                known = ", ".join(cls.CLASSES)
                raise ValueError(f"tracking.to ({name}) must be {known}, or package.module:Class")
        return names


class SampleConfig(Section):
    """The ``[sample]`` section: text that the model generates for the summary."""

    on_resume = OnResume.FREE

    prompt: str = ""
    """The text that the model continues."""
    tokens: int = Field(default=0, ge=0)
    """The number of tokens to generate; 0 generates no text."""


class Sections(Section):
    """Everything that a run depends on; :class:`pretrain.spec.JobSpec` adds the rules between
    tables."""

    on_resume = OnResume.FREE

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The name of the run: letters, digits, dots, hyphens and underscores."""
    run_dir: str | None = None
    """The folder of log, summary and checkpoints; runs/NAME by default."""
    model: Annotated[ModelConfig, OnResume.FIXED]
    """The decoder without its MoE layers."""
    moe: Annotated[MoEConfig | None, OnResume.FIXED] = None
    """The MoE layers; without this table the model is dense."""
    mtp: MTPConfig = MTPConfig()
    """The loss of multi-token prediction."""
    parallel: ParallelConfig = ParallelConfig()
    """Degrees of the parallel axes."""
    plan: PlanConfig = PlanConfig()
    """A layout that the planner chooses."""
    data: DataConfig
    """The corpus and its tokenizer."""
    batch: BatchConfig
    """Sequences of a step."""
    train: TrainConfig
    """The length of the run and its loop."""
    precision: PrecisionConfig = PrecisionConfig()
    """The dtype of compute."""
    init: InitConfig = InitConfig()
    """Initial weights."""
    optimizer: OptimizerConfig
    """The optimizer, whose ``kind`` names the variant; ``adamw`` by default."""
    tune: TuneConfig | None = None
    """Parameters that learn; without this table all do."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning rate over the steps."""
    eval: EvalConfig = EvalConfig()
    """Evaluation on held-out sequences."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""
    elastic: ElasticConfig = ElasticConfig()
    """Other ranks than those of ``[parallel]``."""
    launch: LaunchConfig = LaunchConfig()
    """The engine of a cluster."""
    stragglers: StragglersConfig = StragglersConfig()
    """Ranks that are slow as a whole."""
    health: HealthConfig = HealthConfig()
    """What is done about divergence."""
    inject: list[FaultConfig] = Field(default_factory=list)
    """Faults on purpose; none by default."""
    verify: VerifyConfig = VerifyConfig()
    """The search for silent data corruption."""
    detection: DetectionConfig = DetectionConfig()
    """Ranks that are stuck, and odd ranks."""
    metrics: MetricsConfig = MetricsConfig()
    """The Prometheus endpoint."""
    tracking: TrackingConfig = TrackingConfig()
    """Experiment trackers."""
    sample: SampleConfig = SampleConfig()
    """Generated text at the end of a run."""

    @field_validator("optimizer", mode="before")
    @classmethod
    def _check_optimizer_fields(cls, optimizer: Any) -> Any:
        return with_kind(optimizer)
