"""Every MoE family of transformers: adopted models against the models that they were."""

from __future__ import annotations

import copy
import io
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

import moe
from moe import MoELayer
from moe.adoption.families import ADOPTED, TABLE
from moe.adoption.kinds import Family
from parallel import ParallelDims, Topology, apply_expert_parallel, apply_fsdp
from tests.support.moe_families import inputs_of, make_model
from tests.support.ranks import run_ranks

BY_NAME = {family.name: family for family in ADOPTED}
# One family of each kind of block; the others are slow together.
KINDS = [
    "Qwen2-MoE", "DeepSeek-V2", "ERNIE 4.5 MoE", "DBRX", "gpt-oss", "Llama 4", "Nemotron-H",
    "MiniMax-M2", "AFMoE", "Cohere2-MoE", "DeepSeek-V4", "A.X K1",
]  # fmt: skip
EVERY = [pytest.param(name, marks=() if name in KINDS else pytest.mark.slow) for name in BY_NAME]


def layers_of(model: nn.Module) -> list[MoELayer]:
    return [module for module in model.modules() if isinstance(module, MoELayer)]


def blocks_of(model: nn.Module, family: Family) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ == family.block]


def close(got: Tensor, wanted: Tensor, what: str = "", to: float = 1e-5) -> None:
    torch.testing.assert_close(got, wanted, rtol=to, atol=to, msg=lambda m: f"{what}: {m}")


def run(model: PreTrainedModel, **more: Any) -> tuple[Tensor, Tensor, Any]:
    """Logits, a loss that all of the model has a part in, and all outputs."""
    inputs = inputs_of(model) | more
    out = model(**inputs)
    loss = getattr(out, "loss", None)
    if loss is None:
        weights = torch.linspace(-1, 1, out[0].numel()).view(out[0].shape)
        loss = (out[0] * weights).sum() / len(weights)
    return out[0 if getattr(out, "logits", None) is None else "logits"], loss, out


def compare(model: PreTrainedModel, theirs: PreTrainedModel, **more: Any) -> None:
    """Outputs, loss and all gradients."""
    got, wanted = run(model, **more), run(theirs, **more)
    close(got[0], wanted[0], "logits")
    close(got[1], wanted[1], "loss")
    for name in ("router_logits", "aux_loss"):
        a, b = getattr(got[2], name, None), getattr(wanted[2], name, None)
        assert (a is None) == (b is None), name
        pairs = [] if a is None else zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]
        for x, y in pairs:
            close(x, y.view(x.shape), name)
    for each in (model, theirs):
        each.zero_grad()
    got[1].backward()
    wanted[1].backward()
    for (name, p), q in zip(model.named_parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            scale = q.grad.abs().max().clamp(min=1.0)
            close(p.grad / scale, q.grad / scale, name)


@pytest.mark.parametrize("name", EVERY)
def test_an_adopted_family_computes_and_is_saved_as_before(name, tmp_path):
    family = BY_NAME[name]
    theirs, model = make_model(family), make_model(family)
    blocks = blocks_of(theirs, family)
    assert blocks, f"the model must have a {family.block}"
    before, parameters = model.state_dict(keep_vars=True), list(model.parameters())
    assert moe.adopt(model) is model
    assert len(layers_of(model)) == len(blocks)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    for key, tensor in after.items():
        assert (tensor.shape, tensor.data_ptr()) == (before[key].shape, before[key].data_ptr()), key
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))

    compare(model, theirs)
    compare(model, theirs, output_router_logits=True)

    wanted = run(model)[0]
    assert torch.equal(run(copy.deepcopy(model))[0], wanted)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, local_files_only=True).eval()
    assert len(blocks_of(loaded, family)) == len(blocks)
    close(run(loaded)[0], wanted, "reloaded")
    assert moe.restore(model) is model
    assert [type(b) for b in blocks_of(model, family)] == [type(b) for b in blocks]
    assert torch.equal(run(model)[0], run(theirs)[0])
    compare(model, theirs)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", EVERY)
