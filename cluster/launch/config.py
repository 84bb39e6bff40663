"""The ``[launch]`` section of a spec: what an engine is asked for."""

from __future__ import annotations

import re
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_NODES = re.compile(r"([1-9][0-9]*)(?::([1-9][0-9]*))?")


class _Section(BaseModel):
    """A table of settings that a resume may change."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    on_resume: ClassVar[str] = "free"


class KubernetesConfig(_Section):
    """The ``[launch.kubernetes]`` section: what only Kubernetes needs."""

    kind: Literal["TrainJob", "JobSet"] = "TrainJob"
    """``TrainJob``: a TrainingRuntime and a TrainJob of Kubeflow Trainer v2. ``JobSet``: a JobSet,
    which needs no Kubeflow."""
    namespace: str = "default"
    """The namespace of all objects."""
    volume_claim: str | None = None
    """A PersistentVolumeClaim that all pods mount at ``launch.workdir`` for reading and writing
    (ReadWriteMany); ``run_dir`` and ``checkpoint.path`` are below it."""
    secret: str | None = None
    """A Secret whose keys become environment variables, such as those of an object store."""
    topology_label: str | None = None
    """A label of nodes with equal values within a rack or block. Kueue is asked for one rack, and
    without a queue the pods prefer the rack of the first pod."""


class LaunchConfig(_Section):
    """The ``[launch]`` section: a run on the engine of a cluster, for ``convoy launch``."""

    nodes: int | str = 1
    """The number of nodes, or MIN:MAX: the run begins with at least MIN and goes on with at least
    MIN. Nodes beyond a fixed layout of ``[parallel]`` are spares."""
    ranks_per_node: int = Field(default=1, ge=1)
    """Ranks on each node; one GPU each where there are GPUs."""
    gpus_per_node: int = Field(default=0, ge=0)
    """GPUs to ask for on each node; 0 trains on CPUs."""
    cpus_per_rank: int = Field(default=1, ge=1)
    """CPU cores to ask for each rank."""
    walltime_minutes: float | None = Field(default=None, gt=0)
    """The longest that one start may take; the run stops before it. None: as the queue has it."""
    queue: str | None = None
    """The partition of Slurm, or the local queue of Kueue on Kubernetes."""
    image: str | None = None
    """The container image, with Convoy's version in its tag. Slurm needs pyxis for it."""
    workdir: str | None = None
    """The folder on the nodes in which relative paths begin; by default that of ``convoy launch``,
    and ``/data`` in pods."""
    python: str | None = None
    """The interpreter on the nodes: by default ``python3`` in an image, and otherwise the one that
    ``convoy launch`` runs in."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every rank."""
    setup: list[str] = Field(default_factory=list)
    """Lines of bash that every node runs first, ``module load cuda`` for example."""
    burn_in: str | None = None
    """A line of bash that every node runs before the run. The line may put nodes on RUN_DIR's
    exclude list, and those nodes do not train."""
    rendezvous: dict[str, str] = Field(default_factory=dict)
    """``endpoint`` is HOST:PORT for torchrun on several machines; the engines have their own. All
    else are keys of torchrun's ``--rdzv-conf``, such as ``last_call_timeout``."""
    max_restarts: int = Field(default=100, ge=0)
    """Starts of lost ranks within one job."""
    options: list[str] = Field(default_factory=list)
    """More options of ``sbatch``, such as ``--account=mine``, or ``--switches=1`` for nodes of one
    leaf switch."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """What only Kubernetes needs."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if _NODES.fullmatch(str(self.nodes)) is None:
            raise ValueError(f"launch.nodes ({self.nodes}) must be a number, or MIN:MAX as in 2:4")
        least, most = self.min_nodes, self.max_nodes
        if least > most:
            raise ValueError(f"launch.nodes ({self.nodes}): MIN ({least}) must not be above MAX "
                             f"({most})")  # fmt: skip
        if self.gpus_per_node and self.ranks_per_node > self.gpus_per_node:
            raise ValueError(
                f"launch.ranks_per_node ({self.ranks_per_node}) must not be above "
                f"launch.gpus_per_node ({self.gpus_per_node}): each rank has a GPU of its own"
            )
        return self

    @property
    def min_nodes(self) -> int:
        """The fewest nodes."""
        return int(str(self.nodes).partition(":")[0])

    @property
    def max_nodes(self) -> int:
        """The most nodes."""
        return int(str(self.nodes).rpartition(":")[2])
