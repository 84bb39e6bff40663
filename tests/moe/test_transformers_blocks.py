"""Adopted models of transformers, against the models that they were."""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.checkpoint import set_checkpoint_early_stop
from transformers import PreTrainedModel, Trainer, TrainingArguments

import ckpt
import moe
from moe import MoELayer
from moe.adoption.families import SUPPORTED
from parallel import ParallelDims, Topology, apply_expert_parallel, apply_fsdp
from tests.support.hf import MOE_CASES as EVERY_CASE
from tests.support.hf import load_theirs, logits_of, make_model, tokens
from tests.support.ranks import run_ranks

# Only import and export know the other families.
ADOPTED = ("mixtral", "olmoe", "qwen3_moe", "deepseek_v3")
MOE_CASES = [case for case in EVERY_CASE if case.startswith(ADOPTED) and not case.endswith("-one")]
# DeepSeek-V3 has no auxiliary loss in transformers.
WITH_LOSS = [case for case in MOE_CASES if "deepseek" not in case]


def layers_of(model: nn.Module) -> list[MoELayer]:
    return [module for module in model.modules() if isinstance(module, MoELayer)]


def close(got: torch.Tensor, wanted: torch.Tensor, to: float = 1e-5) -> None:
    torch.testing.assert_close(got, wanted, rtol=to, atol=to)


# ------------------------------------------------------------------------------------------------
# One process.


def test_an_implementation_that_adopted_layers_do_not_have_is_a_warning():
    model = moe.adopt(make_model("mixtral"))
    wanted = logits_of(model)
    with pytest.warns(UserWarning, match=r"no effect on adopted layers: call moe.restore\(model\)"):
        model.set_experts_implementation("eager")
    copied = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="no effect on adopted layers"):
        copied.model.set_experts_implementation("grouped_mm")
    assert torch.equal(logits_of(model), wanted)
    model.generate(tokens()[:, :3], max_new_tokens=2, do_sample=False, pad_token_id=0)
    moe.restore(model).set_experts_implementation("eager")
    assert model.config._experts_implementation == "eager"
    close(logits_of(model), wanted)


