"""The goodput ledger: every second of a run is in one phase, whatever happened to the run."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from convoy.commands.command_line import main as convoy
from convoy.commands.pretrain import main
from parallel import Topology
from pretrain.observe import (
    CheckpointCommitted,
    Evaluated,
    Events,
    IntervalEnded,
    JsonlLog,
    Launched,
    LiveLedger,
    Metrics,
    RankLost,
    RankStuck,
    Regrouped,
    Restored,
    RunDone,
    RunFailed,
    RunStarted,
    RunStopped,
    SaveBegun,
    StepCommitted,
    StepSkipped,
    ledger_of,
    ledger_table,
    read_log,
    summed,
)
from pretrain.observe.jsonl import LoggedEvent
from pretrain.observe.ledger import LOST_CAUSES, PHASES, Ledger
from pretrain.observe.summary import Summary
from pretrain.train.trainer import Trainer
from tests.pretrain.observe.test_observe import EVENTS, example
from tests.support.jobs import data_of, events, make_spec, prepare_job, write_spec
from tests.support.ranks import run_ranks, start_ranks

QUICK = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def check_sums(ledger: Ledger, span: int) -> None:
    assert list(ledger.microseconds) == list(PHASES)
    assert set(ledger.lost_microseconds) == set(LOST_CAUSES)
    assert all(each >= 0 for each in ledger.microseconds.values())
    assert all(each >= 0 for each in ledger.lost_microseconds.values())
    whole = sum(ledger.microseconds.values())
    assert whole == span
    kept = ledger.microseconds["productive"] + ledger.microseconds["idle"]
    assert sum(ledger.lost_microseconds.values()) == whole - kept


# ------------------------------------------------------------------------------------------------
# Runs that are made up, and whose truth is known.


@dataclass
class MadeUpRun:
    """Writes the log of a run on a clock of its own, in milliseconds, and keeps the truth."""

    path: Path
    clock: int = 1_700_000_000_000
    truth: Counter = field(default_factory=Counter)
    restarts: Counter = field(default_factory=Counter)
    step: int = 0
    newest: int = 0
    saved: int = 0
    end: str | None = None
    """How the last start ended; None while one is running."""
    log: JsonlLog | None = None
    began: int | None = None
    last: int = 0
    live: LiveLedger | None = None
    before_step: int = 0
    """What comes between a start and its first step."""
    ranks: int = 0
    rank_milliseconds: int = 0
    first: bool = True
    """Whether this start has taken no step."""

    def warm_up(self) -> None:
        if self.first:
            self.spend("restart", self.before_step)
        self.first = False

    def publish(self, event) -> None:
        self.events.publish(event)
        self.last = self.clock

    def spend(self, phase: str, milliseconds: int) -> None:
        self.clock += milliseconds
        self.truth[phase] += milliseconds
        self.rank_milliseconds += 0 if phase == "idle" else self.ranks * milliseconds

    def spend_watched(self, phase: str, milliseconds: int) -> None:
        """A watching thread writes a line in the middle of the time."""
        self.spend(phase, milliseconds // 2)
        self.publish(
            RankStuck(
                step=self.step, ranks=[0], phase="evaluate", seconds=1.0, limit_seconds=1.0,
                has_heartbeat=True,
            )
        )  # fmt: skip
        self.spend(phase, milliseconds - milliseconds // 2)

    def start(self, gap: int, parts: int) -> None:
        if self.began is None:
            self.began = self.clock
        else:
            self.restarts[self.end] += 1
            self.spend("idle" if self.end in ("stopped", "done") else "down", gap)
        self.ranks = 1 + (self.ranks + gap) % 5  # another layout in each start
        former = read_log(self.path).lines if self.path.exists() else []
        process_start = self.clock
        self.log = JsonlLog(self.path, now=lambda: self.clock / 1000)
        self.events = Events(self.log)
        self.live = LiveLedger(former, self.log, self.events)
        self.events.subscribe(self.live)
        self.end, self.step, self.first = None, self.saved, True
        self.spend("restart", parts)
        began = process_start / 1000
        self.publish(Launched(step=0, process_start=began, world_size=self.ranks))
        if self.step:
            self.spend("restart", 2 * parts)
            self.publish(Restored(step=self.step, tier="shared", seconds=2 * parts / 1000))
        self.spend("restart", parts)
        self.publish(
            RunStarted(
                step=self.step, world_size=self.ranks, topology={}, parameters=1, launch_id="a",
                start_seconds={"imports": parts / 1000},
            )
        )  # fmt: skip

    def take_step(self, whole: int, wait: int, exposed: int) -> None:
        seconds = whole + wait + exposed
        self.warm_up()
        if self.step < self.newest:
            self.spend("rework", seconds)
        else:
            self.spend("productive", whole)
            self.spend("data_wait", wait)
            self.spend("communication_exposed", exposed)
        self.step += 1
        self.newest = max(self.newest, self.step)
        self.publish(
            StepCommitted(
                step=self.step, loss=1.0, grad_norm=1.0, seconds=seconds / 1000, lr=0.1,
                data_wait_seconds=wait / 1000, rank_0_data_wait_seconds=wait / 1000,
                tokens_seen=1_000 * self.step, consumed_samples=1, slowest_rank_seconds=0.0,
                tokens_per_second=1.0, mfu=0.1,
                exposed_seconds={"ep": exposed / 2000, "dp": exposed / 2000},
            )
        )  # fmt: skip

    def skip(self, whole: int) -> None:
        self.warm_up()
        self.spend("skipped", whole)
        self.publish(
            StepSkipped(
                step=self.step + 1, loss=math.nan, grad_norm=math.nan, seconds=whole / 1000,
                reason="not_finite",
            )
        )  # fmt: skip

    def report(self, whole: int) -> None:
        self.spend("other", whole)
        self.publish(
            IntervalEnded(
                step=self.step, loss=1.0, lr=0.1, grad_norm=1.0, tokens_per_second=1.0, mfu=0.1,
                seconds=1.0, communication_seconds={}, exposed_seconds={},
            )
        )  # fmt: skip

    def save(self, stall: int) -> None:
        self.spend("checkpoint_stall", stall)
        self.saved = self.step
        self.publish(SaveBegun(step=self.step, stall_seconds=stall / 1000, tiers=["shared"]))
        self.publish(
            CheckpointCommitted(step=self.step, tier="shared", seconds=0.1, write_seconds=0.1)
        )

    def evaluate(self, whole: int) -> None:
        self.spend_watched("evaluation", whole)
        self.publish(Evaluated(step=self.step, loss=1.0, bits_per_byte=1.0))

    def close(self, end: str) -> None:
        self.log.close()
        self.end = end

    def stop(self, wait: int) -> None:
        self.save(wait)
        self.spend("checkpoint_stall", wait)
        self.publish(RunStopped(step=self.step, cause="signal"))
        self.close("stopped")

    def done(self, whole: int) -> None:
        self.save(whole)
        self.spend("evaluation", whole)
        self.publish(RunDone(step=self.step))
        self.close("done")

    def kill(self, cut_off: int, torn: str) -> None:
        self.spend_watched("down", cut_off)
        self.close("killed")
        with self.path.open("a") as file:
            file.write(torn)

    def lose(self, hang: int, report: int) -> None:
        self.spend_watched("hang", hang)
        self.publish(RankLost(step=self.step, waited_seconds=hang / 1000))
        self.spend("down", report)
        self.publish(RunFailed(step=self.step, state="lost_rank", reason="rank 1 is gone"))
        self.close("lost_rank")

    def fail(self, partial: int) -> None:
        self.spend("down", partial)
        self.publish(RunFailed(step=self.step, state="health", reason="not finite"))
        self.close("health")


SPANS = st.integers(0, 5_000)
WHILE_RUNNING = st.one_of(
    st.tuples(st.just("take_step"), SPANS, SPANS, SPANS.map(lambda n: 2 * n)),
    st.tuples(st.sampled_from(["skip", "report", "save", "evaluate"]), SPANS),
    st.tuples(st.sampled_from(["stop", "done", "fail"]), SPANS),
    st.tuples(st.just("kill"), SPANS, st.sampled_from(["", '{"event": "step", "ti', "\x00\x00"])),
    st.tuples(st.just("lose"), SPANS, SPANS),
)  # fmt: skip


@QUICK
@given(st.lists(st.tuples(WHILE_RUNNING, SPANS, SPANS), max_size=30))
def test_any_run_adds_up_to_the_microsecond(tmp_path, actions):
    path = tmp_path / "log.jsonl"
    path.unlink(missing_ok=True)
    run = MadeUpRun(path, before_step=3)
    run.start(0, 10)
    for (name, *arguments), gap, parts in actions:
        if run.end is not None:
            run.start(gap, parts)
        getattr(run, name)(*arguments)
    if run.end is not None:
        run.start(7, 11)
    ledger = ledger_of(read_log(path).lines)
    check_sums(ledger, 1000 * (run.clock - run.began))
    found = {phase: each // 1000 for phase, each in ledger.microseconds.items() if each}
    assert found == {phase: each for phase, each in run.truth.items() if each}
    assert {c: n for c, n in ledger.restarts.items() if n} == run.restarts
    assert ledger.rank_microseconds == 1000 * run.rank_milliseconds
    assert run.live.ledger() == ledger, "the live ledger is that of the log"
    run.log.close()


@QUICK
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(EVENTS)),
            st.one_of(st.floats(-1e3, 1e10), st.floats(1.7e9, 1.7e9 + 100)),
            st.floats(allow_nan=True, allow_infinity=True),
        ),
        max_size=40,
    )
)
def test_no_line_breaks_the_sums(lines):
    """Two starts at one time, clocks that jump, lines that are lost, numbers that are none."""
    found = []
    for name, at, number in lines:
        event = example(EVENTS[name])
        for each in ("seconds", "stall_seconds", "process_start"):
            if isinstance(getattr(event, each, None), float):
                object.__setattr__(event, each, number)
        found.append(LoggedEvent(event, at))
        ledger = ledger_of(found)
        span = 0 if ledger.begin is None else ledger.end - ledger.begin
        check_sums(ledger, sum(ledger.microseconds.values()))
        assert sum(ledger.microseconds.values()) == pytest.approx(1e6 * span, abs=2)


def test_a_log_without_lines_is_an_empty_ledger():
    ledger = ledger_of([])
    check_sums(ledger, 0)
    assert (ledger.goodput, ledger.step_share, ledger.begin) == (None, None, None)
    assert ledger_table(summed(ledger, 0)) == ""


def test_a_wait_for_the_data_of_another_rank_is_no_communication(tmp_path):
    run = MadeUpRun(tmp_path / "log.jsonl")
    run.start(0, 0)
    run.clock += 10_000
    run.publish(
        StepCommitted(
            step=1, loss=1.0, grad_norm=1.0, seconds=10.0, lr=0.1, data_wait_seconds=3.0,
            rank_0_data_wait_seconds=0.5, tokens_seen=1, consumed_samples=1,
            slowest_rank_seconds=9.0, tokens_per_second=1.0, mfu=0.1, exposed_seconds={"dp": 4.0},
        )
    )  # fmt: skip
    seconds = run.live.ledger().seconds
    run.log.close()
    # 2.5 of the 4 seconds in collectives were a wait for the rank that waited for its batch.
    assert seconds["data_wait"] == 3.0
    assert seconds["communication_exposed"] == 1.5
    assert seconds["productive"] == 5.5


def test_seconds_are_lost_to_what_caused_them(tmp_path):
    run = MadeUpRun(tmp_path / "log.jsonl")
    run.start(0, 1_000)  # 2 s
    run.take_step(4_000, 500, 1_000)
    run.lose(30_000, 2_000)
    run.start(5_000, 1_000)  # nothing is saved: 2 s again
    run.take_step(4_000, 0, 0)  # rework
    run.take_step(4_000, 0, 0)
    run.save(250)
    run.kill(100, "")
    run.start(900, 1_000)  # 4 s, with a restore
    run.take_step(6_000, 0, 0)
    ledger = run.live.ledger()
    run.log.close()
    assert {cause: each for cause, each in ledger.lost_seconds.items() if each} == {
        "first_start": 2.0, "data": 0.5, "communication": 1.0, "checkpoint": 0.25,
        "lost_rank": 30.0 + 2.0 + 5.0 + 2.0 + 4.0,
        "killed": 0.1 + 0.9 + 4.0,
    }  # fmt: skip
    assert ledger.goodput == pytest.approx(14.0 / ledger.wall_seconds)
    assert ledger.step_share == pytest.approx(15.5 / ledger.wall_seconds)
    text = ledger_table(summed(ledger, 3))
    assert "goodput 21.3% of 65.8 s; with communication and waits for data 23.6%" in text
    assert "hang" in text
    assert "lost to     lost_rank 43.0 s, killed 5.0 s, first_start 2.0 s" in text
    assert "restarts    1 after killed, 1 after lost_rank" in text
    assert "last start  imports 1.0 s, first_step 6.0 s" in text


def test_the_seconds_in_which_replicas_regroup_are_lost_to_the_lost_rank():
    def step(number: int) -> StepCommitted:
        return replace(example(StepCommitted), step=number, seconds=1.0, exposed_seconds={})

    left = {"replica": 1, "start": 0, "why": "killed"}
    change = replace(example(Regrouped), left=[left], world_size=4)
    lines = [
        (100.0, replace(example(Launched), process_start=99.0, world_size=8)),
        (102.0, step(1)),
        (105.0, change),
        (106.0, step(2)),
    ]
    ledger = ledger_of([LoggedEvent(event, time) for time, event in lines])
    assert ledger.lost_seconds["lost_rank"] == 3.0
    assert ledger.restarts == dict.fromkeys(ledger.restarts, 0), "no rank has started again"


def test_a_line_that_a_kill_cut_off_takes_no_other_line_with_it(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"event": "stopped", "time": 1.0, "step": 1}\n{"event": "st')
    log = JsonlLog(path)
    log(RunDone(step=3))
    log.close()
    found = read_log(path)
    assert [event.step for event in found.events] == [1, 3]
    assert len(found.problems) == 1
    log = JsonlLog(path)
    log.close()
    assert path.read_text().count("\n") == 3, "nothing is added to a whole line"


def test_metrics_continue_over_restarts(tmp_path):
    run = MadeUpRun(tmp_path / "log.jsonl")
    run.start(0, 1_000)
    run.take_step(6_000, 0, 0)
    run.stop(1_000)
    run.start(100_000, 1_000)
    registry, spec = CollectorRegistry(), make_spec(tmp_path)
    Metrics(registry, spec, Topology(), "1.0", ledger=run.live.ledger)
    run.take_step(4_000, 0, 0)
    run.log.close()
    text = generate_latest(registry).decode().splitlines()
    assert 'convoy_phase_seconds_total{phase="productive"} 10.0' in text
    assert 'convoy_phase_seconds_total{phase="idle"} 100.0' in text
    assert 'convoy_phase_seconds_total{phase="hang"} 0.0' in text
    assert 'convoy_lost_seconds_total{cause="stopped"} 4.0' in text
    assert 'convoy_restarts_total{cause="stopped"} 1.0' in text
    assert "convoy_goodput_ratio 0.5555555555555556" in text
    assert "convoy_cost" not in "".join(text), "without a price there is no cost"


def test_a_resume_has_the_timestamps_and_the_cost_of_former_starts(tmp_path):
    run = MadeUpRun(tmp_path / "log.jsonl")
    run.start(1, 1_000)
    run.take_step(6_000, 0, 0)
    stepped = run.clock / 1000
    run.stop(1_000)
    saved = (run.clock - 1_000) / 1000
    run.start(100_000, 1_000)
    registry = CollectorRegistry()
    spec = make_spec(tmp_path, metrics={"dollars_per_rank_hour": 3600.0})
    former = read_log(run.path).lines
    Metrics(registry, spec, Topology(), "1.0", ledger=run.live.ledger, former=former)
    values = {
        f"{s.name}{''.join(s.labels.values())}": s.value
        for metric in registry.collect()
        for s in metric.samples
    }
    assert values["convoy_last_step_timestamp_seconds"] == stepped
    assert values["convoy_last_checkpoint_timestamp_secondsshared"] == saved
    assert values["convoy_step"] == 1
    # A dollar for a second of a rank: 10 s of 2 ranks, and 4 s of 3.
    assert run.rank_milliseconds == 32_000
    assert values["convoy_cost_dollars_total"] == 32.0
    assert values["convoy_cost_per_billion_tokens_dollars"] == 32.0 * 1e6
    run.log.close()


def test_spares_are_paid_for_too():
    here = {"step": 0, "world_size": 2}
    began = Launched(**here, process_start=100.0)
    ready = RunStarted(**here, topology={}, parameters=1, launch_id="a", spares=1)
    lines = [LoggedEvent(began, 101.0), LoggedEvent(ready, 103.0)]
    assert ledger_of(lines).rank_seconds == 2 * 1.0 + 3 * 2.0


# ------------------------------------------------------------------------------------------------
# A run on two real ranks.


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("job"))


def on_rank(rank: int, spec: str, victims: tuple[int, ...], at: int) -> tuple[int, str]:
    """The command; ``victims`` get a real SIGKILL before step ``at``, and wait for saves first."""
    step = Trainer.step

    def step_or_die(self, stop_requested):
        if self.progress.step == at - 1 and rank in victims:
            self.checkpointer.writer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, stop_requested)

    Trainer.step = step_or_die
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = main([spec])
        except SystemExit as end:
            code = end.code
    return code, out.getvalue()


@pytest.mark.parametrize(
    ("kills", "steps_taken", "restarts"),
    [
        # Rank 0 sees that rank 1 is gone.
        ([((1,), 4)], [1, 2, 3, 3, 4, 5, 6], {"lost_rank": 1}),
        # And then nobody is left who could write.
        pytest.param(
            [((1,), 4), ((0, 1), 6)],
            [1, 2, 3, 3, 4, 5, 5, 6],
            {"lost_rank": 1, "killed": 1},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one", "one and all"],
)
def test_a_run_whose_ranks_are_killed_and_that_resumes_adds_up(
    text, tmp_path, capsys, kills, steps_taken, restarts
):
    spec = write_spec(
        tmp_path, data=data_of(text), parallel={"ep": 2}, checkpoint={"interval_steps": 2},
        train={"timeout_seconds": 20.0},
    )  # fmt: skip
    run, starts = tmp_path / "run", []

    def launch(victims: tuple[int, ...], at: int) -> None:
        before = time.time()
        processes, _ = start_ranks(on_rank, 2, str(spec), victims, at, group=False)
        starts.append((before, time.time()))
        for process in processes:
            process.join(120)
        codes = [process.exitcode for process in processes]
        assert [codes[rank] == -signal.SIGKILL for rank in (0, 1)] == [r in victims for r in (0, 1)]

    for victims, at in kills:
        launch(victims, at)
    (_, out), _ = run_ranks(on_rank, 2, str(spec), (), 0, group=False)
    ended = time.time()
    assert "goodput" in out, "the summary has the table"

    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["event"] == "step"]
    assert steps == steps_taken
    launches = [line for line in lines if line["event"] == "launch"]
    for one, (before, after) in zip(launches, starts, strict=False):
        assert before - 0.05 < one["process_start"] < after + 0.05
    ledger = ledger_of(read_log(run / "log.jsonl").lines)
    # The wall time by another way: the test's clock and the first process.
    wall = lines[-1]["time"] - launches[0]["process_start"]
    assert sum(ledger.seconds.values()) == pytest.approx(wall, rel=0.001)
    assert wall < ended - starts[0][0] + 0.05
    assert not any(line["time"] > ended for line in lines)

    # What the parts are, from the lines themselves. A line's time is rounded to 0.001 s.
    near = {"abs": 0.001 * len(lines)}
    taken, again, newest = 0.0, 0.0, 0
    for line in lines:
        if line["event"] == "step":
            if line["step"] > newest:
                newest, taken = line["step"], taken + line["seconds"]
            else:
                again += line["seconds"]
    counted = ("productive", "data_wait", "communication_exposed")
    assert sum(ledger.seconds[phase] for phase in counted) == pytest.approx(taken, **near)
    assert ledger.seconds["rework"] == pytest.approx(again, **near)
    assert again > 0
    (lost,) = [line for line in lines if line["event"] == "rank_lost"]
    at = lines.index(lost)
    assert ledger.seconds["hang"] == pytest.approx(lost["time"] - lines[at - 1]["time"], **near)
    (failed,) = [line for line in lines if line["event"] == "failed"]
    assert failed["state"] == "lost_rank"
    down = launches[1]["process_start"] - lost["time"]
    for one in launches[2:]:
        down += one["process_start"] - lines[lines.index(one) - 1]["time"]
    assert ledger.seconds["down"] == pytest.approx(down, abs=0.05)
    first_steps = []
    for one in launches:
        first = next(e for e in lines[lines.index(one) :] if e["event"] == "step")
        first_steps.append(first["time"] - first["seconds"] - one["process_start"])
    assert ledger.seconds["restart"] == pytest.approx(sum(first_steps), abs=0.05)
    assert {c: n for c, n in ledger.restarts.items() if n} == restarts
    assert ledger.seconds["idle"] == 0

    # Each start's parts are the time up to its line, and the newest sums are in every place.
    for one, begun in zip(launches, events(run, "start"), strict=True):
        assert list(begun["start_seconds"]) == [
            "imports", "rendezvous", "build", "writer", "load", "staging",
        ]  # fmt: skip
        spent = begun["time"] - one["process_start"]
        assert spent / 2 < sum(begun["start_seconds"].values()) < spent + 0.2
    newest_sums = events(run, "ledger")[-1]
    assert newest_sums["seconds"]["rework"] == pytest.approx(ledger.seconds["rework"])
    status = json.loads((run / "status.json").read_text())
    assert status["ledger"]["seconds"] == newest_sums["seconds"]
    summary = Summary.read(run / "summary.json")
    assert summary.ledger.seconds["rework"] == newest_sums["seconds"]["rework"]
    capsys.readouterr()
    assert convoy("status", [str(run)]) == 0
    out = capsys.readouterr().out
    assert "goodput" in out
    assert "1 after lost_rank" in out
    assert convoy("status", [str(run), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["ledger"]
    assert shown["seconds"] == {p: each for p, each in ledger.seconds.items() if each}
