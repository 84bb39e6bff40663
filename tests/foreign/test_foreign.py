"""The runner of others' suites: what it counts, and what it does not let pass."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.foreign import __main__ as command
from tests.foreign.exclusions import read_exclusions
from tests.foreign.fetching import NotHereError
from tests.foreign.running import run_suite
from tests.foreign.suites import SUITES, Suite

CASES = """
import unittest
import pytest
from tests.foreign.touching import touch

def test_good():
    touch()

@pytest.mark.parametrize("size", [1, 2])
def test_two_sizes(size):
    touch()
    assert size == 1

def test_without_convoy():
    pass

def test_no_gpu():
    pytest.skip("needs a GPU")

def test_that_ends_its_process():
    import os
    os._exit(3)

class TestTheirs(unittest.TestCase):
    def test_subtests(self):
        touch()
        for number in (1, 2):
            with self.subTest(number=number):
                self.assertEqual(number, 1)
"""
EXCLUSIONS = """# of the tests of the runner
cases.py::test_two_sizes[2] | there is one size
cases.py::test_that_ends* | not run: it ends the process
cases.py::TestTheirs::test_subtests | there is one number
"""


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    """A suite of a checkout, as another project's would be."""
    checkout, adapter = tmp_path / "checkout", tmp_path / "adapter"
    checkout.mkdir()
    adapter.mkdir()
    (checkout / "cases.py").write_text(CASES)
    (adapter / "exclusions.txt").write_text(EXCLUSIONS)
    return Suite(
        name="fake", about="a fake", folder=adapter, repository="some/fake", commit="abc123",
        theirs=True,
    )  # fmt: skip


def run(suite: Suite, **options: object):
    return run_suite(suite, suite.parts, checkouts=[suite.folder.parent / "checkout"], **options)


def exclude(suite: Suite, *lines: str) -> None:
    suite.exclusions.write_text("\n".join([EXCLUSIONS, *lines]))


@pytest.mark.parametrize("name", SUITES)
def test_every_exclusion_has_a_reason(name):
    lines = read_exclusions(SUITES[name].exclusions)
    assert all(len(line.reason.split()) > 3 for line in lines)
    assert len({line.case for line in lines}) == len(lines)


@pytest.mark.parametrize("line", ["a case", "a case |", "a case | ", "| why", "a | not run: "])
def test_an_exclusion_without_a_reason_is_refused(tmp_path, line):
    path = tmp_path / "exclusions.txt"
    path.write_text(f"good | reason\n{line}\n")
    with pytest.raises(ValueError, match=r"exclusions.txt:2 must be CASE \| REASON"):
        read_exclusions(path)


def test_cases_are_counted(suite):
    result = run(suite)
    assert result.passed == ["cases.py::test_good", "cases.py::test_two_sizes[1]"]
    assert result.called == 2
    assert result.without_convoy == ["cases.py::test_without_convoy"]
    assert result.skipped == {"cases.py::test_no_gpu": "needs a GPU"}
    assert len(result.excluded) == 3
    assert not result.failed
    assert result.good


def test_stale_exclusions_and_failures_are_told(suite, monkeypatch, capsys, tmp_path):
    exclude(suite, "cases.py::test_good | passes", "cases.py::test_gone | is no more",
            "cases.py::test_no_gpu | is skipped anyway")  # fmt: skip
    text = suite.exclusions.read_text().replace("cases.py::TestTheirs", "elsewhere")
    suite.exclusions.write_text(text)
    monkeypatch.setattr(command, "SUITES", {"fake": suite})
    source = str(tmp_path / "checkout")
    table = tmp_path / "table.json"
    assert command.main(["fake", "--source", source, "--json", str(table)]) == 1
    output = capsys.readouterr().out
    assert "failed: cases.py::TestTheirs::test_subtests" in output
    assert "stale exclusion: cases.py::test_good: cases.py::test_good passes" in output
    for case in ("cases.py::test_gone", "cases.py::test_no_gpu", "elsewhere::test_subtests"):
        assert f"stale exclusion: {case}: no case fails" in output
    (row,) = json.loads(table.read_text())["rows"]
    counted = row["passed"], row["excluded"], row["failed"], row["passed_without_convoy"]
    assert counted == (1, 2, 1, 1)
    assert row["origin"] == "some/fake@abc123"


def test_a_process_that_ends_is_a_failure(suite):
    suite.exclusions.write_text(EXCLUSIONS.replace("cases.py::test_that_ends* | not run: ", "x | "))
    result = run(suite)
    assert "fake::process" in result.failed
    assert "pytest ended with 3" in result.failed["fake::process"]
    assert not result.good


def test_a_file_that_is_not_collected_is_a_failure(suite):
    (suite.folder.parent / "checkout" / "cases.py").write_text("import no_such_module")
    result = run(suite)
    assert "no_such_module" in result.failed["cases.py::collection"]


def test_what_a_part_did_is_kept(suite, tmp_path):
    kept = tmp_path / "kept"
    before = run(suite, keep=kept)
    (suite.folder.parent / "checkout" / "cases.py").write_text("import no_such_module")
    assert run(suite, keep=kept) == before


def test_tests_that_are_missing_are_one_line(suite, tmp_path, monkeypatch, capsys):
    for checkouts in ([], [tmp_path / "adapter"]):
        with pytest.raises(NotHereError, match="checkout of some/fake at abc123"):
            run_suite(suite, [""], checkouts=checkouts)
    monkeypatch.setattr(command, "SUITES", {"fake": suite})
    assert command.main([]) == 0
    assert command.main(["fake"]) == 1
    assert "fake: skipped. fake must have --source" in capsys.readouterr().out


def test_every_suite_says_where_its_tests_are_from():
    for suite in SUITES.values():
        assert suite.about
        assert not (suite.sdist and suite.repository)
        for requirement in (suite.sdist, *suite.wheels):
            assert not requirement or "==" in requirement, requirement
        assert not suite.repository or len(suite.commit) == 40
        assert not set(suite.parts) & set(suite.more)
        assert dataclasses.replace(suite) == suite
