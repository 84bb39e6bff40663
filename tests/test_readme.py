"""What the README shows is run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.support.ranks import run_ranks

README = Path(__file__).parent.parent / "README.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_layer_in_ten_lines_works(capsys):
    alone = [block for block in blocks() if "init_process_group" not in block]
    assert alone, "the README shows no Python"
    for block in alone:
        assert "MoELayer" in block
        assert len(block.strip().splitlines()) <= 12
        exec(compile(block, str(README), "exec"), {})


def on_rank(rank: int, block: str) -> tuple[float, float]:
    namespace: dict[str, Any] = {}
    exec(compile(block, str(README), "exec"), namespace)
    router = namespace["model"].layers[0].router
    return float(namespace["loss"].detach()), float(router.weight.detach().to_local().norm())


def test_the_layer_on_ranks_works():
    (block,) = [block for block in blocks() if "init_process_group" in block]
    for loss, norm in run_ranks(on_rank, 2, block, group=False):
        assert loss > 0
        assert norm > 0


def test_commands_name_files_that_exist():
    text = README.read_text()
    for path in set(re.findall(r"\b(?:tools|docs|bench)/[\w./-]+\.\w+", text)):
        assert (README.parent / path).exists(), path
    targets = set(re.findall(r"`make (\w+)", text)) | set(re.findall(r"^make (\w+)", text, re.M))
    makefile = (README.parent / "Makefile").read_text()
    assert {"setup", "pretrain", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M), target
