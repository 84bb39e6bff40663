"""Adapters on adopted models of transformers: experts in the layout of transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import moe
from parallel import ParallelDims, Topology, apply_expert_parallel, apply_fsdp
from tests.moe.adapters.models import randomized
from tests.support.hf import load_theirs, logits_of, make_model, tokens
from tests.support.ranks import run_ranks

EVERYTHING = ("experts", "router", "attention", "dense")


def with_lora(case: str, **options: Any) -> Any:
    model = moe.adopt(make_model(case), **options)
    has_dense = case != "mixtral"
    return moe.add_lora(model, rank=3, alpha=6, on=EVERYTHING[: 3 + has_dense])


def adapted(case: str, **options: Any) -> Any:
    return randomized(with_lora(case, **options))


def close(got: Tensor, wanted: Tensor, to: float = 1e-5) -> None:
    torch.testing.assert_close(got, wanted, rtol=to, atol=to)


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_a_merged_model_is_one_of_transformers(case, tmp_path):
    model, before = adapted(case), make_model(case)
    names = [name for name in model.state_dict() if ".lora." not in name]
    assert names == list(before.state_dict())
    wanted = logits_of(model)
    assert (wanted - logits_of(before)).abs().max() > 0.1
    with pytest.raises(ValueError, match=r"mlp must have no adapters to be restored: call moe"):
        moe.restore(model)
    moe.merge_lora(model).save_pretrained(tmp_path)
    close(logits_of(model), wanted, 1e-4)
    theirs = load_theirs(tmp_path)
    close(logits_of(theirs), wanted, 1e-4)
    assert type(theirs) is type(before)
    moe.restore(model)


@pytest.mark.parametrize("case", ["mixtral", "deepseek_v3"])
def test_only_adapters_learn_and_the_model_generates(case):
    model = adapted(case)
    base = {n: p.detach().clone() for n, p in model.named_parameters() if ".lora." not in n}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        watch = moe.watch_parameters(model, optimizer)
        with moe.collect_aux(model) as auxes:
            loss = model(tokens(), labels=tokens()).loss
        (loss + sum(aux.aux_loss for aux in auxes)).backward()
        optimizer.step()
        report = watch.report()
        report.check()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    assert len(report.experts) == len(auxes)
    for (trained_experts, _), aux in zip(report.experts.values(), auxes, strict=True):
        assert trained_experts == (aux.tokens_per_expert_E > 0).sum()
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameters[name], value) for name, value in base.items())
    said = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert model.generate(tokens()[:, :5], **said).shape == (len(tokens()), 9)


@pytest.mark.parametrize("side", [slice(0, 9), slice(-9, None)])
def test_padding_of_the_attention_mask_reaches_no_adapter(side):
    model = adapted("mixtral", capacity={"policy": "fixed", "capacity_factor": 1.0})
    ids, mask = tokens().clone(), torch.ones_like(tokens())
    mask[:, side] = 0
    gradients = []
    for padding in (0, 7):
        model.zero_grad()
        logits = model(ids.masked_fill(mask == 0, padding), attention_mask=mask).logits
        logits[mask == 1].square().sum().backward()
        gradients.append(model.model.layers[0].mlp.experts.lora.up_a.grad)
    assert torch.equal(*gradients)
    assert gradients[0].any()


def test_the_format_of_peft():
    """What tests/interop/test_peft.py gives to peft itself, here by its formula of a product."""
    model = adapted("qwen3_moe")
    adapter = moe.peft_adapter(model)
    config = adapter.config
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (3, 6, "LORA")
    assert config["rank_pattern"] == {r".*\.gate_up_proj": 6}
    assert all(tensor.is_contiguous() for tensor in adapter.tensors.values())
    before = dict(make_model("qwen3_moe").named_parameters())
    after = dict(moe.merge_lora(model).named_parameters())
    seen = 0
    for name, parameter in before.items():
        owner, _, short = name.rpartition(".")
        owner = f"{owner}.base_layer" if short == "gate_up_proj" else owner
        a = adapter.tensors.get(f"base_model.model.{owner}.lora_A.weight")
        delta = after[name] - parameter
        if a is None or short == "bias":
            assert not delta.any(), name
            continue
        b = adapter.tensors[f"base_model.model.{owner}.lora_B.weight"]
        if parameter.ndim == 3:
            E = len(parameter)
            a, b = a.reshape(E, -1, a.shape[1]), b.reshape(len(b), -1, E)
            wanted = torch.einsum("o r e, e r i -> e o i", b, a) * 2
            assert name in config["target_parameters"]
        else:
            wanted = b @ a * 2
            targets = config["target_modules"] + config["target_parameters"]
            assert name in targets or name.removesuffix(".weight") in targets
        torch.testing.assert_close(delta, wanted, rtol=1e-3, atol=1e-5, msg=name)
        seen += 2
    assert seen == len(adapter.tensors)


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_what_is_stored_for_peft_is_loaded_again(case):
    model = adapted(case)
    wanted, stored = logits_of(model), moe.peft_adapter(model)
    other = moe.adopt(make_model(case))
    has_dense = case != "mixtral"
    moe.add_lora(other, rank=3, alpha=9, on=EVERYTHING[: 3 + has_dense])  # of another scale
    moe.load_peft_adapter(other, *stored)
    close(logits_of(other), wanted, 1e-4)


def test_an_adapter_of_another_kind_or_of_other_modules_is_refused():
    stored = moe.peft_adapter(adapted("mixtral"))
    model = with_lora("mixtral")
    before = moe.lora_state_dict(model, full=True)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    fewer = {name: tensor for name, tensor in stored.tensors.items() if name != key}
    for tensors, config, message in (
        (fewer, {}, "q_proj.lora_A.weight must be in the file"),
        (stored.tensors | {"base_model.model.x": torch.ones(2)}, {}, "x (1 such tensors) has no"),
        (stored.tensors, {"use_dora": True}, "use_dora (True) must be off"),
        (stored.tensors | {key: torch.ones(4, 32)}, {}, "must have the model's shape"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            moe.load_peft_adapter(model, tensors, stored.config | config)
        assert "\n" not in str(error.value)
    assert all(torch.equal(t, before[n]) for n, t in moe.lora_state_dict(model).items())


def test_what_peft_has_no_place_for_is_refused():
    model = moe.add_lora(moe.adopt(make_model("mixtral")), also_train=["*.gate.weight"])
    with pytest.raises(ValueError, match="is trained whole") as error:
        moe.peft_adapter(model)
    assert "\n" not in str(error.value)
    model = moe.replace_mlp(make_model("llama"), num_experts=4, top_k=2)
    moe.add_lora(model, on=["experts"])
    with pytest.raises(ValueError, match=re.escape("must have gate_up_proj [E, 2 F, D]")) as error:
        moe.peft_adapter(model)
    assert "\n" not in str(error.value)


def test_experts_that_another_library_wraps_are_refused_by_name():
    class Wrapper(torch.nn.Module):
        def __init__(self, experts: torch.nn.Module) -> None:
            super().__init__()
            self.base_layer = experts
            self.lora_A = torch.nn.Linear(32, 12, bias=False)

    model = moe.adopt(make_model("mixtral"))
    for decoder_layer in model.model.layers:
        decoder_layer.mlp.experts = Wrapper(decoder_layer.mlp.experts)
    with pytest.raises(ValueError, match=r"experts \(Wrapper\) must be the layer's own") as error:
        model(tokens())
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------
# Several ranks.


def trained(model: Any, batches: list[Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        total = 0.0
        for ids in batches:
            loss = model(ids, labels=ids).loss / 2
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def on_rank(rank: int, case: str, folder: Path) -> list[float]:
    dims = ParallelDims.build(Topology(dp_shard=2, ep=2), "cpu")
    model = adapted(case)
    apply_expert_parallel(model, dims.ep_mesh)
    apply_fsdp(model, dims, blocks=list(model.model.layers))
    losses = trained(model, [tokens()[rank : rank + 1]])
    state = moe.lora_state_dict(model, full=True)
    # A whole model on one rank: adapters load into it, and merge there.
    if rank == 0:
        single = with_lora(case)
        moe.load_lora_state_dict(single, state)
        moe.merge_lora(single).save_pretrained(folder)
    return losses


@pytest.mark.parametrize("case", ["mixtral", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_two_ranks_train_adapters_that_transformers_loads_merged(case, tmp_path):
    first, second = run_ranks(on_rank, 2, case, tmp_path)
    model = adapted(case)
    expected = trained(model, [tokens()[i : i + 1] for i in range(2)])
    got = [a + b for a, b in zip(first, second, strict=True)]
    assert got == pytest.approx(expected, rel=1e-5)
    close(logits_of(load_theirs(tmp_path)), logits_of(model), 1e-4)
