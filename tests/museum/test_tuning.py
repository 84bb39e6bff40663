"""Fine-tuning that leaves experts out.

Adapters that were never attached, attached to a third of an expert, packed in another order, or
lost when they were merged: training went on, and saved what it had.

Legend: T tokens, D d_model, F d_ff, E experts, L rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moe
from tests.museum.cases import Edit, case
from tests.museum.shared_routing import layer_of, tokens
from tests.support.hf import make_model
from tests.support.hf import tokens as token_ids


def _randomized(model: Any) -> Any:
    """The model with adapters that add something: their second matrices begin as zeros."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora." in f".{name}":
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return model


@case(
    "unslothai/unsloth#6936",
    "Adapters were attached to attention alone while the trainer printed that it adapts experts, "
    "and every expert stayed frozen.",
    Edit(
        "moe/adapters/lora.py",
        "        _adapt(target.module, rank, alpha, dtype)\n",
        "        if target.kind != 'experts':\n"
        "            _adapt(target.module, rank, alpha, dtype)\n",
    ),
)
def test_adapters_of_experts_train_experts():
    """A step moves an adapter of every expert that got a token, in every layer."""
    model = moe.add_lora(moe.adopt(make_model("mixtral")), rank=2, on=("experts", "attention"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with moe.collect_aux(model) as auxes:
        model(token_ids(), labels=token_ids()).loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0).step()
    for layer, aux in enumerate(auxes):
        moved_E = torch.zeros(6, dtype=torch.bool)
        for name, p in model.named_parameters():
            if f"layers.{layer}." in name and "experts.lora.down_b" in name:
                moved_E = (p != before[name]).flatten(1).any(1)
        assert moved_E.tolist() == (aux.tokens_per_expert_E > 0).tolist(), f"layer {layer}"


@case(
    "unslothai/unsloth#11014",
    "Of experts without a gate only the down projection got an adapter, and the up projection of "
    "every expert stayed as it was.",
    Edit(
        "moe/adapters/matrices.py",
        '_MATRICES = ("gate", "up", "down")',
        '_MATRICES = ("down",)',
    ),
)
def test_every_matrix_of_an_expert_gets_an_adapter():
    """Adapters of experts without a gate have gradients for up and down of each used expert."""
    layer = _randomized(moe.add_lora(layer_of(activation="relu2"), rank=2, on=("experts",)))
    hidden, aux = layer(tokens())
    hidden.square().sum().backward()
    used_E = aux.tokens_per_expert_E > 0
    gradients = {n: p.grad for n, p in layer.experts.lora.named_parameters()}
    for matrix in ("up_a", "up_b", "down_a", "down_b"):
        assert matrix in gradients
        assert (gradients[matrix].flatten(1).norm(dim=1) > 0).tolist() == used_E.tolist()


@case(
    "unslothai/unsloth-zoo#779",
    "Merging took experts that are narrower than the model for transposed ones, found that shapes "
    "do not fit, and wrote the base weights.",
    Edit(
        "moe/adapters/matrices.py",
        "    weight.copy_(delta.add_(weight))",
        "    if weight.shape[0] < weight.shape[1]:\n        weight.copy_(delta.add_(weight))",
    ),
)
def test_merging_keeps_what_adapters_of_narrow_experts_learned():
    """A merged layer gives what its adapters gave, with experts narrower than the model."""
    layer = _randomized(moe.add_lora(layer_of(d_ff=8), rank=2, on=("experts",)))
    adapted_TD = layer(tokens()).hidden.detach()
    assert (adapted_TD - layer_of(d_ff=8)(tokens()).hidden).abs().max() > 0.1
    moe.merge_lora(layer)
    torch.testing.assert_close(layer(tokens()).hidden, adapted_TD, rtol=1e-4, atol=1e-5)


@case(
    "unslothai/unsloth#6930",
    "The second matrices of experts' adapters were stored with the experts outermost, where peft "
    "reads them innermost, and a merged model was scrambled.",
    Edit(
        "moe/adapters/peft_format.py",
        "b_EFL.permute(1, 2, 0).flatten(1)",
        "b_EFL.permute(1, 0, 2).flatten(1)",
    ),
)
def test_stored_adapters_have_the_order_that_peft_reads():
    """What peft computes of the stored down projections is what merging adds to each expert."""
    model = _randomized(moe.add_lora(moe.adopt(make_model("qwen3_moe")), rank=3, on=("experts",)))
    stored = moe.peft_adapter(model).tensors
    name = "model.layers.1.mlp.experts"
    before_EDF = model.get_parameter(f"{name}.down_proj").detach().clone()
    moe.merge_lora(model)
    change_EDF = model.get_parameter(f"{name}.down_proj").detach() - before_EDF
    E, D, F = before_EDF.shape
    a_ELF = stored[f"base_model.model.{name}.lora_A.weight"].reshape(E, 3, F)
    b_DLE = stored[f"base_model.model.{name}.lora_B.weight"].reshape(D, 3, E)
    for e in range(E):
        delta_DF = (16 / 3) * b_DLE[:, :, e] @ a_ELF[e]
        torch.testing.assert_close(change_EDF[e], delta_DF, rtol=1e-3, atol=1e-5)


@case(
    "huggingface/peft#2710",
    "A second adapter on parameters of experts was accepted, and was not applied as it should be.",
    Edit("moe/adapters/lora.py", "if adapted is not None:", "if adapted == 0:"),
)
def test_a_second_adapter_is_refused():
    """Adapters on a model that has some are refused in one line, and nothing changes."""
    layer = moe.add_lora(layer_of(), rank=2, on=("experts",))
    names = [name for name, _ in layer.named_parameters()]
    with pytest.raises(ValueError, match="must have no adapter: call add_lora once"):
        moe.add_lora(layer, rank=4, on=("experts",))
    assert [name for name, _ in layer.named_parameters()] == names


@case(
    "huggingface/peft#1959",
    "A name that fits no layer was passed over without a word where another name fits.",
    Edit(
        "moe/adapters/targets.py",
        "if not allow_no_target and not any(_fits(target, word) for target in targets):",
        "if not allow_no_target and not any(_fits(t, w) for t in targets for w in on):",
    ),
)
def test_each_pattern_must_fit_a_layer():
    """A name that fits no layer is refused, also beside a name that fits."""
    with pytest.raises(ValueError, match=r"on \(\*\.gate_proj\) must be"):
        moe.add_lora(layer_of(), on=("experts", "*.gate_proj"))


@case(
    "huggingface/peft#3533",
    "A second adapter whose names fit no layer was accepted, and adapted nothing.",
    Edit(
        "moe/adapters/targets.py",
        "if not allow_no_target and not any(_fits(target, word) for target in targets):",
        "if False:",
    ),
    Edit("moe/adapters/lora.py", "if adapted is not None:", "if adapted == 0:"),
)
def test_an_adapter_that_fits_nothing_is_refused():
    """Names that fit no layer are refused, whether or not the model has adapters."""
    for layer in (layer_of(), moe.add_lora(layer_of(), on=("experts",))):
        before = [name for name, _ in layer.named_parameters()]
        with pytest.raises(ValueError, match="must"):
            moe.add_lora(layer, on=("does_not_exist",))
        assert [name for name, _ in layer.named_parameters()] == before


@case(
    "huggingface/peft#2486",
    "Merging added the bias that an adapter had learned without the adapter's scale.",
    Edit("moe/adapters/peft_format.py", '"modules_to_save", "lora_bias")', '"modules_to_save")'),
)
def test_an_adapter_with_biases_is_refused():
    """An adapter of peft with biases, which have no place here, is refused and not half read."""
    model = moe.add_lora(moe.adopt(make_model("mixtral")), rank=2, on=("attention",))
    stored = moe.peft_adapter(model)
    with pytest.raises(ValueError, match=r"lora_bias \(True\) must be off"):
        moe.load_peft_adapter(model, stored.tensors, {**stored.config, "lora_bias": True})
