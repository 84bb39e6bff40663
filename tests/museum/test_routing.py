"""Routers that choose or weigh experts wrongly.

Every report is of outputs that were finite and looked like a model's: no error told that a weight
was taken from the wrong scores, or that an expert was chosen that the model's authors exclude.

Legend: T tokens, E experts, K top_k.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe import MoEConfig
from tests.museum.cases import Edit, case
from tests.museum.shared_routing import layer_of, one_expert, routed, router_of, tokens

WEIGHTS = "self.routing.weights(logits_TE, scores_TE, indices_TK, gaps)"


@case(
    "huggingface/transformers#33969",
    "The router's jitter was multiplied into the hidden states in place, so that experts computed "
    "with noisy tokens too.",
    Edit(
        "router/topk.py", "x_TD = x_TD * torch.empty_like(x_TD)", "x_TD *= torch.empty_like(x_TD)"
    ),
)
def test_jitter_is_on_the_routers_input_alone():
    """In training with jitter an expert computes with the tokens as they came."""
    layer = layer_of(num_experts=1, top_k=1, norm_topk_prob=False, input_jitter=0.5).train()
    x_TD = tokens()
    wanted_TD = torch.stack([one_expert(layer, 0, x_D) for x_D in x_TD.clone()])
    torch.testing.assert_close(layer(x_TD).hidden, wanted_TD)
    torch.testing.assert_close(x_TD, tokens(), rtol=0, atol=0)


@case(
    "hpcaitech/ColossalAI#419",
    "The router added its noise in evaluation as well, so that equal tokens took different experts "
    "in two evaluations.",
    Edit("router/topk.py", "if jitter and self.training:", "if jitter:"),
)
def test_evaluation_has_no_noise():
    """A router with jitter chooses the same experts in every evaluation, and not in training."""
    router, x_TE = router_of(8, top_k=2, input_jitter=0.5), tokens(64, 8)
    router.eval()
    evaluated = [router(x_TE).logits_TE for _ in range(2)]
    assert torch.equal(evaluated[0], x_TE)
    assert torch.equal(*evaluated)
    assert not torch.equal(router.train()(x_TE).logits_TE, x_TE)


def _weights_by_hand(logits_TE: Tensor, indices_TK: Tensor) -> Tensor:
    """The sigmoid of each chosen logit over their sum, in float64."""
    rows = []
    for logits_E, chosen_K in zip(logits_TE.double(), indices_TK, strict=True):
        scores = torch.stack([1 / (1 + torch.exp(-logits_E[e])) for e in chosen_K])
        rows.append(scores / scores.sum())
    return torch.stack(rows)


@case(
    "vllm-project/vllm#12002",
    "The bias that balances experts was part of the weights of their outputs, and not of the "
    "choice alone.",
    Edit("router/topk.py", WEIGHTS, WEIGHTS.replace("scores_TE", "scores_TE + self.expert_bias")),
)
def test_the_balancing_bias_is_not_in_the_weights():
    """A bias changes which experts a token takes, and the weights are of the scores without it."""
    logits_TE = tokens(32, 6)
    plain = routed(logits_TE, [0.0] * 6, top_k=2, score_func="sigmoid")
    biased = routed(logits_TE, [0.6, 0, 0, -0.6, 0, 0.3], top_k=2, score_func="sigmoid")
    assert not torch.equal(plain.expert_indices_TK, biased.expert_indices_TK)
    wanted_TK = _weights_by_hand(logits_TE, biased.expert_indices_TK)
    torch.testing.assert_close(biased.expert_weights_TK.double(), wanted_TK, rtol=1e-5, atol=0)


@case(
    "flashinfer-ai/flashinfer#3875",
    "Scores were recovered as the biased score minus the bias, which is 0 in float32 where a score "
    "is 1e-8 and a bias 12.",
    Edit(
        "router/topk.py",
        WEIGHTS,
        WEIGHTS.replace("scores_TE", "preferences_TE - self.expert_bias"),
    ),
)
def test_small_scores_keep_their_proportions_beside_large_biases():
    """Weights of scores near 1e-8 are in their proportion, whatever the size of the biases."""
    logits_TE = tokens(16, 6) - 17.0
    got = routed(logits_TE, [12.0, 12.0, 12.0, 0.0, 0.0, 0.0], top_k=2, score_func="sigmoid")
    assert int(got.expert_indices_TK.max()) <= 2
    wanted_TK = _weights_by_hand(logits_TE, got.expert_indices_TK)
    torch.testing.assert_close(got.expert_weights_TK.double(), wanted_TK, rtol=1e-5, atol=0)


GROUPS = {"top_k": 2, "score_func": "sigmoid", "n_groups": 2, "topk_groups": 1}


@case(
    "huggingface/transformers#45440",
    "Experts of groups that are left out got a score of 0, which is above the negative biased "
    "scores of the groups that stay.",
    Edit(
        "router/routing_top_k.py",
        "masked_fill(out_TG.unsqueeze(-1), -torch.inf)",
        "masked_fill(out_TG.unsqueeze(-1), 0.0)",
    ),
)
def test_negative_biases_do_not_bring_in_experts_of_other_groups():
    """A token's experts are of its best group, where biases make every score negative too."""
    logits_TE = torch.tensor([[2.0, 1.0, -1.0, -2.0], [-1.0, -2.0, 1.5, 2.0]])
    got = routed(logits_TE, [-5.0] * 4, **GROUPS)
    assert got.expert_indices_TK.sort().values.tolist() == [[0, 1], [2, 3]]


