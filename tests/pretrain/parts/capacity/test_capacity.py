"""Runs with straggler-aware capacity, and with routers that go wrong, on real ranks."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ckpt
from convoy.commands.pretrain import main
from moe import MoEConfig, MoELayer, Stopwatch
from parallel import Topology
from pretrain.job import Job
from pretrain.parts.capacity import CapacityBalance, CapacityPart
from pretrain.parts.step import Wish
from pretrain.parts.testing import context_of
from pretrain.train.trainer import Trainer
from router import UNITS_PER_RANK, StragglerAwareConfig
from tests.support.commands import pretrain
from tests.support.jobs import events, prepare_job, write_spec
from tests.support.ranks import run_ranks

MOE = {
    "num_experts": 4,
    "top_k": 2,
    "d_ff": 24,
    "capacity": {"policy": "straggler_aware"},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("job"))


def on_rank(
    rank: int, arguments: list[str], slowness: float, bad_step: int
) -> tuple[int, str, str]:
    """The command, on ranks that take 1 and ``slowness`` seconds for a row."""
    if slowness:
        Stopwatch.seconds = lambda self: float(self.rows) * (slowness if rank else 1.0)
    step = Trainer.step

    def step_with_a_bad_router(self, stop_requested):
        if self.progress.step == bad_step - 1 and rank == 1:
            # Sigmoid scores would make nothing of it: the loss stays finite.
            with torch.no_grad():
                self.job.routers[1].weight.fill_(3e38)
        return step(self, stop_requested)

    if bad_step:
        Trainer.step = step_with_a_bad_router
    return pretrain(arguments)


def launch(folder: Path, text: Path, *overrides: str, slowness=0.0, bad_step=0, **moe: Any):
    folder.mkdir(exist_ok=True)
    data = {"source": str(text / "text"), "path": str(text / "corpus")}
    spec = write_spec(
        folder, moe={**MOE, **moe}, data=data, parallel={"ep": 2}, schedule={"kind": "constant"},
        batch={"global_batch_size": 4},
    )  # fmt: skip
    arguments = [str(spec), *(part for o in overrides for part in ("--set", o))]
    results = run_ranks(on_rank, 2, arguments, slowness, bad_step, group=False)
    assert len({code for code, _, _ in results}) == 1, results
    return results[0][0], results[0][1], "".join(err for _, _, err in results)


def losses(run: Path) -> list[float]:
    found = {event["step"]: event["loss"] for event in events(run, "step")}
    return [found[step] for step in sorted(found)]


@pytest.mark.slow
def test_plans_follow_speed_resume_and_are_replayed(tmp_path, text):
    straight = tmp_path / "straight"
    steps = "train.steps=12"
    code, out, err = launch(straight, text, steps, slowness=3.0)
    assert code == 0, err
    plans = events(straight / "run", "capacity_plan")
    # Two steps of warm-up, and eight in which rank 1 has a third of the other's speed: shares of
    # 1.5 and 0.5, at once and for good.
    assert [(p["step"], p["plans"]) for p in plans] == [(10, [[1536, 512]])]
    assert plans[0]["relative_speeds"] == pytest.approx([1.5, 0.5], rel=1e-3)
    assert "rerouted" in out

    resumed = tmp_path / "resumed"
    code, _, err = launch(resumed, text, "train.steps=10", slowness=3.0)
    assert code == 0, err
    saved = ckpt.read_manifest(resumed / "run" / "checkpoints").state["parts"]["capacity"]
    assert saved["plans"] == [[1536, 512]]
    code, _, err = launch(resumed, text, steps, slowness=3.0)
    assert code == 0, err
    assert losses(resumed / "run") == losses(straight / "run")
    assert len(events(resumed / "run", "capacity_plan")) == 1, "the plan was in the checkpoint"

    replayed, free = tmp_path / "replayed", tmp_path / "free"
    log = straight / "run" / "log.jsonl"
    replay = f"moe.capacity.replay_log={log}"
    code, _, err = launch(replayed, text, steps, replay, slowness=0.1)
    assert code == 0, err
    assert losses(replayed / "run") == losses(straight / "run")
    code, _, err = launch(free, text, steps, slowness=0.1)
    assert code == 0, err
    assert losses(free / "run") != losses(straight / "run"), "plans matter"


def test_a_state_goes_on_and_a_state_of_before_starts_its_measurement_anew():
    topology, config = Topology(dp_shard=4, ep=2), StragglerAwareConfig()
    balance = CapacityBalance(config, topology)
    for step in range(12):
        balance.after(step, [9.0] * 4, [1.0, 3.0, 1.0, 1.0])
    assert balance.plans == [[1536, 512], [1024, 1024]]
    assert balance.relative_speeds == pytest.approx([1.5, 0.5, 1.0, 1.0], rel=1e-3)
    again = CapacityBalance(config, topology)
    again.load(json.loads(json.dumps(balance.state())))
    assert again.state() == balance.state()

    # As checkpoints were before: mean speeds, and the plans in force.
    before = {"speeds": [[1.0, None], [3.0, 3.0]], "plans": [[1536, 512], [1024, 1024]]}
    former = CapacityBalance(config, topology)
    former.load(before)
    assert former.plans == balance.plans
    for step in range(12, 40):
        assert not former.after(step, [9.0] * 4, [1.0, 3.0, 1.0, 1.0]), "the plan is still right"
    for speeds in (former, CapacityBalance(config, topology)):
        if speeds is not former:
            speeds.load(before)
        for step in range(40, 80):
            speeds.after(step, [9.0] * 4, [1.0] * 4)
        assert speeds.plans == [[1024, 1024], [1024, 1024]], "the plan is not right for ever"


@pytest.mark.slow
def test_a_replay_of_what_is_no_log_is_refused(tmp_path, text):
    other = tmp_path / "other.jsonl"
    for content, message in (
        ("{}", "must be the log.jsonl of a run"),
        (json.dumps({"event": "capacity_plan", "time": 1.0, "step": 1, "plans": [[1], [2]]}),
         "must be of 1 expert groups of 2 ranks; after step 1 it has [1, 1]"),
        (json.dumps({"event": "capacity_plan", "time": 1.0, "step": 1, "plans": [[2048, 0]]}),
         "must have positive units that sum to 1024 a rank; after step 1 it has [[2048, 0]]"),
    ):  # fmt: skip
        other.write_text(content + "\n")
        code, _, err = launch(tmp_path / "run", text, f"moe.capacity.replay_log={other}")
        assert code == 2
        assert message in err
    code, _, err = launch(tmp_path / "run", text, "moe.capacity.replay_log=nowhere.jsonl")
    assert code == 2
    assert "moe.capacity.replay_log (nowhere.jsonl) cannot be read: No such file" in err
    code, _, err = launch(
        tmp_path / "run", text, "moe.capacity.replay_log=x", capacity={"policy": "dropless"}
    )
    assert code == 2
    assert "moe.capacity.policy (dropless); policy straggler_aware has it" in err


def test_a_router_that_goes_wrong_is_refused_with_layer_and_step(tmp_path, text):
    code, out, err = launch(
        tmp_path, text, bad_step=3, score_func="sigmoid", norm_topk_prob=False,
        capacity={"policy": "dropless"},
    )  # fmt: skip
    assert code == 3
    # Rank 1 spoils its slice of the parameter, which all ranks compute with.
    said = "router logits of layer 2 are not finite on rank 0"
    assert f"step 3 skipped: {said}" in out
    assert f"step 3 was not finite 3 times in a row ({said})" in err
    skips = events(tmp_path / "run", "skip")
    assert [s["bad_router"] for s in skips] == [[2, 0]] * 3
    assert len(losses(tmp_path / "run")) == 2


def counted_on_rank(rank: int, arguments: list[str]) -> list[list[int]]:
    """What the load-balancing losses of a run's forwards counted, by MoE layer."""
    counted = []
    # The room has a function of this name too, which an import statement would give.
    step_module = importlib.import_module("pretrain.parallelize.micro_batches")
    routing_stats = step_module.routing_stats

    def counting(reports, *args):
        counted.append([int(aux.expert_counts_E.sum()) for aux in reports])
        return routing_stats(reports, *args)

    step_module.routing_stats = counting
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(arguments) == 0
    return counted


