"""Whole runs on real ranks: resume is bitwise, a resize keeps the samples and the losses."""

from __future__ import annotations

import copy
import itertools
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.format import encode_manifest
from parallel import Topology
from pretrain.checkpoint import resume
from pretrain.checkpoint.compatible import resolved
from pretrain.data import read_batch
from pretrain.observe.summary import Summary
from pretrain.runtime.locks import lock_run
from pretrain.spec.read import load_spec
from pretrain.train import evaluate as evaluation
from pretrain.train.trainer import Trainer
from tests.support.checkpoints import eventually, manifest_file
from tests.support.commands import pretrain
from tests.support.jobs import data_of, events, prepare_job, write_spec
from tests.support.ranks import run_ranks

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("job"))


def on_rank(rank: int, arguments: list[str], stop_after: int | None) -> tuple[int, str, str]:
    """The command; with ``stop_after``, the last rank gets a real SIGTERM in the step before."""
    if stop_after is not None and rank == int(os.environ["WORLD_SIZE"]) - 1:
        step = Trainer.step

        def step_with_signal(self, stop_requested):
            # The flag is read before a step: what comes during this one stops the next.
            if self.progress.step == stop_after - 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(self, stop_requested)

        Trainer.step = step_with_signal
    return pretrain(arguments)


def launch(spec: Path, world: int, *overrides: str, stop_after=None) -> tuple[int, str, str]:
    arguments = [str(spec), *(part for o in overrides for part in ("--set", o))]
    results = run_ranks(on_rank, world, arguments, stop_after, group=False)
    codes = {code for code, _, _ in results}
    assert len(codes) == 1, results
    for code, out, _ in results[1:]:
        assert out == "" or code != 0, "only rank 0 speaks"
    return codes.pop(), results[0][1], "".join(err for _, _, err in results)


def losses(run: Path) -> list[float]:
    found = {event["step"]: event["loss"] for event in events(run, "step")}
    assert sorted(found) == list(range(1, len(found) + 1))
    return [found[step] for step in sorted(found)]


def fingerprints(run: Path) -> dict[str, int]:
    """A checksum of every object of the newest checkpoint: parameters, moments, random states."""
    manifest = ckpt.read_manifest(run / "checkpoints")
    ckpt.verify(run / "checkpoints", manifest)
    return {key: record.checksum for key, record in manifest.objects.items()}


def check_expert_loads(intervals: list[dict[str, Any]]) -> None:
    """The loads that the log has of each interval say what its other fields say."""
    for interval in intervals:
        assert list(interval["expert_loads"]) == ["1", "2"], "the MoE layers"
        largest = [max(loads) for loads in interval["expert_loads"].values()]
        assert largest == pytest.approx([100 * x for x in interval["layer_imbalances"]], abs=0.51)
        assert interval["load_quantiles"]["max"] == pytest.approx(max(interval["layer_imbalances"]))
        assert list(interval["load_quantiles"]) == ["p50", "p90", "p99", "max"]


@pytest.mark.parametrize(
    ("world", "parallel", "moe"),
    [
        pytest.param(1, {}, {"input_jitter": 0.01}, marks=SLOW),
        (2, {"ep": 2}, {"expert_bias": True, "input_jitter": 0.01}),
        pytest.param(2, {"ep": 1, "memory": {"zero_stage": 1}}, {}, marks=SLOW),
        pytest.param(2, {"dp_replicate": 2, "gradient_compression": "one_bit"}, {}, marks=SLOW),
        pytest.param(4, {"ep": 2}, {}, marks=SLOW),
        pytest.param(4, {"ep": 4, "cp": 2}, {"input_jitter": 0.01}, marks=SLOW),
        pytest.param(4, {"dp_replicate": 2}, {"expert_bias": True}, marks=SLOW),
        pytest.param(
            4, {"tp": 2, "pp": 2}, {"expert_bias": True, "input_jitter": 0.01}, marks=SLOW
        ),
    ],
)
def test_a_stopped_and_resumed_run_is_bitwise_the_uninterrupted_one(
    text, tmp_path, world, parallel, moe
):
    # An evaluation just before the checkpoint must leave no trace in either.
    evaluation = {"interval_steps": 3}
    spec = write_spec(tmp_path, parallel=parallel, data=data_of(text), eval=evaluation, moe=moe)
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"

    code, out, _ = launch(spec, world, f"run_dir={straight}")
    assert code == 0
    assert "bits per byte" in out
    per_token = [e["mfu"] / e["tokens_per_second"] for e in events(straight, "interval")]
    assert per_token == pytest.approx([per_token[0]] * 3)
    assert per_token[0] > 0
    check_expert_loads(events(straight, "interval"))

    code, out, _ = launch(spec, world, f"run_dir={resumed}", stop_after=4)
    assert code == 75
    assert "stopped after step 4" in out
    assert ckpt.committed_steps(resumed / "checkpoints") == [3, 4]
    code, out, _ = launch(spec, world, f"run_dir={resumed}")
    assert code == 0
    assert "resuming after step 4" in out

    assert losses(straight) == losses(resumed)
    assert fingerprints(straight) == fingerprints(resumed)
    a, b = (ckpt.read_manifest(run / "checkpoints") for run in (straight, resumed))
    for key in ("step", "tokens_seen", "consumed_samples", "train_loss_first", "train_loss_last"):
        assert a.state[key] == b.state[key], key
    assert a.state["consumed_samples"] == 6 * 8
    if "expert_bias" in moe:
        bias = ckpt.read.open_group(straight / "checkpoints")["model/layers/moe/router/expert_bias"]
        assert bias.shape == (2, 4)
        assert 0 < abs(bias[...]).max() < 0.0061, "six steps of 0.001"

    code, out, _ = launch(spec, world, f"run_dir={resumed}")
    assert code == 0
    assert "done already: step 6 of 6" in out


