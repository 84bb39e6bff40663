"""Former names: refused in a spec file, brought up to date in a spec that a checkpoint holds."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ckpt
from moe import MoEConfig
from parallel import ParallelConfig
from pretrain.checkpoint.compatible import resolved
from pretrain.checkpoint.contents import checkpoint_arrays, save_info
from pretrain.checkpoint.resume import restore
from pretrain.errors import InputError
from pretrain.job import build_job
from pretrain.runtime.ranks import start
from pretrain.spec.job import JobSpec
from pretrain.spec.read import load_spec
from pretrain.spec.renamed import MOE_RENAMED, PARALLEL_RENAMED, RENAMED, upgraded
from pretrain.state.progress import Progress
from router import FixedCapacityConfig
from tests.support.jobs import make_spec, prepare_job, write_spec
from tests.support.ranks import run_ranks

FORMER: dict[str, Any] = json.loads((Path(__file__).parent / "data/former_spec.json").read_text())
"""The resolved spec of the tiny recipe, as the release before the renames stored it."""


def former(**sections: dict[str, Any]) -> dict[str, Any]:
    spec = copy.deepcopy(FORMER)
    for name, fields in sections.items():
        spec[name] |= fields
    return spec


def test_the_tables_without_torch_are_those_of_the_configs():
    assert MOE_RENAMED == MoEConfig.RENAMED
    assert PARALLEL_RENAMED == ParallelConfig.RENAMED


def test_a_stored_spec_is_brought_up_to_date():
    before = copy.deepcopy(FORMER)
    spec = JobSpec.model_validate(upgraded(FORMER))
    assert before == FORMER, "the argument is not changed"
    recipe = load_spec(Path("tools/recipes/stdlib-tiny.toml"))
    assert ckpt.lifecycle.spec_differences(spec.as_dict(), recipe.as_dict()) == []
    assert resolved(FORMER) == recipe.as_dict()


def test_a_spec_of_now_stays_as_it_is(tmp_path):
    overrides = ["moe.capacity={policy='fixed',drop_policy='probs'}", "init.strict=false",
                 "batch.batch_size_rampup={start=2,tokens=64}"]  # fmt: skip
    for chosen in ([], overrides):
        spec = load_spec(write_spec(tmp_path), chosen).as_dict()
        assert upgraded(spec) == spec
        dense = {**spec, "moe": None}
        assert upgraded(dense) == dense


@pytest.mark.parametrize(
    ("section", "fields", "found"),
    [
        ("moe", {"capacity_policy": "fixed", "capacity_factor": 2.0, "overflow": "drop_by_score"},
         {"moe.capacity": {"policy": "fixed", "capacity_factor": 2.0, "drop_policy": "probs"}}),
        ("moe", {"max_received_rows": 9},
         {"moe.capacity": {"policy": "dropless", "max_tokens_per_rank": 9}}),
        ("moe", {"capacity_policy": "straggler_aware", "capacity_floor": 0.5},
         {"moe.capacity": {
             "policy": "straggler_aware", "capacity_factor": 1.25, "rank_capacity_factor": 1.0,
             "floor": 0.5, "ceiling": 2.0, "hysteresis": 0.05, "false_alarm_rate": 1e-6,
             "warmup_steps": 2, "replay_log": None}}),
        ("moe", {"selection": "forced_balance"}, {"moe.routing": "force_load_balance"}),
        ("moe", {"dispatcher": "fixed_split", "max_tokens": 4096},
         {"moe.dispatcher": "padded_all_to_all", "moe.max_tokens_per_call": 4096}),
        ("parallel", {"pp": 2, "pp_schedule": "zbv", "pp_stages_per_rank": 2},
         {"parallel.pipeline": {"schedule": "zbv", "stages_per_rank": 2}}),
        ("parallel", {"zero": 1, "recompute": "full", "recompute_every": 2},
         {"parallel.memory.zero_stage": 1, "parallel.memory.recompute_layer_freq": 2}),
        ("train", {"ramp_batch_size": 4, "ramp_tokens": 600},
         {"batch.batch_size_rampup": {"start": 4, "tokens": 600}}),
        ("train", {"init_from": "a", "init_missing": "keep"},
         {"init.checkpoint": "a", "init.strict": False}),
        ("train", {"precision": "bfloat16"}, {"precision.compute": "bfloat16"}),
        ("checkpoint", {"on_topology_change": "abort"}, {"checkpoint.reshard_on_load": False}),
        ("checkpoint", {"peer": True, "memory": True, "shared_every": 3, "linger_seconds": 5.0},
         {"checkpoint.tiers.replicate_to_peer": True, "checkpoint.tiers.memory": True,
          "checkpoint.tiers.shared_interval": 3,
          "checkpoint.tiers.memory_retention_seconds": 5.0}),
        ("checkpoint", {"keep": 7, "grace_seconds": 1.5},
         {"checkpoint.retention.keep": 7, "checkpoint.retention.grace_seconds": 1.5}),
    ],
)  # fmt: skip
def test_values_of_a_stored_spec_have_their_present_places(section, fields, found):
    if section == "train":
        fields = {**fields, "eval_interval_steps": 80}
    spec = JobSpec.model_validate(upgraded(former(**{section: fields}))).as_dict()
    for path, value in found.items():
        here: Any = spec
        for part in path.split("."):
            here = here[part]
        assert here == value, path


def test_a_capacity_plan_that_was_replayed():
    spec = former(moe={"capacity_policy": "straggler_aware"},
                  train={"replay_capacity_plans": "log.jsonl"})  # fmt: skip
    assert upgraded(spec)["moe"]["capacity"]["replay_log"] == "log.jsonl"


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_former_name_is_refused_with_the_present_one(old, new, tmp_path):
    with pytest.raises(InputError) as error:
        load_spec(write_spec(tmp_path), [f"{old}=1"])
    assert f"{old} is now {new}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "moe.capacity={policy='straggler_aware', smoothing=0.3}",
            "moe.capacity.smoothing must be left out: the test on speeds needs no smoothing",
        ),
        ("train.init_missing=keep", "train.init_missing is now init.strict = false"),
        (
            "checkpoint.on_topology_change=reshard",
            "checkpoint.on_topology_change is now checkpoint.reshard_on_load = true",
        ),
        ("moe.dispatcher=fixed_split", "moe.dispatcher (fixed_split) is now padded_all_to_all"),
        ("moe.routing=forced_balance", "moe.routing (forced_balance) is now force_load_balance"),
        ("moe.overflow=drop_by_score", "moe.overflow is now moe.capacity.drop_policy = probs"),
    ],
)
def test_a_former_value_is_refused_with_the_present_one(override, message, tmp_path):
    with pytest.raises(InputError) as error:
        load_spec(write_spec(tmp_path), [override])
    assert message in str(error.value)


def test_parallel_config_names_the_present_field():
    from parallel import ParallelConfig

    with pytest.raises(ValueError, match=r"parallel.zero is now parallel.memory.zero_stage"):
        ParallelConfig.model_validate({"zero": 1})


def test_every_present_name_is_a_field():
    from pretrain.spec.read import _paths

    assert set(RENAMED.values()) <= set(_paths(JobSpec))
    assert not set(RENAMED) & set(_paths(JobSpec))


def resume_on_rank(spec: JobSpec, rank: int) -> list[Any]:
    """A checkpoint whose manifest holds the spec as the former release wrote it."""
    runtime = start(60.0)
    job = build_job(spec, runtime)
    restore(job)
    save = replace(save_info(job, Progress(step=1, tokens_seen=32)), spec=in_former_terms(spec))
    root = spec.checkpoint_path
    ckpt.save(root, save, checkpoint_arrays(job), runtime.rank, runtime.agree)
    resumed = restore(build_job(spec, runtime))
    kept = dict(ckpt.read_manifest(root).spec)
    assert spec.moe is not None
    fields = {"capacity": FixedCapacityConfig(), "aux_loss_coeff": 0.5}
    other = spec.model_copy(update={"moe": spec.moe.model_copy(update=fields)})
    try:
        restore(build_job(other, runtime))
    except InputError as error:
        return [resumed.step, kept, str(error)]
    return [resumed.step, kept, ""]


def in_former_terms(spec: JobSpec) -> dict[str, Any]:
    """The tiny job's spec, in the tables and fields of the former release."""
    now = spec.as_dict()
    moe = {key: now["moe"][key] for key in ("num_experts", "top_k", "d_ff", "d_model")}
    former_spec = former(moe=moe, model=now["model"], data=now["data"])
    former_spec["train"] |= {"steps": 6, "global_batch_size": 8, "micro_batch_size": 2}
    former_spec["train"]["eval_sequences"] = 8
    return former_spec


def test_a_checkpoint_with_a_former_spec_resumes(tmp_path):
    spec = make_spec(prepare_job(tmp_path))
    ((step, kept, refusal),) = run_ranks(partial(resume_on_rank, spec), 1, group=False)
    assert step == 1
    assert "capacity_policy" in kept["moe"], "the manifest is of the former release"
    assert "moe.capacity.policy (fixed) must be as in the checkpoint of step 1" in refusal
