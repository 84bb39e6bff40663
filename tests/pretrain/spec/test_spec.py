"""The spec: what is refused says the field, the values and the rule, in one line."""

from __future__ import annotations

import json

import pytest
import torch

from convoy.convert.commands import spec_toml
from pretrain.checkpoint.compatible import resolved
from pretrain.errors import InputError
from pretrain.job import compute_dtype
from pretrain.spec.job import JobSpec
from pretrain.spec.read import load_spec
from pretrain.spec.stored import other_constants, stored_spec
from tests.support.jobs import make_spec, tiny, write_spec

RECIPE = "tools/recipes/stdlib-tiny.toml"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepz=3", "train.stepz: no such field; did you mean train.steps?"),
        ("trian.steps=3", "trian: no such field; did you mean train?"),
        ("train.step=3", "train.step: no such field; did you mean train.steps or inject.step?"),
        ("train.int=3", "train.int: no such field"),
        (
            "checkpoint.interval_steps=auto2",
            "checkpoint.interval_steps ('auto2'): Input should be 'auto' or a",
        ),
        ("steps=3", "steps: no such field; did you mean train.steps?"),
        (
            "train.compute=3",
            "train.compute: no such field; did you mean train.compile or precision.compute?",
        ),
        ("moe.seq_len=3", "moe.seq_len: no such field; did you mean data.seq_len?"),
        (
            "parallel.memory.recomputed=full",
            "parallel.memory.recomputed: no such field; did you mean",
        ),
        ("moe.capacity.capacity_factor=2", "(dropless); policy fixed or straggler_aware has it"),
        (
            "moe.capacity.polizy=3",
            "moe.capacity.polizy: no such field; did you mean moe.capacity.policy?",
        ),
        (
            "moe.capacity={policy='fixed', zzz=1}",
            "moe.capacity.zzz: no such field; there are policy,",
        ),
        (
            "moe.capacity.policy=none",
            "moe.capacity.policy (none) must be dropless, fixed, straggler_aware or package",
        ),
        (
            "moe.capacity={policy='fixed', capacity_factor=0}",
            "moe.capacity.capacity_factor (0): Input should be greater than 0",
        ),
        ("moe.capacity=3", "moe.capacity (3): Input should be"),
        (
            "moe.capacity={policy='straggler_aware'}",
            "parallel.ep (1) must be at least 2 with moe.capacity.policy (straggler_aware)",
        ),
        ("parallel.pipeline.schedule=2f2b", "parallel.pipeline.schedule ('2f2b'): Input should be"),
        ("moe.zzz=3", "moe.zzz: no such field; there are num_experts, top_k,"),
        ("train.steps=ten", "train.steps ('ten'): Input should be a valid integer"),
        ("train.steps=1.5", "train.steps (1.5): Input should be a valid integer"),
        ("train.steps=0", "train.steps (0): Input should be greater than or equal to 1"),
        ("optimizer.lr=nan", "optimizer.lr (nan): Input should be"),
        ("moe.num_experts=63", "moe.num_experts (63) must be at least parallel.ep (64)"),
        ("moe.num_experts=96", "moe.num_experts (96) must be a multiple of parallel.ep (64)"),
        ("moe.d_model=32", "moe.d_model: no such field; it follows from model.d_model"),
        ("model.num_heads=5", "model.d_model (32) must be an even multiple of model.num_heads (5)"),
        (
            "model.num_kv_heads=3",
            "model.num_heads (4) must be a multiple of model.num_kv_heads (3)",
        ),
        ("model.first_k_dense=4", "model.first_k_dense (4) must be at most model.num_layers (3)"),
        (
            "checkpoint.retention.keep_best=1",
            "checkpoint.retention.keep_best (1) must be 0 without eval.interval_steps",
        ),
        ("model.d_ff=0", "model.d_ff (0) must be at least 1 where a layer is dense"),
        ("model.vocab_size=256", "model.vocab_size (256): Input should be greater than or equal"),
        ("parallel.tp=3", "data.seq_len (32) must be a multiple of parallel.tp (3)"),
        ("parallel.tp=8", "model.num_heads (4) must be a multiple of parallel.tp (8)"),
        ("parallel.tp=4", "model.num_kv_heads (2) must be a multiple of parallel.tp (4)"),
        ("parallel.pp=4", "model.num_layers (3) must be at least parallel.pp x"),
        (
            "parallel.pipeline.stages_per_rank=2",
            "parallel.pipeline.stages_per_rank (2) must be 1 where",
        ),
        (
            "parallel.pipeline.schedule=zbv",
            "parallel.pipeline.stages_per_rank (1) must be 2 with",
        ),
        (
            "precision.loss_scale=3",
            "precision.loss_scale (3) must be a power of two from 1 to 2^127",
        ),
        ("precision.loss_scale=0", "precision.loss_scale (0) must be a power of two"),
        ("precision.loss_scale=-2", "precision.loss_scale (-2) must be a power of two"),
        (f"precision.loss_scale={1 << 128}", "must be a power of two from 1 to 2^127"),
        ("precision.loss_scale=2.5", "precision.loss_scale (2.5): Input should be a valid integer"),
        (
            "precision.compute=float8",
            "precision.compute (float8) must be float32, bfloat16 or float16: float8 is for",
        ),
        (
            "precision.compute=half",
            "precision.compute ('half'): Input should be 'float32', 'bfloat16' or 'float16'",
        ),
        (
            "parallel.gradient_compression=one_bit",
            "parallel.gradient_compression (one_bit) must be none where parallel.dp_replicate is 1",
        ),
        (
            "parallel.memory.zero_stage=4",
            "parallel.memory.zero_stage (4): Input should be 1, 2 or 3",
        ),
        (
            "batch.batch_size_rampup={start=9,tokens=600}",
            "batch.batch_size_rampup.start (9) must be at most",
        ),
        (
            "parallel.cp=5",
            "data.seq_len (32) must be a multiple of 2 x parallel.cp x parallel.tp (2 x 5 x 1)",
        ),
        (
            "parallel.memory.recompute_layer_freq=2",
            "parallel.memory.recompute_layer_freq (2) must be 1 where",
        ),
        ("batch.micro_batch_size=9", "batch.micro_batch_size (9) must be at most"),
        ("schedule.warmup_steps=7", "schedule.warmup_steps + decay_steps (7 + 0) must be at most"),
        ("schedule.kind=wsd", "schedule.decay_steps (0) must be above 0 for wsd"),
        ("data.shard_tokens=32", "data.seq_len (32) must be less than data.shard_tokens (32)"),
        ("name=a b", "name ('a b'): String should match pattern"),
        ("train", "--set (train) must be SECTION.FIELD=VALUE"),
        ("name.x=1", "--set (name.x=1): name is not a section"),
    ],
)
def test_bad_specs_are_refused_in_one_line(tmp_path, override, message):
    overrides = [override]
    if override.startswith("moe.num_experts"):
        overrides.append("parallel.ep=64")
    with pytest.raises(InputError) as error:
        load_spec(write_spec(tmp_path), overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"qk_norm": "all_heads"}, "parallel.tp (2) must be 1 with model.qk_norm (all_heads)"),
        ({"tie_embeddings": True}, "parallel.tp (2) must be 1 with model.tie_embeddings (True)"),
        ({"d_ff": 47}, "model.d_ff (47) must be a multiple of parallel.tp (2)"),
        ({"vocab_size": 321}, "model.vocab_size (321) must be a multiple of parallel.tp (2)"),
    ],
)  # fmt: skip
def test_models_that_tensor_parallelism_does_not_cut(tmp_path, fields, message):
    with pytest.raises(InputError) as error:
        load_spec(write_spec(tmp_path, model=fields), ["parallel.tp=2"])
    assert message in str(error.value)


