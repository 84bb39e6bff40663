"""The museum of peers: its declarations, and that only a wrong answer counts as wrong."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path

import pytest

from bench.museum_peers import run as runner
from bench.museum_peers.frame import Answer, Case, all_cases, peer_case


def answers() -> Answer:
    import fake_peer

    return Answer(right=fake_peer.VALUE == 2, seen=f"{fake_peer.VALUE}")


def raises() -> Answer:
    raise RuntimeError("this peer asserts")


def ends() -> Answer:
    import os

    os._exit(7)


def hangs() -> Answer:
    import time

    time.sleep(600)
    return Answer(right=False, seen="")


def fake(folders: Path, version: str, value: int) -> str:
    """A folder with a package of one value, as the installer leaves it."""
    requirement = f"fake-peer=={version}"
    about = folders / requirement / f"fake_peer-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fake-peer\nVersion: {version}\n")
    (folders / requirement / "fake_peer.py").write_text(f"VALUE = {value}\n")
    return requirement


def case(ask, wrong: str, fixed: str | None = None, seconds: float = 60.0) -> Case:
    no_fix = "" if fixed else "there is none"
    return Case("o/r#1", "It went wrong.", (wrong,), fixed and (fixed,), no_fix, seconds, ask)


@pytest.fixture
def versions(tmp_path: Path) -> tuple[Path, str, str]:
    return tmp_path, fake(tmp_path, "1.0", 1), fake(tmp_path, "2.0", 2)


@pytest.mark.waits
def test_a_wrong_and_a_fixed_version_are_told_apart(versions):
    folders, wrong, fixed = versions
    row = runner.show(case(answers, wrong, fixed), folders)
    assert (row.verdict, row.fields["wrong"]["seen"], row.fields["fixed"]["seen"]) == (
        runner.SHOWN, "1", "2",
    )  # fmt: skip
    assert runner.show(case(answers, fixed), folders).verdict == runner.NOT_WRONG
    assert runner.show(case(answers, wrong, wrong), folders).verdict == runner.STILL_WRONG


@pytest.mark.waits
@pytest.mark.parametrize(
    ("ask", "seconds", "words"),
    [(raises, 60.0, "RuntimeError"), (ends, 60.0, "exit code 7"), (hangs, 1.0, "no answer in 1 s")],
)
def test_a_peer_that_does_not_answer_is_not_seen_wrong(versions, ask, seconds, words):
    row = runner.show(case(ask, versions[1], seconds=seconds), versions[0])
    assert row.verdict == runner.NOT_RUN
    assert words in row.fields["wrong"]["seen"]


@pytest.mark.waits
def test_another_version_than_the_required_one_is_not_asked(versions):
    folders, wrong, _ = versions
    (folders / wrong).rename(folders / "fake-peer==1.5")
    row = runner.show(case(answers, "fake-peer==1.5"), folders)
    assert row.verdict == runner.NOT_RUN
    assert "1.0 is imported instead of 1.5" in row.fields["wrong"]["seen"]


@pytest.mark.waits
def test_a_second_start_runs_only_what_has_no_standing_row(versions, monkeypatch):
    folders, wrong, fixed = versions
    path, asked = folders / "rows.json", []
    show = runner.show
    monkeypatch.setattr(runner, "show", lambda *args: asked.append(1) or show(*args))
    cases = [case(answers, wrong, fixed)]
    first = runner.run(cases, path, folders)
    assert runner.run(cases, path, folders) == first
    assert len(asked) == 1
    runner.run([case(answers, wrong)], path, folders)  # no fixed version: another question
    assert len(asked) == 2
    assert len(json.loads(path.read_text())["rows"]) == 1


def test_declarations_are_well_formed():
    cases = all_cases()
    assert cases
    assert len({case.thread for case in cases}) == len(cases)
    for declared in cases:
        lines, _ = inspect.getsourcelines(declared.ask)
        assert len(lines) <= 40, declared.claim
        assert len(declared.claim.split()) > 3, declared.claim
        assert declared.went_wrong.endswith("."), declared.thread
        tree = ast.parse(Path(declared.ask.__code__.co_filename).read_text())
        peers = {r.partition("==")[0].replace("-", "_") for r in declared.wrong} - {"torch"}
        for node in tree.body:  # a peer is imported inside its case
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not peers & {name.split(".")[0] for name in names}, declared.thread


@pytest.mark.parametrize(
    ("thread", "wrong", "fixed", "no_fix"),
    [
        ("no thread", ("a==1",), ("a==2",), ""),
        ("o/r#1", ("a>=1",), ("a==2",), ""),
        ("o/r#1", (), ("a==2",), ""),
        ("o/r#1", ("a==1",), None, ""),
        ("o/r#1", ("a==1",), ("a==2",), "open"),
    ],
)
def test_a_malformed_declaration_is_refused(thread, wrong, fixed, no_fix):
    with pytest.raises(ValueError, match=r"thread|requirement|names"):
        peer_case(thread, went_wrong="It.", wrong=wrong, fixed=fixed, no_fix=no_fix)


def test_a_thread_is_declared_once():
    (first, *_) = all_cases()
    with pytest.raises(ValueError, match="declared twice"):
        peer_case(first.thread, went_wrong="It.", wrong=("a==1",), fixed=("a==2",))(answers)
