"""Ranks that are slow as a whole: found, given fewer micro-batches, and reported."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from cluster.members import read_exclusions
from parallel import Topology
from pretrain.data.division import Division, divide, equal_division, step_seconds
from pretrain.data.loader import Cursor, micro_batches
from pretrain.errors import InputError
from pretrain.job import Job
from pretrain.parts.stragglers import GainMeter, Stragglers, StragglersConfig
from pretrain.train.trainer import Trainer
from tests.support.commands import pretrain
from tests.support.jobs import events, make_spec, prepare_job, write_spec
from tests.support.ranks import run_ranks

# ------------------------------------------------------------------------------------------------
# Division of micro-batches.

speeds = st.lists(st.sampled_from([0.3, 0.5, 0.8, 1.0, 1.1]), min_size=1, max_size=6)


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 40), speeds, st.booleans(), st.sampled_from([0.0, 0.05, 0.3]))
def test_a_division_has_every_micro_batch_and_is_never_slower(total, speeds, lockstep, min_gain):
    counts = divide(total, tuple(speeds), lockstep=lockstep, min_gain=min_gain)
    equal = equal_division(total, len(speeds))
    assert sum(counts) == total
    assert min(counts) >= min(1, total // len(speeds)), "a rank without work shows no speed"
    now = step_seconds(equal, speeds, lockstep)
    assert counts == equal or step_seconds(counts, speeds, lockstep) < now * (1 - min_gain)


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("speeds", [(1.0, 0.5), (1.0, 0.5, 1.0), (0.3, 1.0, 0.5), (1.0, 0.8, 0.8)])
@pytest.mark.parametrize("total", [4, 7, 9])
def test_no_other_division_makes_the_step_shorter(speeds, total, lockstep):
    counts = divide(total, speeds, lockstep=lockstep, min_gain=0.0)
    others = [
        others
        for others in itertools.product(range(1, total), repeat=len(speeds))
        if sum(others) == total
    ]
    best = min(step_seconds(other, speeds, lockstep) for other in others)
    assert step_seconds(counts, speeds, lockstep) == pytest.approx(best)


def test_a_step_lasts_as_long_as_its_slowest_rank_or_as_all_of_its_turns():
    assert step_seconds([4, 4], [1.0, 0.5], lockstep=False) == 8
    assert step_seconds([5, 3], [1.0, 0.5], lockstep=False) == 6
    # Two turns at half the speed, and one at full speed.
    assert step_seconds([3, 2], [1.0, 0.5], lockstep=True) == 5
    assert step_seconds([3, 0], [1.0, 0.5], lockstep=True) == 3


def test_ranks_that_wait_at_the_end_only_have_work_in_proportion_to_speed():
    assert divide(24, (1.0, 0.5, 1.0, 1.0), lockstep=False, min_gain=0.05) == (7, 3, 7, 7)


def test_in_lockstep_a_slow_rank_has_as_little_as_the_turns_of_the_others_allow():
    assert divide(32, (1.0,) * 7 + (0.5,), lockstep=True, min_gain=0.05) == (5, 5, 5, 4, 4, 4, 4, 1)
    assert divide(8, (1.0, 0.5), lockstep=True, min_gain=0.05) == (4, 4), "no division is faster"


@pytest.mark.parametrize("total", [2, 4, 5])
def test_few_micro_batches_are_not_divided_anew(total):
    assert divide(total, (1.0, 0.8, 1.0, 1.0), lockstep=False, min_gain=0.05) == (
        equal_division(total, 4)
    )


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 9), st.data())
def test_who_takes_a_micro_batch_changes_no_micro_batch(start, micro, data):
    counts = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(sum))
    size = data.draw(st.integers((sum(counts) - 1) * micro + 1, sum(counts) * micro))
    cursor, ranks = Cursor(start), len(counts)
    every = [micro_batches(cursor, size, micro, r, ranks, counts) for r in range(ranks)]
    assert len({len(mine) for mine in every}) == 1, "all join the same collectives"
    assert [sum(1 for b in mine if len(b)) for mine in every] == counts
    parts = sorted((b for mine in every for b in mine if len(b)), key=lambda b: b.start)
    assert parts == micro_batches(cursor, size, micro, 0, 1)
    # In every turn the ranks take the next micro-batches in the order of their numbers.
    turns = [b for turn in zip(*every, strict=True) for b in turn if len(b)]
    assert turns == parts


def test_a_division_knows_its_gain():
    division = Division(2, lockstep=False)
    assert (division.counts(8), division.gain(8)) == ((4, 4), 0.0)
    slow = replace(division, speeds=(1.0, 0.5))
    assert slow.counts(9) == (6, 3)
    assert slow.gain(9) == pytest.approx(1 - 6 / 8)


# ------------------------------------------------------------------------------------------------
# Finding slow ranks.


def stragglers(topology: Topology, **config: Any) -> Stragglers:
    made = StragglersConfig(**{"patience_steps": 20, **config})
    found = Stragglers(made, topology, token_flops=10.0, row_flops=1.0)
    found.test = replace(found.test, warmup_steps=0)
    return found


def test_a_slow_rank_is_found_then_lasts_then_ends():
    found, topology = stragglers(Topology(dp_replicate=4)), Topology(dp_replicate=4)
    told = []
    for step in range(1, 61):
        times = [1.0, 2.0 if 5 <= step < 40 else 1.0, 1.0, 1.0]
        findings = found.after(step, [8.0] * 4, [0.0] * 4, times)
        told += [("found", step, one) for one in findings.found]
        told += [("lasting", step, one) for one in findings.lasting]
        told += [("ended", step, one) for one in findings.ended]
        assert findings.changed == (told != [] and told[-1][1] == step and not findings.lasting)
        if step == 20:
            assert found.dp_speeds == (1.0, 0.5, 1.0, 1.0)
            again = stragglers(topology)
            again.load(json.loads(json.dumps(found.state())))
            assert again.state() == found.state()
            assert again.slow == found.slow
    assert [(what, one.rank, one.since_step) for what, _, one in told] == [
        ("found", 1, 5), ("lasting", 1, 5), ("ended", 1, 5),
    ]  # fmt: skip
    assert told[0][2].speed == pytest.approx(0.5, rel=0.01)
    assert told[1][1] == 25
    assert found.slow == {}


def test_speed_is_work_over_time_and_not_time():
    """Ranks with fewer micro-batches, or more rows for their experts, are not faster or slower."""
    found = stragglers(Topology(dp_shard=4, ep=2))
    for step in range(1, 40):
        tokens, rows = [4.0, 8.0, 16.0, 8.0], [30.0, 10.0, 70.0, 10.0]
        times = [10 * t + r for t, r in zip(tokens, rows, strict=True)]
        assert not found.after(step, tokens, rows, times).changed
    assert found.work([4.0, 0.0, 0.0, 0.0], [1.0] * 4)[0] == 41.0


def test_a_rank_without_tokens_shows_no_speed():
    found = stragglers(Topology(dp_replicate=2))
    assert found.work([8.0, 0.0], [3.0, 3.0]).tolist() == [83.0, 0.0]


def test_ranks_that_share_sequences_share_their_work_and_the_slowest_counts():
    topology = Topology(dp_shard=2, tp=2)
    found = stragglers(topology)
    # The first rank of a tensor-parallel pair reports the tokens of both.
    assert found.work([8.0, 0.0, 8.0, 0.0], [0.0] * 4).tolist() == [40.0] * 4
    for step in range(1, 12):
        found.after(step, [8.0, 0.0, 8.0, 0.0], [0.0] * 4, [1.0, 1.0, 1.0, 2.0])
    assert found.dp_speeds == (1.0, 0.5)
    assert [found.dp_rank(rank) for rank in range(4)] == [0, 0, 1, 1]


def test_stages_of_a_pipeline_are_not_compared():
    found = stragglers(Topology(pp=2, dp_replicate=2))
    for step in range(1, 30):
        # The last stage reports the tokens, and takes three times as long as the first.
        findings = found.after(step, [0.0, 0.0, 8.0, 8.0], [0.0] * 4, [1.0, 1.0, 3.0, 3.0])
        assert not findings.changed
    for step in range(30, 45):
        found.after(step, [0.0, 0.0, 8.0, 8.0], [0.0] * 4, [1.0, 1.0, 3.0, 6.0])
    assert list(found.slow) == [3]
    assert found.slow[3].speed == pytest.approx(0.5, rel=0.01)


def test_a_gain_compares_eight_steps_before_and_after():
    meter = GainMeter()
    meter.begin(1)
    for seconds in (9.0, *[2.0] * 8):
        assert meter.after(seconds) == []
    meter.begin(2)
    assert [meter.after(seconds) for seconds in (50.0, *[1.5] * 7)] == [[]] * 8
    (gain,) = meter.after(1.5)
    assert (gain.stage, gain.seconds_before, gain.seconds_after) == (2, 2.0, 1.5)
    assert meter.after(1.5) == []


# ------------------------------------------------------------------------------------------------
# On real ranks.


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("job"))


def on_rank(
    rank: int, arguments: list[str], slowness: float, sleep: float, machines: str
) -> tuple[int, str, str]:
    """The command. With ``slowness`` rank 1 reports so many seconds a token and rank 0 one second;
    with ``sleep`` rank 1 really sleeps that long for each sequence. Machines are named after
    ``machines``; the launch can go on without one where they are ``spared``."""
    os.environ["CONVOY_NODE_NAME"] = f"{machines}-{rank}"
    stages = import_module("pretrain.job.build")
    stages.starts_again_without_machine = lambda left: machines == "spared"
    if slowness:
        report = Trainer._report

        def with_seconds(self, attempt, stop_requested):
            made = report(self, attempt, stop_requested)
            seconds = made.target_tokens * (slowness if rank else 1.0)
            return replace(made, step_seconds=seconds + 5.0, exposed_seconds=5.0)

        Trainer._report = with_seconds
    if sleep and rank:
        forward_backward = Job.forward_backward

        def slowly(self, batches, *rest):
            time.sleep(sleep * sum(len(batch) for batch in batches))
            return forward_backward(self, batches, *rest)

        Job.forward_backward = slowly
    return pretrain(arguments)


def launch(
    folder: Path,
    text: Path,
    *overrides: str,
    slowness: float = 0.0,
    sleep: float = 0.0,
    code: int = 0,
    machines: str = "machine",
    **sections: Any,
) -> str:
    folder.mkdir(exist_ok=True)
    spec = write_spec(
        folder,
        **{
            "data": {"source": str(text / "text"), "path": str(text / "corpus")},
            "parallel": {"dp_replicate": 2, "dp_shard": 1},
            "batch": {"global_batch_size": 6, "micro_batch_size": 1},
            "schedule": {"kind": "constant"},
            "checkpoint": {"interval_steps": 100},
            "eval": {"sequences": 2},
            "stragglers": {"rebalance": True, "patience_steps": 12},
            **sections,
        },
    )
    arguments = [str(spec), *(part for o in overrides for part in ("--set", o))]
    results = run_ranks(on_rank, 2, arguments, slowness, sleep, machines, group=False)
    assert {ended for ended, _, _ in results} == {code}, results
    return results[0][1]


def losses(run: Path) -> list[float]:
    found = {event["step"]: event["loss"] for event in events(run, "step")}
    return [found[step] for step in sorted(found)]


def test_a_slow_rank_computes_fewer_micro_batches_of_the_same_samples(tmp_path, text):
    even, slow = tmp_path / "even", tmp_path / "slow"
    steps = "train.steps=20"
    launch(even, text, steps, slowness=1.0)
    assert events(even / "run", "micro_batch_plan") == []
    assert events(even / "run", "straggler") == []
    out = launch(slow, text, steps, slowness=2.0)
    (plan,) = events(slow / "run", "micro_batch_plan")
    # Two steps of warm-up and eight slow steps; then 4 micro-batches to 2.
    assert (plan["step"], plan["counts"]) == (10, [4, 2])
    assert plan["relative_speeds"][0] / plan["relative_speeds"][1] == pytest.approx(2, rel=0.01)
    assert plan["predicted_gain"] == pytest.approx(1 / 3, rel=0.01)
    found, lasting = events(slow / "run", "straggler")
    assert (found["rank"], found["since_step"], found["stage"]) == (1, 3, 2)
    assert found["speed"] == pytest.approx(0.5, rel=0.01)
    assert (lasting["rank"], lasting["step"], lasting["stage"]) == (1, 15, 3)
    assert "rank 1 is slow since step 3: 50% of the other ranks' speed" in out
    (gain,) = events(slow / "run", "straggler_gain")
    assert (gain["stage"], gain["step"], gain["kept"]) == (2, 19, True)
    # 3 sequences of 32 tokens at 2 seconds a token before; 2 after; and 5 seconds of waiting.
    assert (gain["seconds_before"], gain["seconds_after"]) == (3 * 64 + 5, 2 * 64 + 5)
    # The samples and their order are the same; sums of gradients are rounded in another order.
    assert losses(slow / "run") == pytest.approx(losses(even / "run"), rel=1e-5)
    consumed = [event["consumed_samples"] for event in events(slow / "run", "step")]
    assert consumed == [6 * step for step in range(1, 21)]


@pytest.mark.slow
def test_a_resume_on_the_same_machines_goes_on_with_the_division(tmp_path, text):
    slow, resumed, steps = tmp_path / "slow", tmp_path / "resumed", "train.steps=14"
    launch(slow, text, steps, slowness=2.0)
    (plan,) = events(slow / "run", "micro_batch_plan")
    launch(resumed, text, "train.steps=12", slowness=2.0)
    state = ckpt.read_manifest(resumed / "run" / "checkpoints").state["stragglers"]
    assert state["division_speeds"] == plan["relative_speeds"]
    replaced = tmp_path / "replaced"
    shutil.copytree(resumed, replaced)
    launch(resumed, text, steps, slowness=2.0)
    assert losses(resumed / "run") == losses(slow / "run"), "the division was in the checkpoint"
    assert len(events(resumed / "run", "micro_batch_plan")) == 1
    # Another machine is not taken for slow.
    launch(replaced, text, steps, slowness=1.0, machines="another")
    state = ckpt.read_manifest(replaced / "run" / "checkpoints").state["stragglers"]
    assert state["division_speeds"] is None


@pytest.mark.slow
def test_a_slow_rank_is_only_reported_where_nothing_can_be_done(tmp_path, text):
    for name, sections, why in (
        ("off", {"stragglers": {"patience_steps": 2}}, "stragglers.rebalance is false"),
        ("few", {"batch": {"global_batch_size": 2, "micro_batch_size": 1}},
         "a step of 2 micro-batches on 2 ranks has no division that saves 5% of its time"),
        ("lockstep", {"parallel": {"dp_shard": 2}},
         "a step of 6 micro-batches on 2 ranks has no division that saves 5% of its time"),
    ):  # fmt: skip
        launch(tmp_path / name, text, "train.steps=11", slowness=2.0, **sections)
        run = tmp_path / name / "run"
        assert all(plan["counts"] in ([1, 1], [3, 3]) for plan in events(run, "micro_batch_plan"))
        found = events(run, "straggler")[0]
        assert (found["rank"], found["stage"]) == (1, 0), name
        assert why in found["action"], name


@pytest.mark.slow
def test_a_rank_that_really_sleeps_gets_less_work(tmp_path, text):
    launch(tmp_path, text, "train.steps=50", sleep=0.1)
    plan = events(tmp_path / "run", "micro_batch_plan")[0]
    assert plan["counts"][1] < plan["counts"][0]
    assert events(tmp_path / "run", "straggler")[0]["rank"] == 1


def test_a_launch_that_needs_the_slow_machine_keeps_it(tmp_path, text):
    """As with --nnodes=2:2 and no spare: the rendezvous would wait for a second machine."""
    sections = {"stragglers": {"replace": True, "patience_steps": 2}, "elastic": {"enabled": True}}
    launch(tmp_path, text, "train.steps=14", slowness=2.0, **sections)
    run = tmp_path / "run"
    assert not (run / "exclude.json").exists()
    assert events(run, "straggler")[-1]["action"] == (
        "still slow: this launch needs machine-1; replace the machine"
    )


def test_the_machine_of_a_rank_that_stays_slow_is_replaced(tmp_path, text):
    sections = {"stragglers": {"replace": True, "patience_steps": 2}, "elastic": {"enabled": True}}
    launch(tmp_path, text, "train.steps=40", slowness=2.0, code=75, machines="spared", **sections)
    run = tmp_path / "run"
    assert [one.node for one in read_exclusions(run / "exclude.json")] == ["spared-1"]
    found = events(run, "straggler")
    assert [one["stage"] for one in found] == [0, 3]
    assert found[-1]["action"] == (
        "still slow: spared-1 is excluded, and the run starts again without it"
    )
    last = events(run, "step")[-1]["step"]
    assert last < 40
    (stop,) = events(run, "stopped")
    assert stop["cause"] == "slow_machine"
    status = json.loads((run / "status.json").read_text())
    assert status["reason"].startswith("stopped to go on without a slow machine")
    assert ckpt.committed_steps(run / "checkpoints")[-1] == last


def test_replacement_needs_an_elastic_run(tmp_path):
    with pytest.raises(InputError, match=r"stragglers\.replace \(true\) must be false"):
        make_spec(tmp_path, stragglers={"replace": True})
