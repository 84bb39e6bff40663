"""The view of a run on a terminal: what it shows, and that it is only there where a person is."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console as Terminal

from pretrain.observe import (
    CheckpointCommitted,
    Evaluated,
    IntervalEnded,
    LiveConsole,
    Notice,
    RunDone,
    RunStarted,
    StepCommitted,
)
from pretrain.observe.live import View, sparkline
from tests.pretrain.observe.test_observe import REPORTED, STARTED, STEPPED
from tests.support.jobs import data_of, prepare_job, write_spec

ROOT = Path(__file__).parents[3]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def shown(view: View) -> str:
    out = io.StringIO()
    Terminal(file=out, width=110, force_terminal=True, color_system=None).print(view.drawing())
    return out.getvalue()


def test_the_view_shows_what_the_run_does_now():
    clock = Clock()
    midnight = time.mktime((2026, 1, 1, 0, 0, 0, 0, 0, -1))
    view = View(60, clock, wall=lambda: midnight + 123)
    view.take(RunStarted(step=0, **STARTED))
    assert shown(view).strip() == ""
    for step, loss in enumerate((5.0, 4.0, 3.0), 1):
        clock.now += 2.0
        exposed = {"ep": 0.5, "world": 0.1}
        taken = {**STEPPED, "exposed_seconds": exposed, "data_wait_seconds": 0.4}
        view.take(StepCommitted(step=step, loss=loss, **taken))
    view.take(Evaluated(step=3, loss=1.0, bits_per_byte=1.2345))
    view.take(
        IntervalEnded(
            step=3, loss=3.0, seconds=6.0, **REPORTED,
            layer_imbalances=[1.0, 2.5], rank_seconds=[1.0, 3.0], aux_loss=0.0123,
            peak_memory_bytes=3 << 20,
        )
    )  # fmt: skip
    view.take(CheckpointCommitted(step=2, tier="shared", seconds=1.0, write_seconds=1.0))
    clock.now += 4.0
    text = shown(view)
    for words in (
        "tiny", "step 3/60", "10.0 s, 1 m 54 s left", "loss        3.0000  █▅▁", "1.2345 bits",
        "128 tokens/s", "2.000 s a step", "compute 50%   data 20%   ep 25%   sync 5%",
        "auxiliary 0.0123", "256 tokens seen", "3.0 MiB at most on a rank", "00:02:03",
        "▁█  busiest 2.50 x mean", "slowest 1.50 x mean time", "step 2 in tier shared, 4.0 s ago",
    ):  # fmt: skip
        assert words in text, (words, text)
    assert "no step for" not in text
    clock.now += 60.0
    assert "no step for 1" not in text
    assert "no step for" in shown(view), "a run that hangs is seen to hang"


def test_a_sparkline_has_extremes_and_survives_numbers_that_are_none():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([1.0, math.nan, 2.0]) == "▁x█"
    assert sparkline([math.nan, math.inf]) == "xx"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""
    assert len(sparkline([float(i) for i in range(1000)])) == 40


def test_the_drawing_is_gone_after_the_run_and_lines_stay(capsys):
    out = io.StringIO()
    terminal = Terminal(file=out, width=80, force_terminal=True)
    console = LiveConsole(3, terminal=terminal)
    console(RunStarted(step=0, **STARTED))
    console(StepCommitted(step=1, loss=2.5, **STEPPED))
    console(Notice(step=1, text="by the way"))
    console(IntervalEnded(step=1, loss=2.5, seconds=2.0, **REPORTED))
    console(IntervalEnded(step=3, loss=2.25, seconds=2.0, **REPORTED))
    console(RunDone(step=3))
    console.close()
    text = out.getvalue()
    assert "step 1/3" in text
    assert "by the way" in text, "lines go above the drawing"
    assert text.endswith(("\x1b[?25h", "\x1b[2K")), "the cursor is back"
    lines = re.findall(r"step [13]/3  loss", text + capsys.readouterr().out)
    assert lines == ["step 1/3  loss", "step 3/3  loss"], "the last interval has a line"


def on_a_terminal(spec: Path, *words: str) -> str:
    """What the command writes to a real pseudo-terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tools" / "pretrain.py"), str(spec), *words],
        stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(theirs)
    said = b""
    # A writer process that lingers holds the terminal longer than the run.
    while True:
        ended = process.poll() is not None
        if select.select([ours], [], [], 0.2)[0]:
            try:
                said += os.read(ours, 65536)
                continue
            except OSError:  # nobody holds the other end
                pass
        if ended:
            break
    os.close(ours)
    assert process.wait() == 0, said.decode()
    return said.decode()


@pytest.mark.slow
def test_a_real_run_draws_on_a_terminal_and_prints_lines_elsewhere(tmp_path):
    data = data_of(prepare_job(tmp_path))
    spec = write_spec(tmp_path, data=data, run_dir=str(tmp_path / "a"), train={"steps": 60})
    drawn = on_a_terminal(spec)
    assert "\x1b[" in drawn
    assert "tokens/s" in drawn
    assert "validation" in drawn, "the summary is there when the drawing is gone"
    spec = write_spec(tmp_path, data=data, run_dir=str(tmp_path / "b"), train={"steps": 6})
    plain = on_a_terminal(spec, "--plain")
    assert "\x1b[" not in plain
    assert re.search(r"step 1/6  loss .* first step of this start", plain)
    assert re.search(r"step 2/6  loss .* left  [0-9:]+\r?\n", plain)
