"""Balancing that does not balance, or counts what is not there.

What a trainer and a model of transformers make of the losses: which are added, how often, with what
coefficient, and which number is reported.

Legend: B batch, S sequence, T tokens, E experts, L layers.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import moe
from pretrain.checkpoint.resume import restore
from pretrain.data import Cursor
from pretrain.job import build_job
from pretrain.runtime.ranks import start
from pretrain.train.trainer import Trainer
from tests.museum.cases import Edit, case
from tests.support.hf import make_model
from tests.support.hf import tokens as token_ids
from tests.support.jobs import make_spec, prepare_job
from tests.support.layouts import NoCheckpoints
from tests.support.ranks import run_ranks


class Measured(NamedTuple):
    """What the tiny job's first step is, under several specs."""

    router_gradients: dict[int, list[Tensor]]
    """By micro-batch size, with a z-loss."""
    loss_sums: dict[float, float]
    """By the coefficient of the balancing loss."""
    loads_LE: list[list[int]]
    biases_LE: list[list[float]]
    """After one step with a rate of 0.25."""


def _measure(folder: Path, rank: int) -> Measured:
    runtime = start(60.0)

    def first_backward(**sections: Any) -> tuple[Any, Any]:
        job = build_job(make_spec(folder, **sections), runtime)
        job.initialize()
        batches, _ = job.loader.step(Cursor(0))
        return job, job.forward_backward(batches, 256.0)

    gradients, losses = {}, {}
    for size in (8, 2):
        with_z = {"z_loss_coeff": 1.0, "aux_loss_coeff": 0.0}
        job, _ = first_backward(moe=with_z, batch={"micro_batch_size": size})
        gradients[size] = [router.weight.grad.clone() for router in job.routers]
    for coefficient in (0.0, 5.0):
        _, result = first_backward(moe={"aux_loss_coeff": coefficient})
        losses[coefficient] = float(result.loss_sum)
    biased = {"expert_bias": True, "bias_update_rate": 0.25}
    job = build_job(make_spec(folder, moe=biased), runtime)
    training = Trainer(job, restore(job), NoCheckpoints())
    training.step(False)
    loads_LE = training.attempt.result.routing.tokens_per_expert_LE.tolist()
    biases_LE = [router.expert_bias.tolist() for router in job.routers]
    runtime.close()
    return Measured(gradients, losses, loads_LE, biases_LE)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Measured:
    folder = prepare_job(tmp_path_factory.mktemp("balancing"))
    return run_ranks(partial(_measure, folder), 1, group=False)[0]


@case(
    "NVIDIA-NeMo/Automodel#3359",
    "The auxiliary loss of each micro-batch was added whole, so that four micro-batches gave it "
    "four times the weight against the language model's loss.",
    Edit(
        "pretrain/parallelize/micro_batches.py",
        "routed.loss_weight / divisor * aux.aux_loss",
        "aux.aux_loss",
    ),
)
def test_accumulation_does_not_weigh_auxiliary_losses_up(measured):
    """A batch in four micro-batches gives routers the gradient that it gives them at once."""
    for once, in_parts in zip(*measured.router_gradients.values(), strict=True):
        torch.testing.assert_close(in_parts, once, rtol=1e-4, atol=1e-6)


@case(
    "mlfoundations/open_lm#255",
    "The load-balancing loss was left in the training loss that was reported and compared.",
    Edit(
        "pretrain/parallelize/micro_batches.py",
        "loss_sum += on_loss_grid(nll.detach())",
        "loss_sum += on_loss_grid(loss.detach() * divisor)",
    ),
)
def test_the_reported_loss_is_that_of_the_tokens_alone(measured):
    """The loss of a first step is equal with any coefficient of the balancing loss."""
    assert measured.loss_sums[0.0] == measured.loss_sums[5.0]