def test_a_global_batch_is_counted_over_ranks_and_micro_batches(tmp_path, text):
    data = {"source": str(text / "text"), "path": str(text / "corpus")}
    moe = {"num_experts": 4, "top_k": 2, "d_ff": 24, "aux_loss_scope": "global_batch"}
    spec = write_spec(tmp_path, moe=moe, data=data)
    results = run_ranks(counted_on_rank, 2, [str(spec), "--set", "train.steps=2"], group=False)
    # 2 ranks x 2 sequences x 32 tokens x 2 experts, then as many again, in each of two steps.
    assert results == [[[256, 256], [512, 512]] * 2] * 2


def test_a_plan_that_is_wished_for_reaches_this_ranks_routers():
    config = MoEConfig(
        d_model=8, d_ff=8, num_experts=4, top_k=2, capacity={"policy": "straggler_aware"}
    )
    layer = MoELayer(config)
    topology = Topology(dp_shard=2, ep=2)
    part = CapacityPart(CapacityBalance(config.capacity, topology), context_of(0, []))
    job = Job.__new__(Job)
    block = SimpleNamespace(moe=layer)
    model = SimpleNamespace(local_model=SimpleNamespace(blocks={"0": block}))
    for name, value in {
        "parts": (part,), "parallel_model": model, "runtime": SimpleNamespace(rank=1),
    }.items():  # fmt: skip
        object.__setattr__(job, name, value)
    plans = [[UNITS_PER_RANK + 100, UNITS_PER_RANK - 100]]
    job.act(Wish(plans=plans))
    assert part.balance.plans == plans
    assert list(layer.router.capacity.plan.units) == plans[0]
