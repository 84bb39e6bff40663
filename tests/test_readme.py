"""What the README shows is run."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_layer_in_ten_lines_works(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert blocks, "the README shows no Python"
    for block in blocks:
        assert "MoELayer" in block
        assert len(block.strip().splitlines()) <= 12
        namespace: dict[str, object] = {}
        exec(compile(block, str(README), "exec"), namespace)


def test_commands_name_files_that_exist():
    text = README.read_text()
    for path in set(re.findall(r"\b(?:tools|docs|bench)/[\w./-]+\.\w+", text)):
        assert (README.parent / path).exists(), path
    targets = set(re.findall(r"`make (\w+)", text)) | set(re.findall(r"^make (\w+)", text, re.M))
    makefile = (README.parent / "Makefile").read_text()
    assert {"setup", "pretrain", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M), target