@case(
    "vllm-project/vllm#13474",
    "The score of a group of experts was its best expert's, and not the sum of its best two.",
    Edit("router/routing_top_k.py", ".topk(topk_per_group, dim=-1).values.sum(-1)", ".amax(-1)"),
)
def test_a_group_is_scored_by_its_best_two_experts():
    """The group with the one best expert loses to the group whose best two sum to more."""
    scores_TE = torch.tensor([[0.9, 0.1, 0.6, 0.55]])
    got = routed(scores_TE.logit(), [0.0] * 4, **GROUPS)
    assert got.expert_indices_TK.sort().values.tolist() == [[2, 3]]


@case(
    "sgl-project/sglang#35160",
    "Without normalization the weights of the chosen experts were raw logits, of any sign, and not "
    "probabilities.",
    Edit(
        "router/routing.py",
        "weights_TK = scores_TE.gather(1, nearest_TK)",
        "weights_TK = logits_TE.gather(1, nearest_TK)",
    ),
)
def test_weights_without_normalization_are_probabilities_of_all_experts():
    """With norm_topk_prob false a weight is the expert's probability among all experts."""
    logits_TE = tokens(32, 6)
    got = routed(logits_TE, top_k=2, norm_topk_prob=False)
    for logits_E, chosen_K, weights_K in zip(
        logits_TE, got.expert_indices_TK, got.expert_weights_TK, strict=True
    ):
        total = sum(float(torch.exp(z)) for z in logits_E)
        wanted_K = torch.stack([torch.exp(logits_E[e]) / total for e in chosen_K])
        torch.testing.assert_close(weights_K, wanted_K)


@case(
    "vllm-project/vllm#45037",
    "The scaling factor of routed experts was applied twice, by the router and by the experts.",
    Edit(
        "router/topk.py",
        "(weights_TK * config.route_scale)",
        "(weights_TK * config.route_scale**2)",
    ),
)
def test_routed_outputs_are_scaled_once():
    """A route_scale of 2.5 makes a layer's routed output 2.5 times as large."""
    plain, scaled = layer_of(), layer_of(route_scale=2.5)
    torch.testing.assert_close(scaled(tokens()).hidden, 2.5 * plain(tokens()).hidden)


@case(
    "jingyaogong/minimind#858",
    "With one expert for a token the normalized weight was the constant 1, so that the model's "
    "loss never reached the router.",
    Edit("router/config.py", "if self.top_k == 1 and self.norm_topk_prob:", "if False:"),
)
def test_a_router_that_could_not_learn_is_refused():
    """A normalized weight of one expert is refused; without normalization the router learns."""
    with pytest.raises(ValueError, match="router would get no gradient"):
        MoEConfig(d_model=16, d_ff=24, num_experts=4, top_k=1)
    layer = layer_of(top_k=1, norm_topk_prob=False, aux_loss_coeff=0.0)
    layer(tokens()).hidden.square().sum().backward()
    assert layer.router.weight.grad.norm() > 1e-3
