"""``train.exact``: every layout has the bits of one process; what cannot have them is refused."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from convoy.commands.command_line import main
from moe.copies import CopyPlan, balance, plan_copies
from parallel import CollectiveKind, monitor_collectives
from parallel.exact import arithmetic as exact
from pretrain.checkpoint.compatible import check_resumable
from pretrain.checkpoint.resume import restore
from pretrain.data import Cursor
from pretrain.errors import InputError
from pretrain.job import Job, build_job
from pretrain.runtime.ranks import start
from pretrain.spec.job import JobSpec
from pretrain.train.evaluate import evaluate
from router import UNITS_PER_RANK, CapacityPlan
from tests.support.exact import BY_THREE, CELLS, LATENT, OF_SHARED, exact_spec, sections_of
from tests.support.fake_gpu.values import VARIABLE
from tests.support.jobs import data_of, prepare_job
from tests.support.layouts import Trained, bits_that_differ, spec_for, train
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return data_of(prepare_job(tmp_path_factory.mktemp("exact")))


@dataclass
class Alone:
    """One process, for each variant of the spec."""

    folder: Path
    data: dict[str, str]
    made: dict[str, Trained] = field(default_factory=dict)

    def trained(self, variant: str, steps: int, **sections: Any) -> Trained:
        if variant not in self.made:
            spec = exact_spec(self.folder / str(len(self.made)), self.data, "", **sections)
            self.made[variant] = train(spec, steps)
        return self.made[variant]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, data: dict[str, str]) -> Alone:
    return Alone(tmp_path_factory.mktemp("alone"), data)


EVERYDAY = {("top_k 4", "dp_shard=2,ep=2"), ("top_k 4", "cp=2,ep=2"), ("top_k 2", "tp=2,ep=2")}
TABLE = [
    pytest.param(variant, layout, id=f"{variant} on {layout}",
                 marks=() if (variant, layout) in EVERYDAY else pytest.mark.slow)
    for variant, layout in CELLS
]  # fmt: skip


@pytest.mark.parametrize(("variant", "layout"), TABLE)
def test_a_layout_has_the_bits_of_one_process(
    variant: str, layout: str, alone: Alone, data: dict[str, str], tmp_path: Path
) -> None:
    name, sections = sections_of(variant, layout)
    if "seq_len" in sections.get("data", {}) and VARIABLE in os.environ:
        pytest.skip("attention's plain path, which a pretended device takes, has no bits by head")
    expected = alone.trained(name, 3, **sections)
    trained = train(exact_spec(tmp_path, data, layout, **sections), 3)
    assert bits_that_differ(trained, expected) == []


LONG = {"seq_len": 512}


def use_coarse_grid() -> None:
    """Round gradients so that a sum that is rounded, in the place of its parts, has other bits."""
    exact.FRACTION_BITS = 24


def first_rank_is_slow() -> None:
    """Plans give the first of two ranks a quarter of the rows, as if it had been measured."""
    CapacityPlan.equal = staticmethod(  # type: ignore[method-assign]
        lambda ranks: (
            CapacityPlan((UNITS_PER_RANK // 2, 3 * UNITS_PER_RANK // 2))
            if ranks == 2
            else CapacityPlan((UNITS_PER_RANK,) * ranks)
        )
    )

    def plan(rows_E: Any, shares: Any, *more: Any) -> CopyPlan:
        made = plan_copies(rows_E, shares, *more)
        slow, fast = made.loads(rows_E)
        assert made.num_copies, "there is nothing to see"
        assert slow < 0.4 * fast
        return made

    balance.plan_copies = plan


def test_a_slow_ranks_rows_are_copied_and_no_bit_changes(
    alone: Alone, data: dict[str, str], tmp_path: Path
) -> None:
    sections: dict[str, Any] = {"moe": {"top_k": 4}}
    expected = alone.trained("top_k 4", 3, **sections)
    sections["moe"] |= {"copies": 4, "capacity": {"policy": "straggler_aware"}}
    spec = exact_spec(tmp_path, data, "dp_shard=2,ep=2", **sections)
    assert bits_that_differ(train(spec, 3, first=first_rank_is_slow), expected) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp=2 zbv", "dp_shard=2,ep=2"])
def test_every_micro_batch_is_rounded_by_itself(
    layout: str, data: dict[str, str], tmp_path: Path
) -> None:
    """In bfloat16 FSDP has the gradients of a pipeline's stages too."""
    sections: dict[str, Any] = {"precision": {"compute": "bfloat16"}}
    expected = train(exact_spec(tmp_path / "alone", data, "", **sections), 2, first=use_coarse_grid)
    spec = exact_spec(tmp_path / "laid out", data, layout, **sections)
    assert bits_that_differ(train(spec, 2, first=use_coarse_grid), expected) == []


