"""Engines by name: those of the house, and any other as ``package.module:Class``."""

from __future__ import annotations

import inspect
import pkgutil
from typing import Any, Protocol, cast

from cluster.launch.job import EngineJob

ENGINES = {
    "torchrun": "cluster.launch.torchrun:Torchrun",
    "slurm": "cluster.launch.slurm:Slurm",
    "ray": "cluster.launch.ray:Ray",
    "kubernetes": "cluster.launch.kubernetes:Kubernetes",
}
"""The class of each engine. Classes are imported when they are asked for."""


class Engine(Protocol):
    """How a run is started on one kind of cluster; made without arguments.

    ``cluster.launch.testing.EngineContract`` checks what is promised here.
    """

    brings_spec: bool
    """Whether the rendered job holds the spec, so that nodes need no file of it."""
    tells_end: bool
    """Whether ranks are told when their job ends; otherwise the run keeps to the walltime alone."""
    container_workdir: str | None
    """The folder in which relative paths begin where nodes are containers without the folders of
    this machine, and ``launch.workdir`` is not given; None where nodes have this machine's."""

    def render(self, job: EngineJob) -> str:
        """The job as text, for people and for the engine. Touches nothing; needs no cluster."""
        ...

    def check(self, job: EngineJob) -> None:
        """Refuse what cannot be started from here. Raises ValueError: one line."""
        ...

    def submit(self, job: EngineJob, text: str) -> str:
        """Check the job and start it; returns its name or number for :meth:`submitted`, or becomes
        the launcher. Raises ValueError where the engine refuses it; nothing runs then."""
        ...

    def submitted(self, job: EngineJob, number: str) -> list[str]:
        """Lines for people about a job that was submitted: its output, how to stop it."""
        ...

    def on_node(self, job: EngineJob, *words: str) -> int:
        """What ``python -m cluster.launch.node ENGINE JOB WORDS`` does on a node; returns the exit
        code. Raises ValueError, one line, for exit code 2."""
        ...


def engine_named(name: str) -> Engine:
    """The engine of a name in ``ENGINES``, or of ``package.module:Class``.

    Raises ValueError where there is no such class, and where the class is no engine.
    """
    if name not in ENGINES and ":" not in name:
        raise ValueError(
            f"--on ({name}) must be one of {', '.join(ENGINES)}, or package.module:Class for an "
            f"engine of your own"
        )
    try:
        engine = pkgutil.resolve_name(ENGINES.get(name, name))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--on ({name}) must name a class: {error}") from None
    return _checked(engine, name)


def name_of(engine: Engine) -> str:
    """The name by which :func:`engine_named` finds the class of an engine."""
    path = f"{type(engine).__module__}:{type(engine).__qualname__}"
    return next((name for name, home in ENGINES.items() if home == path), path)


def _checked(engine: Any, name: str) -> Engine:
    protocol = f"the protocol {Engine.__module__}.{Engine.__name__}"
    if not inspect.isclass(engine):
        raise ValueError(f"--on ({name}) must name a class with {protocol}: it is {engine!r}")
    names = [*Engine.__annotations__, *(key for key in vars(Engine) if not key.startswith("_"))]
    missing = [key for key in names if not hasattr(engine, key)]
    if missing:
        raise ValueError(
            f"--on ({name}): the class {engine.__name__} lacks {', '.join(missing)} of {protocol}"
        )
    return cast(Engine, engine())
