"""Balancing that does not balance, or counts what is not there.

Losses that were constant, doubled or pooled, counts that were rounded or had padding in them: the
model trained on, and its experts were balanced by numbers that were wrong.

Legend: B batch, S sequence, T tokens, D d_model, E experts, K top_k.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import moe
from moe import MoELayer
from parallel import apply_recompute
from router import RouterOutput
from tests.museum.cases import Edit, case
from tests.museum.shared_routing import layer_of, routed, tokens
from tests.support.hf import make_model
from tests.support.hf import tokens as token_ids

COUNTS = "counts_E = count_tokens_per_expert(wanted_TK, E + 1)[:E]"


def _switch_loss(got: RouterOutput, logits_TE: Tensor) -> float:
    """The number of experts times the sum over them of load times mean probability."""
    T, E = logits_TE.shape
    total = 0.0
    for e in range(E):
        load = sum(int(i) == e for i in got.expert_indices_TK.flatten())
        share = load / got.expert_indices_TK.numel()
        total += E * share * sum(float(row.softmax(0)[e]) for row in logits_TE) / T
    return total


@case(
    "mindspore-ai/hyper-parallel#752",
    "The load-balancing loss multiplied loads by a mean over all experts, so that the loss was a "
    "constant whatever the router chose.",
    Edit(
        "router/losses.py",
        "torch.dot(f_E, mean_over_tokens(probs_TE, token_mask_T))",
        "(f_E * mean_over_tokens(probs_TE, token_mask_T).mean()).sum()",
    ),
)
def test_the_loss_tells_even_loads_from_uneven_ones():
    """The load-balancing loss is 1 for even loads, and grows to the formula's value for uneven."""
    even_TE = 4.0 * torch.eye(4).repeat(8, 1)
    uneven_TE = even_TE + torch.tensor([6.0, 0.0, 0.0, 0.0])
    losses = []
    for logits_TE in (even_TE, uneven_TE):
        got = routed(logits_TE, top_k=1, norm_topk_prob=False)
        losses.append(got.load_balance_loss.item())
        assert losses[-1] == pytest.approx(_switch_loss(got, logits_TE), rel=1e-5)
    assert losses[0] == pytest.approx(1.0, rel=1e-5)
    assert losses[1] > 3.0


@case(
    "tensorflow/tensor2tensor#1628",
    "The balancing loss was multiplied by its coefficient twice, in the gating and by the caller.",
    Edit("router/balancing.py", "[factor * loss for", "[factor**2 * loss for"),
)
def test_each_coefficient_is_applied_once():
    """The loss that a layer adds is each loss times its own coefficient."""
    layer = layer_of(aux_loss_coeff=0.1, seq_aux_loss_coeff=0.02, z_loss_coeff=0.003)
    aux = layer(tokens()).aux
    parts = (aux.load_balance_loss, aux.sequence_balance_loss, aux.z_loss)
    wanted = sum(c * loss.item() for c, loss in zip((0.1, 0.02, 0.003), parts, strict=True))
    assert aux.aux_loss.item() == pytest.approx(wanted, rel=1e-5)


@case(
    "huggingface/transformers#31464",
    "The loss pooled the tokens of all layers before it compared loads, so that layers that each "
    "used one expert looked balanced together.",
    Edit(
        "router/topk.py",
        "        expert_counts_E = counts_E\n",
        "        TopKRouter.pooled = counts_E + getattr(TopKRouter, 'pooled', 0)\n"
        "        expert_counts_E = TopKRouter.pooled\n",
    ),
)
def test_layers_are_balanced_one_by_one():
    """Three layers that each send all tokens to another expert have the loss of collapsed ones."""
    for used in range(3):
        layer = layer_of(num_experts=3, top_k=1, norm_topk_prob=False, router_bias=True)
        layer.router.bias.data[used] = 20.0
        loss = layer(tokens()).aux.load_balance_loss.item()
        assert loss == pytest.approx(3.0, rel=1e-3), f"layer {used} of 3"


@case(
    "NVIDIA/Megatron-LM#7081",
    "Counts of tokens were summed in bfloat16, whose steps near 40,000 are 256, and the bias of a "
    "busy expert moved up instead of down.",
    Edit(
        "router/topk.py",
        "self.balancing.bias_change(counts.to(self.expert_bias.device))",
        "self.balancing.bias_change(counts.bfloat16().float().round())",
    ),
)
def test_biases_move_by_exact_counts():
    """An expert with one token more than the mean of 40,840 is lowered, in a bfloat16 model too."""
    layer = layer_of(top_k=2, expert_bias=True, bias_update_rate=0.001).bfloat16()
    one_call_E = layer(tokens().bfloat16()).aux.tokens_per_expert_E
    assert one_call_E.dtype == torch.int64
    layer.router.update_bias(torch.tensor([40_841, 40_840, 40_839, 40_840]))
    assert layer.router.expert_bias.dtype == torch.float32
    torch.testing.assert_close(layer.router.expert_bias, torch.tensor([-0.001, 0, 0.001, 0]))


@case(
    "pytorch/torchtitan#1593",
    "Full recomputation ran the router again in the backward, and each token counted twice in the "
    "loads of experts.",
    Edit(
        "router/topk.py",
        COUNTS,
        COUNTS + "\n        self.seen = getattr(self, 'seen', counts_E * 0).add_(counts_E)"
        "\n        counts_E = self.seen",
    ),
)
def test_recomputation_counts_no_token_twice():
    """After a backward with full recomputation the loads of experts are those of one forward."""
    layer = layer_of(expert_bias=True, bias_update_rate=0.001)
    wanted = layer_of()(tokens()).aux.tokens_per_expert_E.tolist()
    apply_recompute([layer], "full")
    hidden, aux = layer(tokens())
    (hidden.square().sum() + aux.aux_loss).backward()
    assert aux.tokens_per_expert_E.tolist() == wanted


