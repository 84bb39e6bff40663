"""Replicas that leave and come back: nobody else starts again, and every bit stays."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from parallel import Topology
from tests.support.healing import (
    HealingRun,
    LogTail,
    arrays_in_common,
    differences,
    healing_spec,
    lost_or_repeated,
)
from tests.support.jobs import prepare_job
from tests.support.processes import kill_with_descendants


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("job"))


def alone(folder: Path, job: Path, steps: int, **sections: Any) -> HealingRun:
    """The run on one rank, until some step."""
    reference = HealingRun(folder, healing_spec(folder, job, {}, **sections), Topology())
    try:
        reference.wait(
            lambda: len(reference.log.of("digest")) >= steps, "the reference is slow", 300
        )
        reference.stop()
    finally:
        reference.close()
    return reference


def check_moments(run: Path, reference: Path) -> None:
    """Parameters, moments and buffers of the newest common checkpoint have equal bits."""
    arrays = arrays_in_common(run, reference)
    assert any(name.startswith("optimizer") or "exp_avg" in name for name in arrays), arrays
    assert set(arrays.values()) == {"alike"}, arrays


@pytest.mark.timeout(400)
def test_the_loss_of_rank_0_restarts_no_other_process_and_changes_no_bit(tmp_path, job):
    topology = Topology(dp_replicate=2)
    folder = tmp_path / "healed"
    spec = healing_spec(folder, job, {"dp_replicate": 2})
    run = HealingRun(folder, spec, topology)
    try:
        before = run.wait_for_all()
        run.wait(lambda: len(run.log.of("step")) >= 3, "no steps")
        moment = run.strike(0)
        run.first_step_after_regroup(moment)
        after = run.wait_for_all()
        assert after[1] == before[1], "the healthy replica keeps its process"
        assert after[0] != before[0]
        came = run.log.of("regrouped", moment)[-1]
        run.wait(lambda: run.log.of("step", came["time"])[3:], "no steps")
        run.stop()
    finally:
        run.close()
    left = next(e for e in run.log.of("regrouped") if e["left"])
    assert left["left"][0] == {"replica": 0, "start": 0, "why": "rank 0 ended by signal 9"}
    assert len(run.log.of("start")) == 1
    reference = alone(tmp_path / "alone", job, len(run.log.of("step")))
    assert differences(run.log, reference.log) == []
    assert lost_or_repeated(run.log) == []
    assert "replica 0 left (rank 0 ended by signal 9)" in run.output.read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("degrees", "number"),
    [
        ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, signal.SIGKILL),
        ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, signal.SIGSTOP),
        ({"dp_replicate": 2, "pp": 2}, signal.SIGKILL),
        ({"dp_replicate": 3}, signal.SIGKILL),
    ],
)
def test_losses_of_many_ranks_in_turn_change_no_bit(tmp_path, job, degrees, number):
    topology, folder = Topology(**degrees), tmp_path / "healed"
    run = HealingRun(folder, healing_spec(folder, job, degrees), topology)
    rng = random.Random(0)
    try:
        for _ in range(5):
            before = run.wait_for_all()
            time.sleep(rng.random() * 0.3)
            rank = rng.choice(sorted(before))
            run.first_step_after_regroup(run.strike(rank, number))
            after = run.trainers()
            for other, process in before.items():
                if run.replica_of(other) != run.replica_of(rank):
                    assert after[other] == process
        run.train_on(12)
        run.stop()
    finally:
        run.close()
    steps = len(run.log.of("step"))
    reference = alone(tmp_path / "alone", job, steps)
    assert differences(run.log, reference.log) == []
    assert lost_or_repeated(run.log) == []
    check_moments(run.run, reference.run)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_where_all_replicas_are_lost_the_run_goes_on_from_its_checkpoint(tmp_path, job):
    folder = tmp_path / "healed"
    run = HealingRun(
        folder, healing_spec(folder, job, {"dp_replicate": 2}), Topology(dp_replicate=2)
    )
    try:
        run.wait_for_all()
        run.wait(lambda: run.log.of("checkpoint"), "no checkpoint")
        for process in run.trainers().values():
            kill_with_descendants(process)
        run.wait(lambda: len(run.log.of("start")) == 2, "no second start")
        run.wait(lambda: run.log.of("step")[-1]["step"] > 30, "no steps")
        run.stop()
    finally:
        run.close()
    assert run.log.of("start")[1]["step"] >= 10
    reference = alone(tmp_path / "alone", job, 30)
    assert differences(run.log, LogTail(reference.run)) == []
    assert lost_or_repeated(run.log) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("watched", [True, False])
def test_a_rank_that_hangs_costs_its_replica_alone(tmp_path, job, watched):
    """With and without the watch over heartbeats: a time-out of a collective finds the rank too."""
    folder = tmp_path / "healed"
    spec = healing_spec(
        folder,
        job,
        {"dp_replicate": 2},
        train={"timeout_seconds": 12.0},
        detection={"stuck_seconds": 1.0 if watched else 1000.0},
        inject=[{"kind": "hang", "step": 20, "rank": 1}],
    )
    run = HealingRun(folder, spec, Topology(dp_replicate=2))
    try:
        before = run.wait_for_all()
        run.wait(lambda: [e for e in run.log.of("regrouped") if e["joined"]], "nobody came")
        assert run.trainers()[0] == before[0]
        run.wait(lambda: run.log.of("step")[-1]["step"] > 30, "no steps")
        run.stop()
    finally:
        run.close()
    reference = alone(tmp_path / "alone", job, 30)
    assert differences(run.log, LogTail(reference.run)) == []
    assert lost_or_repeated(run.log) == []
    left = next(e for e in run.log.of("regrouped") if e["left"])["left"][0]
    assert left["replica"] == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "sections",
    [
        {"verify": {"parameters_interval_steps": 2, "gradients_interval_steps": 3}},
        {"moe": {"num_experts": 4, "top_k": 2, "d_ff": 24, "expert_bias": True,
                 "bias_update_rate": 0.01}},
    ],
    ids=["verify", "bias"],
)  # fmt: skip
def test_what_a_run_does_besides_survives_too(tmp_path, job, sections):
    """Checks of ``[verify]`` go on, and routers' biases move as if nothing had happened."""
    degrees, folder = {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, tmp_path / "healed"
    run = HealingRun(folder, healing_spec(folder, job, degrees, **sections), Topology(**degrees))
    try:
        for rank in (3, 0):
            run.wait_for_all()
            run.first_step_after_regroup(run.strike(rank))
        run.train_on(8)
        run.stop()
    finally:
        run.close()
    assert not run.log.of("corruption")
    if "verify" in sections:
        assert run.log.of("verified")
    reference = alone(tmp_path / "alone", job, len(run.log.of("step")), **sections)
    assert differences(run.log, reference.log) == []
    check_moments(run.run, reference.run)
