"""``convoy report``: the page has the numbers of the logs, whatever the logs are like."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convoy.commands.command_line import main
from convoy.commands.pretrain import write_report_apart
from convoy.report.record import RunRecord, read_run
from pretrain.observe import (
    CapacityPlanned,
    Evaluated,
    Events,
    FaultInjected,
    IntervalEnded,
    JsonlLog,
    Launched,
    LiveLedger,
    RankLost,
    Resized,
    Restored,
    RunDone,
    RunStarted,
    StepCommitted,
)
from tests.support.checkpoints import save_small
from tests.support.jobs import data_of, prepare_job, write_spec
from tests.support.ranks import run_ranks

matplotlib = pytest.importorskip("matplotlib")
from matplotlib.collections import QuadMesh  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from convoy.report import figures  # noqa: E402

LOSSES = [9.0, 7.5, 8.25, 5.0, 4.0, 3.5]


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def write_run(folder: Path, losses: list[float] = LOSSES, job: str = "a") -> Path:
    """A log of a run that was resized after a lost rank in its middle."""
    folder.mkdir(parents=True)
    clock = Clock()
    log = JsonlLog(folder / "log.jsonl", now=clock)
    events = Events(log)
    events.subscribe(LiveLedger((), log, events))
    half = len(losses) // 2
    for ranks, part in ((2, losses[:half]), (4, losses[half:])):
        first = half if ranks == 4 else 0
        events.publish(Launched(step=0, process_start=clock.now, world_size=ranks))
        if first:
            events.publish(Restored(step=first, tier="shared", seconds=1.0))
            events.publish(
                Resized(
                    step=first,
                    epoch=1,
                    before={"dp_shard": 2, "ep": 2},
                    after={"dp_shard": 4, "ep": 4},
                    save_id="s",
                )
            )
        events.publish(
            RunStarted(
                step=first, job=job, spec_hash="c0ffee" * 4, world_size=ranks, steps=len(losses),
                topology={"ep": ranks}, parameters=1234, launch_id="l", layout=f"ep={ranks}",
                device="cpu", step_tokens=100,
            )
        )  # fmt: skip
        for step, loss in enumerate(part, first + 1):
            clock.now += 2.0
            events.publish(
                StepCommitted(
                    step=step, loss=loss, grad_norm=1.0, lr=0.1 / step, seconds=2.0,
                    tokens_seen=100 * step, target_tokens=100, consumed_samples=step,
                    slowest_rank_seconds=2.0, tokens_per_second=50.0, mfu=0.1,
                )
            )  # fmt: skip
            events.publish(
                IntervalEnded(
                    step=step, loss=loss, lr=0.1, grad_norm=1.0, tokens_per_second=50.0, mfu=0.1,
                    seconds=2.0, communication_seconds={}, exposed_seconds={},
                    layer_imbalances=[1.5, 2.0], rank_seconds=[1.0] * ranks,
                    expert_loads={"2": [150, 50], "4": [200, 0]},
                )
            )  # fmt: skip
        events.publish(CapacityPlanned(step=first + 1, plans=[[1100, 948]]))
        if not first:
            events.publish(FaultInjected(step=half, kind="kill", rank=1, text="SIGKILL to <1>"))
            clock.now += 5.0
            events.publish(RankLost(step=half, waited_seconds=5.0))
            clock.now += 3.0
    events.publish(Evaluated(step=len(losses), loss=2.0, bits_per_byte=2.5))
    events.publish(RunDone(step=len(losses)))
    log.close()
    return folder


class Page(HTMLParser):
    """What a reader of the file finds, and what a browser would fetch for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.data: Any = None
        self.paths: dict[str, str] = {}
        self.said: list[str] = []
        self._open: list[str] = []
        self._line = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        gid = found.get("id") or ""
        if tag == "g" and ":" in gid:
            self._line = gid
        if tag == "path" and self._line:
            self.paths.setdefault(self._line, found.get("d") or "")
            self._line = ""
        for name in ("src", "href", "xlink:href"):
            value = found.get(name) or "#"
            if not value.startswith(("#", "data:")):
                self.fetched.append(value)
        self._open.append(gid)

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "data" and self.data is None:
            self.data = json.loads(data)
        elif data.strip():
            self.said.append(data.strip())


