"""``make test`` fails where either of its lanes does, and says what each has said."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import lanes


@pytest.mark.parametrize(
    ("works", "waits", "expected"),
    [(0, 0, 0), (1, 0, 1), (0, 1, 1), (5, 0, 0), (0, 5, 0), (0, 2, 1)],
)
def test_both_exit_codes_count(works, waits, expected, monkeypatch, capfd):
    starts = {"not waits and not slow": (works, 2), "waits and not slow": (waits, 6)}

    def lane(marks, workers, arguments, out):
        code, expected_workers = starts.pop(marks)
        assert workers == expected_workers
        assert arguments[-1] == "-x"
        program = f"print('FAILED a test of', {marks!r}); raise SystemExit({code})"
        return subprocess.Popen([sys.executable, "-c", program], stdout=out, text=True)

    monkeypatch.setattr(lanes, "lane", lane)
    assert lanes.main(["-x"]) == expected
    said = capfd.readouterr().out
    assert "FAILED a test of not waits" in said
    assert said.count("FAILED a test of waits") == 2, "in the lane's output, and at the end"
    assert said.splitlines()[-1].startswith("passed" if expected == 0 else "FAILED")
    assert not starts


def test_the_files_of_the_lane_that_waits_have_its_mark():
    files = lanes.files_that_wait()
    assert "tests/cluster/test_hang.py" in files
    assert "tests/test_lanes.py" not in files
