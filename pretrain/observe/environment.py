"""What a run is made with: the experiment record of logs, trackers and manifests."""

from __future__ import annotations

import platform
import socket
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from parallel.version import VERSION

_PACKAGES = ("torch", "numpy", "zarr")
_GIT_SECONDS = 5.0


def experiment_record(*, corpus: str, run_id: str) -> dict[str, str]:
    """What a run is made with.

    Args:
        corpus: the fingerprint of the tokenizer and of every token.
        run_id: of the run, over all of its starts.

    Returns ``run_id``, ``corpus``, ``code`` (see :func:`code_version`), ``python``, the versions of
    the main packages, ``host``, ``system`` and ``device``; what is not known is left out.
    """
    record = {
        "run_id": run_id,
        "corpus": corpus,
        "code": code_version(),
        "python": platform.python_version(),
        "convoy-moe": VERSION,
        **{name: _version(name) for name in _PACKAGES},
        "host": socket.gethostname(),
        "system": platform.platform(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
    }
    return {key: value for key, value in record.items() if value}


@cache
def code_version() -> str:
    """The git commit of the checkout that this package is in, with ``+changes`` where its files
    differ from the commit; empty where the package is in no checkout, or there is no git."""
    package = Path(__file__).resolve().parent.parent
    commit = _git(package, "rev-parse", "HEAD")
    if not commit or _git(package, "ls-files", "errors.py") != "errors.py":
        return ""  # the checkout is somebody else's, around an installed package
    changes = _git(package.parent, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if changes else commit


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
