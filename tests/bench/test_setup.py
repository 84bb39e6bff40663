"""What ``make setup`` says on a machine with a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")
@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize("cuda", ["None", "'12.9'"])
def test_setup_says_that_a_gpu_needs_another_torch(cuda, has_gpu, tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    torch = tmp_path / ".venv/lib/python3.11/site-packages/torch"
    torch.mkdir(parents=True)
    (torch / "version.py").write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\n")
    (tmp_path / ".venv/.ready").touch()  # all is installed
    if has_gpu:
        program = tmp_path / "bin/nvidia-smi"
        program.parent.mkdir()
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    said = subprocess.run(
        ["make", "setup"], cwd=tmp_path, env={**os.environ, "PATH": path}, check=True,
        capture_output=True, text=True,
    ).stdout  # fmt: skip
    if has_gpu and cuda == "None":
        assert "the installed torch is built without CUDA" in said
        assert "pip install -c constraints.txt torch --index-url https://" in said
    else:
        assert "CUDA" not in said
