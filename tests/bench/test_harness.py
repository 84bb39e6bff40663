"""What benchmarks write, and what is committed of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.harness import Row, finish

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def test_a_written_row_has_the_ends_of_its_samples_and_none_of_them(tmp_path):
    timed = Row("case", "convoy", "seconds", 2.0, "s", 0.5, [2.0, 1.5, 9.0])
    counted = Row("case", "convoy", "bytes", 64, "bytes", 1.0, [])
    finish("some", [timed, counted], ["torch"], tmp_path / "some.json")
    written = json.loads((tmp_path / "some.json").read_text())
    assert {"bench", "date", "machine", "versions"} < set(written)
    assert written["rows"] == [
        {"case": "case", "subject": "convoy", "metric": "seconds", "value": 2.0, "unit": "s",
         "ratio_to_limit": 0.5, "n": 3, "min": 1.5, "max": 9.0},
        {"case": "case", "subject": "convoy", "metric": "bytes", "value": 64, "unit": "bytes",
         "ratio_to_limit": 1.0, "n": 0},
    ]  # fmt: skip


def test_a_bench_without_a_row_writes_that_there_is_none(tmp_path):
    finish("some", [], ["torch"], tmp_path / "some.json")
    assert json.loads((tmp_path / "some.json").read_text())["rows"] == []


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_rows_have_no_samples(path):
    rows = json.loads(path.read_text()).get("rows", [])
    assert not any("samples" in row for row in rows)
