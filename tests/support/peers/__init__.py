"""Scripts that run other projects' own code, and what tests need to run them.

The other projects are those of bench/requirements-peers.txt, installed as bench/README.md says, in
``build/peers`` or on PYTHONPATH. A script runs in a process of its own: these packages change
torch, warn, and need a process group.
"""

from __future__ import annotations

import importlib.util
import os
import re
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


def documented(flag: str, places: dict[str, Path]) -> list[str]:
    """The words of the command of docs/moving-over.md that has ``flag``, without ``convoy``; for
    each folder of the page that of a test."""
    page = (ROOT / "docs/moving-over.md").read_text()
    (line,) = re.findall(rf"^convoy (.* {flag}.*)$", page, re.MULTILINE)
    words = line.split()
    assert places.keys() <= set(words), line
    return [str(places.get(word, word)) for word in words]


def run_script(name: str, package: str, *arguments: object, ranks: int = 1) -> None:
    """Run ``tests.support.peers.NAME``, under torchrun where ``ranks`` is above 1; skips the test
    where ``package`` is not installed."""
    if not installed(package):
        pytest.skip(f"{package} is not installed: see bench/README.md, Other systems")
    path = os.pathsep.join([str(ROOT), str(PEERS), os.environ.get("PYTHONPATH", "")])
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words = [*(launcher if ranks > 1 else []), "-m", f"tests.support.peers.{name}"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *words, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