def test_a_matrix_of_the_first_and_the_last_stage(tmp_path):
    with pytest.raises(InputError, match=r"parallel.pp \(2\) must be 1 with model.tie_embeddings"):
        load_spec(write_spec(tmp_path, model={"tie_embeddings": True}), ["parallel.pp=2"])


def test_files_that_are_no_spec(tmp_path):
    with pytest.raises(InputError, match=r"cannot be read: No such file"):
        load_spec(tmp_path / "none.toml")
    (tmp_path / "spec.yaml").write_text("a: 1")
    with pytest.raises(InputError, match=r"spec.yaml: a spec is TOML or JSON, in a file named"):
        load_spec(tmp_path / "spec.yaml")
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(InputError, match=r"bad.toml is not valid .toml"):
        load_spec(tmp_path / "bad.toml")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(InputError, match="must be a table"):
        load_spec(tmp_path / "list.json")
    spec = tiny(tmp_path)
    del spec["data"]["seq_len"]
    (tmp_path / "lacks.json").write_text(json.dumps(spec))
    with pytest.raises(InputError, match=r"data.seq_len: required"):
        load_spec(tmp_path / "lacks.json")


@pytest.mark.parametrize("how", ["selective", "full"])
def test_experts_are_recomputed_once(tmp_path, how):
    fields = {"moe": {"recompute_experts": True}, "parallel": {"memory": {"recompute": how}}}
    with pytest.raises(InputError) as error:
        make_spec(tmp_path, **fields)
    assert "moe.recompute_experts (true) must be false with parallel.memory." in str(error.value)
    assert f"recompute ({how})" in str(error.value)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