def points(path: str) -> list[tuple[float, float]]:
    """The places of a line in its picture, in points from the upper left corner."""
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path)]


def check_line(path: str, values: list[float]) -> None:
    """The heights of a line are its values, by one scale."""
    found = points(path)
    assert len(found) == len(values)
    ys = [y for _, y in found]
    low, high = values.index(min(values)), values.index(max(values))
    scale = (ys[low] - ys[high]) / (values[low] - values[high])
    assert scale < 0, "larger is higher"
    for y, value in zip(ys, values, strict=True):
        assert y == pytest.approx(ys[low] + scale * (value - values[low]), abs=0.01)


def report(*words: object) -> int:
    return main(arguments=["report", *map(str, words)])


def test_the_page_has_the_numbers_of_two_runs_and_needs_nothing_else(tmp_path, capsys):
    one = write_run(tmp_path / "one")
    other = write_run(tmp_path / "other", [x + 1 for x in LOSSES], job="b")
    save_small(one / "checkpoints", 3)
    assert report(one, other, "--output", tmp_path / "page.html") == 0
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert page.fetched == []
    assert [run["run"] for run in page.data] == ["a", "b"]
    first = page.data[0]
    assert (first["steps"], first["tokens"], first["ranks"], first["loss"]) == (6, 600, 4, 3.5)
    assert first["validation_bits_per_byte"] == 2.5
    assert first["tokens_per_second"] == 50.0
    # 12 s of steps in 20 s: 5 s of hang, and 3 s of being down.
    assert first["goodput"] == pytest.approx(12 / 20)
    assert first["restarts"] == 1
    assert first["ledger"]["seconds"]["hang"] == pytest.approx(5.0)
    assert first["dollars"] is None
    check_line(page.paths["loss:a"], LOSSES)
    check_line(page.paths["loss:b"], [x + 1 for x in LOSSES])
    check_line(page.paths["lr:a"], [0.1 / step for step in range(1, 7)])
    said = " ".join(page.said)
    for words in (
        "resize after step 3: dp_shard 2 to 4, ep 2 to 4", "step 4: injected fault: SIGKILL to <1>",
        "after step 3: a rank was lost", "Load of the busiest expert of a", "Speed of ranks of a",
        "Load of experts in layer 2 of a", "Load of experts in layer 4 of b",
        "Capacity shares of a", "3.5000", "Where the time went", "00000003-",
    ):  # fmt: skip
        assert words in said, words
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids)), "every id is there once"
    err = capsys.readouterr().err
    assert err.startswith("error: b: there is no checkpoint at ")
    assert err.count("\n") == 1


def test_a_loss_that_is_no_number_is_a_gap_and_is_told(tmp_path, capsys):
    run = write_run(tmp_path / "run", [3.0, math.nan, 2.0, 1.0, 1.5, math.inf])
    assert report(run) == 0
    page = Page((run / "report.html").read_text())
    assert len(points(page.paths["loss:a"])) == 4
    assert page.paths["loss:a"].count("M") == 2, "the line is broken"
    assert page.data[0]["loss"] is None
    assert "a: the loss is not a number in 2 steps, first in step 2" in capsys.readouterr().err


