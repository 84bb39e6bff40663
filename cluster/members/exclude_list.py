"""The exclude list of a run: machines that must not join its next start, each with a reason."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

EXCLUDE_LIST = "exclude.json"
"""The name of the list in a run's folder."""


@dataclass(frozen=True)
class Exclusion:
    """A machine that must not join."""

    node: str
    """As :func:`node_name` gives the name on that machine."""
    reason: str
    time: str = ""
    """In UTC, as in ISO 8601."""


def node_name() -> str:
    """The name of this machine: CONVOY_NODE_NAME, or else the host name."""
    return os.environ.get("CONVOY_NODE_NAME") or socket.gethostname()


def read_exclusions(path: Path) -> list[Exclusion]:
    """The list; empty where there is no file.

    Raises ValueError where the file is no exclude list, and OSError where it cannot be read.
    """
    try:
        listed = json.loads(path.read_text())["excluded"]
        return [Exclusion(**fields) for fields in listed]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f'{path} must be an exclude list, as {{"excluded": [{{"node": NAME, '
            f'"reason": TEXT}}]}}: {error}'
        ) from None


def exclude(path: Path, node: str, reason: str) -> None:
    """Add a machine to the list; a machine that is on the list already keeps its reason.

    The file is replaced as a whole: a reader sees the list of before or after. Writers on all
    machines wait for each other where the file system has POSIX locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        with suppress(OSError):  # a file system without locks
            fcntl.lockf(lock, fcntl.LOCK_EX)
        known = read_exclusions(path)
        if any(exclusion.node == node for exclusion in known):
            return
        known.append(Exclusion(node, reason, datetime.now(UTC).isoformat(timespec="seconds")))
        text = json.dumps({"excluded": [asdict(exclusion) for exclusion in known]}, indent=1) + "\n"
        draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with draft.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