@pytest.mark.parametrize("case", MOE_CASES)
def test_an_adopted_model_computes_what_it_did(case):
    theirs, model = make_model(case), make_model(case)
    before, parameters = model.state_dict(keep_vars=True), list(model.parameters())
    assert moe.adopt(model) is model
    close(logits_of(model), logits_of(theirs))
    prompt = tokens()[:, :7]
    said = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **said), theirs.generate(prompt, **said))

    # Nothing is copied, and an optimizer would see the same parameters in the same order.
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    for name, tensor in after.items():
        assert tensor is before[name] or name.endswith("e_score_correction_bias"), name
        assert tensor.data_ptr() == before[name].data_ptr(), name
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    for layer in layers_of(model):
        weights = layer.experts.local_weights()
        for view, fused in ((weights.w_gate, "gate_up_proj"), (weights.w_down, "down_proj")):
            storage = getattr(layer.experts, fused).untyped_storage()
            assert view.untyped_storage().data_ptr() == storage.data_ptr()

    for each in (model, theirs):
        each(tokens(), labels=tokens()).loss.backward()
    for (name, p), q in zip(model.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("case", ["mixtral", "deepseek_v3"])
def test_a_deep_copy_of_an_adopted_model_computes_with_its_own_weights(case):
    model, rebuilt = moe.adopt(make_model(case)), moe.adopt(make_model(case))
    before = model(tokens(), output_router_logits=case == "mixtral").logits
    copied = copy.deepcopy(model)
    for each in (copied, rebuilt):
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.mul_(1.5)
        each(tokens(), labels=tokens()).loss.backward()
    for (name, p), q in zip(copied.named_parameters(), rebuilt.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    assert all(p.grad is None for p in model.parameters())
    expected = logits_of(rebuilt)
    assert torch.equal(logits_of(copied), expected)
    close(logits_of(moe.restore(copied)), expected, 1e-4)
    assert torch.equal(logits_of(model), before)


@pytest.mark.parametrize("recorded_before", [False, True])
@pytest.mark.parametrize("case", WITH_LOSS)
def test_router_logits_and_the_loss_of_transformers_are_what_they_were(case, recorded_before):
    theirs, model = make_model(case), make_model(case)
    if recorded_before:  # hooks of the gates are then in place
        model(tokens(), output_router_logits=True)
    moe.adopt(model)
    mask = torch.ones_like(tokens())
    mask[0, 30:] = 0
    labels = tokens().masked_fill(mask == 0, -100)
    inputs = {"labels": labels, "attention_mask": mask, "output_router_logits": True}
    ours, wanted = model(tokens(), **inputs), theirs(tokens(), **inputs)
    assert len(ours.router_logits) == len(wanted.router_logits) == len(layers_of(model))
    for a, b in zip(ours.router_logits, wanted.router_logits, strict=True):
        close(a[mask.flatten() == 1], b[mask.flatten() == 1])
    close(ours.aux_loss, wanted.aux_loss)
    close(ours.loss, wanted.loss)
    ours.aux_loss.backward()
    wanted.aux_loss.backward()
    routers = [name for name, _ in model.named_parameters() if name.endswith("gate.weight")]
    assert routers
    for name in routers:
        close(model.get_parameter(name).grad, theirs.get_parameter(name).grad)


ATTENTION = ["eager", "sdpa", "recomputed", "positional"]


def by_place(_: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of an attention, the mask by its place and not by its name."""
    names = ["hidden_states", "position_embeddings", "attention_mask"][len(args) :]
    return (*args, *(kwargs.pop(name) for name in names)), kwargs


@pytest.mark.parametrize("how", ATTENTION)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", MOE_CASES)
def test_padding_of_the_attention_mask_is_no_token(case, side, how):
    """Under a tight capacity: logits, gradients and statistics are those of the texts by
    themselves."""
    model = make_model(case, attn_implementation="eager" if how == "eager" else "sdpa")
    fields = {"capacity": {"policy": "fixed", "capacity_factor": 1.0, "drop_policy": "position"}}
    if how == "positional":
        for decoder_layer in model.model.layers:
            decoder_layer.self_attn.register_forward_pre_hook(by_place, with_kwargs=True)
    moe.adopt(model.train(), **fields)
    twin = copy.deepcopy(model)
    if how == "recomputed":
        model.activation_checkpointing_enable()
    text = tokens()[:1]
    padding = torch.zeros(1, 9, dtype=torch.int64)
    parts = [(padding, padding), (text, torch.ones_like(text))]
    ids, mask = (torch.cat(p, 1) for p in zip(*parts[:: 1 if side == "left" else -1], strict=True))
    places = slice(9, None) if side == "left" else slice(text.shape[1])

    def run(model, ids, mask, places):
        layers = len(layers_of(model))
        with moe.collect_aux(model) as auxes, set_checkpoint_early_stop(False):
            logits = model(ids, attention_mask=mask, use_cache=False).logits[:, places]
        auxes = auxes[:layers]
        (logits.square().sum() + sum(aux.z_loss for aux in auxes)).backward()
        return logits, auxes

    got, auxes = run(model, ids, mask, places)
    wanted, expected = run(twin, text, None, slice(None))
    close(got, wanted, 1e-4)
    assert any(aux.num_dropped for aux in expected), "the capacity must be tight"
    for a, b in zip(auxes, expected, strict=True):
        assert torch.equal(a.tokens_per_expert_E, b.tokens_per_expert_E)
        assert torch.equal(a.num_dropped, b.num_dropped)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= 1e-4 * q.grad.norm(), name


def test_a_restored_model_has_no_hook_of_the_layers():
    model = make_model("mixtral")
    before = [len(module._forward_pre_hooks) for module in model.modules()]
    moe.restore(moe.adopt(model))
    assert [len(module._forward_pre_hooks) for module in model.modules()] == before


def test_texts_of_unequal_length_are_continued_as_they_are_alone():
    theirs, model = make_model("qwen3_moe"), moe.adopt(make_model("qwen3_moe"))
    text = tokens()[:1, :7]
    said = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    wanted = theirs.generate(text, **said)[:, 7:]
    batch = torch.cat([F.pad(text, (4, 0)), tokens()[1:2, :11]])
    mask = torch.ones_like(batch)
    mask[0, :4] = 0
    for cache in (None, "static"):
        got = model.generate(batch, attention_mask=mask, cache_implementation=cache, **said)
        assert torch.equal(got[:1, 11:], wanted)


@pytest.mark.parametrize("case", WITH_LOSS)
def test_the_losses_of_layers_are_collected(case):
    # The loss of transformers counts top_k fractions of 1, and Convoy's one.
    config = {"num_hidden_layers": 1, "mlp_only_layers": []} if "qwen" in case else {
        "num_hidden_layers": 1
    }  # fmt: skip
    model = moe.adopt(make_model(case, **config))
    (layer,) = layers_of(model)
    with moe.collect_aux(model) as auxes:
        out = model(tokens(), output_router_logits=True)
    (aux,) = auxes
    close(aux.load_balance_loss * layer.config.top_k, out.aux_loss)
    assert layer.config.aux_loss_coeff == model.config.router_aux_loss_coef > 0
    close(aux.aux_loss, aux.load_balance_loss * model.config.router_aux_loss_coef)
    model(tokens())
    assert len(auxes) == 1


def test_a_layer_that_is_computed_again_is_collected_once():
    theirs = moe.adopt(make_model("mixtral"))
    model = copy.deepcopy(theirs).train()
    model.activation_checkpointing_enable()
    runs = []
    layers_of(model)[0].register_forward_hook(lambda *_: runs.append(1))
    for each in (model, theirs):
        with moe.collect_aux(each) as auxes, set_checkpoint_early_stop(False):
            loss = each(tokens(), labels=tokens()).loss
        assert len(auxes) == 3
        (loss + 100 * sum(aux.aux_loss for aux in auxes)).backward()
        assert len(auxes) == 3
    assert len(runs) == 2, "nothing was computed again"
    for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
        close(p.grad, q.grad)


def test_the_recipe_of_deepseek_v3_moves_the_bias_that_transformers_saves(tmp_path):
    model = moe.adopt(make_model("deepseek_v3"), bias_update_rate=0.25)
    layers = layers_of(model)
    assert [(c.aux_loss_coeff, c.seq_aux_loss_coeff) for c in (layers[0].config,)] == [(0, 1e-4)]
    before = layers[0].router.expert_bias.clone()
    with moe.collect_aux(model) as auxes:
        model(tokens())
    for layer, aux in zip(layers, auxes, strict=True):
        layer.router.update_bias(aux.tokens_per_expert_E)
    moved = layers[0].router.expert_bias - before
    assert set(moved.abs().round(decimals=4).tolist()) <= {0.0, 0.25}
    assert moved.abs().max() > 0
    model.save_pretrained(tmp_path)
    close(logits_of(load_theirs(tmp_path)), logits_of(model))
    model.bfloat16()
    assert layers[0].router.expert_bias.dtype == torch.float32
    assert model.state_dict()["model.layers.1.mlp.gate.e_score_correction_bias"].any()


def test_lower_precision():
    theirs = make_model("qwen3_moe", moe_intermediate_size=24).bfloat16()
    wanted, model = logits_of(theirs), moe.adopt(theirs)
    difference = (logits_of(model) - wanted).abs()
    assert difference.median() < 0.05
    assert model(tokens()).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe"])
def test_a_single_expert_with_a_normalized_weight(case):
    config = {"num_experts_per_tok": 1} | ({"norm_topk_prob": True} if "qwen" in case else {})
    wanted = logits_of(make_model(case, **config))
    close(logits_of(moe.adopt(make_model(case, **config))), wanted)


@pytest.mark.parametrize("case", ["mixtral", "deepseek_v3"])
def test_a_model_that_was_cast_is_restored_as_transformers_casts_it(case):
    theirs, model = make_model(case).bfloat16(), moe.adopt(make_model(case)).bfloat16()
    routers = [layer.router.weight for layer in layers_of(model)]
    assert {weight.dtype for weight in routers} == {torch.float32}
    moe.restore(model)
    wanted = theirs.state_dict()
    for name, tensor in model.state_dict().items():
        if not name.endswith("e_score_correction_bias"):  # of which bfloat16 would lose steps
            assert (name, tensor.dtype) == (name, wanted[name].dtype)
            assert torch.equal(tensor, wanted[name]), name
    if case == "mixtral":  # transformers takes no sizes like these in bfloat16
        assert torch.equal(logits_of(model), logits_of(theirs))
    kept = {id(weight) for weight in model.parameters()}
    assert all(id(weight) in kept for weight in routers), "an optimizer has the same parameters"


def test_hooks_of_blocks_and_gates_stay():
    said: dict[str, list[str]] = {}

    def run(adopted: bool) -> nn.Module:
        model, heard = make_model("mixtral"), said.setdefault(str(adopted), [])
        block = model.model.layers[1].mlp
        for where, module in (("block", block), ("gate", block.gate)):

            def note(*_, what: str, where: str = where) -> None:
                heard.append(f"{where} {what}")

            handle = module.register_forward_pre_hook(partial(note, what="removed"))
            module.register_forward_pre_hook(
                lambda *a, note=note: note(what=f"pre {sorted(a[2])}"), with_kwargs=True
            )
            module.register_forward_hook(
                lambda *a, note=note: note(what="kwargs"), with_kwargs=True, always_call=True
            )
            if where == "block":
                module.register_full_backward_pre_hook(partial(note, what="before backward"))
                module.register_full_backward_hook(partial(note, what="backward"))
            if adopted and where == "gate":
                moe.adopt(model)
            handle.remove()
        model(tokens(), labels=tokens()).loss.backward()
        return model

    run(False)
    model = run(True)
    assert said["True"] == said["False"]
    assert "block before backward" in said["True"]
    heard = said["True"].copy()
    said["True"].clear()
    moe.restore(model)(tokens(), labels=tokens()).loss.backward()
    assert said["True"] == heard


def train(model: PreTrainedModel, folder: Path, trainer: type[Trainer] = Trainer, **more: object):
    texts = torch.randint(300, (4, 24), generator=torch.Generator().manual_seed(3)).repeat(4, 1)
    values = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
              "save_strategy": "no", "adam_epsilon": 1e-3} | more  # fmt: skip
    args = TrainingArguments(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1, **values
    )
    return trainer(
        model=model,
        args=args,
        train_dataset=[{"input_ids": ids, "labels": ids} for ids in texts],
    )


def losses(trainer: Trainer) -> torch.Tensor:
    return torch.tensor([each["loss"] for each in trainer.state.log_history if "loss" in each])


@pytest.mark.parametrize("case", ["mixtral", "deepseek_v3"])
def test_trainer_trains_it_and_transformers_loads_what_it_saves(case, tmp_path):
    theirs, model = make_model(case), moe.adopt(make_model(case), bias_update_rate=0.0)
    model.config.output_router_logits = theirs.config.output_router_logits = case == "mixtral"
    first = logits_of(model)
    ended = []
    for each, more in ((theirs, {}), (model, {"save_strategy": "steps", "save_steps": 4})):
        trainer = train(each, tmp_path, **more)
        trainer.train()
        ended.append(trainer)
    close(losses(ended[1]), losses(ended[0]), 1e-4)
    assert losses(ended[0])[0] > losses(ended[0])[-1] + 0.1
    model.eval(), theirs.eval()
    assert (logits_of(model) - first).abs().max() > 0.1
    close(logits_of(model), logits_of(theirs), 1e-3)

    # Three ways out: the Trainer's checkpoint, save_pretrained, and the blocks put back.
    model.save_pretrained(tmp_path / "saved")
    wanted = logits_of(moe.restore(model))
    assert not layers_of(model)
    assert torch.equal(logits_of(load_theirs(tmp_path / "saved")), wanted)
    assert torch.equal(logits_of(load_theirs(tmp_path / "checkpoint-4")), wanted)
    close(logits_of(moe.adopt(model)), wanted)


# ------------------------------------------------------------------------------------------------
# What is refused, and leaves the model as it was.


def one_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    (line,) = str(error.value).splitlines()
    return line


def test_a_subclass_may_compute_something_else():
    model = make_model("mixtral")
    block = model.model.layers[2].mlp
    block.__class__ = type("MyBlock", (type(block),), {})
    with pytest.raises(
        ValueError, match=r"model.layers.2.mlp \(MyBlock\) cannot be adopted"
    ) as error:
        moe.adopt(model)
    assert one_line(error).endswith(SUPPORTED)
    assert not layers_of(model)
    assert all(layer.mlp.experts.down_proj is not None for layer in model.model.layers)


def sharded(model):
    model.model.layers[1].mlp.experts._is_expert_parallel = True


def quantized(model):
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.to(torch.uint8), requires_grad=False)


def hooked(model):
    model.model.layers[1].mlp.experts.act_fn.register_forward_hook(lambda *_: None)


BLOCK = r"model.layers.\d.mlp \(MixtralSparseMoeBlock\): "
REFUSED = [
    ({"router_jitter_noise": 0.1}, {}, None, BLOCK + r"router_jitter_noise \(0.1\) must be 0"),
    (
        {"hidden_act": "relu"},
        {},
        None,
        BLOCK + r"hidden_act \(ReLU\) must be silu or gelu",
    ),
    ({}, {}, hooked, BLOCK + "the experts or parts of the router have hooks, which an adopted"),
    ({}, {"top_k": 3}, None, BLOCK + "top_k is the block's and must be left out"),
    ({}, {"score_func": "sigmoid"}, None, BLOCK + "score_func is the block's"),
    ({}, {"overlap_chunks": 0}, None, BLOCK + r"MoEConfig: overlap_chunks \(0\): Input should be"),
    ({}, {"no_such_field": 0}, None, BLOCK + "MoEConfig: there is no field no_such_field"),
    ({}, {}, sharded, BLOCK + r"gate_up_proj \(Parameter\) must be a plain floating-point"),
    ({}, {}, quantized, BLOCK + r"down_proj \(Parameter\) must be a plain floating-point"),
]


@pytest.mark.parametrize(("config", "options", "change", "message"), REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(config, options, change, message):
    model = make_model("mixtral", **config)
    if change:
        change(model)
    before = model.state_dict(keep_vars=True)
    with pytest.raises(ValueError, match=message) as error:
        moe.adopt(model, **options)
    one_line(error)
    assert not layers_of(model)
    assert all(model.state_dict(keep_vars=True)[name] is tensor for name, tensor in before.items())


def test_models_without_blocks_are_refused():
    llama = make_model("llama")
    with pytest.raises(ValueError, match="LlamaForCausalLM must have MoE blocks") as error:
        moe.adopt(llama)
    assert SUPPORTED in one_line(error)
    with pytest.raises(ValueError, match="LlamaForCausalLM must have adopted layers"):
        moe.collect_aux(llama).__enter__()
    with pytest.raises(ValueError, match="MixtralSparseMoeBlock is itself a block"):
        moe.adopt(make_model("mixtral").model.layers[0].mlp)
    with pytest.raises(ValueError, match="MixtralForCausalLM is adopted already") as error:
        moe.adopt(moe.adopt(make_model("mixtral")))
    one_line(error)
    with pytest.raises(ValueError, match="MixtralForCausalLM must have adopted layers"):
        moe.restore(make_model("mixtral"))


def test_transformers_is_not_imported():
    code = "import sys, moe, parallel; moe.adopt; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ------------------------------------------------------------------------------------------------
# Several ranks.


class SummedTrainer(Trainer):
    """For models whose gradients are summed over ranks."""

    def compute_loss(self, model, inputs, **kwargs):
        return super().compute_loss(model, inputs, **kwargs) / torch.distributed.get_world_size()


def on_rank(rank: int, case: str, folder: str):
    options = StateDictOptions(full_state_dict=True)
    model = make_model(case)
    wanted = logits_of(model)
    dims = ParallelDims.build(Topology(dp_shard=2, ep=2), "cpu")
    apply_expert_parallel(moe.adopt(model), dims.ep_mesh)
    held = [layer.experts.down_proj.to_local().shape[0] for layer in layers_of(model)]
    assert held == [layer.config.num_experts // 2 for layer in layers_of(model)]
    close(logits_of(model), wanted)
    prompt = tokens()[:1, :7]
    assert model.generate(prompt, max_new_tokens=3, pad_token_id=0).shape == (1, 10)
    try:
        moe.restore(model)
    except ValueError as error:
        refused = str(error)
    apply_fsdp(model, dims, blocks=list(model.model.layers))
    trainer = train(model, Path(folder), SummedTrainer, per_device_train_batch_size=2)
    trainer.is_distributed_loading_by_transformers = True
    trainer.train()
    ckpt.save_state_dict(f"{folder}/shards", {"model": model.state_dict()}, step=4)
    full = get_model_state_dict(model, options=options)
    model.save_pretrained(f"{folder}/saved", state_dict=full, is_main_process=rank == 0)
    return refused, losses(trainer).tolist()


@pytest.mark.parametrize(
    "case",
    [
        "mixtral",
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", marks=pytest.mark.slow),
    ],
)
def test_trainer_on_two_ranks_trains_as_transformers_does_on_one(case, tmp_path):
    refused, logged = run_ranks(on_rank, 2, case, str(tmp_path))[0]
    theirs = make_model(case)
    trainer = train(theirs, tmp_path)
    trainer.train()
    close(2 * torch.tensor(logged), losses(trainer), 1e-4)
    saved = load_theirs(tmp_path / "saved")
    for (name, p), q in zip(saved.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4, msg=name)
    state = {"model": theirs.state_dict()}
    ckpt.load_state_dict(tmp_path / "shards", state)
    assert torch.equal(logits_of(theirs), logits_of(saved))
    assert "must not be sharded to be restored: gather the model" in refused
    assert "\n" not in refused
