"""What an engine is to start: pure data, which each engine renders in its own language."""

from __future__ import annotations

import shlex

from pydantic import BaseModel, ConfigDict

from cluster.launch.config import LaunchConfig

EXIT_BAD_INPUT, EXIT_HEALTH, EXIT_TRY_AGAIN = 2, 3, 75
"""Exit codes of a run that engines know: 2 and 3 need a person, 75 asks for another start."""
STATUS_FILE = "status.json"
"""In the run's folder: its ``exit_code`` is the run's, which torchrun hides behind 1."""
_DEFAULT_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # torchrun's shared store can leave a restart hanging.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # After SIGTERM ranks finish a step and commit a checkpoint.
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
}


class EngineJob(BaseModel):
    """A run as an engine is to start it: what ``[launch]`` asks for, and facts of the run.

    Paths are absolute. Each node has one launcher process, torchrun, which starts
    ``launch.ranks_per_node`` ranks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    launch: LaunchConfig
    """Its ``workdir`` and ``python`` are those of the nodes."""
    name: str
    version: str
    """Of Convoy; nodes with another version are refused."""
    program: tuple[str, ...]
    """The words behind the interpreter that start a rank, ``("-m", "package", ...)``."""
    config: str
    """The file that the program reads, on a folder that nodes share."""
    overrides: tuple[str, ...] = ()
    """The words behind the file."""
    config_text: str = ""
    """The file with the overrides in it, for engines that bring the file to the nodes."""
    run_dir: str
    checkpoints: str
    """A folder, or the URL of an object store."""
    folders: tuple[str, ...] = ()
    """Further folders that ranks read, with the corpus: a container must have them."""
    excluded: tuple[str, ...] = ()
    """Nodes that must not be asked for."""
    metrics_port: int | None = None
    notes: tuple[str, ...] = ()
    """Lines for people, which every engine's text begins with."""

    @property
    def nodes(self) -> tuple[int, int]:
        """The fewest and the most nodes."""
        return self.launch.min_nodes, self.launch.max_nodes

    @property
    def workdir(self) -> str:
        """The folder on the nodes in which relative paths begin."""
        return self.launch.workdir or ""

    @property
    def python(self) -> str:
        """The interpreter on the nodes."""
        return self.launch.python or "python3"

    @property
    def is_elastic(self) -> bool:
        """Whether the run goes on with fewer nodes than it began with."""
        return self.nodes[0] < self.nodes[1]

    @property
    def cpus_per_node(self) -> int:
        """CPU cores to ask for on each node."""
        return self.launch.ranks_per_node * self.launch.cpus_per_rank

    def check_cpus(self, found: int, where: str) -> None:
        """Refuse, by ValueError, more CPU cores than the ``found`` ones of ``where``."""
        if self.cpus_per_node > found:
            raise ValueError(
                f"launch.ranks_per_node ({self.launch.ranks_per_node}) x launch.cpus_per_rank "
                f"({self.launch.cpus_per_rank}) must not be above the {found} CPUs of {where}"
            )

    @property
    def all_environment(self) -> dict[str, str]:
        """The environment variables of every rank, Convoy's defaults first."""
        return _DEFAULT_ENVIRONMENT | self.launch.environment

    @property
    def rank_words(self) -> list[str]:
        """The words that start a rank, without the interpreter."""
        return [*self.program, self.config, *self.overrides]

    @property
    def has_local_checkpoints(self) -> bool:
        """Whether checkpoints are in a folder, and not in an object store."""
        return "://" not in self.checkpoints

    def for_nodes(self) -> str:
        """The job as JSON for ``cluster.launch.node``, without what only rendering needs."""
        rendered = {"notes", "config_text", "excluded"}
        return self.model_dump_json(indent=1, exclude_defaults=True, exclude=rendered)

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
