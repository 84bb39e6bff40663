"""Each case is seen red: the case runs in a copy of the repository that has the case's defect."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tests.museum.cases import ROOT, Case

LIMIT_SECONDS = 300.0
"""Of one case, with its interpreter's start."""
_LEFT_OUT = shutil.ignore_patterns("results", "images", "*.md", "node_modules")
_FOLDERS = (
    "router", "moe", "parallel", "ckpt", "cluster", "corpus", "pretrain", "convoy", "tools",
    "bench", "tests",
)  # fmt: skip
_FILES = ("pyproject.toml", "README.md")
_NOT_A_CLAIM = re.compile(
    r"(SyntaxError|IndentationError|NameError|UnboundLocalError|ImportError|ModuleNotFoundError"
    r"|TypeError|AttributeError)\b"
)
"""What an edit with a mistake gives, instead of the defect."""
_TEMPORARY = re.compile(r"/\S*/museum-\w+/pytest-of-\w+/pytest-\d+/")
"""Folders of one proof, which say nothing to a reader."""


@dataclass(frozen=True)
class Proof:
    """What a case said of Convoy with the defect."""

    case: Case
    red: bool
    said: str
    """The last line of the failure; or why the case is not proven."""


def prove(cases: Iterable[Case], workers: int = 2) -> Iterator[Proof]:
    """The proofs of cases, in the order in which they come."""
    with ThreadPoolExecutor(workers) as pool:
        for future in as_completed([pool.submit(prove_case, each_case) for each_case in cases]):
            yield future.result()


def prove_case(case: Case) -> Proof:
    """Run a case in a copy of the repository with the case's edits."""
    with tempfile.TemporaryDirectory(prefix="museum-", ignore_cleanup_errors=True) as name:
        root = Path(name) / "tree"
        _copy(root)
        try:
            for edit in case.edits:
                edit.apply(root)
        except ValueError as error:
            return Proof(case, False, str(error))
        report = Path(name) / "report.xml"
        command = [
            sys.executable, "-m", "pytest", "-m", "museum", "-p", "no:cacheprovider",
            "--timeout", str(int(LIMIT_SECONDS) - 30), "--junitxml", str(report), case.node,
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": str(root), "TMPDIR": name}
        try:
            subprocess.run(
                command, cwd=root, env=environment, timeout=LIMIT_SECONDS,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Proof(case, False, f"no end in {LIMIT_SECONDS:.0f} s")
        return _read(case, report)


def _copy(root: Path) -> None:
    """Link the repository's code under ``root``: a copy takes no time and no room."""
    root.mkdir(parents=True)
    for folder in _FOLDERS:
        shutil.copytree(ROOT / folder, root / folder, copy_function=_link, ignore=_LEFT_OUT)
    for file in _FILES:
        shutil.copy2(ROOT / file, root / file)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _read(case: Case, report: Path) -> Proof:
    if not report.exists():
        return Proof(case, False, "the case did not start")
    tests = list(ElementTree.parse(report).iter("testcase"))
    failures = [failure for test in tests for failure in test.findall("failure")]
    if any(test.find("error") is not None for test in tests) or not tests:
        return Proof(case, False, "the case was not run: an error before or after its claim")
    if not failures:
        return Proof(case, False, "the case passes with the defect")
    said = _last_line(failures[0])
    if _NOT_A_CLAIM.match(said):
        return Proof(case, False, f"the edit has a mistake: {said}")
    return Proof(case, True, said)


def _last_line(failure: ElementTree.Element) -> str:
    """What was raised, in one line; of ranks, the last line of the first traceback."""
    text = failure.text or ""
    text = _TEMPORARY.sub("", text)
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    if not lines:
        return "a failure without a word"
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed)\b", line)]
    return (raised[1] if "Traceback" in text and len(raised) > 1 else lines[0])[:200]
