"""The contract of a model family: what it declares is what transformers computes, reads and writes.

A family without a tiny model in ``tests/support/hf.py`` fails here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

import ckpt
from ckpt.format.dtypes import convert
from ckpt.rewrite import (
    LEAST_MEMORY,
    CheckpointTarget,
    Converted,
    Joined,
    Rows,
    Stacked,
    Unstacked,
    rewrite,
)
from ckpt.rewrite.source import CheckpointSource, SourceArray
from convoy.convert.commands import new_spec
from convoy.convert.hf.expressed import FREE, IMPLIED, Expressed, fields_of_specs
from convoy.convert.hf.families import FAMILIES, family_of
from convoy.convert.hf.family import Family
from convoy.convert.hf.files import from_hf, to_hf
from convoy.convert.hf.model_config import HFConfig
from convoy.convert.hf.others import NOT_CONVERTED
from convoy.convert.hf.tensors import HFTensor, Within
from moe import MoEConfig
from parallel import Topology
from pretrain.errors import InputError
from pretrain.model import ModelConfig, meta_decoder
from tests.convoy.commands.test_tools import one_error_line
from tests.support.hf import (
    CASES,
    SHORT,
    load_ours,
    load_theirs,
    logits_of,
    make_model,
    run,
    tokens,
)
from tests.support.sources import MemorySource

EACH = [pytest.param(case, marks=() if case in SHORT else pytest.mark.slow) for case in CASES]


def kind_of(case: str) -> str:
    return case.partition("-")[0]


def test_every_family_has_a_tiny_model():
    assert {kind_of(case) for case in CASES} == set(FAMILIES)


def loss_and_gradients(logits: Tensor, model: torch.nn.Module, first: str) -> tuple[float, Tensor]:
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten())
    loss.backward()
    grad = model.get_parameter(first).grad
    assert grad is not None
    return float(loss.detach()), grad


def stored(folder: Path) -> dict[str, Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


@pytest.mark.parametrize("case", EACH)
def test_a_model_goes_in_and_out(case, tmp_path, capsys):
    """Logits, loss and gradients are those of transformers; files come out as they went in."""
    theirs = make_model(case)
    theirs.save_pretrained(tmp_path / "hf")
    assert run("import", tmp_path / "hf", tmp_path / "ours") == 0
    ours = load_ours(tmp_path / "ours/checkpoints")

    logits, wanted = ours(tokens()).logits, theirs(tokens(), use_cache=False).logits
    assert wanted.detach().abs().max() > 1
    assert (logits - wanted).abs().max() < 1e-4
    loss, grad = loss_and_gradients(logits, ours, "embed.weight")
    wanted_loss, wanted_grad = loss_and_gradients(wanted, theirs, "model.embed_tokens.weight")
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert (grad - wanted_grad).norm() / wanted_grad.norm() < 1e-4

    assert run("export", tmp_path / "ours/checkpoints", tmp_path / "out") == 0
    assert f": {kind_of(case)}, float32," in capsys.readouterr().out, (
        "by where it was imported from"
    )
    before, after = stored(tmp_path / "hf"), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    again = load_theirs(tmp_path / "out")
    assert type(again) is type(theirs)
    assert torch.equal(logits_of(again), wanted)

    config = HFConfig.read(tmp_path / "out")
    family = family_of(config)
    read = [family.sections(of) for of in (config, HFConfig.read(tmp_path / "hf"))]
    models = [ModelConfig.model_validate(model) for model, _ in read]
    # The files decide whether there are layers of multi-token prediction.
    same = {"head_dim": models[0].qk_head_dim, "num_mtp_layers": 0}
    assert models[0].qk_head_dim == models[1].qk_head_dim
    assert models[0].model_copy(update=same) == models[1].model_copy(update=same)
    assert read[0][1] == read[1][1]


@pytest.mark.parametrize(
    "case",
    [
        "granitemoeshared",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("ernie4_5_moe", "glm4_moe",
                                                                  "hy_v3", "minimax_m2")),
    ],
)  # fmt: skip
def test_bfloat16_in_many_files(case, tmp_path):
    """Into float32 and back, without a change of a bit; biases of experts stay in float32."""
    theirs = make_model(case).bfloat16()
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    before = stored(tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    assert run("import", tmp_path / "hf", tmp_path / "ours") == 0
    options = ["--dtype", "bfloat16", "--max-file-bytes", 40_000, "--family", kind_of(case)]
    assert run("export", tmp_path / "ours/checkpoints", tmp_path / "out", *options) == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    after = stored(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name].to(tensor.dtype), tensor), name
    ours = load_ours(tmp_path / "ours/checkpoints")
    wide = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        assert (ours(tokens()).logits - logits_of(wide)).abs().max() < 1e-4


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_takes(kind):
    family = FAMILIES[kind]
    config = getattr(transformers, family.architecture.replace("ForCausalLM", "Config"))()
    theirs = config.to_dict()
    for name, ours in family.defaults.items():
        value = theirs.get(name, getattr(config, name, None))
        if value is None:
            assert not ours or name in ("scoring_func", "topk_method", "use_qk_norm",
                                        "use_routing_bias"), name  # fmt: skip
        elif name == "rope_parameters":
            layers = "full_attention"  # of Mellum, which has a table for each type of layers
            assert value.get(layers, value) == ours.get(layers, ours)
        else:
            assert value == ours, name


PUBLISHED = {  # the numbers that the hub counts, and what matters of config.json
    "qwen2_moe": (14_315_784_192, {  # Qwen1.5-MoE-A2.7B
        "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 5632,
        "max_position_embeddings": 8192, "max_window_layers": 21, "moe_intermediate_size": 1408,
        "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 60,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16,
        "rope_theta": 1e6, "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
        "use_sliding_window": False, "vocab_size": 151936,
    }),
    "ernie4_5_moe": (21_825_437_888, {  # ERNIE-4.5-21B-A3B
        "hidden_size": 2560, "intermediate_size": 12288, "max_position_embeddings": 131072,
        "moe_intermediate_size": 1536, "moe_k": 6, "moe_layer_interval": 1,
        "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2,
        "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False,
        "vocab_size": 103424,
    }),
    "granitemoe": (1_334_628_352, {  # granite-3.0-1b-a400m
        "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "hidden_size": 1024,
        "intermediate_size": 512, "logits_scaling": 6.0, "max_position_embeddings": 4096,
        "num_attention_heads": 16, "num_experts_per_tok": 8, "num_hidden_layers": 24,
        "num_key_value_heads": 8, "num_local_experts": 32, "residual_multiplier": 0.22,
        "rope_theta": 10000, "tie_word_embeddings": True, "vocab_size": 49155,
    }),
    "qwen2": (7_615_616_512, {  # Qwen2-7B
        "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072,
        "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rope_theta": 1e6, "sliding_window": 131072,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152064,
    }),
}  # fmt: skip


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_models_have_their_sizes(kind):
    parameters, values = PUBLISHED[kind]
    config = HFConfig({"model_type": kind, **values}, "config.json")
    spec = new_spec(family_of(config).sections(config), Path("published"))
    state = meta_decoder(spec.model, spec.moe).state_dict()
    assert sum(t.numel() for t in state.values()) == parameters


def decoder_of(case: str) -> tuple[Family, ModelConfig, MoEConfig | None]:
    prefix, values = CASES[case]
    config = getattr(transformers, f"{prefix}Config")(**values).to_dict()
    family = FAMILIES[kind_of(case)]
    spec = new_spec(family.sections(HFConfig(config, "config.json")), Path("made"))
    return family, spec.model, spec.moe


def another(section: type[Any], field: str, value: Any) -> Any:
    """A value of a field that is not the given one."""
    annotation = section.model_fields[field].annotation
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 2
    if field in ("yarn", "multipliers"):
        table = get_args(annotation)[0]
        made = {"factor": 3.0, "original_seq_len": 16} if field == "yarn" else {"embedding": 9.0}
        return None if value is not None else table(**made)
    if field == "head_dim":
        return 2
    choices = [c for a in (annotation, *get_args(annotation)) for c in get_args(a)]
    if get_origin(annotation) is Literal:
        choices = list(get_args(annotation))
    return next(choice for choice in choices if isinstance(choice, str) and choice != value)


def changed(
    model: ModelConfig, moe: MoEConfig | None, name: str
) -> tuple[ModelConfig, MoEConfig | None]:
    section, field = name.split(".")
    of = model if section == "model" else moe
    assert of is not None
    update = {field: another(type(of), field, getattr(of, field))}
    if section == "model":
        return model.model_copy(update=update), moe
    return model, of.model_copy(update=update)


ONE_CASE = {kind_of(case): case for case in reversed(CASES)}


@pytest.mark.parametrize("kind", FAMILIES)
def test_nothing_that_numbers_depend_on_is_lost_on_the_way_out(kind):
    """Another value of any field makes another config.json, or is refused by its name."""
    family, model, moe = decoder_of(ONE_CASE[kind])
    before = family.config(model, moe, 128)
    for name in fields_of_specs(family.sparse):
        if name in FREE:
            continue
        other = changed(model, moe, name)
        values = [Expressed(*sections, 128, kind).value(name) for sections in ((model, moe), other)]
        if values[0] == values[1]:  # as the d_ff of a model without dense layers
            continue
        try:
            after = family.config(*other, 128)
        except InputError as error:
            told = str(error)
            assert name in told or (name in IMPLIED and "model.latent" in told), told
            continue
        if name in IMPLIED and name not in family.names:
            continue  # latent attention's sizes, where there is none
        assert after != before, name


def test_families_that_are_not_converted_say_why(tmp_path, capsys):
    assert not NOT_CONVERTED.keys() & FAMILIES.keys()
    for kind, why in NOT_CONVERTED.items():
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        assert run("import", tmp_path, tmp_path / "out") == 2
        told = one_error_line(capsys.readouterr().err)
        assert told.rstrip().endswith(f"config.json: model_type ({kind}) is not converted: {why}")


def test_tensors_of_modules_that_nobody_has_are_left_out(tmp_path, capsys):
    make_model("ernie4_5_moe").save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf/model.safetensors"
    whole = load_file(path)
    save_file({**whole, "model.mtp_block.0.mlp.up_proj.weight": torch.zeros(2)}, path)
    assert run("import", tmp_path / "hf", tmp_path / "ours") == 0
    save_file({**whole, "model.mtq_block.0.mlp.up_proj.weight": torch.zeros(2)}, path)
    assert run("import", tmp_path / "hf", tmp_path / "other") == 2
    assert "model.mtq_block.0.mlp.up_proj.weight is unexpected" in capsys.readouterr().err


def test_a_large_tensor_of_all_experts_is_never_read_whole(tmp_path):
    """And each number of it is read once, on the way in and on the way out."""
    shape = (3, 2 * 512, 2048)  # gate and up, 12 MiB
    files = MemorySource({"fused": SourceArray(shape, "bfloat16")})
    arrays = {
        f"model/{role}": SourceArray((1, 3, 2048, 512), "float32", (), {"layers": [0]})
        for role in ("gate", "up")
    }
    tensors = [
        HFTensor(f"fused [{e}] {i}/2", array, (0, e), (512, 2048), True,
                 within=Within("fused", shape, (e,), i, 2))
        for i, array in enumerate(arrays) for e in range(3)
    ]  # fmt: skip
    source = Converted(from_hf(files, tensors, arrays), arrays, "float32")
    rewrite(CheckpointTarget(source, tmp_path, Topology()), LEAST_MEMORY)
    assert max(files.read_bytes) <= LEAST_MEMORY // 4
    assert sum(files.read_bytes) == 12 << 20
    made = CheckpointSource(tmp_path, ckpt.read_manifest(tmp_path))
    again = to_hf(made, tensors, "bfloat16")
    assert again.arrays["fused"].shape == shape
    box = ((1, 2), (500, 530), (0, 2048))
    values = files.values["fused"][1:2, 500:530]
    wanted = convert(convert(values, "bfloat16", "float32"), "float32", "bfloat16")
    assert np.array_equal(again.read_box("fused", box), wanted)


def upcycled(case: str, folder: Path) -> Path:
    make_model(case).save_pretrained(folder / "hf")
    sizes = ["--num-experts", 4, "--top-k", 2]
    assert run("upcycle", folder / "hf", folder / "grown", *sizes) == 0
    return folder / "grown/checkpoints"


DENSE = [case for case in CASES if not FAMILIES[kind_of(case)].sparse]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case == "granite" else pytest.mark.slow) for case in DENSE],
)
def test_an_upcycled_model_begins_as_the_dense_one(case, tmp_path, capsys):
    """With the biases, the norms and the factors that its family has; and it has a family."""
    root, wanted = upcycled(case, tmp_path), logits_of(make_model(case))
    with torch.no_grad():
        assert (load_ours(root)(tokens()).logits - wanted).abs().max() < 1e-4
    sparse = {"granite": "granitemoe", "olmo2": "flex_olmo", "qwen3": "qwen3_moe"}.get(case)
    if sparse is not None:
        assert run("export", root, tmp_path / "out", "--family", sparse) == 0
        assert (logits_of(load_theirs(tmp_path / "out")) - wanted).abs().max() < 1e-4


def test_a_joined_tensor_is_read_box_by_box():
    """Gate and up of experts in one tensor, and out of it again: every box is that of the whole."""
    files = MemorySource({"fused": SourceArray((3, 10, 4), "float32")})
    led = Unstacked(files, {str(e): ("fused", (e,)) for e in range(3)})
    extents = {"gate": ((0, 4),), "up": ((4, 10),)}
    cut = Rows(led, {f"{e} {k}": (str(e), v) for e in range(3) for k, v in extents.items()})
    joined = Joined(cut, {str(e): (f"{e} gate", f"{e} up") for e in range(3)})
    again = Stacked(joined, {"fused": {(e,): str(e) for e in range(3)}}, {})
    assert again.arrays["fused"].shape == (3, 10, 4)
    for rows in ((0, 10), (0, 4), (3, 5), (4, 10), (9, 10)):
        box = ((1, 3), rows, (1, 4))
        wanted = files.values["fused"][1:3, slice(*rows), 1:4]
        assert (again.read_box("fused", box) == wanted).all(), rows
