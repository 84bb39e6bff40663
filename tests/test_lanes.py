"""``make test`` runs every test in forked workers, and fails where one of them fails or dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.lanes import Lane

ROOT = Path(__file__).parents[1]
MAIN = """
import sys, pytest
from tests.lanes import Lanes
sys.exit(pytest.main(sys.argv[1:], plugins=[Lanes()]))
"""
CONFIG = "[pytest]\nmarkers =\n    waits: x\n"


def run(folder: Path, files: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    for name, text in {"pytest.ini": CONFIG, **files}.items():
        (folder / name).write_text(text)
    return subprocess.run(
        [sys.executable, "-c", MAIN, "-q", "-p", "no:cacheprovider", *words], cwd=folder, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=120,
    )  # fmt: skip


def test_tests_of_both_lanes_run_in_other_processes(tmp_path):
    text = """
import os, pathlib, time, pytest
@pytest.fixture(scope="module")
def made(): open("made", "a").write("x")
@pytest.mark.waits
def test_slow(): time.sleep(0.2)
@pytest.mark.parametrize("i", range(5))
def test_it(i, made, tmp_path, capfd):
    pathlib.Path(f"pid-{os.getpid()}").touch()
    print(i)
    assert capfd.readouterr().out == f"{i}\\n"
"""
    result = run(tmp_path, {"test_a.py": text})
    assert result.returncode == 0, result.stdout
    assert "6 passed" in result.stdout
    pids = {int(path.name[4:]) for path in tmp_path.glob("pid-*")}
    assert len((tmp_path / "made").read_text()) == len(pids) <= 2
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


def test_a_failure_and_an_error_of_a_fixture_count(tmp_path):
    text = """
import pytest
@pytest.fixture
def broken(): raise ValueError("no fixture")
def test_it(broken): pass
@pytest.mark.waits
def test_fails(): assert 1 + 1 == 3
def test_passes(): pass
"""
    result = run(tmp_path, {"test_a.py": text})
    assert result.returncode == 1
    assert "1 failed, 1 passed, 1 error" in result.stdout
    assert "assert (1 + 1) == 3" in result.stdout
    assert "no fixture" in result.stdout


def test_a_test_that_kills_its_worker_fails_and_others_run(tmp_path):
    text = """
import os, signal
def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
"""
    others = "def test_a(): pass\ndef test_b(): pass\n"
    result = run(tmp_path, {"test_dies.py": text, "test_others.py": others})
    assert result.returncode == 1
    assert "the worker process of this test died" in result.stdout
    assert "test_dies.py::test_dies" in result.stdout
    assert "2 passed" in result.stdout or "1 passed" in result.stdout


def test_no_test_runs_after_the_first_failure_that_ends_a_run(tmp_path):
    tests = "".join(f"def test_{i}():\n    time.sleep(0.05)\n    assert {i}\n" for i in range(40))
    result = run(tmp_path, {"test_a.py": f"import time\n{tests}"}, "-x")
    assert result.returncode == 1
    passed = (
        int(result.stdout.split(" passed")[0].rpartition(" ")[2])
        if "passed" in result.stdout
        else 0
    )
    assert passed < 30


def test_a_file_that_cannot_be_imported_ends_the_run(tmp_path):
    result = run(
        tmp_path, {"test_a.py": "import nowhere_to_be_found", "test_b.py": "def test(): pass"}
    )
    assert result.returncode == 2
    assert "nowhere_to_be_found" in result.stdout


def test_a_worker_takes_a_files_tests_in_order_and_helps_others_at_the_end():
    lane = Lane([(0, "a"), (1, "a"), (2, "a"), (3, "b"), (4, "tests/router/c")])
    assert lane.take(None) == (0, "a")
    assert lane.take(None) == (3, "b")
    assert lane.take("a") == (1, "a")
    assert lane.take("b") == (4, "tests/router/c")
    assert lane.take("tests/router/c") == (2, "a")
    assert lane.take("a") is None


LISTING = """
import pathlib
from tests.lanes import mark_long
def pytest_collection_modifyitems(config, items):
    mark_long(config, items, pathlib.Path("long_tests.txt").resolve())
"""


def test_a_listed_test_is_long_and_a_stale_line_ends_the_run(tmp_path):
    text = """
import pytest
@pytest.mark.parametrize("case", ["one", "two"])
def test_a(case): pass
def test_b(): pass
def test_c(): pass
"""
    files = {
        "pytest.ini": CONFIG + "    long: x\n", "conftest.py": LISTING, "test_it.py": text,
        "long_tests.txt": "# why\ntest_it.py::test_a[one]\ntest_it.py::test_b\nother.py::test_x\n",
    }  # fmt: skip
    result = run(tmp_path, files, "-v", "-m", "long")
    assert "2 passed, 2 deselected" in result.stdout
    assert "test_a[two]" not in result.stdout
    result = run(tmp_path, {**files, "long_tests.txt": "test_it.py::test_gone\n"})
    assert "long_tests.txt: no test is named test_it.py::test_gone" in result.stderr
    assert result.returncode != 0
    assert run(tmp_path, {}, "test_it.py::test_c").returncode == 0
