"""Routers that choose or weigh experts wrongly.

What a layer makes of a right choice: weights of experts' outputs and biases, shared experts, and
models of transformers whose blocks Convoy's layers replace.

Legend: T tokens, D d_model, E experts, K top_k.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Llama4ForCausalLM, Llama4TextConfig

import moe
from moe import MoELayer
from parallel import ParallelDims, Topology, apply_expert_parallel
from tests.museum.cases import Edit, case
from tests.museum.shared_routing import by_loops, layer_of, normalized, tokens
from tests.support.hf import SIZES, logits_of, make_model
from tests.support.ranks import run_ranks


@case(
    "NVIDIA-NeMo/Automodel#2591",
    "The bias of each expert's down projection was added whole, and not times the expert's weight, "
    "so that each token got the sum of its experts' biases.",
    Edit("moe/experts/packed.py", "y.addr_(weight, w.b_down)", "y.add_(w.b_down)"),
)
def test_the_bias_of_an_experts_output_has_the_experts_weight():
    """With every backend an expert's output bias counts by the weight of the token's choice."""
    for backend in ("packed", "loop", "grouped_mm"):
        layer = layer_of(ffn_bias=True, backend=backend)
        wanted_TD = by_loops(layer, tokens(), normalized)
        torch.testing.assert_close(layer(tokens()).hidden, wanted_TD, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def _routed_and_shared(layer: MoELayer) -> tuple[Tensor, Tensor]:
    """The outputs of a layer's routed experts and of its shared experts, by plain products."""
    x_TD, shared = tokens(), layer.shared_experts
    gate_TF, up_TF = x_TD @ shared.w_gate.weight.T, x_TD @ shared.w_up.weight.T
    shared_TD = (gate_TF * gate_TF.sigmoid() * up_TF) @ shared.w_down.weight.T
    return by_loops(layer, x_TD, normalized), shared_TD


@case(
    "sgl-project/sglang#28237",
    "The shared expert was divided by the scaling factor of the routed experts, for a "
    "multiplication that a faster path had moved elsewhere.",
    Edit(
        "moe/layer.py", "else y_TD + shared_TD", "else y_TD + shared_TD / self.config.route_scale"
    ),
)
def test_the_scale_of_routed_experts_leaves_shared_experts_alone():
    """A layer's output is route_scale times the routed output, plus the shared experts' output."""
    layer = layer_of(num_shared_experts=1, route_scale=2.5)
    routed_TD, shared_TD = _routed_and_shared(layer)
    wanted_TD = 2.5 * routed_TD + shared_TD
    torch.testing.assert_close(layer(tokens()).hidden, wanted_TD, rtol=1e-4, atol=1e-5)


@case(
    "NousResearch/torchtitan#36",
    "The gate of the shared expert was loaded and initialized, and the forward did not use it.",
    Edit(
        "moe/layer.py",
        "y_TD if self.shared_gate is None else y_TD * self.shared_gate(x_TD).sigmoid()",
        "y_TD",
    ),
)
def test_the_gate_of_shared_experts_is_used():
    """Each token's shared output is multiplied by the sigmoid of the shared gate."""
    layer = layer_of(num_shared_experts=1, shared_expert_gate=True)
    routed_TD, shared_TD = _routed_and_shared(layer)
    open_T1 = torch.stack(
        [1 / (1 + torch.exp(-x_D @ layer.shared_gate.weight.T)) for x_D in tokens()]
    )
    wanted_TD = routed_TD + open_T1 * shared_TD
    torch.testing.assert_close(layer(tokens()).hidden, wanted_TD, rtol=1e-4, atol=1e-5)


def _hidden_on_rank(rank: int) -> Tensor:
    dims = ParallelDims.build(Topology(dp_shard=2, ep=2), "cpu")
    layer = layer_of(num_shared_experts=1)
    apply_expert_parallel(layer, dims.ep_mesh)
    return layer(tokens().chunk(2)[rank]).hidden.detach()


@case(
    "sgl-project/sglang#26845",
    "Every expert-parallel rank computed the whole shared expert and the sum over ranks counted "
    "the output once for each rank.",
    Edit(
        "moe/layer.py",
        "else y_TD + shared_TD",
        "else y_TD + shared_TD * "
        "(1 if self.router.balance_group is None else self.router.balance_group.size())",
    ),
)
def test_shared_experts_count_once_under_expert_parallelism():
    """Two expert-parallel ranks give the tokens what one process gives them, shared experts too."""
    wanted_TD = layer_of(num_shared_experts=1)(tokens()).hidden
    got_TD = torch.cat(run_ranks(_hidden_on_rank, 2))
    torch.testing.assert_close(got_TD, wanted_TD, rtol=1e-4, atol=1e-5)


@case(
    "pytorch/torchtitan#1448",
    "The weights of a token's experts were not scaled to a sum of 1 for checkpoints whose config "
    "has norm_topk_prob true.",
    Edit(
        "moe/adoption/reading.py",
        "normalize = bool(value(block, kind.normalize)) and not after",
        "normalize = False",
    ),
)
def test_a_checkpoints_normalization_of_weights_is_kept():
    """An adopted DeepSeek-V3 with norm_topk_prob true has the logits that transformers computes."""
    model = make_model("deepseek_v3", norm_topk_prob=True)
    wanted = logits_of(model)
    torch.testing.assert_close(logits_of(moe.adopt(model)), wanted, rtol=1e-4, atol=1e-4)


@case(
    "databricks/megablocks#87",
    "With one expert for a token weights were normalized over the tokens of the batch, and not "
    "over the experts of a token.",
    Edit("router/routing.py", "return chosen_TK.softmax(-1)", "return chosen_TK.softmax(0)"),
)
def test_a_single_normalized_weight_is_one_in_any_batch():
    """An adopted top-1 model gives a sequence the logits that it gives the sequence by itself."""
    model = make_model("qwen3_moe-one")
    wanted = logits_of(model)
    moe.adopt(model)
    torch.testing.assert_close(logits_of(model), wanted, rtol=1e-4, atol=1e-4)


@case(
    "huggingface/transformers#40609",
    "Llama 4 multiplied its experts' inputs by the router's scores in another order than that of "
    "the tokens, and generated garbage.",
    Edit(
        "moe/layer.py",
        "x_TD * routed.expert_weights_TK.to(x_TD.dtype)",
        "x_TD * routed.expert_weights_TK.flip(0).to(x_TD.dtype)",
    ),
)
def test_the_weights_on_experts_inputs_are_those_of_their_tokens():
    """An adopted Llama 4, whose weights multiply the inputs, has the logits of transformers."""
    torch.manual_seed(0)
    model = Llama4ForCausalLM(
        Llama4TextConfig(**SIZES, head_dim=8, intermediate_size=24, intermediate_size_mlp=40,
                         num_local_experts=4, num_experts_per_tok=2, interleave_moe_layer_step=1)
    ).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    wanted = logits_of(model)
    torch.testing.assert_close(logits_of(moe.adopt(model)), wanted, rtol=1e-4, atol=1e-4)