@pytest.mark.parametrize("stages", [1, 3])
def test_a_v_has_two_stages_on_a_rank(tmp_path, schedule, stages):
    fields = {"pp": 2, "pipeline": {"schedule": schedule, "stages_per_rank": stages}}
    with pytest.raises(InputError) as error:
        make_spec(tmp_path, model={"num_layers": 6}, parallel=fields)
    assert f"parallel.pipeline.stages_per_rank ({stages}) must be 2 with" in str(error.value)
    assert (
        f"parallel.pipeline.schedule ({schedule}): a rank has one stage of each arm of the V"
        in str(error.value)
    )
    make_spec(
        tmp_path, model={"num_layers": 4}, parallel=fields | {"pipeline": {"stages_per_rank": 2}}
    )


def test_degrees_must_fit_the_world(tmp_path):
    spec = make_spec(tmp_path, parallel={"ep": 2})
    assert spec.topology(4).describe() == "dp_shard=4 ep=2"
    with pytest.raises(InputError, match=r"parallel.ep \(2\) must divide .* = 3\)"):
        spec.topology(3)


def test_what_ranks_share_of_an_expert_must_divide_it(tmp_path):
    spec = make_spec(tmp_path)
    with pytest.raises(
        InputError, match=r"model.d_model \(32\) must be a multiple of dp_shard x cp x tp / ep"
    ):
        spec.topology(3)
    spec = make_spec(tmp_path, moe={"d_ff": 26})
    with pytest.raises(InputError, match=r"moe.d_ff \(26\) .* \(4 x 1 x 1 / 1 = 4\)"):
        spec.topology(4)


@pytest.mark.parametrize(
    ("parallel", "world", "nearest"),
    [
        ({"dp_shard": 3}, 4, "dp_shard=4; dp_shard=4 ep=2; dp_shard=2 tp=2"),
        ({"ep": 4}, 2, "dp_shard=2 ep=2; tp=2 ep=2; cp=2 ep=2"),
        ({"tp": 2}, 7, "dp_replicate=7"),
        ({"pp": 2, "tp": 2}, 6, "pp=3 tp=2"),
        ({"tp": 2, "ep": 2}, 4096, "dp_replicate=256 dp_shard=8 tp=2 ep=2"),
    ],
)
def test_layouts_that_would_work_are_named(tmp_path, parallel, world, nearest):
    with pytest.raises(InputError) as error:
        make_spec(tmp_path, parallel=parallel).topology(world)
    message = str(error.value)
    assert "\n" not in message
    known = message.partition(f"layouts that work on {world} ranks: ")[2]
    assert known.startswith(nearest)
    for layout in known.split("; "):
        degrees = dict(part.split("=") for part in layout.split())
        spec = make_spec(tmp_path, parallel={axis: int(n) for axis, n in degrees.items()})
        assert spec.topology(world).describe() == layout


def test_on_one_rank_the_degrees_to_lower_are_named(tmp_path):
    spec = make_spec(tmp_path, parallel={"ep": 2, "tp": 2})
    with pytest.raises(InputError, match=r"layouts that work on 1 rank: tp=1 ep=1$"):
        spec.topology(1)


def test_no_layout_of_so_many_ranks(tmp_path):
    moe = {"capacity": {"policy": "straggler_aware"}}  # wants experts on several ranks; there are 4
    spec = make_spec(tmp_path, moe=moe, parallel={"ep": 2})
    with pytest.raises(InputError, match="no layout of 5 ranks works for this model and data"):
        spec.topology(5)


