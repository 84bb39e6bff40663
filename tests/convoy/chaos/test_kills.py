"""Campaigns of SIGKILLs over layouts: what a piece counts, how a campaign goes on, and a short one
on real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest

from convoy.chaos import kills
from convoy.chaos.kills import DONE, Piece, judge, run_pieces, totals
from convoy.chaos.launched import Launch, Watched, children, is_running
from convoy.commands.chaos import kills_table
from convoy.commands.command_line import main
from pretrain.observe import CheckpointCommitted, LoggedEvent, RunStarted
from pretrain.spec import load_spec
from tests.convoy.chaos.test_campaign import BATCH, step
from tests.support.jobs import data_of, prepare_job, write_spec

LAYOUT = "parallel.dp_shard=2 parallel.ep=2"


def start(at: int) -> LoggedEvent:
    event = RunStarted(step=at, world_size=2, topology={}, parameters=1, launch_id="one")
    return LoggedEvent(event, 0.0)


def commit(at: int) -> LoggedEvent:
    return LoggedEvent(
        CheckpointCommitted(step=at, tier="shared", seconds=1.0, write_seconds=1.0), 0.0
    )


def followed(lines: list[LoggedEvent]) -> Piece:
    piece = Piece(LAYOUT, 2, True, "warm")
    kills._follow(piece, lines, BATCH)
    return piece


def test_steps_that_a_start_takes_again_are_neither_lost_nor_repeated():
    lines = [start(0), step(1, 1.0), step(2, 2.0), commit(2), step(3, 3.0), start(2), step(3, 4.0)]
    found = followed(lines)
    assert (found.lost_samples, found.repeated_samples, found.lost_checkpoints) == (0, 0, 0)
    assert found.steps_taken_again == 1


@pytest.mark.parametrize(
    ("lines", "field", "number"),
    [
        ([start(0), step(1, 1.0), step(3, 2.0)], "lost_samples", BATCH),
        ([start(0), step(1, 1.0), step(1, 2.0)], "repeated_samples", BATCH),
        ([start(0), step(1, 1.0), start(2), step(4, 2.0)], "lost_samples", BATCH),
        ([start(0), step(1, 1.0), commit(1), start(0)], "lost_checkpoints", 1),
    ],
)
def test_what_is_lost_or_comes_twice_is_counted(lines, field, number):
    assert getattr(followed(lines), field) == number


def test_a_campaign_goes_on_with_the_pieces_that_are_missing(tmp_path, monkeypatch):
    spec = write_spec(tmp_path, data=data_of(prepare_job(tmp_path / "job")))
    done = Piece(LAYOUT, 2, False, "warm", kills=7, steps=9)
    (tmp_path / "out" / "00").mkdir(parents=True)
    (tmp_path / "out" / "00" / DONE).write_text(json.dumps(asdict(done)))
    half = tmp_path / "out" / "01"
    half.mkdir()
    (half / "spec.json").write_text("of a start that was cut off")
    ran = []

    class Run:
        def __init__(self, spec, text, folder, limit_seconds) -> None:
            assert not folder.exists(), "what is half done begins anew"
            self.text = text
            folder.mkdir()

        def strike(self, kills: int, seed: int) -> Piece:
            ran.append((self.text, kills, seed))
            return Piece(self.text, 2, False, "warm", kills=kills)

    monkeypatch.setattr(kills, "_Run", Run)
    monkeypatch.setattr(kills, "undisturbed_run", lambda *_: None)
    monkeypatch.setattr(kills, "judge", lambda *_: None)
    options = {"kills": 9, "seed": 5, "limit_seconds": 1.0, "say": lambda _: None}
    layouts = [LAYOUT, "parallel.pp=2"]
    found = run_pieces(spec, [], layouts, tmp_path / "out", **options)
    assert ran == [("parallel.pp=2", 5, 6)]
    assert [piece.kills for piece in found] == [7, 5]
    again = run_pieces(spec, [], layouts, tmp_path / "out", **options)
    assert (len(ran), [asdict(p) for p in again]) == (1, [asdict(p) for p in found])


def test_the_table_says_what_is_wrong():
    well = Piece(LAYOUT, 2, True, "warm", kills=84, steps=100)
    wrong = replace(well, layout="parallel.pp=2", lost_samples=8, problems=["8 lost samples"])
    assert kills_table([well]).endswith("nothing lost, nothing wrong")
    assert "parallel.pp=2: 8 lost samples" in kills_table([well, wrong])
    sums = totals([well, wrong])
    assert (sums["kills"], sums["layouts"], sums["layouts_lost_or_wrong"]) == (168, 2, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kills", "3"], "--kills and --layout must be given together"),
        (["--layout", LAYOUT], "--kills and --layout must be given together"),
        (["--kills", "0", "--layout", LAYOUT], "--kills (0) must be at least 1"),
    ],
)
def test_words_that_make_no_campaign_are_refused(tmp_path, capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        main("chaos", ["spec.toml", str(tmp_path / "out"), *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_watched_log_gives_the_newest_whole_lines(tmp_path):
    log = tmp_path / "log.jsonl"
    watched = Watched(log)
    watched.look()
    lines = [
        {"event": "start", "time": 1.0, "step": 0, "world_size": 4},
        {"event": "step", "time": 2.0, "step": 1},
        {"event": "regrouped", "time": 3.0, "step": 1, "world_size": 2},
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "ste')
    watched.look()
    assert (watched.step, watched.step_time) == (1, 2.0)
    assert (watched.world, watched.change_time) == (2, 3.0)


def test_processes_that_outlive_a_launch_are_found_and_killed(tmp_path):
    launch = object.__new__(Launch)
    launch.id = f"of-{tmp_path.name}-{os.getpid()}"
    env = {**os.environ, "TORCHELASTIC_RUN_ID": launch.id}
    launch.torchrun = subprocess.Popen([sys.executable, "-c", "pass"])
    launch.torchrun.wait()
    with subprocess.Popen(["sleep", "600"], env=env) as left:
        try:
            while launch._processes() != [left.pid]:  # until the program has begun
                time.sleep(0.01)
            assert left.pid in children(os.getpid())
            left.send_signal(signal.SIGKILL)
            while is_running(left.pid):
                time.sleep(0.01)
            assert left.pid not in children(os.getpid())
            left.wait()
            launch.close()
        finally:
            left.kill()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_short_campaign_loses_nothing_and_a_changed_log_is_seen(tmp_path, capsys):
    spec = write_spec(
        tmp_path,
        data=data_of(prepare_job(tmp_path / "job")),
        train={"steps": 100_000, "timeout_seconds": 60.0, "exact": True},
        checkpoint={"interval_steps": 3, "retention": {"keep": 3, "keep_every": 6}},
        elastic={"enabled": True, "recovery": "warm"},
    )
    out = tmp_path / "out"
    heal = "parallel.dp_replicate=2 elastic.recovery=heal"
    words = [str(spec), str(out), "--kills", "8", "--layout", LAYOUT, "--layout", heal,
             "--limit", "300", "--json", str(tmp_path / "kills.json")]  # fmt: skip
    assert main("chaos", words) == 0, capsys.readouterr()
    found = json.loads((tmp_path / "kills.json").read_text())
    assert found["totals"]["kills"] >= 8
    assert found["totals"]["layouts_lost_or_wrong"] == 0
    warm, healed = found["rows"]
    assert warm["starts"] > 0
    assert healed["healed"] + healed["starts"] > 0
    assert warm["arrays"] == healed["arrays"] > 20
    assert main("chaos", words) == 0, "a second start has nothing to do"

    run, calm = out / "00" / "run", out / "undisturbed" / "run"
    log = run / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    steps = [number for number, line in enumerate(lines) if '"event": "step"' in line]
    changed = {
        "is missing": [line for number, line in enumerate(lines) if number != steps[1]],
        "come twice": [*lines[: steps[-1] + 1], *lines[steps[-1] :]],
        "losses differ": [line.replace('"loss": ', '"loss": 1') for line in lines],
    }
    for what, texts in changed.items():
        log.write_text("".join(texts))
        piece = Piece(LAYOUT, 2, True, "warm", steps=warm["steps"])
        judge(piece, load_spec(out / "00" / "spec.json"), run, calm)
        assert piece.problems, what
