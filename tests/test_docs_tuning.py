"""docs/tuning.md, from a model to an answer of the tuned one: its commands with fewer steps."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "tuning.md").read_text()
BIN = Path(sys.executable).parent


def block(language: str, number: int = 0) -> str:
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return pattern.findall(PAGE)[number]


def run(folder: Path, line: str) -> str:
    command, *words = shlex.split(line)
    words = [str(ROOT / word) if word.startswith("tools/") else word for word in words]
    program = {"python": [sys.executable], "convoy": [sys.executable, "-m", "convoy"],
               "torchrun": [str(BIN / "torchrun")]}[command]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*program, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_leads_from_a_model_to_a_tuned_one(tmp_path):
    pytest.importorskip("transformers")
    recipe = ROOT / "tools" / "recipes" / "stdlib-tiny.toml"
    run(tmp_path, f"convoy prepare {recipe}")
    few = "--set train.steps=4 --set schedule.warmup_steps=2 --set eval.sequences=8"
    starts = "torchrun --standalone --nproc-per-node 2 tools/pretrain.py"
    run(tmp_path, f"{starts} {recipe} {few}")
    for name, text in (("talks.py", block("python")), ("tune.toml", block("toml")),
                       ("ask.py", block("python", 1))):  # fmt: skip
        assert text.startswith(f"# {name}\n")
        (tmp_path / name).write_text(text)
    said = []
    for line in block("sh").splitlines():
        shorter = " --set train.steps=12" if line.startswith("torchrun") else ""
        said.append(run(tmp_path, line + shorter))
    # How many of the experts get a token depends on the weights.
    line = re.sub("[0-9]+ of", "[0-9]+ of", block("text").splitlines()[0])
    assert re.search(f"^{line}$", said[2], re.MULTILINE), said[2]
    assert said[-1].strip()