def test_the_hash_is_of_the_resolved_spec(tmp_path):
    path = write_spec(tmp_path)
    spec = load_spec(path)
    assert load_spec(path, ["train.steps=6"]).hash == spec.hash
    assert load_spec(path, ["train.steps=7"]).hash != spec.hash
    assert JobSpec.model_validate(spec.as_dict()).hash == spec.hash
    masked = load_spec(path, ["data.document_mask=true"])
    assert masked.data.document_mask
    assert not spec.data.document_mask
    assert JobSpec.model_validate(masked.as_dict()) == masked
    assert masked.hash != spec.hash


def test_the_layer_has_what_follows_from_other_sections_and_the_spec_does_not(tmp_path):
    moe = {"dispatcher": "padded_all_to_all"}
    spec = make_spec(tmp_path, moe=moe, batch={"micro_batch_size": 2})
    assert (spec.moe.d_model, spec.moe.gemm, spec.moe.max_tokens_per_call) == (32, "compute", 64)
    assert make_spec(tmp_path).moe.max_tokens_per_call == 0
    planned = spec.with_layout(spec.parallel, 4, 1, 1)
    assert planned.moe.max_tokens_per_call == 128
    assert JobSpec.model_validate(planned.as_dict()) == planned
    of_before = {"d_model": 32, "gemm": "compute", "max_tokens_per_call": 9999}
    assert not of_before.keys() & spec.as_dict()["moe"].keys()
    saved = spec.as_dict()
    saved["moe"] |= of_before
    assert stored_spec(saved) == spec.as_dict()


def test_only_float16_scales_its_loss(tmp_path):
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    for compute, scale in (("float32", None), ("bfloat16", None), ("float16", 2.0**127)):
        for name in (compute, short[compute]):
            spec = make_spec(tmp_path, precision={"compute": name, "loss_scale": 1 << 127})
            assert compute_dtype(spec.precision) == getattr(torch, compute)
            assert spec.precision.first_loss_scale == scale


def test_the_recipe_is_valid_toml_and_fits_one_and_many_ranks():
    from pathlib import Path

    spec = load_spec(Path(RECIPE))
    assert spec.topology(2).ep == 2
    assert spec.topology(64).world == 64
    assert load_spec(Path(RECIPE), ["parallel.ep=1"]).topology(1).world == 1


@pytest.mark.parametrize("policy", ["dropless", "fixed"])
def test_a_spec_written_as_toml_reads_as_the_same_spec(tmp_path, policy):
    rampup = {"batch_size_rampup": {"start": 2, "tokens": 64}}
    spec = make_spec(tmp_path, moe={"capacity": {"policy": policy}}, batch=rampup,
                     parallel={"pp": 2, "pipeline": {"schedule": "gpipe"}})  # fmt: skip
    (tmp_path / "written.toml").write_text(spec_toml(spec))
    assert load_spec(tmp_path / "written.toml") == spec


def test_a_stored_spec_is_read_without_options_that_were_dropped(tmp_path):
    tables = {"inject": [{"kind": "kill", "step": 1}], "health": {"skip_steps": 3}}
    spec = JobSpec.model_validate(tiny(tmp_path, **tables))
    saved = json.loads(json.dumps(spec.as_dict()))
    assert stored_spec(saved) == saved
    tables = [
        saved, saved["train"], saved["moe"], saved["moe"]["capacity"], saved["optimizer"],
        saved["health"]["loss_spike"], saved["inject"][0],
    ]  # fmt: skip
    for table in tables:
        table["an_option_of_before"] = 3
    before = json.loads(json.dumps(saved))
    assert JobSpec.model_validate(stored_spec(saved)) == spec
    assert resolved(saved) == spec.as_dict()
    assert saved == before, "the argument is not changed"
    saved["train"] = 3
    assert resolved(saved)["train"] == 3, "what this version refuses stays, and is compared"


def test_a_stored_layout_that_was_planned_is_planned_no_more(tmp_path):
    saved = make_spec(tmp_path, parallel={"dp_shard": 2}).as_dict()
    before = {**saved, "plan": {"auto": False, "cluster": "h100"}}
    assert resolved(before) == saved


def test_a_dropped_option_on_which_numbers_depend_is_told_by_its_former_value():
    now = {"moe": {"router_dtype": "float32"}, "optimizer": {"update_rms": 0.2}}
    assert other_constants(now) == {}
    assert other_constants({"moe": None, "optimizer": {}}) == {}
    was = {"moe": {"router_dtype": "float64"}, "optimizer": {"update_rms": 0.4}}
    assert other_constants(was) == {"moe.router_dtype": "float64", "optimizer.update_rms": 0.4}