@SLOW
def on_rank_that_is_told_within_an_evaluation(
    rank: int, arguments: list[str], at: int
) -> tuple[int, str, str]:
    """The command; rank 1 gets a real SIGTERM before its forward number ``at`` of an evaluation."""
    reads = itertools.count(1)

    def read_with_signal(*args):
        if rank == 1 and next(reads) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return read_batch(*args)

    evaluation.read_batch = read_with_signal
    return on_rank(rank, arguments, None)


@pytest.mark.parametrize("at", [2, 6])
def test_a_run_stops_within_an_evaluation_and_goes_on_from_there(text, tmp_path, at):
    # A rank has 4 forwards in the evaluation of step 2, and the summary needs some more.
    evaluates = {"interval_steps": 2, "sequences": 16, "final_sequences": 64}
    spec = write_spec(tmp_path, data=data_of(text), eval=evaluates, batch={"micro_batch_size": 2},
                      train={"steps": 2 if at == 6 else 4})  # fmt: skip
    run = tmp_path / "run"
    arguments = [str(spec), "--set", f"run_dir={run}"]
    results = run_ranks(on_rank_that_is_told_within_an_evaluation, 2, arguments, at, group=False)
    assert [code for code, _, _ in results] == [75, 75], results
    step = ckpt.committed_steps(run / "checkpoints")[-1]
    assert f"stopped after step {step}; the same command resumes" in results[0][1]
    assert step == (2 if at == 6 else 3)
    assert not (run / "summary.json").exists()
    code, out, _ = launch(spec, 2, f"run_dir={run}")
    assert code == 0
    assert re.search(r"scoring \d+ held-out sequences for the summary", out)
    assert Summary.read(run / "summary.json").steps == step + (at != 6)


def test_a_batch_that_grows_is_the_same_on_any_ranks_and_after_a_resume(text, tmp_path):
    batch = {"batch_size_rampup": {"start": 2, "tokens": 600}}
    spec = write_spec(tmp_path, data=data_of(text), train={"steps": 8}, batch=batch)
    runs = {world: tmp_path / str(world) for world in (1, 2, 4)}
    for world, run in runs.items():
        if world == 2:
            code, *_ = launch(spec, world, f"run_dir={run}", stop_after=3)
            assert code == 75
        code, _, err = launch(spec, world, f"run_dir={run}")
        assert code == 0, err
    # 32 tokens of a sequence: 2 + 6 · tokens / 600, by whole micro-batches, and 8 from 600 on.
    cursors = [2, 4, 6, 8, 12, 16, 22, 30]
    for run in runs.values():
        assert [event["consumed_samples"] for event in events(run, "step")] == cursors
        assert losses(run) == pytest.approx(losses(runs[1]), rel=1e-5)
    assert [event["tokens_seen"] for event in events(runs[2], "step")] == [32 * c for c in cursors]


