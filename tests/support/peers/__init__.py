"""Scripts that run other projects' own code, and what tests need to run them.

The other projects are those of bench/requirements-peers.txt, installed as bench/README.md says, in
``build/peers`` or on PYTHONPATH. A script runs in a process of its own: these packages change
torch, warn, and need a process group.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PEERS = ROOT / "build/peers"


@cache
def installed(package: str) -> bool:
    """Whether a package is where scripts look for it; nothing of it is imported."""
    return (PEERS / package).is_dir() or importlib.util.find_spec(package) is not None


def run_script(name: str, package: str, *arguments: object) -> None:
    """Run ``tests.support.peers.NAME``; skips the test where ``package`` is not installed."""
    if not installed(package):
        pytest.skip(f"{package} is not installed: see bench/README.md, Other systems")
    path = os.pathsep.join([str(ROOT), str(PEERS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.support.peers.{name}", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
