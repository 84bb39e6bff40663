"""A trace of some steps: JSON that a trace viewer opens, with steps, phases and operators."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from convoy.commands.pretrain import main
from pretrain.errors import InputError
from pretrain.train.profile import StepProfiler, read_window
from tests.support.jobs import data_of, events, prepare_job, write_spec
from tests.support.ranks import run_ranks

PHASES = ["data", "forward_backward", "barrier", "optimizer"]


def regions(path: Path) -> list[dict[str, Any]]:
    """Regions and operators of a trace, by their begin."""
    found = json.loads(path.read_text())["traceEvents"]
    return sorted((e for e in found if e.get("ph") == "X"), key=lambda e: e["ts"])


def inside(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(
        other["ts"] <= one["ts"] and one["ts"] + one["dur"] <= other["ts"] + other["dur"] + 1
    )


def check_steps(path: Path, steps: list[int], operator: str) -> None:
    """The trace has these steps alone, each with its phases, and an operator in the second."""
    found = regions(path)
    outer = [e for e in found if e["name"].startswith("step ") and e["cat"] == "user_annotation"]
    assert [e["name"] for e in outer] == [f"step {n}" for n in steps]
    for step in outer:
        phases = [e for e in found if e["name"] in PHASES and inside(e, step)]
        assert [e["name"] for e in phases] == PHASES
        assert any(e["name"] == operator and inside(e, phases[1]) for e in found)


def take_steps(profiler: StepProfiler, first: int, last: int) -> None:
    """What the training loop does around steps."""
    for step in range(first, last + 1):
        for phase in PHASES:
            profiler.phase(phase, step - 1)
            if phase == "forward_backward":
                torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.end_step()
    profiler.phase("finish", last)
    profiler.close()


def test_a_trace_has_the_steps_of_the_window_and_their_phases(tmp_path):
    told: list[str] = []
    path = tmp_path / "profile" / "a.json"
    take_steps(StepProfiler((3, 4), path, told.append), 1, 6)
    check_steps(path, [3, 4], "aten::mm")
    assert told == [f"profile written: {path}, for chrome://tracing or ui.perfetto.dev"]


def test_a_run_that_ends_in_the_window_has_a_trace_of_what_it_took(tmp_path):
    path = tmp_path / "a.json"
    take_steps(StepProfiler((3, 9), path, lambda _: None), 1, 4)
    check_steps(path, [3, 4], "aten::mm")


def test_a_window_that_is_past_is_told_and_nothing_is_written(tmp_path):
    told: list[str] = []
    take_steps(StepProfiler((3, 4), tmp_path / "a.json", told.append), 6, 8)
    assert told == ["steps 3 to 4 are not profiled: step 5 is taken already"]
    assert not (tmp_path / "a.json").exists()


def test_a_trace_that_cannot_be_written_is_told_and_training_goes_on(tmp_path):
    told: list[str] = []
    (tmp_path / "profile").write_text("a file")
    take_steps(StepProfiler((1, 1), tmp_path / "profile" / "a.json", told.append), 1, 2)
    (line,) = told
    assert line.startswith("the profile cannot be written: ")


@pytest.mark.parametrize("text", ["3", "4:3", "0:2", "1:7", "a:b", "1:2:3", "-1:2", ""])
def test_a_window_that_is_none_is_refused(text):
    with pytest.raises(InputError, match=r"--profile .* must be FIRST:LAST"):
        read_window(text, 6)
    assert read_window("2:6", 6) == (2, 6)


def pretrain_on_rank(rank: int, *words: str) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(list(words))
        except SystemExit as end:
            code = end.code
    return code, said.getvalue()


@pytest.mark.slow
def test_every_rank_of_a_real_run_writes_a_trace(tmp_path):
    spec = write_spec(tmp_path, data=data_of(prepare_job(tmp_path)), eval={"sequences": 2})
    done = run_ranks(pretrain_on_rank, 2, str(spec), "--profile", "3:4", group=False)
    assert [code for code, _ in done] == [0, 0], done
    for rank in (0, 1):
        path = tmp_path / "run" / "profile" / f"steps-3-4-rank-{rank}.json"
        check_steps(path, [3, 4], "aten::mm")
    texts = [each["text"] for each in events(tmp_path / "run", "notice")]
    assert sum(text.startswith("profile written: ") for text in texts) == 1
    refused = run_ranks(pretrain_on_rank, 1, str(spec), "--profile", "9:8", group=False)
    assert refused[0][0] == 2
    assert refused[0][1].startswith("error: --profile (9:8) must be FIRST:LAST")
