"""Convoy on a PYTHONPATH, where no distribution says its version."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from parallel.version import VERSION
from tests.support.jobs import prepare_job, write_spec

ROOT = Path(__file__).resolve().parents[1]

SAVE = """
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    raise SystemExit(f"installed: {version('convoy-moe')}")
except PackageNotFoundError:
    pass
import torch, ckpt
from convoy.commands import main
state = {"w": torch.arange(4.0), "step": 3}
ckpt.save_state_dict(sys.argv[1], state, step=3)
into = {"w": torch.zeros(4), "step": 0}
assert ckpt.load_state_dict(sys.argv[1], into) == 3
assert torch.equal(into["w"], state["w"])
print(ckpt.read_manifest(sys.argv[1], 3).versions["convoy-moe"])
main(None, ["--version"])
"""


def python_without_convoy(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with this tree and all packages of this Python on the PYTHONPATH, but without the
    distribution of Convoy."""
    packages = folder / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "convoy" not in path.name and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    env = dict(os.environ)
    # Each by itself: an editable install leaves metadata beside the packages of a checkout.
    for name in (
        "router",
        "parallel",
        "moe",
        "ckpt",
        "cluster",
        "corpus",
        "pretrain",
        "convoy",
        "tools",
    ):
        (packages / name).symlink_to(ROOT / name)
    env["PYTHONPATH"] = str(packages)
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_the_version_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION


def test_a_save_without_an_installed_convoy(tmp_path):
    run = python_without_convoy(tmp_path, "-c", SAVE, str(tmp_path / "saved"))
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [VERSION, VERSION]


@pytest.mark.slow
def test_a_run_without_an_installed_convoy(tmp_path):
    spec = write_spec(prepare_job(tmp_path / "job"))
    run = python_without_convoy(tmp_path, "-m", "convoy", "pretrain", str(spec))
    assert run.returncode == 0, run.stderr