@SLOW
def test_recomputed_activations_change_no_bit(text, tmp_path):
    moe = {"expert_bias": True, "input_jitter": 0.01, "seq_aux_loss_coeff": 0.01}
    found = []
    for name in ("none", "full", "selective"):
        parallel = {"ep": 2, "memory": {"recompute": name}}
        spec = write_spec(tmp_path, parallel=parallel, data=data_of(text), moe=moe)
        code, _, err = launch(spec, 4, f"run_dir={tmp_path / name}")
        assert code == 0, err
        found.append(fingerprints(tmp_path / name))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("before", "after", "cp", "steps"),
    [
        (2, 1, 1, 12),
        pytest.param(2, 1, 1, 24, marks=SLOW),
        pytest.param(2, 4, 2, 24, marks=SLOW),
        pytest.param(1, 2, 1, 24, marks=SLOW),
        pytest.param(2, 4, 1, 24, marks=SLOW),
        pytest.param(1, 2, 2, 24, marks=SLOW),
    ],
)
def test_a_resize_keeps_the_samples_and_the_losses(text, tmp_path, before, after, cp, steps):
    sections = {
        "data": data_of(text),
        "train": {"steps": steps},
        "batch": {"global_batch_size": 6},
        "eval": {"final_sequences": 4},
        "checkpoint": {"interval_steps": 100},
        "moe": {"expert_bias": True, "seq_aux_loss_coeff": 0.01},
    }
    spec = write_spec(tmp_path, **sections)
    ep = {1: 1, 2: 2, 4: 4}
    straight, resized = tmp_path / "straight", tmp_path / "resized"
    code, *_ = launch(spec, before, f"run_dir={straight}", f"parallel.ep={ep[before]}")
    assert code == 0
    on_resized = f"run_dir={resized}"
    code, *_ = launch(spec, before, on_resized, f"parallel.ep={ep[before]}", stop_after=4)
    assert code == 75

    layout = f"parallel.ep={ep[after]}", f"parallel.cp={cp}"
    code, _, err = launch(spec, after, on_resized, *layout)
    assert code == 2
    assert err.count("\n") == 1
    assert "must be that of the checkpoint of step 4" in err
    assert "checkpoint.reshard_on_load must be true" in err

    # A checkpoint that was resharded before needs no such word.
    was = ckpt.read_manifest(resized / "checkpoints")
    shape = Topology(dp_shard=after // cp, cp=cp, ep=ep[after])
    ckpt.reshard(resized / "checkpoints", was, tmp_path / "resharded", shape)
    elsewhere = f"run_dir={tmp_path / 'elsewhere'}", f"checkpoint.path={tmp_path / 'resharded'}"
    code, out, err = launch(spec, after, *elsewhere, *layout, "train.steps=6")
    assert code == 0, err
    assert "resuming after step 4" in out
    went_on = [event["loss"] for event in events(tmp_path / "elsewhere", "step")]

    code, *_ = launch(spec, after, on_resized, *layout, "checkpoint.reshard_on_load=true")
    assert code == 0
    a, b = losses(straight), losses(resized)
    assert len(a) == len(b) == steps
    assert len(went_on) == 2
    assert went_on[0] == pytest.approx(a[4], rel=1e-5)
    for step, (x, y) in enumerate(zip(a, b, strict=True), 1):
        assert y == pytest.approx(x, rel=1e-5), f"step {step}"
    assert [e["consumed_samples"] for e in events(straight, "step")] == [
        e["consumed_samples"] for e in events(resized, "step")
    ]
    assert a[-1] < a[0]
    (score,) = events(straight, "eval")
    assert not score["whole"], "eval.final_sequences is less than what is held out"


def reading_noted(rank: int, arguments: list[str], note: Path) -> tuple[int, str, str]:
    """The command; what arrays this rank has read is noted."""
    from importlib import import_module

    loading = import_module("ckpt.read.load")

    real, names = loading.read_one, set()

    def read(store, manifest, layout, box, target):
        names.add(layout.record.name)
        return real(store, manifest, layout, box, target)

    loading.read_one = read
    resume._read_once = lambda root: True  # as of an object store
    result = on_rank(rank, arguments, None)
    (note / f"rank-{rank}").write_text("\n".join(sorted(names)))
    return result


@SLOW
def test_copies_of_the_model_may_be_read_once(text, tmp_path):
    spec = write_spec(
        tmp_path, data=data_of(text), parallel={"dp_replicate": 2}, moe={"expert_bias": True}
    )
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert launch(spec, 2, f"run_dir={straight}")[0] == 0
    assert launch(spec, 2, f"run_dir={resumed}", stop_after=4)[0] == 75
    arguments = [str(spec), "--set", f"run_dir={resumed}"]
    results = run_ranks(reading_noted, 2, arguments, tmp_path, group=False)
    assert [code for code, _, _ in results] == [0, 0], results
    first, second = ((tmp_path / f"rank-{r}").read_text().split() for r in (0, 1))
    assert "model/layers/moe/experts/w_gate" in first
    assert second == ["rng/cpu"]
    assert losses(straight) == losses(resumed)
    assert fingerprints(straight) == fingerprints(resumed)


@SLOW
def test_gradients_with_fewer_bits_train_as_well(text, tmp_path):
    found = {}
    for how in ("none", "bfloat16", "one_bit"):
        spec = write_spec(
            tmp_path, f"{how}.json", data=data_of(text), run_dir=str(tmp_path / how),
            parallel={"dp_replicate": 2, "gradient_compression": how},
            train={"steps": 12}, checkpoint={"interval_steps": 12},
        )  # fmt: skip
        assert launch(spec, 2)[0] == 0
        found[how] = losses(tmp_path / how)
    assert found["bfloat16"] != found["none"]
    assert found["bfloat16"] == pytest.approx(found["none"], rel=2e-3)
    assert found["one_bit"][0] == found["none"][0]
    # Signs alone, but none of what they leave out is lost.
    assert found["one_bit"][-1] < found["none"][0] - 0.5 * (found["none"][0] - found["none"][-1])

    owed = ckpt.read_manifest(tmp_path / "one_bit" / "checkpoints")
    arrays = {a.name: a.shape for a in owed.arrays}
    parameters = {name for name in arrays if name.startswith("optimizer/exp_avg/")}
    assert {name.replace("residual", "optimizer/exp_avg") for name in arrays
            if name.startswith("residual/")} == parameters  # fmt: skip
    assert arrays["residual/layers/moe/experts/w_gate"][:2] == (2, 2)

    code, out, err = launch(
        tmp_path / "one_bit.json", 2, "parallel.gradient_compression=none", "train.steps=13"
    )
    assert code == 0, err
    assert "error-feedback buffers of compressed gradients are dropped: the spec asks" in out
    # The checkpoint after that has nothing of the kind: the one before it is gone back to.
    manifest_file(tmp_path / "one_bit" / "checkpoints", 13).unlink()

    code, out, err = launch(
        tmp_path / "one_bit.json", 1, "parallel.dp_replicate=1", "train.steps=14",
        "parallel.gradient_compression=none", "checkpoint.reshard_on_load=true",
    )  # fmt: skip
    assert code == 0, err
    assert "error-feedback buffers of compressed gradients are dropped: they are" in out


def test_fields_of_a_saved_spec_that_are_no_more_do_not_matter(text, tmp_path):
    spec = load_spec(write_spec(tmp_path, data=data_of(text))).as_dict()
    saved = copy.deepcopy(spec)
    saved["parallel"]["reshard_after_forward"] = True
    saved["forgotten"] = {"section": 1}
    del saved["data"]["document_mask"]
    assert resolved(saved) == spec


def test_a_run_that_diverges_ends_with_3_and_keeps_the_last_good_state(text, tmp_path):
    spec = write_spec(
        tmp_path, data=data_of(text), parallel={"ep": 2},
        optimizer={"lr": 1e30, "clip_norm": 0.0}, checkpoint={"interval_steps": 1},
        train={"steps": 50, "seed": 20260101},
    )  # fmt: skip
    code, out, err = launch(spec, 2)
    assert code == 3
    assert "was not finite 3 times in a row" in err
    assert out.count("skipped: loss") == 3
    run = tmp_path / "run"
    good = len(events(run, "step"))
    assert good >= 1
    skips = events(run, "skip")
    assert [s["step"] for s in skips] == [good + 1] * 3, "a skip moves nothing forward"
    # Such a run does not wait for its writer processes, which finish what they were given.
    root = run / "checkpoints"
    eventually(lambda: ckpt.committed_steps(root)[-1:] == [good], "the last good step is saved")
    fingerprints(run)
    assert f"the newest committed checkpoint is step {good} in" in err


def check_communication(interval: dict, parallel: dict) -> None:
    """Every axis with ranks has seconds, others have none, and the waits are within the step."""
    seconds, exposed = interval["communication_seconds"], interval["exposed_seconds"]
    degrees = {axis: value for axis, value in parallel.items() if isinstance(value, int)}
    axes = {axis for axis, degree in degrees.items() if "_" not in axis and degree > 1}
    assert set(seconds) - {"dp", "world"} == axes
    for axis in seconds:
        assert 0 < exposed[axis] <= seconds[axis] <= interval["seconds"]
    assert sum(exposed.values()) < interval["seconds"]
    if "pp" in axes:
        assert 0 < interval["bubble"] < 1
        p, m = parallel["pp"], 4
        passes = 6 * m if parallel.get("pipeline", {}).get("schedule") == "zbv" else m
        assert interval["bubble_formula"] == (p - 1) / (passes + p - 1)


ZBV = {"pp": 2, "tp": 2, "pipeline": {"schedule": "zbv", "stages_per_rank": 2}}
MORE_LAYOUTS = [(4, {"ep": 4}), (3, {"pp": 3}), (4, {"cp": 2, "ep": 2}), (4, {"pp": 2, "tp": 2})]


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [[(4, ZBV)], MORE_LAYOUTS])
def test_evaluation_and_text_do_not_depend_on_the_layout(text, tmp_path, layouts):
    bits, samples, loads = [], [], []
    for number, (world, parallel) in enumerate([(1, {}), *layouts]):
        run = tmp_path / str(number)
        spec = write_spec(
            tmp_path, f"{number}.json", data=data_of(text), train={"steps": 1},
            schedule={"warmup_steps": 0}, run_dir=str(run), parallel=parallel,
            sample={"prompt": "def f(", "tokens": 5}, model={"num_layers": 4},
        )  # fmt: skip
        code, out, err = launch(spec, world)
        assert code == 0, err
        assert "sample, from 'def f('" in out
        check_communication(events(run, "interval")[0], parallel)
        bits.append([e["bits_per_byte"] for e in events(run, "eval") if "whole" in e])
        summary = Summary.read(run / "summary.json")
        samples.append(summary.sample)
        loads.append(summary.tokens_per_expert)
    for each in bits:
        assert each == pytest.approx(bits[0], rel=1e-5)
    assert 1 < bits[0][0] < 9
    assert set(samples) == {samples[0]}
    for each in loads:
        # A token between two experts may go to the other: products are summed in another order.
        assert sum(abs(a - b) for x, y in zip(each, loads[0], strict=True)
                   for a, b in zip(x, y, strict=True)) <= 4  # fmt: skip


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory) -> Path:
    """A folder with a run that has ended, on one rank."""
    folder = tmp_path_factory.mktemp("finished")
    spec = write_spec(folder, data=data_of(text))
    assert launch(spec, 1)[0] == 0
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "batch.global_batch_size=4",
            r"batch.global_batch_size \(4\) must be as in the checkpoint",
        ),
        ("moe.top_k=1", "moe.norm_topk_prob"),
        ("moe.d_ff=16", r"moe.d_ff \(16\) must be as in the checkpoint of step 6"),
        ("data.seq_len=16", r"data.seq_len \(16\) must be as in"),
        ("data.document_mask=true", r"data.document_mask \(True\) must be as in"),
        ("train.seed=1", r"train.seed \(1\) must be as in"),
        ("optimizer.kind=muon", r"optimizer.kind \(muon\) must be as in .* \(adamw\)"),
    ],
)
def test_a_resume_that_would_be_another_run_is_refused(finished, change, message):
    before = fingerprints(finished / "run")
    code, _, err = launch(finished / "spec.json", 1, change)
    assert code == 2
    assert err.count("\n") == 1
    assert __import__("re").search(message, err), err
    assert fingerprints(finished / "run") == before


def test_a_state_of_another_step_than_its_manifest_is_refused(finished, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run")
    root = tmp_path / "run/checkpoints"
    manifest = ckpt.read_manifest(root, 6)
    forged = manifest.model_copy(update={"state": {**manifest.state, "step": 5}})
    manifest_file(root, 6).write_bytes(encode_manifest(forged))
    code, _, err = launch(finished / "spec.json", 1, f"run_dir={tmp_path / 'run'}")
    assert code == 2
    assert err.count("\n") == 1
    assert "state.step (5) must be the step of the manifest (6)" in err


def test_two_runs_never_share_a_folder(text, tmp_path):
    path = write_spec(tmp_path, data=data_of(text))
    shared = f"checkpoint.path={tmp_path / 'shared'}"
    with lock_run(load_spec(path, [shared])):
        for overrides, field in [
            ([], "run_dir"),
            ([f"run_dir={tmp_path / 'other'}", shared], "checkpoint.path"),
        ]:
            code, _, err = launch(path, 1, *overrides)
            assert code == 2
            assert err.startswith(f"error: {field} (")
            assert "in use by another run" in err
    assert launch(path, 1, shared)[0] == 0
