"""MoE layers in the place of feed-forward modules of dense models: new ones, and upcycled ones."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

import moe
from moe import MoEConfig, MoELayer
from parallel import ParallelDims, Topology, apply_expert_parallel, apply_fsdp
from tests.support.hf import tokens
from tests.support.ranks import run_ranks

SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
         "num_attention_heads": 4, "max_position_embeddings": 128, "bos_token_id": None,
         "eos_token_id": None, "pad_token_id": None}  # fmt: skip
GPT2 = {"vocab_size": 300, "n_embd": 32, "n_inner": 48, "n_layer": 3, "n_head": 4,
        "activation_function": "gelu", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "bos_token_id": None, "eos_token_id": None}  # fmt: skip
GATED = {**SIZES, "num_key_value_heads": 2}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GATED),
    "llama-biases": ("Llama", {**GATED, "mlp_bias": True}),
    "qwen2": ("Qwen2", GATED),
    "qwen3": ("Qwen3", {**GATED, "head_dim": 8, "hidden_act": "gelu"}),
    "mistral": ("Mistral", GATED),
    "gpt2": ("GPT2", GPT2),
    "phi": ("Phi", {**SIZES, "hidden_act": "relu2", "resid_pdrop": 0.0}),
    "nemotron": ("Nemotron", GATED),
}


def make_dense(case: str, **options: Any) -> Any:
    name, config = DENSE[case]
    torch.manual_seed(0)
    name = f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**config | options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.25)
    return model


def layers_of(model: nn.Module) -> list[MoELayer]:
    return [module for module in model.modules() if isinstance(module, MoELayer)]


def close(got: Tensor, wanted: Tensor, to: float = 1e-5) -> None:
    torch.testing.assert_close(got, wanted, rtol=to, atol=to)


@pytest.mark.parametrize("case", DENSE)
def test_an_upcycled_model_begins_as_the_dense_one(case):
    dense, model = make_dense(case), make_dense(case)
    wanted = dense(tokens()).logits
    assert moe.upcycle(model, num_experts=4, top_k=2, first_k_dense=1) is model
    assert len(layers_of(model)) == 2
    close(model(tokens()).logits, wanted)
    layer = layers_of(model)[0]
    assert all(torch.equal(p[0], p[e]) for p in layer.experts.parameters() for e in range(4))
    assert layer.router.weight.abs().sum() > 0
    prompt = tokens()[:, :7]
    said = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **said), dense.generate(prompt, **said))


@pytest.mark.parametrize(("top_k", "weights"), [
    (3, {"norm_topk_prob": True}),
    (2, {"score_func": "sigmoid", "norm_topk_prob": True}),
    (1, {"softmax_after_topk": True, "norm_topk_prob": False}),
])  # fmt: skip
def test_normalized_weights_begin_as_the_dense_model_and_others_do_not(top_k, weights):
    wanted = make_dense("llama")(tokens()).logits
    fields = {"num_experts": 4, "top_k": top_k}
    close(moe.upcycle(make_dense("llama"), **fields, **weights)(tokens()).logits, wanted)
    other = moe.upcycle(make_dense("llama"), norm_topk_prob=False, **fields)
    assert not torch.allclose(other(tokens()).logits, wanted, atol=1e-2)


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_an_upcycled_model_trains_and_its_experts_part(case):
    model = moe.upcycle(make_dense(case), num_experts=4, top_k=2, aux_loss_coeff=0.1).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        with moe.collect_aux(model) as auxes:
            loss = model(tokens(), labels=tokens()).loss
        assert len(auxes) == 3
        (loss + sum(aux.aux_loss for aux in auxes)).backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    experts = layers_of(model)[0].experts.w_up
    assert not torch.equal(experts[0], experts[1])


@pytest.mark.parametrize("case", ["llama", "gpt2", "qwen3"])
def test_new_layers_of_other_sizes_save_and_load(case, tmp_path):
    fields = {"num_experts": 4, "top_k": 2, "d_ff": 16, "num_shared_experts": 1}
    model = moe.replace_mlp(make_dense(case), **fields)
    assert {layer.experts.w_up.shape for layer in layers_of(model)} == {(4, 32, 16)}
    wanted = model(tokens()).logits
    torch.save(model.state_dict(), tmp_path / "state.pt")
    model.save_pretrained(tmp_path)
    fresh = moe.replace_mlp(other_seed(make_dense(case)), **fields)
    assert not torch.allclose(fresh(tokens()).logits, wanted, atol=1e-3)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(fresh(tokens()).logits, wanted)
    from safetensors.torch import load_file

    again = moe.replace_mlp(other_seed(make_dense(case)), **fields)
    missing = again.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"}  # tied
    assert not missing.unexpected_keys
    assert torch.equal(again(tokens()).logits, wanted)


def other_seed(model: Any) -> Any:
    """The model, of which new layers get values of another seed."""
    torch.manual_seed(9)
    return model


def test_modules_are_chosen_by_names_and_numbers():
    def replaced(**options: Any) -> list[str]:
        model = moe.replace_mlp(make_dense("llama"), num_experts=4, top_k=2, **options)
        return [n for n, m in model.named_modules() if isinstance(m, MoELayer)]

    names = [f"model.layers.{i}.mlp" for i in range(3)]
    assert replaced() == names
    assert replaced(first_k_dense=2) == names[2:]
    assert replaced(modules="*.1.mlp") == names[1:2]
    assert replaced(modules=[0, "*.2.*"]) == [names[0], names[2]]
    assert replaced(modules=range(0, 3, 2), first_k_dense=1) == names[2:]


def test_one_config_for_all_layers():
    config = MoEConfig(d_model=32, d_ff=8, num_experts=4, top_k=2)
    model = moe.replace_mlp(make_dense("llama").bfloat16(), config)
    assert all(layer.config is config for layer in layers_of(model))
    assert layers_of(model)[0].experts.w_up.dtype == torch.bfloat16
    assert layers_of(model)[0].router.weight.dtype == torch.float32


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_padding_of_the_attention_mask_is_no_token(case, side, recomputed):
    """Under a tight capacity: logits and statistics are those of the texts by themselves."""
    capacity = {"policy": "fixed", "capacity_factor": 1.0, "drop_policy": "position"}
    model = moe.replace_mlp(make_dense(case).train(), num_experts=4, top_k=2, capacity=capacity)
    twin = copy.deepcopy(model)
    if recomputed:
        model.activation_checkpointing_enable()
    text = tokens()[:1]
    padding = torch.zeros(1, 9, dtype=torch.int64)
    parts = [(padding, padding), (text, torch.ones_like(text))]
    ids, mask = (torch.cat(p, 1) for p in zip(*parts[:: 1 if side == "left" else -1], strict=True))
    places = slice(9, None) if side == "left" else slice(text.shape[1])
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    gradients = []
    for each, said in ((model, {"attention_mask": mask, **positions}), (twin, {})):
        with moe.collect_aux(each) as auxes, set_checkpoint_early_stop(False):
            logits = each(ids if said else text, use_cache=False, **said).logits
        logits = logits[:, places] if said else logits
        (logits.square().sum() + sum(aux.z_loss for aux in auxes[:3])).backward()
        gradients.append((logits, auxes[:3], [p.grad for p in each.parameters()]))
    (got, auxes, grads), (wanted, expected, wanted_grads) = gradients
    close(got, wanted, 1e-4)
    assert any(aux.num_dropped for aux in expected), "the capacity must be tight"
    for a, b in zip(auxes, expected, strict=True):
        assert torch.equal(a.tokens_per_expert_E, b.tokens_per_expert_E)
    for a, b in zip(grads, wanted_grads, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


# ------------------------------------------------------------------------------------------------
# Plain modules.


class Tower(nn.Module):
    def __init__(self, ffn: nn.Module) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([copy.deepcopy(ffn) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class SwiGLU(nn.Module):
    def __init__(self, gate_first: bool, square: bool = False) -> None:
        super().__init__()
        F_ = 8 if square else 20
        self.w1, self.w2 = nn.Linear(8, F_, bias=False), nn.Linear(F_, 8, bias=False)
        self.w3 = nn.Linear(8, F_, bias=False)
        self.gate_first = gate_first

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.w1(x), self.w3(x)
        return self.w2(F.silu(a) * b if self.gate_first else a * F.silu(b))


PLAIN = {
    "sequential": nn.Sequential(nn.Linear(8, 20), nn.GELU(), nn.Dropout(0.5), nn.Linear(20, 8)),
    "without a bias": nn.Sequential(nn.Linear(8, 20, bias=False), nn.GELU(), nn.Linear(20, 8)),
    "gate first": SwiGLU(True),
    "gate last": SwiGLU(False),
}


@pytest.mark.parametrize("case", PLAIN)
def test_plain_modules_are_upcycled(case):
    dense, x = Tower(PLAIN[case]), torch.randn(3, 5, 8)
    model = moe.upcycle(copy.deepcopy(dense).eval(), num_experts=4, top_k=2)
    assert len(layers_of(model)) == 2
    close(model(x), dense.eval()(x))
    with moe.collect_aux(model) as auxes:
        model(x)
    assert [int(aux.tokens_per_expert_E.sum()) for aux in auxes] == [30, 30]


@pytest.mark.parametrize("gate_first", [True, False])
def test_square_matrices_need_the_name_of_a_feed_forward_module(gate_first):
    torch.manual_seed(0)
    dense, x = nn.ModuleDict({"mlp": SwiGLU(gate_first, square=True)}), torch.randn(5, 8)
    wanted = dense["mlp"](x)
    model = moe.upcycle(dense, num_experts=4, top_k=2)
    close(model["mlp"](x), wanted)
    with pytest.raises(ValueError, match="Tower must have feed-forward modules"):
        moe.upcycle(Tower(SwiGLU(gate_first, square=True)), num_experts=4, top_k=2)


def one_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    (line,) = str(error.value).splitlines()
    return line


TANH = nn.Sequential(nn.Linear(8, 20), nn.GELU("tanh"), nn.Linear(20, 8))
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (SwiGLU(True, square=True), {}, "Tower must have feed-forward modules: linear layers D -> F"),
    (SwiGLU(True, square=True), {}, "looked at blocks.0 (SwiGLU: w1 8 -> 8, w2 8 -> 8, w3 8 -> 8)"),
    (TANH, {}, "blocks.0 (Sequential: 0 8 -> 20, 2 20 -> 8) must compute what an expert with "
               "activation gelu or relu2 does"),
    (SwiGLU(True), {"modules": "*.mlp"}, "modules (*.mlp) must be a number below 2, or a pattern"),
    (SwiGLU(True), {"modules": [2]}, "modules (2) must be a number below 2"),
    (SwiGLU(True), {"first_k_dense": 2}, "first_k_dense (2) must be from 0 to 1"),
    (SwiGLU(True), {"d_ff": 3}, "d_ff is the dense modules' and must be left out"),
    (SwiGLU(True), {"top_k": 1}, "top_k (1) must be at least 2 for the output to begin as"),
    (SwiGLU(True), {"top_k": 5}, "blocks.0: MoEConfig: top_k (5) must be"),
    (SwiGLU(True).to("meta"), {}, "blocks.0 must have values: load the dense model"),
    (nn.Sequential(nn.Linear(8, 20), nn.GELU(), nn.Linear(20, 8), nn.Flatten(0)), {},
     "blocks.0 (Sequential) must give one tensor of its input's shape"),
]  # fmt: skip


@pytest.mark.parametrize(("ffn", "options", "message"), REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(ffn, options, message):
    model = Tower(ffn)
    before = list(model.state_dict())
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        moe.upcycle(model, **{"num_experts": 4, "top_k": 2} | options)
    one_line(error)
    assert list(model.state_dict()) == before


def test_other_things_that_are_refused():
    config = MoEConfig(d_model=9, d_ff=8, num_experts=4, top_k=2)
    for options, message in (
        ({"config": config}, r"config.d_model \(9\) must be that of blocks.0 \(8\)"),
        ({"config": config, "top_k": 2}, "top_k must be left out with a config"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            moe.replace_mlp(Tower(SwiGLU(True)), **options)
        one_line(error)
    with pytest.raises(ValueError, match="must have adopted layers: call"):
        moe.collect_aux(Tower(SwiGLU(True))).__enter__()
    quantized = Tower(SwiGLU(True))
    weight = quantized.blocks[1].w1.weight.to(torch.int8)
    quantized.blocks[1].w1.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(ValueError, match=r"blocks.1.w1.weight \(Parameter, torch.int8\) must be a"):
        moe.replace_mlp(quantized, num_experts=4, top_k=2)
    assert not layers_of(quantized)


def test_experts_of_an_moe_model_are_no_dense_modules():
    model = moe.upcycle(make_dense("llama"), modules=[0], num_experts=4, top_k=2)
    moe.upcycle(model, modules=[0], num_experts=2, top_k=2)
    assert [layer.config.num_experts for layer in layers_of(model)] == [4, 2]


# ------------------------------------------------------------------------------------------------
# Several ranks.


def trained(model: Any, batches: list[Tensor], scale: float) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        total = 0.0
        for ids in batches:
            loss = model(ids, labels=ids).loss * scale
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def upcycled() -> Any:
    return moe.upcycle(make_dense("llama").train(), num_experts=4, top_k=2, aux_loss_coeff=0.0)


def on_rank(rank: int, folder: Path) -> tuple[list[float], Tensor]:
    dims = ParallelDims.build(Topology(dp_shard=2, ep=2), "cpu")
    model = upcycled()
    apply_expert_parallel(model, dims.ep_mesh)
    apply_fsdp(model, dims, blocks=list(model.model.layers))
    losses = trained(model, [tokens()[rank : rank + 1]], 0.5)
    return losses, model.model.layers[1].mlp.experts.w_up.full_tensor().detach()


def test_ranks_train_an_upcycled_model_as_one_process_does(tmp_path):
    first, second = run_ranks(on_rank, 2, tmp_path)
    model = upcycled()
    expected = trained(model, [tokens()[i : i + 1] for i in range(2)], 0.5)
    got = [a + b for a, b in zip(first[0], second[0], strict=True)]
    assert got == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0]
    close(first[1], model.model.layers[1].mlp.experts.w_up.detach())