def test_a_log_that_is_cut_or_has_noise_is_read_as_far_as_it_goes(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    text = (run / "log.jsonl").read_text()
    (run / "log.jsonl").write_text("noise\n" + text[: text.rindex('"event": "done"') + 5])
    assert report(run) == 0
    assert Page((run / "report.html").read_text()).data[0]["steps"] == 6
    err = capsys.readouterr().err
    assert "log.jsonl: line 1 is not an event" in err
    assert "passed over" in err


def test_two_starts_that_wrote_one_log_at_a_time_are_told(tmp_path):
    assert not any("two starts" in note for note in read_run(write_run(tmp_path / "good")).notes)
    run = write_run(tmp_path / "run")
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    again = [line for line in lines if '"event": "step"' in line][3:]
    mixed = [each for pair in zip(lines[-6:], again, strict=False) for each in pair]
    (run / "log.jsonl").write_text("".join([*lines[:-6], *mixed]))
    assert any("two starts wrote the log at one time" in note for note in read_run(run).notes)


def test_a_step_that_was_taken_again_counts_once(tmp_path):
    run = write_run(tmp_path / "run")
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    (third,) = (json.loads(x) for x in lines if '"event": "step"' in x and '"step": 3,' in x)
    after = next(i for i, x in enumerate(lines) if '"event": "start"' in x and '"step": 3,' in x)
    lines.insert(after + 1, json.dumps({**third, "loss": 6.0}) + "\n")
    (run / "log.jsonl").write_text("".join(lines))
    found = read_run(run)
    assert [step.loss for step in found.steps.values()] == [9.0, 7.5, 6.0, 5.0, 4.0, 3.5]
    assert len(found.hours) == 7


def test_a_long_run_keeps_its_extremes_in_few_points(tmp_path):
    from convoy.report.figures import MOST_POINTS, thinned

    values = [(float(i), math.sin(i / 50)) for i in range(50_000)]
    values[31_234] = (31_234.0, 99.0)
    kept = thinned(values)
    assert len(kept) <= MOST_POINTS
    assert (31_234.0, 99.0) in kept
    assert list(kept) == sorted(kept)
    assert thinned(values[:100]) == values[:100]


def loads_of_run(loads_by_step: dict[int, dict[str, list[int]]]) -> RunRecord:
    run = RunRecord("a", Path("a"), label="a")
    for step, loads in loads_by_step.items():
        run.intervals[step] = IntervalEnded(
            step=step, loss=1.0, lr=0.1, grad_norm=1.0, tokens_per_second=50.0, mfu=0.1,
            seconds=2.0, communication_seconds={}, exposed_seconds={}, expert_loads=loads,
        )  # fmt: skip
    return run


def titles(pictures: list[str]) -> list[str]:
    return [re.findall(r'aria-label="([^"]*)"', text)[0] for text in pictures]


def test_loads_are_drawn_of_the_outer_and_middle_layers_and_the_most_unequal_one():
    even = {layer: [100] * 4 for layer in ("3", "8", "13", "18", "23")}
    # Layer 9 is the most unequal of two intervals, and layer 18 of one.
    loads = {10: even | {"9": [400, 0, 0, 0]}, 20: even | {"18": [150, 50, 100, 100]},
             30: even | {"9": [300, 100, 0, 0]}, 40: {}}  # fmt: skip
    run = loads_of_run(loads)
    drawn = titles(figures.expert_loads(run))
    assert drawn == [f"Load of experts in layer {n} of a" for n in (3, 9, 13, 23)]
    assert figures.expert_loads(loads_of_run({10: {}})) == []
    few = {step: {"1": [150, 50]} for step in (10, 20)}
    assert len(figures.expert_loads(loads_of_run(few))) == 1


def test_the_colors_of_loads_are_means_over_steps_and_the_largest_of_neighbours():
    def cells(loads: dict[int, list[int]]) -> tuple[np.ndarray, np.ndarray]:
        axes = Figure().subplots()
        figures.draw_loads(axes, loads=loads, title="loads")
        (mesh,) = [one for one in axes.collections if isinstance(one, QuadMesh)]
        return mesh.get_array(), mesh.get_coordinates()

    colors, places = cells({10: [150, 50, 0], 20: [300, 0, 0], 40: [100, 100, 100]})
    assert colors.tolist() == [[1.5, 3, 1], [0.5, 0.001, 1], [0.001, 0.001, 1]]
    assert places[0, :, 0].tolist() == [0, 10, 20, 40]
    assert places[:, 0, 1].tolist() == [0, 1, 2, 3]
    # Twice as many steps, and experts, as there are cells.
    most = figures.MOST_CELLS
    colors, _ = cells({step: [100, 100 + step % 2 * 100] * most for step in range(2 * most)})
    assert colors.shape == (most, most)
    assert colors.max() == colors.min() == 1.5


def test_a_picture_of_many_loads_is_small():
    rng = np.random.default_rng(0)
    loads = {step: {"1": rng.integers(0, 900, 256).tolist()} for step in range(300)}
    (text,) = figures.expert_loads(loads_of_run(loads))
    assert len(text) < 600_000, "noise is the worst case; loads of a run take a third"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["none"], "none has no log that can be read (none/log.jsonl: No such file or directory)"),
        (["empty"], "empty/log.jsonl has no line that can be read: the run has not begun"),
        (["run", "run", "--output", "x.html"], "RUN (run, run) must name each folder once"),
        (["run", "other"], "--output is missing: several runs need the name of a file"),
        (["run", "--output", "nowhere/x.html"], "(nowhere/x.html): its folder does not exist"),
        (["run", "--output", "empty"], "--output (empty) must be a file that can be written"),
    ],
)
def test_what_cannot_be_reported_is_one_line(tmp_path, monkeypatch, capsys, words, line):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "log.jsonl").touch()
    try:
        code = report(*words)
    except SystemExit as end:
        code = end.code
    err = capsys.readouterr().err
    assert code == 2
    assert line in err
    assert err.count("\n") == 1