@pytest.mark.slow
def test_tied_embeddings_have_the_bits_of_one_process(
    alone: Alone, data: dict[str, str], tmp_path: Path
) -> None:
    tied = {"model": {**OF_SHARED["model"], "tie_embeddings": True}, "data": OF_SHARED["data"]}
    expected = alone.trained("tied", 3, **tied)
    layouts = ("dp_shard=2,ep=2", "dp_replicate=2,dp_shard=2,ep=2", "cp=2,ep=2", "tp=4,ep=4")
    for i, layout in enumerate(layouts):
        trained = train(exact_spec(tmp_path / str(i), data, layout, **tied), 3)
        assert bits_that_differ(trained, expected) == []


@pytest.mark.slow
def test_auxiliary_losses_have_the_same_bits(data: dict[str, str], tmp_path: Path) -> None:
    """A divisor by which another order of the factors would round otherwise: 96 of 224 tokens."""
    batch = {"batch": {"global_batch_size": 7}}
    expected = train(exact_spec(tmp_path / "alone", data, "", **batch), 2)
    trained = train(exact_spec(tmp_path / "pp", data, "pp=2", **batch), 2)
    assert bits_that_differ(trained, expected) == []


@pytest.mark.slow
def test_a_dense_model_has_the_bits_of_one_process(data: dict[str, str], tmp_path: Path) -> None:
    def dense(folder: Path, layout: str) -> Trained:
        sections: dict[str, Any] = {"moe": None, "train": {"exact": True}}
        sections["model"] = OF_SHARED["model"]
        return train(spec_for(folder, {**data, **OF_SHARED["data"]}, layout, **sections), 3)

    expected = dense(tmp_path, "")
    for layout in ("dp_shard=3", "dp_replicate=2,dp_shard=2", "pp=2", "cp=2,tp=2", "pp=2,tp=2"):
        assert bits_that_differ(dense(tmp_path, layout), expected) == [], layout


@pytest.mark.slow
def test_a_history_of_resizes_has_the_bits_of_one_process(
    data: dict[str, str], tmp_path: Path
) -> None:
    sections: dict[str, Any] = {**copy.deepcopy(BY_THREE), "eval": {"interval_steps": 0}}
    # Sizes that four ranks that share sequences divide, and three.
    for section, values in OF_SHARED.items():
        sections[section] = {**sections.get(section, {}), **values}
    history = ["", "dp_shard=4,ep=2", "dp_shard=3,ep=3", "tp=2,ep=2", "pp=2,cp=2,ep=2"]
    expected = train(exact_spec(tmp_path / "alone", data, "", **sections), 60)
    losses, norms, digests = [], [], []
    for layout in history:
        last = train(exact_spec(tmp_path / "resized", data, layout, **sections), 12, save_at=12)
        losses += last.losses
        norms += last.norms
        digests += last.digests
    assert losses == expected.losses
    assert norms == expected.norms
    state = Trained(losses, norms, expected.gradients, last.state, {}, [], last.progress,
                    digests)  # fmt: skip
    assert bits_that_differ(state, expected) == []


def reduced_on_rank(spec: JobSpec, rank: int) -> int:
    """How often this rank's gradients are reduced within a replica, in a step of two
    micro-batches."""
    runtime = start(spec.train.timeout_seconds)
    job = build_job(spec, runtime)
    restore(job)
    batches, _ = job.loader.step(Cursor())
    assert len(batches) == 2
    with monitor_collectives() as monitor:
        job.forward_backward(batches, 10 * spec.data.seq_len)
    runtime.close()
    return monitor.take()[CollectiveKind("reduce_scatter", "dp")].count


@pytest.mark.long
def test_gradients_that_are_kept_travel_once_a_step(data: dict[str, str], tmp_path: Path) -> None:
    def reduced(stage: int) -> list[int]:
        kept = {"parallel": {"memory": {"zero_stage": stage}}}
        spec = exact_spec(tmp_path / str(stage), data, "dp_shard=2,ep=2", **kept)
        return run_ranks(partial(reduced_on_rank, spec), 2, group=False)

    once, every_time = reduced(1), reduced(2)
    assert once[0] > 0
    assert [2 * each for each in once] == every_time


def evaluate_on_rank(spec: JobSpec, rank: int) -> tuple[float, float, int]:
    runtime = start(spec.train.timeout_seconds)
    job = build_job(spec, runtime)
    restore(job)
    found = evaluate(job)
    runtime.close()
    return found.loss, found.bits_per_byte, found.tokens


