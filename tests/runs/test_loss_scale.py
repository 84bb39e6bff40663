"""The loss scale of float16: exact, found by trying, and part of the state."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from convoy.commands.pretrain import main
from parallel import local_shard
from pretrain.checkpoint.resume import restore
from pretrain.errors import HealthError
from pretrain.job import build_job, rank_model
from pretrain.observe import JsonlLog
from pretrain.runtime.ranks import start
from pretrain.spec.job import JobSpec
from pretrain.state.progress import Progress
from pretrain.train import trainer
from pretrain.train.trainer import Trainer
from tests.support.jobs import data_of, events, prepare_job, save_checkpoint
from tests.support.layouts import Attempt, NoCheckpoints, Trained, spec_for, train
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    return data_of(prepare_job(tmp_path_factory.mktemp("scale")))


def slow(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def float16(
    folder: Path, data: dict[str, str], layout: str, compression: str = "none", **fields: Any
) -> JobSpec:
    """With noise on the routers' input, so that a step that is tried again shows whether it is the
    same one."""
    precision = {"compute": "float16"}
    precision |= {name: fields.pop(name) for name in list(fields) if name.startswith("loss_scale")}
    sections = {
        "run_dir": str(folder),
        "parallel": {"gradient_compression": compression},
        "moe": {"expert_bias": True, "input_jitter": 0.01},
        "batch": {"global_batch_size": 6},
        "precision": precision,
        "train": {"steps": 20, **fields},
    }
    folder.mkdir()
    return spec_for(folder, data, layout, **sections)


@pytest.mark.parametrize(
    ("layout", "compression"),
    [
        ("dp_shard=1", "none"), ("pp=2", "none"), slow("dp_replicate=2", "one_bit"),
        slow("dp_replicate=2", "bfloat16"), slow("pp=2,dp_shard=2,ep=2", "none"),
    ],
)  # fmt: skip
def test_scales_change_no_bit_in_float32(layout, compression, data, tmp_path):
    spec = spec_for(
        tmp_path, data, layout, moe={"z_loss_coeff": 1e-3},
        parallel={"gradient_compression": compression},
    )  # fmt: skip
    plain = train(spec, 3)
    scaled = train(spec, 3, loss_scale=2.0**16, first=partial(grow_after, 1))
    assert [attempt.loss_scale for attempt in plain.attempts] == [None] * 3
    assert [attempt.loss_scale for attempt in scaled.attempts] == [2.0**16, 2.0**17, 2.0**18]
    assert scaled.losses == plain.losses
    assert scaled.norms == plain.norms
    for mine, theirs in ((scaled.gradients, plain.gradients), (scaled.state, plain.state)):
        assert all(torch.equal(mine[name], value) for name, value in theirs.items())
        assert mine.keys() == theirs.keys()


def grow_after(steps: int) -> None:
    """On a rank: the loss scale doubles after so few steps."""
    trainer.GROWTH_STEPS = steps


def same_run(a: Trained, b: Trained) -> None:
    for name, value in a.state.items():
        assert torch.equal(b.state[name], value), name
    own = {"train_seconds": 0.0, "run_id": ""}
    assert replace(a.progress, **own) == replace(b.progress, **own)


def follow_the_rule(attempts: list[Attempt], scale: float, growth_steps: int) -> None:
    """Samples and scales of every attempt, from nothing but which of them overflowed."""
    samples = steps = 0
    for attempt in attempts:
        assert (attempt.samples, attempt.loss_scale) == (samples, scale)
        assert attempt.outcome in ("commit", "overflow")
        if attempt.outcome == "overflow":
            scale, steps = scale / 2, 0
            continue
        samples, steps = samples + 6, steps + 1
        if steps == growth_steps:
            scale, steps = scale * 2, 0


@pytest.mark.parametrize(
    ("layout", "compression"),
    [
        slow("dp_shard=2,ep=2", "none"), slow("pp=2", "none"), slow("tp=2", "none"),
        slow("dp_replicate=2", "one_bit"),
    ],
)  # fmt: skip
def test_a_scale_that_fits_is_found_and_leaves_no_trace(layout, compression, data, tmp_path):
    growth, first = 2, 2**40
    made = partial(float16, data=data, layout=layout, compression=compression)
    grows = partial(grow_after, growth)
    spec = made(tmp_path / "a", loss_scale=first)
    found = train(spec, 6, save_at=3, first=grows)
    follow_the_rule(found.attempts, first, growth)
    outcomes = [attempt.outcome for attempt in found.attempts]
    overflows = outcomes.index("commit")
    assert 15 < overflows < 30
    assert "overflow" in outcomes[overflows:], "it grows until it is too large again"

    low = int(found.attempts[overflows].loss_scale or 0)
    straight = train(made(tmp_path / "b", loss_scale=low), 6, first=grows)
    assert straight.attempts == found.attempts[overflows:]
    assert straight.norms == found.norms
    same_run(straight, found)

    resumed = train(spec, 3, first=grows)
    assert resumed.attempts == found.attempts[-len(resumed.attempts) :]
    assert resumed.losses == found.losses[3:]
    same_run(resumed, found)


def poisoned_on_rank(spec: JobSpec, poison: str, rank: int) -> str:
    """From the second step on the loss is NaN, or gradients are and the loss is not."""
    runtime = start(60.0)
    job = build_job(spec, runtime)
    job.events.subscribe(JsonlLog(spec.run_path / "log.jsonl"))
    training = Trainer(job, restore(job), NoCheckpoints())
    training.step(False)
    if poison == "gradients":
        rank_model.grad_square_sum = lambda *_: torch.tensor(torch.nan)
    else:
        local_shard(job.model.head.weight).detach().fill_(torch.nan)
    try:
        for _ in range(20):
            training.step(False)
    except HealthError as error:
        return str(error)
    return "no error in 20 steps"


@pytest.mark.parametrize(
    ("poison", "skips"),
    [
        ("loss", [("not_finite", 8.0)] * 3),
        (
            "gradients",
            [*(("overflow", scale) for scale in (8.0, 4.0, 2.0)), *[("not_finite", 1.0)] * 3],
        ),
    ],
)
def test_what_no_scale_helps_ends_the_run(poison, skips, data, tmp_path):
    spec = float16(tmp_path / "run", data, "", loss_scale=8)
    (message,) = run_ranks(partial(poisoned_on_rank, spec, poison), 1, group=False)
    assert "step 2 was not finite 3 times in a row" in message
    assert [step["loss_scale"] for step in events(spec.run_path, "step")] == [8.0]
    found = events(spec.run_path, "skip")
    assert [(skip["reason"], skip["loss_scale"]) for skip in found] == skips
    assert {skip["step"] for skip in found} == {2}


SCALED, NONE = (
    {"loss_scale": scale, "steps_at_loss_scale": steps} for scale, steps in ((64.0, 7), (None, 0))
)
CHECKPOINTS: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({}, "float32", NONE),  # {}: a checkpoint from before there was a scale
    ({}, "float16", {"loss_scale": 512.0, "steps_at_loss_scale": 0}),
    (NONE, "float16", {"loss_scale": 512.0, "steps_at_loss_scale": 0}),
    (SCALED, "float16", SCALED),
    (SCALED, "bfloat16", NONE),
]
"""What a checkpoint says, the precision of the run that takes it up, and what that has."""


def resume_on_rank(spec: JobSpec, rank: int) -> list[Progress]:
    runtime = start(60.0)
    job = build_job(spec, runtime)
    restore(job)
    as_dict, found = Progress.as_dict, []
    for step, (saved, precision, _) in enumerate(CHECKPOINTS, 1):

        def only_saved(self: Progress, saved: dict[str, Any] = saved) -> dict[str, Any]:
            return {k: v for k, v in as_dict(self).items() if k not in NONE} | saved

        Progress.as_dict = only_saved
        save_checkpoint(job, Progress(step=step, tokens_seen=192 * step, consumed_samples=6 * step))
        section = spec.precision.model_copy(update={"compute": precision})
        restored = restore(build_job(spec.model_copy(update={"precision": section}), runtime))
        found.append(replace(restored, run_id=""))
    return found


def test_a_checkpoint_with_a_scale_or_without(data, tmp_path):
    spec = float16(tmp_path / "run", data, "", loss_scale=512)
    (found,) = run_ranks(partial(resume_on_rank, spec), 1, group=False)
    assert found == [
        Progress(step=step, tokens_seen=192 * step, consumed_samples=6 * step, **expected)
        for step, (_, _, expected) in enumerate(CHECKPOINTS, 1)
    ]


def test_float8_is_refused_before_anything_begins(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("pretrain.train.run", lambda spec, status: pytest.fail("it began"))
    float16(tmp_path / "run", data, "")
    assert main([str(tmp_path / "run" / "spec.json"), "--set", "precision.compute=float8"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "precision.compute (float8) must be float32, bfloat16 or float16" in err
    assert "float8 is for precision.experts and precision.dense" in err