@case(
    "AI-Hypercomputer/maxtext#2494",
    "The bias of DeepSeek-V3's routing was declared and read, and no step updated it.",
    Edit("pretrain/train/trainer.py", "router.update_bias(by_layer[row])", "pass"),
)
def test_a_step_moves_the_biases_of_experts(measured):
    """After a step each bias has moved down for a load above the mean, and up for one below."""
    for loads_E, biases_E in zip(measured.loads_LE, measured.biases_LE, strict=True):
        mean = sum(loads_E) / len(loads_E)
        wanted = [0.25 * ((load < mean) - (load > mean)) for load in loads_E]
        assert biases_E == wanted


# ------------------------------------------------------------------------------------------------
# Models of transformers.


def _switch_loss(logits_TE: Tensor, top_k: int) -> float:
    """The number of experts times the sum over them of load times mean probability."""
    T, E = logits_TE.shape
    chosen_TK, probs_E = logits_TE.topk(top_k).indices, logits_TE.softmax(-1).sum(0) / T
    loads = [int((chosen_TK == e).sum()) / (T * top_k) for e in range(E)]
    return E * sum(load * float(p) for load, p in zip(loads, probs_E, strict=True))


@case(
    "huggingface/transformers#28255",
    "Mixtral's loss took the loads of experts from a wrong sum, and was not the fraction of tokens "
    "times the mean probability.",
    Edit(
        "router/losses.py",
        "torch.dot(f_E, mean_over_tokens(probs_TE, token_mask_T))",
        "f_E.mean() * mean_over_tokens(probs_TE, token_mask_T).sum()",
    ),
)
def test_the_loss_of_an_adopted_model_is_that_of_its_formula():
    """Each layer of an adopted Mixtral has the loss that plain sums make of its router's logits."""
    model = make_model("mixtral")
    for gate in (layer.mlp.gate for layer in model.model.layers):
        gate.weight.data *= 4
    logits = model(token_ids(), output_router_logits=True).router_logits
    wanted = [_switch_loss(logits_TE.detach().view(-1, 6), 2) for logits_TE in logits]
    with moe.collect_aux(moe.adopt(model)) as auxes:
        model(token_ids())
    got = [aux.load_balance_loss.item() for aux in auxes]
    assert got == pytest.approx(wanted, rel=1e-3)


@case(
    "huggingface/transformers#44586",
    "With router_aux_loss_coef set and output_router_logits left at its default the loss was not "
    "computed, so that training balanced nothing.",
    Edit("moe/adoption/reading.py", '"aux_loss_coeff": float(coeff)', '"aux_loss_coeff": 0.0'),
)
def test_the_coefficient_of_a_models_config_reaches_its_routers():
    """A router_aux_loss_coef of 0.7 alone gives each router the gradient of 0.7 times its loss."""
    model = moe.adopt(make_model("mixtral", router_aux_loss_coef=0.7))
    assert not model.config.output_router_logits
    with moe.collect_aux(model) as auxes:
        model(token_ids())
    sum(aux.aux_loss for aux in auxes).backward()
    for layer, aux in zip(model.model.layers, auxes, strict=True):
        assert aux.aux_loss.item() == pytest.approx(0.7 * aux.load_balance_loss.item())
        assert layer.mlp.gate.weight.grad.norm() > 0


@case(
    "huggingface/transformers#45315",
    "Routers gave their probabilities under the name of logits, and the loss took the softmax of a "
    "softmax.",
    Edit(
        "router/topk.py",
        "            logits_TE=logits_TE,\n            expert_indices_TK=indices_TK,\n"
        "            topk_indices_TK=record_TK,",
        "            logits_TE=scores_TE,\n            expert_indices_TK=indices_TK,\n"
        "            topk_indices_TK=record_TK,",
    ),
)
def test_an_adopted_models_router_logits_are_logits():
    """An adopted Qwen3-MoE records the router logits, and the loss of them, that it had before."""
    model = make_model("qwen3_moe")
    before = model(token_ids(), labels=token_ids(), output_router_logits=True)
    after = moe.adopt(model)(token_ids(), labels=token_ids(), output_router_logits=True)
    for got, wanted in zip(after.router_logits, before.router_logits, strict=True):
        torch.testing.assert_close(got.view_as(wanted), wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(after.aux_loss, before.aux_loss, rtol=1e-3, atol=1e-4)
