"""The protocol of parts: the contract of those that there are, and a part from outside in a run."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import ckpt
from convoy.commands.pretrain import main
from pretrain.data import Division
from pretrain.observe import Notice
from pretrain.parts.capacity import CapacityBalance, CapacityPart
from pretrain.parts.rank_watch import OddLosses
from pretrain.parts.step import Part, PartContext, Report, SkipReason, StepFacts, Wish
from pretrain.parts.stragglers import Stragglers, StragglersConfig, StragglersPart
from pretrain.parts.testing import WORLD, PartContract
from router import StragglerAwareConfig
from tests.support.jobs import data_of, events, prepare_job, write_spec
from tests.support.ranks import run_ranks

OUTSIDE = f"{__name__}:Countdown"


class Slow(PartContract):
    """Steps in which rank 2 takes twice the time of the others."""

    def steps(self) -> list[list[Report]]:
        return [
            [
                replace(report, step_seconds=2.0, expert_seconds=1.0) if rank == 2 else report
                for rank, report in enumerate(reports)
            ]
            for reports in super().steps()
        ]


class TestOddLosses(PartContract):
    def make(self, context: PartContext) -> Part:
        return OddLosses(context)


class TestStragglers(Slow):
    def make(self, context: PartContext) -> Part:
        config = StragglersConfig(rebalance=True, patience_steps=12)
        speeds = Stragglers(config, context.topology, token_flops=1.0, row_flops=0.0)
        return StragglersPart(
            config,
            context,
            speeds=speeds,
            division=Division(WORLD, lockstep=False),
            capacity_follows_speed=False,
        )

    def test_a_slow_rank_gets_fewer_micro_batches(self):
        wishes = self._run(self._made(0)[0])
        divided = [wish.division for wish in wishes if wish.division is not None]
        assert divided[0].counts(8)[2] < 2


class TestCapacity(Slow):
    def make(self, context: PartContext) -> Part:
        config = StragglerAwareConfig()
        topology = replace(context.topology, dp_replicate=1, dp_shard=WORLD, ep=WORLD)
        return CapacityPart(CapacityBalance(config, topology), context)

    def test_a_slow_rank_gets_less_capacity(self):
        wishes = self._run(self._made(0)[0])
        plans = [wish.plans for wish in wishes if wish.plans is not None]
        assert plans[0][0][2] < plans[0][0][0]


class Countdown(Part):
    """A part from outside: counts tokens of all ranks by a column of its own, leaves out the
    samples of one step, and asks for a save after the third step."""

    name: ClassVar[str] = "countdown"

    def __init__(self, context: PartContext) -> None:
        self.context, self.tokens, self.left_out = context, 0, False

    def report(self, mine: Report) -> Mapping[str, float]:
        return {"tokens": mine.target_tokens}

    def judge(self, facts: StepFacts) -> Wish | None:
        if facts.step == 2 and not self.left_out:
            self.left_out = True
            return Wish(skip=SkipReason("countdown", "the second step is left out"))
        return Wish(save=facts.step == 3)

    def after(self, facts: StepFacts) -> Wish | None:
        self.tokens += int(sum(facts.columns["countdown.tokens"]))
        self.context.publish(Notice(step=facts.step, text=f"counted {self.tokens}"))
        return None

    def state(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "left_out": self.left_out}

    def load(self, state: dict[str, Any]) -> Wish | None:
        self.tokens, self.left_out = state["tokens"], state["left_out"]
        return None


class TestCountdown(PartContract):
    def make(self, context: PartContext) -> Part:
        return Countdown(context)


def pretrain(rank: int, arguments: list[str]) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return code, out.getvalue() + err.getvalue()


def test_a_part_from_outside_judges_acts_and_is_resumed(tmp_path):
    job = prepare_job(tmp_path / "job")
    train = {"steps": 4, "log_interval_steps": 1, "timeout_seconds": 60.0, "parts": [OUTSIDE]}
    spec = write_spec(
        tmp_path, data=data_of(job), train=train, checkpoint={"interval_steps": 100},
        parallel={"dp_replicate": 2},
    )  # fmt: skip
    for steps in (4, 5):
        arguments = [str(spec), "--set", f"train.steps={steps}"]
        results = run_ranks(pretrain, 2, arguments, group=False)
        assert {code for code, _ in results} == {0}, results
    run = tmp_path / "run"
    counted = [n["text"] for n in events(run, "notice") if n["text"].startswith("counted")]
    assert counted == [f"counted {256 * step}" for step in range(1, 6)]
    (skipped,) = events(run, "skip")
    assert (skipped["step"], skipped["reason"]) == (2, "countdown")
    assert skipped["skipped_samples"] == [8, 16]
    assert [e["consumed_samples"] for e in events(run, "step")] == [8, 24, 32, 40, 48]
    assert [e["step"] for e in events(run, "save")] == [3, 4, 5]
    state = ckpt.read_manifest(run / "checkpoints", 5).state
    assert state["parts"]["countdown"] == {"tokens": 1280, "left_out": True}


class Enough(Part):
    """A part from outside that wishes for the end of the run after its second step."""

    name: ClassVar[str] = "enough"

    def __init__(self, context: PartContext) -> None:
        self.context = context

    def after(self, facts: StepFacts) -> Wish | None:
        return Wish(save=True, stop=facts.step == 2)


class Twice(Enough):
    """A part with the name of another part."""

    name: ClassVar[str] = "stragglers"


class Nameless(Part):
    """A part that forgot its name."""

    def __init__(self, context: PartContext) -> None:
        self.context = context


def test_a_part_saves_and_stops_the_run_for_good(tmp_path):
    job = prepare_job(tmp_path / "job")
    train = {"steps": 6, "log_interval_steps": 1, "parts": [f"{__name__}:Enough"]}
    spec = write_spec(tmp_path, data=data_of(job), train=train, checkpoint={"interval_steps": 100})
    code, _ = pretrain(0, [str(spec)])
    assert code == 75
    run = tmp_path / "run"
    assert [event["step"] for event in events(run, "save")] == [1, 2]
    (stopped,) = events(run, "stopped")
    assert (stopped["step"], stopped["cause"]) == (2, "part")


def test_a_state_of_another_layout_is_not_loaded(tmp_path):
    job = prepare_job(tmp_path / "job")
    train = {"log_interval_steps": 1, "timeout_seconds": 60.0, "parts": [OUTSIDE]}
    spec = write_spec(
        tmp_path, data=data_of(job), train=train, checkpoint={"reshard_on_load": True},
    )  # fmt: skip
    counted = []
    for ranks, steps in ((2, 3), (1, 4)):
        changes = [f"train.steps={steps}", f"parallel.dp_replicate={ranks}"]
        words = [word for change in changes for word in ("--set", change)]
        results = run_ranks(pretrain, ranks, [str(spec), *words], group=False)
        assert {code for code, _ in results} == {0}, results
        texts = [notice["text"] for notice in events(tmp_path / "run", "notice")]
        counted = [text for text in texts if text.startswith("counted")]
    assert counted[-1] == "counted 256", "of one step, as in a run that begins"


def test_a_part_that_cannot_be_named_is_one_line(tmp_path):
    job = prepare_job(tmp_path / "job")
    for kind, why in (
        ("nowhere.at_all:Part", "must be package.module:Class, importable on every rank"),
        ("collections:OrderedDict", "must be a subclass of pretrain.parts.step.Part"),
        (f"{__name__}:Nameless", "must have a name, which is a word"),
    ):
        train = {"steps": 6, "parts": [kind]}
        spec = write_spec(tmp_path, data=data_of(job), train=train)
        code, text = pretrain(0, [str(spec)])
        assert code == 2
        assert f"error: train.parts ({kind}) {why}" in text
    train = {"steps": 6, "parts": [f"{__name__}:Twice"]}
    code, text = pretrain(0, [str(write_spec(tmp_path, data=data_of(job), train=train))])
    assert code == 2
    assert "error: train.parts must have a name each, and these are " in text
