"""What an engine is to start: pure data, which each engine renders in its own language."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

EXIT_BAD_INPUT, EXIT_HEALTH, EXIT_TRY_AGAIN = 2, 3, 75
"""Exit codes of a run that engines know: 2 and 3 need a person, 75 asks for another start."""
STATUS_FILE = "status.json"
"""In the run's folder: its ``exit_code`` is the run's, which torchrun hides behind 1."""
PRINT_VERSION = "from importlib.metadata import version; print(version('convoy-moe'))"
"""A program in Python: the version of Convoy that a node has."""
_DEFAULT_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # torchrun's shared store can leave a restart hanging.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # After SIGTERM ranks finish a step and commit a checkpoint.
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
}


@dataclass(frozen=True)
class PodOptions:
    """What only Kubernetes needs."""

    kind: str = "TrainJob"
    """``TrainJob`` or ``JobSet``."""
    namespace: str = "default"
    volume_claim: str | None = None
    mount_path: str = "/data"
    secret: str | None = None
    topology_label: str | None = None


@dataclass(frozen=True)
class Job:
    """A run on nodes of an engine.

    Paths are absolute. ``nodes`` are the fewest and the most; each node has one launcher process,
    torchrun, which starts ``ranks_per_node`` ranks.
    """

    name: str
    nodes: tuple[int, int]
    ranks_per_node: int
    program: tuple[str, ...]
    """The words behind the interpreter that start a rank, ``("-m", "convoy", ...)``."""
    config: str
    """The file that the program reads, on a folder that nodes share."""
    overrides: tuple[str, ...]
    """The words behind the file."""
    config_text: str
    """The file with the overrides in it, for engines that bring the file to the nodes."""
    run_dir: str
    checkpoints: str
    """A folder, or the URL of an object store."""
    version: str
    """Of Convoy; nodes with another version are refused."""
    workdir: str = ""
    python: str = "python3"
    folders: tuple[str, ...] = ()
    """Further folders that ranks read, with the corpus: a container must have them."""
    gpus_per_node: int = 0
    cpus_per_rank: int = 1
    walltime_minutes: float | None = None
    queue: str | None = None
    image: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    burn_in: str | None = None
    endpoint: str | None = None
    rendezvous: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 100
    resize_seconds: float = 60.0
    """How often Ray looks for more nodes."""
    switches: int | None = None
    segment: int | None = None
    options: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    """Nodes that must not be asked for."""
    metrics_port: int | None = None
    notes: tuple[str, ...] = ()
    """Lines for people, which every engine's text begins with."""
    pods: PodOptions = PodOptions()

    @property
    def is_elastic(self) -> bool:
        """Whether the run goes on with fewer nodes than it began with."""
        return self.nodes[0] < self.nodes[1]

    @property
    def cpus_per_node(self) -> int:
        """CPU cores to ask for on each node."""
        return self.ranks_per_node * self.cpus_per_rank

    def check_cpus(self, found: int, where: str) -> None:
        """Refuse, by ValueError, more CPU cores than the ``found`` ones of ``where``."""
        if self.cpus_per_node > found:
            raise ValueError(
                f"launch.ranks_per_node ({self.ranks_per_node}) x launch.cpus_per_rank "
                f"({self.cpus_per_rank}) must not be above the {found} CPUs of {where}"
            )

    @property
    def all_environment(self) -> dict[str, str]:
        """The environment variables of every rank, Convoy's defaults first."""
        return _DEFAULT_ENVIRONMENT | dict(self.environment)

    @property
    def rank_words(self) -> list[str]:
        """The words that start a rank, without the interpreter."""
        return [*self.program, self.config, *self.overrides]

    @property
    def has_local_checkpoints(self) -> bool:
        """Whether checkpoints are in a folder, and not in an object store."""
        return "://" not in self.checkpoints

    @property
    def version_check(self) -> str:
        """A line of bash that ends with 2 on a node, or in an image, of another version."""
        return (
            f'found=$({shlex.quote(self.python)} -c "{PRINT_VERSION}" 2>/dev/null)\n'
            f'[ "$found" = {self.version} ] || {{ echo "error: node $(hostname) has version '
            f"'$found' of convoy-moe, and the launch is of {self.version}: use an image, or an "
            f'environment, of that version" >&2; exit {EXIT_BAD_INPUT}; }}'
        )

    def head(self) -> list[str]:
        """Comments that the text begins with: what runs, and where log, status and metrics are."""
        lines = [
            *self.notes,
            f"log          {self.run_dir}/log.jsonl",
            f"status       convoy status {shlex.quote(self.run_dir)}",
            f"checkpoints  {self.checkpoints}",
        ]
        if self.metrics_port:
            lines.append(f"metrics      http://NODE-OF-RANK-0:{self.metrics_port}/metrics")
        return [f"# {line}" for line in lines]


def one_line(text: str) -> str:
    """What an engine's program said, on one line."""
    return " ".join(text.split())