@pytest.mark.slow
def test_the_held_out_loss_has_the_bits_of_one_process(
    data: dict[str, str], tmp_path: Path
) -> None:
    def held_out(layout: str, ranks: int) -> list[tuple[float, float, int]]:
        spec = exact_spec(tmp_path, data, layout, **OF_SHARED)
        return run_ranks(partial(evaluate_on_rank, spec), ranks, group=False)

    expected = held_out("", 1)
    for layout, ranks in (("dp_shard=2,ep=2", 2), ("dp_replicate=3", 3), ("pp=2", 2),
                          ("cp=2,ep=2", 2), ("pp=2,tp=2,ep=2", 4)):  # fmt: skip
        assert held_out(layout, ranks) == expected * ranks


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"parallel": {"tp": 2, "ep": 2}}, "data.seq_len (32) must be a multiple of 128"),
        ({"parallel": {"cp": 4}, "data": LONG}, "model.num_kv_heads (2) must be a multiple of 4"),
        ({"parallel": {"cp": 8}, "data": LONG}, "model.num_heads (4) must be a multiple of 8"),
        ({"parallel": {"cp": 2}, "data": LONG}, "parallel.ep (1) must be a multiple of 2"),
        ({"parallel": {"cp": 2, "ep": 2}, "data": LONG, "moe": {"copies": 2}},
         "moe.copies (2) must be 0"),
        ({"parallel": {"cp": 2, "ep": 2}, "data": LONG, "model": {"head_dim": 10}},
         "model.qk_head_dim (10) must be a multiple of 4"),
        ({"parallel": {"tp": 2, "ep": 2},
          "data": {**LONG, "packing": "best_fit", "document_mask": True}},
         "data.packing (best_fit) must be concat"),
        ({"parallel": {"tp": 2, "ep": 2}, "data": {**LONG, "mask_boundary_labels": True}},
         "data.mask_boundary_labels (true) must be false"),
        ({"parallel": {"cp": 2, "ep": 2}, "data": LONG, "model": {**LATENT, "v_head_dim": 6}},
         "model.v_head_dim (6) must be qk_head_dim (12), or a multiple of 4"),
        ({"parallel": {"cp": 2, "ep": 2}, "data": LONG,
          "model": {**LATENT, "qk_nope_head_dim": 4, "v_head_dim": 12}},
         "model.v_head_dim (12) must be qk_head_dim (8), or a multiple of 4 with qk_head_dim of"),
        ({"parallel": {"tp": 2, "ep": 2}, "data": LONG, "tune": {"lora": {}}},
         "tune.lora (given) must be left out"),
        ({"parallel": {"dp_replicate": 2, "gradient_compression": "bfloat16"}},
         "parallel.gradient_compression (bfloat16) must be none"),
        ({"parallel": {"memory": {"offload_optimizer": True}}},
         "parallel.memory.offload_optimizer (true) must be false"),
        ({"train": {"compile": True}}, "train.compile (true) must be false"),
        ({"precision": {"compute": "float16"}},
         "precision.compute (float16) must be float32 or bfloat16"),
        ({"precision": {"experts": "float8"}}, "precision.experts (float8) must be compute"),
        ({"precision": {"dense": "float8"}, "model": {"d_model": 128, "d_ff": 128, "head_dim": 32},
          "moe": {"d_ff": 128}}, "precision.dense (float8) must be compute"),
        ({"moe": {"dispatch_dtype": "float8"}}, "moe.dispatch_dtype (float8) must be compute"),
        ({"moe": {"input_jitter": 0.1}}, "moe.input_jitter (0.1) must be 0"),
        ({"moe": {"capacity": {"policy": "straggler_aware"}}, "parallel": {"ep": 2, "dp_shard": 2}},
         "moe.capacity.policy (straggler_aware) must be dropless or fixed"),
        ({"moe": {"capacity": {"policy": "dropless", "max_tokens_per_rank": 64}}},
         "moe.capacity.max_tokens_per_rank (64) must be 0"),
        ({"moe": {"aux_loss_scope": "global_batch"}},
         "moe.aux_loss_scope (global_batch) must be previous_step or micro_batch"),
        ({"moe": {"dispatcher": "all_gather"}}, "moe.dispatcher (all_gather) must be all_to_all"),
        ({"moe": {"overlap_chunks": 2}}, "moe.overlap_chunks (2) must be 1"),
        ({"moe": {"backend": "grouped_mm"}}, "moe.backend (grouped_mm) must be auto, packed or"),
    ],
)  # fmt: skip
def test_what_cannot_be_exact_is_refused_in_one_line(
    sections: dict[str, Any], words: str, data: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(InputError) as refused:
        exact_spec(tmp_path, data, "", **sections)
    assert words in str(refused.value)
    assert "train.exact (true)" in str(refused.value)
    assert "\n" not in str(refused.value)


def resume_on_rank(spec: JobSpec, others: list[JobSpec], rank: int) -> list[str]:
    """What a resume from the checkpoint of ``spec`` says of it, of others, and of more threads."""
    runtime = start(spec.train.timeout_seconds)
    job = build_job(spec, runtime)
    manifest = ckpt.read_manifest(spec.checkpoint_path, 1)
    plain = {**manifest.spec, "train": {**manifest.spec["train"], "exact": False}}
    found = [_refusal(replace(job, spec=each), manifest) for each in (spec, *others)]
    found.append(_refusal(job, manifest.model_copy(update={"spec": plain})))
    torch.set_num_threads(2)
    found.append(_refusal(job, manifest))
    runtime.close()
    return found


def _refusal(job: Job, manifest: ckpt.Manifest) -> str:
    try:
        check_resumable(job, manifest)
    except InputError as error:
        return str(error)
    return ""


def test_a_resume_that_would_change_bits_is_refused(data: dict[str, str], tmp_path: Path) -> None:
    spec = exact_spec(tmp_path, data, "")
    train(spec, 1, save_at=1)
    others = [
        exact_spec(tmp_path, data, "", batch={"micro_batch_size": 1}),
        exact_spec(tmp_path, data, "", precision={"compute": "bfloat16"}),
        exact_spec(tmp_path, data, "", moe={"backend": "loop"}),
    ]
    (found,) = run_ranks(partial(resume_on_rank, spec, others), 1, group=False)
    where = f"must be as in the checkpoint of step 1 in {spec.checkpoint_path}"
    assert found[0] == ""
    assert found[1].startswith(f"batch.micro_batch_size (1) {where} (3) with train.exact (true)")
    assert found[2].startswith(f"precision.compute (bfloat16) {where} (float32)")
    assert found[3].startswith(f"moe.backend (loop) {where} (auto)")
    assert found[4].startswith(f"train.exact (true) {where} (false)")
    assert found[5].startswith(f"threads of a process (2) {where} (1)")
    assert all("\n" not in each for each in found)


def test_a_gradient_over_the_limit_skips_the_step(data: dict[str, str], tmp_path: Path) -> None:
    """The step is skipped as one that is not finite, whatever the layout."""
    spec = exact_spec(tmp_path, data, "")
    (found,) = run_ranks(partial(overflow_on_rank, spec), 1, group=False)
    assert found == [True, False]


def overflow_on_rank(spec: JobSpec, rank: int) -> list[bool]:
    """Whether the norm is finite, before and after a weight that makes gradients large."""
    runtime = start(spec.train.timeout_seconds)
    job = build_job(spec, runtime)
    restore(job)
    exact, found = job.parallel_model.exact, []
    assert exact is not None
    for factor in (1.0, 1e6):
        with torch.no_grad():
            job.model.head.weight.mul_(factor)
        batches, _ = job.loader.step(Cursor())
        job.forward_backward(batches, 10 * spec.data.seq_len)
        found.append(bool(exact.square_sum(job.model, job.dims).isfinite()))
    runtime.close()
    return found


def pretrain_on_rank(spec: Path, rank: int) -> int:
    return main("pretrain", [str(spec)])


def replay_on_rank(arguments: list[str], rank: int) -> int:
    return main("replay", arguments)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp_shard=2,ep=2", "cp=2,ep=2", "tp=2,ep=2"])
def test_a_step_of_two_ranks_is_replayed_on_one(
    layout: str, data: dict[str, str], tmp_path: Path
) -> None:
    spec = exact_spec(tmp_path, data, layout, train={"steps": 5}, **OF_SHARED,
                      checkpoint={"interval_steps": 2, "retention": {"keep": 5}},
                      metrics={"port": -1})  # fmt: skip
    train_it = partial(pretrain_on_rank, tmp_path / "spec.json")
    assert run_ranks(train_it, 2, group=False) == [0, 0]
    run, before = spec.run_path, sorted(p.name for p in spec.run_path.rglob("*"))
    for step, ranks, more in (
        (4, 1, []),  # two steps after the checkpoint of step 2
        (
            5,
            2,
            [
                "--set",
                "parallel.dp_replicate=2",
                "--set",
                "parallel.dp_shard=1",
                "--set",
                "parallel.cp=1",
                "--set",
                "parallel.tp=1",
                "--set",
                "parallel.ep=1",
            ],
        ),
    ):
        replay_it = partial(replay_on_rank, [str(run), "--step", str(step), *more])
        assert run_ranks(replay_it, ranks, group=False) == [0] * ranks
    assert sorted(p.name for p in run.rglob("*")) == before, "the run is changed"
    log = run / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if line["event"] == "step" and line["step"] == 4:
            line["loss"] *= 1 + 1e-15
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, code in ((3, 0), (4, 1), (1, 2), (9, 2)):
        replay_it = partial(replay_on_rank, [str(run), "--step", str(step)])
        assert run_ranks(replay_it, 1, group=False) == [code], step
