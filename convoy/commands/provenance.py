"""When a result was made, and with what: the head of what commands write as JSON."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from parallel.version import VERSION


def provenance(*packages: str) -> dict[str, Any]:
    """``date``, and ``versions`` of Python, of ``packages`` and of Convoy."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
            "convoy-moe": VERSION,
        },
    }
