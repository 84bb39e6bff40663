"""Names of variables: nouns of the field, and no words that a reader must look up.

``NOT_YET`` has the files in which such names are left, with how many. A file that is changed may
have fewer, never more; a file without any is taken out of the list.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("router", "parallel", "moe", "ckpt", "cluster", "corpus", "pretrain", "convoy")
BANNED = {"found", "one", "each", "at", "part", "told", "held", "room", "place", "whole"}
"""Names that say nothing of the thing. ``part`` and ``place`` are words of the house too: a part of
a step, and a rank's place in a topology. ``ALLOWED`` has the files where they are these things."""
NOT_YET_FILE = Path(__file__).with_name("names_not_yet.json")
ALLOWED = {
    "pretrain/job/build.py": {"part"},
    "pretrain/train/trainer.py": {"part"},
    "pretrain/checkpoint/resume.py": {"part"},
    "pretrain/parts/testing.py": {"part"},
    "parallel/layout.py": {"place"},
}


def bindings(source: str) -> Iterator[str]:
    """Every name that the source binds: assignments, loops, parameters and comprehensions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def counts() -> dict[str, int]:
    """The banned names that each file binds, by file; files without any are left out."""
    by_file = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            banned = BANNED - ALLOWED.get(name, set())
            count = sum(bound in banned for bound in bindings(path.read_text()))
            if count:
                by_file[name] = count
    return by_file


def test_names_say_what_things_are():
    allowed, now = json.loads(NOT_YET_FILE.read_text()), counts()
    more = {name: n for name, n in now.items() if n > allowed.get(name, 0)}
    assert not more, "new names that say nothing of the thing; files with more than names_not_yet"
    fewer = {name for name, n in allowed.items() if now.get(name, 0) < n}
    assert not fewer, f"cleaner than the list says: write the list anew ({sorted(fewer)[:3]})"


def test_a_banned_name_is_seen():
    source = "def f(found): ...\nfor one in x: ...\n[each for each in y]\nwith z as held: ..."
    assert {name for name in bindings(source) if name in BANNED} == {"one", "held", "found", "each"}


if __name__ == "__main__":
    NOT_YET_FILE.write_text(json.dumps(counts(), indent=1) + "\n")