def test_left_padding_of_an_adopted_family_is_no_token(name):
    family = BY_NAME[name]
    theirs, model = make_model(family), moe.adopt(make_model(family))
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :4] = 0
    with moe.collect_aux(model) as auxes, torch.no_grad():
        got = run(model, attention_mask=mask)[0]
        wanted = run(theirs, attention_mask=mask)[0]
    close(got[mask == 1], wanted[mask == 1], "tokens")
    counts = [int(aux.tokens_per_expert_E.sum()) for aux in auxes]
    tokens = int(mask.sum()) if family.kind.sees_mask else mask.numel()
    assert counts == [layer.config.top_k * tokens for layer in layers_of(model)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("DBRX", "AFMoE") else pytest.mark.slow)
        for name in BY_NAME
    ],
)
def test_an_adopted_family_is_pickled(name):
    model = moe.adopt(make_model(BY_NAME[name]))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    wanted = run(model)[0]
    assert torch.equal(run(loaded)[0], wanted)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.mul_(1.5)
    assert torch.equal(run(model)[0], wanted)
    assert not torch.equal(run(loaded)[0], wanted)
    with pytest.warns(UserWarning, match="no effect on adopted layers"):
        loaded.set_experts_implementation("eager")
    assert len(blocks_of(moe.restore(loaded), BY_NAME[name])) == len(layers_of(model))


BIASES = {
    "MiniMax-M2": "mlp.e_score_correction_bias", "AFMoE": "mlp.expert_bias",
    "ERNIE 4.5 MoE": "mlp.gate.moe_statics.e_score_correction_bias",
    "Laguna": "mlp.gate.e_score_correction_bias",
}  # fmt: skip


@pytest.mark.parametrize("name", BIASES)
def test_biases_of_the_choice_move_where_the_family_has_them(name):
    model = moe.adopt(make_model(BY_NAME[name]), bias_update_rate=0.25)
    layer, key = layers_of(model)[-1], f"model.layers.1.{BIASES[name]}"
    stored = model.state_dict()[key]
    copied, before = copy.deepcopy(model), stored.clone()
    counts = torch.arange(8)
    layer.router.update_bias(counts)
    steps = 0.25 * torch.sign(3.5 - counts)
    close((model.state_dict()[key] - before).view(-1), steps, key)
    assert torch.equal(copied.state_dict()[key], before)
    assert torch.equal(layer.router.expert_bias, model.state_dict()[key].view(-1))
    model.bfloat16()
    assert model.state_dict()[key].dtype == torch.float32, "bfloat16 would lose small steps"
    close((model.state_dict()[key] - before).view(-1), steps, key)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("Cohere2-MoE", {"expert_selection_fn": "sigmoid"}),
    ("Cohere2-MoE", {"shared_expert_combination_strategy": "sum"}),
    ("DeepSeek-V2", {"topk_method": "greedy", "n_group": None, "topk_group": None}),
    ("LFM2-MoE", {"use_expert_bias": False}),
    ("Qwen2-MoE", {"num_experts_per_tok": 1}),
    ("Llama 4", {"num_experts_per_tok": 1}),
    ("gpt-oss", {"num_experts_per_tok": 1, "swiglu_limit": 7.0}),
    ("ERNIE 4.5 MoE", {"moe_num_shared_experts": 0}),
    ("Step-3.7", {"swiglu_limits": None}),
]


@pytest.mark.parametrize(("name", "changes"), VARIANTS, ids=str)
def test_values_that_a_family_reads_from_its_config(name, changes):
    theirs = make_model(BY_NAME[name], **changes)
    compare(moe.adopt(make_model(BY_NAME[name], **changes)), theirs)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt-oss", {"swiglu_alpha": 1.5}, r"swiglu_alpha \(1.5\) must be 1.702: "),
    ("Nemotron-H", {"moe_latent_size": 16}, r"moe_latent_size \(16\) must be None: "),
    ("Step-3.7", {"swiglu_limits": [1.0, 1.0]}, r"swiglu_limits \(1.0\) must be inf: "),
    ("Laguna", {"moe_router_logit_softcapping": 30.0}, r"softcapping \(30.0\) must be 0: "),
    ("A.X K2", {"n_group": 4, "topk_group": 2}, r"n_group \(4\) must be None: "),
    ("DeepSeek-V4", {"scoring_func": "sigmoid"}, r"scoring_func \(\w+\) must be Sqrt"),
    ("MiniMax-M2", {"router_jitter_noise": 0.1}, r"router_jitter_noise \(0.1\) must be 0: "),
    ("MiniMax-M2", {"num_experts_per_tok": 1}, r"norm_topk_prob \(true\) must be false"),
    ("DeepSeek-V3", {"hidden_act": "relu"}, r"hidden_act \(ReLU\) must be silu or gelu"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED, ids=str)
def test_values_that_a_declaration_does_not_cover_are_refused(name, changes, message):
    model = make_model(BY_NAME[name], **changes)
    with pytest.raises(ValueError, match=message) as error:
        moe.adopt(model)
    assert "\n" not in str(error.value)
    assert not layers_of(model)


