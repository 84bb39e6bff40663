"""Experiment trackers: one small adapter each for TensorBoard, W&B, MLflow and trackio.

Training never waits for a tracker: values go through a queue to a thread. An error of a tracker
ends its tracking, and not the run.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pretrain.errors import InputError
from pretrain.observe.console import complain
from pretrain.observe.event import Event
from pretrain.observe.events import RunDone, RunFailed, RunStarted, RunStopped
from pretrain.observe.metric import measurements
from pretrain.spec import TrackingConfig

_QUEUED = 1000
_LAST_SECONDS = 30.0
_MLFLOW_PARAMETER = 500
"""Characters of a value that every version of MLflow takes."""


@dataclass(frozen=True)
class About:
    """What a tracker is told of a run at a start."""

    name: str
    run_id: str
    """The same in all starts of a run: a tracker goes on with what it has of the run."""
    step: int
    """After which the start goes on."""
    parameters: dict[str, str]
    """Fields of the spec by their dotted names, and the experiment record below ``record.``."""


class Tracker(Protocol):
    """What the adapters have in common. All calls come from one thread."""

    def start(self, about: About) -> None:
        """Begin, or go on with a run that the tracker has."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record some values of a step."""

    def finish(self, *, ok: bool) -> None:
        """End this start."""


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
        found = self._client.get_experiment_by_name(self._project)
        experiment = (
            self._client.create_experiment(self._project) if found is None else found.experiment_id
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


TRACKERS: dict[str, Callable[[TrackingConfig, Path], Tracker]] = {
    "tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "trackio": Trackio,
}  # fmt: skip


def _module(extra: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            f"tracking.to names {extra}, which cannot be imported ({error}): "
            f"pip install -e '.[{extra}]' in Convoy's checkout"
        ) from None


def open_trackers(config: TrackingConfig, run_dir: Path) -> list[Tracking]:
    """The sinks of ``[tracking]``.

    Raises InputError where a tracker is not installed.
    """
    return [Tracking(name, TRACKERS[name](config, run_dir)) for name in config.to]


class Tracking:
    """A sink that gives a run's values to one tracker, from a thread of its own.

    Args:
        name: of the tracker, for people.
        tracker: the adapter.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name, self._tracker = name, tracker
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(_QUEUED)
        self._left_out = 0
        self._ok = False
        self._begun = False
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"tracker-{name}")
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Queue what one event says."""
        match event:
            case RunStarted():
                about = about_of(event)
                self._begun = True
                self._put(lambda: self._tracker.start(about))
            case RunDone() | RunStopped():
                self._ok = True
            case RunFailed():
                self._ok = False
            case _:
                values = {k: v for k, v in values_of(event).items() if math.isfinite(v)}
                if values and self._begun:
                    self._put(lambda: self._tracker.log(event.step, values))

    def close(self) -> None:
        """Wait a while for what is queued, and end the tracking."""
        end = time.monotonic() + _LAST_SECONDS
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_LAST_SECONDS)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            complain(f"tracker {self.name} does not end within {_LAST_SECONDS:.0f} s: left behind")
        if self._left_out:
            complain(f"tracker {self.name} was too slow for {self._left_out} values")

    def _put(self, act: Callable[[], None]) -> None:
        try:
            self._queue.put_nowait(act)
        except queue.Full:
            self._left_out += 1

    def _work(self) -> None:
        act: Callable[[], None] | None = None
        try:
            while (act := self._queue.get()) is not None:
                act()
            if self._begun:
                self._tracker.finish(ok=self._ok)
        except Exception as error:
            text = " ".join(str(error).split()) or type(error).__name__
            complain(f"tracker {self.name} ends; training goes on: {text}")
            while act is not None and self._queue.get() is not None:
                pass


def about_of(start: RunStarted) -> About:
    """What a start tells of itself."""
    record = {f"record.{key}": value for key, value in start.record.items()}
    parameters = {**dict(_flat(start.spec)), **record, "layout": start.layout}
    parameters["spec_hash"] = start.spec_hash
    return About(start.job, start.record.get("run_id", ""), start.step, parameters)


def _flat(values: Mapping[str, Any], before: str = "") -> Sequence[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{before}{key}.")
        elif value is not None:
            found.append((f"{before}{key}", str(value)))
    return found


def values_of(event: Event) -> dict[str, float]:
    """The values of an event, by the names that all trackers use."""
    values: dict[str, float] = {}
    for metric, series in measurements(event):
        if metric.tracker:
            named = ((metric.tracker.format(*key), value) for key, value in series.items())
            values |= {name: float(value) for name, value in named if value is not None}
    return values