@case(
    "huggingface/transformers#28505",
    "The balancing loss counted padding, which every sequence of a batch has in other numbers.",
    Edit("moe/adoption/blocks.py", "token_mask=token_mask(attention_mask, x)", "token_mask=None"),
)
def test_padding_is_in_no_loss_of_an_adopted_model():
    """A batch of an adopted Mixtral has equal balancing losses with and without 40 pads."""
    model = moe.adopt(make_model("mixtral"))
    ids_BS = token_ids()
    mask_BS = torch.ones_like(ids_BS)
    losses = []
    for pads in (0, 40):
        padded = torch.nn.functional.pad(ids_BS, (pads, 0))
        with moe.collect_aux(model) as auxes:
            model(padded, attention_mask=torch.nn.functional.pad(mask_BS, (pads, 0)))
        losses.append([aux.load_balance_loss.item() for aux in auxes])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


PADDED = "return wanted_TK.masked_fill(is_padding_T1, E), kept_TK.masked_fill(is_padding_T1, E)"


def _with_pads(layer: MoELayer) -> tuple[Tensor, Tensor]:
    """[1, S, D] with 24 pads, which are alike, before 24 tokens; and the mask."""
    x_BSD = torch.cat((torch.ones(24, 16), tokens())).unsqueeze(0)
    return x_BSD, (torch.arange(48) >= 24).unsqueeze(0)


@case(
    "pytorch/torchtitan#4594",
    "Padding counted in the loads that move the experts' biases, so that the experts of the "
    "padding were pushed down.",
    Edit(
        "router/topk.py", PADDED, PADDED.replace("wanted_TK.masked_fill(is_padding_T1, E)",
                                                 "wanted_TK")
    ),
)  # fmt: skip
def test_padding_is_in_no_load_of_an_expert():
    """The loads of a padded sequence are those of its tokens."""
    layer = layer_of(expert_bias=True, bias_update_rate=0.001, seq_aux_loss_coeff=0.01)
    x_BSD, mask_BS = _with_pads(layer)
    got_E = layer(x_BSD, token_mask=mask_BS).aux.tokens_per_expert_E
    assert got_E.tolist() == layer(tokens()).aux.tokens_per_expert_E.tolist()
    assert int(got_E.sum()) == 24 * 2


@case(
    "NVIDIA/Megatron-LM#5542",
    "Padding was left out of the losses alone, and still took the places of tokens in experts with "
    "a capacity.",
    Edit(
        "router/topk.py", PADDED, PADDED.replace("kept_TK.masked_fill(is_padding_T1, E)",
                                                 "kept_TK")
    ),
)  # fmt: skip
def test_padding_takes_no_capacity():
    """Experts with a capacity take and drop the assignments that they would without padding."""
    capacity = {"policy": "fixed", "capacity_factor": 1.0, "drop_policy": "position"}
    layer = layer_of(capacity=capacity, seq_aux_loss_coeff=0.01)
    alone = layer(tokens())
    x_BSD, mask_BS = _with_pads(layer)
    padded = layer(x_BSD, token_mask=mask_BS)
    assert 0 < int(alone.aux.num_dropped) == int(padded.aux.num_dropped)
    torch.testing.assert_close(padded.hidden[0, 24:], alone.hidden)


@case(
    "huggingface/trl#7222",
    "The coefficient of the balancing loss was dropped without a word for families whose config "
    "lacks a field that the trainer looked for.",
    Edit(
        "moe/adoption/reading.py", "MoEConfig(**fields | options)", "MoEConfig(**options | fields)"
    ),
)
def test_a_coefficient_that_was_asked_for_is_used_in_every_family():
    """DeepSeek-V3, whose config has no such coefficient, trains with the one given to adopt."""
    for family in ("deepseek_v3", "qwen3_moe"):
        model = moe.adopt(make_model(family), aux_loss_coeff=0.5, seq_aux_loss_coeff=0.0)
        with moe.collect_aux(model) as auxes:
            model(token_ids())
        assert auxes
        for aux in auxes:
            assert aux.aux_loss.item() == pytest.approx(0.5 * aux.load_balance_loss.item())


@case(
    "pytorch/torchtitan#4148",
    "Forwards in evaluation were added to the loads of experts, and moved the biases of the next "
    "training step.",
    Edit(
        "router/topk.py",
        COUNTS,
        COUNTS + "\n        self.seen = getattr(self, 'seen', 0) + counts_E",
    ),
    Edit(
        "router/topk.py",
        "self.balancing.bias_change(counts.to(self.expert_bias.device))",
        "self.balancing.bias_change(self.seen)",
    ),
)
def test_evaluation_moves_no_bias():
    """Biases move by a training step's loads, whatever experts an evaluation used in between."""
    layer = layer_of(expert_bias=True, bias_update_rate=0.001).train()
    loads_E = layer(tokens()).aux.tokens_per_expert_E
    idle = int(loads_E.argmin())
    assert int(loads_E[idle]) < 12
    layer.eval()
    liked_D = layer.router.weight.detach()[idle] * 100
    assert int(layer(liked_D.repeat(500, 1)).aux.tokens_per_expert_E[idle]) == 500
    layer.train().router.update_bias(loads_E)
    assert layer.router.expert_bias[idle] > 0