def test_a_table_that_names_an_expert_twice_is_refused():
    model = make_model(BY_NAME["DeepSeek-V4"])
    model.model.layers[0].mlp.gate.tid2eid[5] = 3
    with pytest.raises(ValueError, match="tid2eid must have different experts in each row"):
        moe.adopt(model)


@pytest.mark.parametrize("name", ["Phimoe", "SwitchTransformers", "JetMoe"])
def test_a_family_that_cannot_be_adopted_is_refused_with_the_reason(name):
    sizes = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 2, "intermediate_size": 8, "num_local_experts": 4,
             "num_experts": 4, "d_model": 8, "d_ff": 8, "d_kv": 4, "num_heads": 2,
             "num_layers": 2, "num_decoder_layers": 2, "kv_channels": 4,
             "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}  # fmt: skip
    kind = {"SwitchTransformers": "ForConditionalGeneration"}.get(name, "ForCausalLM")
    model = getattr(transformers, name + kind)(getattr(transformers, f"{name}Config")(**sizes))
    with pytest.raises(ValueError, match="cannot be adopted: ") as error:
        moe.adopt(model)
    reasons = [f.why_not for f in TABLE if f.model_type in (name.lower(), "switch_transformers")]
    assert str(error.value).partition("adopted: ")[2] in reasons


def test_every_model_of_transformers_with_experts_is_in_the_table():
    pattern = re.compile(
        r"class \w+(Experts|SparseMoeBlock|MoE|Moe|TopkRouter|TopKRouter|SparseMLP)\(", re.M
    )
    folder = Path(transformers.__file__).parent / "models"
    have = {
        path.parent.name
        for path in folder.glob("*/modeling_*.py")
        if pattern.search(path.read_text()) and "TensorFlow" not in path.name
    }
    assert have - {family.model_type for family in TABLE} == set()


@pytest.mark.slow  # imports the models of all families
def test_every_entry_of_the_table_names_a_class_and_is_adopted_or_says_why_not():
    for family in TABLE:
        module = __import__(family.full_name.rpartition(".")[0], fromlist=["_"])
        assert isinstance(getattr(module, family.block), type), family.full_name
        assert family.adopt == (not family.why_not), family.name
        assert len({f.name for f in TABLE}) == len(TABLE)


# ------------------------------------------------------------------------------------------------
# Two ranks: one family of each layout of experts, and one with a table of experts.

LAYOUTS = [
    ["gpt-oss", "DBRX"],
    pytest.param(["Llama 4", "OpenAI privacy filter", "Nemotron-H", "DeepSeek-V4"],
                 marks=pytest.mark.slow),
]  # fmt: skip


def on_rank(rank: int, names: list[str]) -> None:
    dims = ParallelDims.build(Topology(dp_shard=2, ep=2), "cpu")
    mesh = dims.ep_mesh
    for name in names:
        family = BY_NAME[name]
        theirs, model = make_model(family), moe.adopt(make_model(family))
        apply_expert_parallel(model, mesh)
        got, wanted = run(model), run(theirs)
        close(got[0], wanted[0], f"{name}: logits")
        got[1].backward()
        wanted[1].backward()
        whole = dict(theirs.named_parameters())
        of_experts = 0
        for key, p in model.named_parameters():
            grad, q = p.grad, whole[key].grad
            if hasattr(p, "to_local"):  # summed over the tokens of both ranks, which are the same
                grad, q = grad.to_local(), 2 * q.chunk(2)[rank]
                of_experts += 1
            if q is not None:
                scale = q.abs().max().clamp(min=1.0)
                close(grad / scale, q / scale, f"{name}: {key}")
        assert of_experts == len(family.kind.experts.names) * len(layers_of(model))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        with pytest.raises(RuntimeError, match="unpickled without its process groups"):
            run(loaded)
        apply_expert_parallel(loaded, mesh)
        assert torch.equal(run(loaded)[0], run(model)[0]), name
        assert torch.equal(run(copy.deepcopy(model))[0], run(model)[0]), name
        if name == "gpt-oss":
            apply_fsdp(model, dims, blocks=list(model.model.layers))
            close(run(model)[0], wanted[0], f"{name} under FSDP")
            with pytest.raises(pickle.PicklingError, match=r"save its state_dict\(\)") as error:
                torch.save(model, file)
            assert "\n" not in str(error.value)


@pytest.mark.parametrize("names", LAYOUTS, ids=str)
def test_each_layout_of_experts_on_two_ranks(names):
    run_ranks(on_rank, 2, names)
