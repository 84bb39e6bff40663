"""Taking a machine out of a run."""

from __future__ import annotations

from cluster.members import EXCLUDE_LIST, exclude
from pretrain.job import Job
from pretrain.observe import Notice


def exclude_machine(job: Job, machine: str, why: str) -> bool:
    """Put a machine on the run's exclude list; every rank must call with equal arguments.

    Returns whether the machine is on the list now, on every rank. Where the list cannot be written,
    rank 0 publishes why.
    """

    def write() -> int:
        path = job.spec.run_path / EXCLUDE_LIST
        try:
            exclude(path, machine, why)
        except (OSError, ValueError) as error:
            text = f"{machine} cannot be put on {path}: {error}"
            job.events.publish(Notice(step=0, text=text, problem=True))
            return 0
        return 1

    return bool(job.runtime.from_first(write))
