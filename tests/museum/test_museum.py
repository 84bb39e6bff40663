"""The cases are whole: a thread, a claim, an edit that still meets its text, and few lines."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from docs.museum_page import page
from tests.museum.cases import ROOT, Case, Edit, all_cases, case
from tests.museum.prove import prove_case

MOST_LINES = 40
FILES = [
    path
    for path in sorted(Path(__file__).parent.glob("test_*.py"))
    if path.name != "test_museum.py"
]


def test_no_thread_is_shown_twice():
    counts = Counter(shown.thread for shown in all_cases())
    assert [thread for thread, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("shown", all_cases(), ids=lambda shown: shown.thread)
def test_a_case_says_what_went_wrong_and_what_holds_here(shown):
    for sentence in (shown.went_wrong, shown.claim):
        assert sentence.endswith(".")
        assert len(sentence) > 20
    for edit in shown.edits:
        assert (ROOT / edit.file).read_text().count(edit.old) == 1, (edit.file, edit.old)
        assert edit.old != edit.new
        assert not edit.file.startswith(("tests/", "bench/", "docs/"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_case_is_short(path):
    functions = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions}
    assert {name: lines for name, lines in long.items() if lines > MOST_LINES} == {}


def test_a_case_without_a_defect_is_refused():
    with pytest.raises(ValueError, match="must have an edit"):
        case("owner/repository#1", "It went wrong.")
    with pytest.raises(ValueError, match="must be owner/repository#number"):
        case("repository#1", "It went wrong.", Edit("a.py", "a", "b"))


def test_an_edit_that_no_longer_meets_its_text_proves_nothing():
    shown = all_cases()[0]
    stale = Case(
        shown.thread, shown.went_wrong, (Edit("README.md", "no such text", ""),), shown.test
    )
    proof = prove_case(stale)
    assert not proof.red
    assert "must have once" in proof.said


def test_the_page_is_made_from_the_cases():
    assert (ROOT / "docs" / "museum.md").read_text() == page(), "make docs/museum.md"