def test_without_matplotlib_one_line_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report(write_run(tmp_path / "run")) == 2
    assert "pip install -e '.[plot]'" in capsys.readouterr().err


def test_a_report_that_fails_is_one_line_of_a_run_that_is_done(tmp_path, monkeypatch, capsys):
    def no_time(*words: object, **options: object) -> None:
        raise subprocess.TimeoutExpired("convoy report", 300.0)

    monkeypatch.setattr(subprocess, "run", no_time)
    write_report_apart(tmp_path)
    err = capsys.readouterr().err
    assert err.startswith("error: the run is done, and its report is not written: ")
    assert "timed out after 300.0 seconds" in err


def pretrain_on_rank(rank: int, spec: str) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        return main(arguments=["pretrain", spec, "--report"]), said.getvalue()


@pytest.mark.slow
def test_a_run_that_is_done_names_its_report_below_the_summary(tmp_path, capsys):
    data = data_of(prepare_job(tmp_path))
    spec = write_spec(tmp_path, data=data, train={"steps": 2}, eval={"sequences": 2})
    codes, said = zip(*run_ranks(pretrain_on_rank, 2, str(spec), group=False), strict=True)
    assert codes == (0, 0), said
    page = tmp_path / "run" / "report.html"
    assert said[0].splitlines()[-1] == f"report      {page}"
    assert "report" not in said[1]
    found = Page(page.read_text())
    assert found.data[0]["steps"] == 2
    assert "done after step 2" in " ".join(found.said)
    write_report_apart(tmp_path / "nowhere")
    err = capsys.readouterr().err
    assert "its report is not written: " in err
    assert "has no log that can be read" in err
    assert err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.engine
def test_a_browser_shows_the_numbers_of_the_page(tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("chromium is missing: apt-get install chromium")
    run = write_run(tmp_path / "run")
    assert report(run) == 0
    # The browser adds what it has computed of the page to the page, and prints the whole.
    script = """<script>
      const box = s => document.querySelector(s).getBoundingClientRect();
      const line = document.getElementById("loss:a").querySelector("path");
      document.body.dataset.read = JSON.stringify({
        cells: [...document.querySelectorAll("#key-figures td")].map(cell => cell.innerText),
        data: JSON.parse(document.getElementById("data").textContent)[0].loss,
        length: line.getTotalLength(), width: box("svg").width,
        outside: [...document.querySelectorAll("svg")].filter(
          one => one.getBoundingClientRect().right > document.documentElement.clientWidth).length,
        requests: performance.getEntriesByType("resource").length});
    </script>"""
    shown = tmp_path / "shown.html"
    shown.write_text((run / "report.html").read_text().replace("</body>", script + "</body>"))
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900",
            f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", shown.as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    (read,) = re.findall(r'data-read="([^"]*)"', done.stdout)
    found = json.loads(read.replace("&quot;", '"'))
    cells = dict(zip(found["cells"][::2], found["cells"][1::2], strict=True))
    assert cells["steps"] == "6"
    assert cells["training loss of the last step, nats per token"] == "3.5000"
    assert cells["goodput"] == "60.0%"
    assert found["data"] == 3.5
    assert found["length"] > found["width"] / 2, "the line of the loss is drawn"
    assert found["outside"] == 0
    assert found["requests"] == 0
