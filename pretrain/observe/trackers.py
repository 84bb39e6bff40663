"""Experiment trackers: one small adapter each for TensorBoard, W&B, MLflow and trackio.

Each keeps the contract of :class:`pretrain.observe.testing.TrackerContract`, and has a line in
``TrackingConfig.CLASSES``, which says where it is.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain.errors import InputError
from pretrain.observe.tracking import About
from pretrain.spec import TrackingConfig

_MLFLOW_PARAMETER = 500
"""Characters of a value that every version of MLflow takes."""


def _module(extra: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            f"tracking.to names {extra}, which cannot be imported ({error}): "
            f"pip install -e '.[{extra}]' in Convoy's checkout"
        ) from None


class TensorBoard:
    """``torch.utils.tensorboard``; files in ``RUN_DIR/tensorboard``."""

    def __init__(self, config: TrackingConfig, run_dir: Path) -> None:
        self._module = _module("tensorboard", "torch.utils.tensorboard")
        self._folder = run_dir / "tensorboard"

    def start(self, about: About) -> None:
        """Steps after ``about.step`` that a former start has written are hidden."""
        self._writer = self._module.SummaryWriter(str(self._folder), purge_step=about.step + 1)
        lines = [f"{key}: {value}" for key, value in about.parameters.items()]
        self._writer.add_text("spec", "\n\n".join(lines), about.step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, *, ok: bool) -> None:
        """Close the file."""
        self._writer.close()


class WandB:
    """Weights & Biases; its account and address come from W&B's own settings."""

    def __init__(self, config: TrackingConfig, run_dir: Path) -> None:
        self._module = _module("wandb", "wandb")
        self._project, self._folder = config.project, run_dir

    def start(self, about: About) -> None:
        """W&B refuses values of a step that it has, so the step is a value like others."""
        self._run = self._module.init(
            project=self._project, name=about.name, id=about.run_id, resume="allow",
            dir=str(self._folder), config=about.parameters,
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One record."""
        self._run.log({**values, "step": step})

    def finish(self, *, ok: bool) -> None:
        """Upload the rest."""
        self._run.finish(exit_code=0 if ok else 1)


class MLflow:
    """MLflow: files in ``RUN_DIR/mlflow``, or the server that ``MLFLOW_TRACKING_URI`` names."""

    def __init__(self, config: TrackingConfig, run_dir: Path) -> None:
        # Newer versions want a word before they write files, which need no server.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        module = _module("mlflow", "mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (run_dir.resolve() / "mlflow").as_uri()
        self._client, self._entities = module.MlflowClient(uri), module.entities
        self._project = config.project

    def start(self, about: About) -> None:
        """Go on with the run that has the tag ``convoy.run_id``, or create it."""
        known = self._client.get_experiment_by_name(self._project)
        experiment = (
            self._client.create_experiment(self._project) if known is None else known.experiment_id
        )
        tag = f"tags.`convoy.run_id` = '{about.run_id}'"
        runs = self._client.search_runs([experiment], tag, max_results=1)
        tags = {"convoy.run_id": about.run_id}
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            run = self._client.create_run(experiment, run_name=about.name, tags=tags)
            self._id = run.info.run_id
        # Parameters of a run cannot change in MLflow, and a spec may: then they are tags.
        has = self._client.get_run(self._id).data.params
        short = {k: v[:_MLFLOW_PARAMETER] for k, v in about.parameters.items()}
        for key, value in short.items():
            if key not in has:
                self._client.log_param(self._id, key, value)
            elif has[key] != value:
                self._client.set_tag(self._id, key, value)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One batch."""
        now = int(1000 * time.time())
        metrics = [self._entities.Metric(k, v, now, step) for k, v in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, *, ok: bool) -> None:
        """Set the status."""
        self._client.set_terminated(self._id, "FINISHED" if ok else "FAILED")


class Trackio:
    """trackio; its files are in ``TRACKIO_DIR``, by default ``RUN_DIR/trackio``."""

    def __init__(self, config: TrackingConfig, run_dir: Path) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run_dir.resolve() / "trackio"))
        self._module = _module("trackio", "trackio")
        self._project = config.project

    def start(self, about: About) -> None:
        """Names of trackio are names of runs, so the run id is part of the name."""
        name = f"{about.name}-{about.run_id[:8]}"
        self._module.init(project=self._project, name=name, config=about.parameters, resume="allow")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One record."""
        self._module.log(dict(values), step=step)

    def finish(self, *, ok: bool) -> None:
        """Write the rest."""
        self._module.finish()
