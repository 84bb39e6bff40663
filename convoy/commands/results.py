"""Results as JSON: printed, or in a file that says when the result was made, and with what."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from parallel.version import VERSION
from pretrain.errors import InputError
from pretrain.observe import say


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


def say_json(result: Any) -> None:
    """Print a result."""
    say(json.dumps(result, indent=1))


def write_json(file: Path | None, result: Any) -> None:
    """Write a result to a file; nothing for None."""
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n")


def check_writable(option: str, file: Path | None) -> None:
    """Refuse a file that a command is to write, by InputError, where the file cannot be written."""
    if file is None:
        return
    folder = file.absolute().parent
    if not folder.is_dir():
        raise InputError(f"{option} ({file}): its folder does not exist")
    if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        raise InputError(f"{option} ({file}) must be a file that can be written")


def check_picture(option: str, file: Path) -> None:
    """Refuse a picture that could not be drawn, by InputError, before anything is computed."""
    if file.suffix not in (".svg", ".png", ".pdf"):
        raise InputError(f"{option} ({file}) must be a file named *.svg, *.png or *.pdf")
    check_writable(option, file)
    check_matplotlib(f"{option} ({file})")


def check_matplotlib(what: str) -> None:
    """Refuse ``what``, by InputError, where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError(
            f"{what} needs matplotlib: pip install -e '.[plot]' in Convoy's checkout, or pip "
            f"install matplotlib"
        ) from None
