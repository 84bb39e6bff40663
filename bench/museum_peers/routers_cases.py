"""Routers of mixture-of-experts models in transformers, on one process and on two ranks.

Legend: B batch, S sequence, D model dimension, E experts.
"""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import torch

from bench.museum_peers.frame import Answer, peer_case, run_gloo

FIRST_57 = ("transformers==4.57.1", "huggingface_hub==0.35.3", "tokenizers==0.22.1")
FIRST_44 = ("transformers==4.44.2", "huggingface_hub==0.25.2", "tokenizers==0.19.1")
FIRST_46 = ("transformers==4.46.1", "huggingface_hub==0.25.2", "tokenizers==0.20.3")
FIRST_5 = ("transformers==5.17.0", "huggingface_hub==1.33.0", "httpx==0.28.1", "httpcore==1.0.9")
FIXED_5 = ("transformers==5.18.0", *FIRST_5[1:])
NEWEST = ("transformers==5.24.0",)


def _whole_numbers(answer: Any) -> torch.Tensor:
    """The tensor of whole numbers that a router answers: releases order their answers otherwise."""
    return next(t for t in answer if isinstance(t, torch.Tensor) and not t.is_floating_point())


def _switch_config(**options: Any) -> Any:
    from transformers import SwitchTransformersConfig

    sizes = {"d_model": 16, "d_ff": 32, "num_experts": 4, "dropout_rate": 0.0}
    return SwitchTransformersConfig(**{**sizes, **options})


@peer_case(
    "huggingface/transformers#45440",
    went_wrong="A masked group had score 0, above the negative scores of the groups that count.",
    wrong=FIRST_57,
    fixed=NEWEST,
)
def negative_biases_choose_no_expert_of_a_group_that_is_out() -> Answer:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    torch.manual_seed(1)
    config = DeepseekV3Config(
        hidden_size=16, moe_intermediate_size=8, n_routed_experts=8, n_group=4, topk_group=1,
        num_experts_per_tok=2, n_shared_experts=1,
    )  # fmt: skip
    router = DeepseekV3MoE(config).gate
    torch.nn.init.normal_(router.weight)
    router.e_score_correction_bias.fill_(-2.0)
    x_BSD = torch.randn(1, 64, 16)
    with torch.no_grad():
        chosen = _whole_numbers(router(x_BSD)).reshape(-1, 2)
    split = int((chosen[:, 0] // 2 != chosen[:, 1] // 2).sum())
    return Answer(split == 0, f"{split} of 64 tokens have experts of two groups; one is allowed")


@peer_case(
    "huggingface/transformers#48421",
    went_wrong="A token's place in its expert was counted over that token, so none was dropped.",
    wrong=FIRST_5,
    fixed=NEWEST,
)
def an_expert_takes_no_more_tokens_than_its_capacity() -> Answer:
    from transformers.models.switch_transformers.modeling_switch_transformers import (
        SwitchTransformersTop1Router,
    )

    torch.manual_seed(2)
    router = SwitchTransformersTop1Router(_switch_config(expert_capacity=3)).eval()
    with torch.no_grad():
        chosen = _whole_numbers(router(torch.randn(1, 64, 16)))
    most = int(chosen.reshape(64, 4).sum(0).max())
    return Answer(most <= 3, f"capacity 3, and the fullest expert takes {most} of 64 tokens")


@peer_case(
    "huggingface/transformers#33582",
    went_wrong="Axes were swapped before the list of used experts was made: some were left out.",
    wrong=FIRST_44,
    fixed=FIRST_46,
)
def each_token_gets_the_expert_of_its_router() -> Answer:
    from transformers.models.switch_transformers.modeling_switch_transformers import (
        SwitchTransformersSparseMLP,
    )

    torch.manual_seed(3)
    layer = SwitchTransformersSparseMLP(_switch_config(expert_capacity=64)).eval()
    wrong = 0
    with torch.no_grad():
        for _ in range(20):
            x_BSD = torch.randn(1, 3, 16)
            seen_BSD = layer(x_BSD)[0]
            mask, scores, _ = layer.router(x_BSD)
            for token, expert in enumerate(mask[0].argmax(-1).tolist()):
                right_D = scores[0, token] * layer.experts[f"expert_{expert}"](x_BSD[0, token])
                wrong += not torch.allclose(seen_BSD[0, token], right_D, atol=1e-5)
    return Answer(wrong == 0, f"{wrong} of 60 tokens without the output of their expert")


@peer_case(
    "huggingface/transformers#33969",
    went_wrong="The router's noise was multiplied into the tokens that the experts read.",
    wrong=NEWEST,
    fixed=None,
    no_fix="The pull requests with a fix are open; 5.24.0 is the newest release.",
)
def the_noise_of_a_router_stays_in_the_router() -> Answer:
    from transformers.models.switch_transformers.modeling_switch_transformers import (
        SwitchTransformersSparseMLP,
    )

    torch.manual_seed(4)
    layer = SwitchTransformersSparseMLP(_switch_config(router_jitter_noise=0.5)).train()
    read: list[torch.Tensor] = []
    layer.experts.register_forward_pre_hook(lambda _, args: read.append(args[0].detach().clone()))
    x_BSD = torch.randn(1, 32, 16)
    layer(x_BSD.clone())
    off = float((read[0].reshape(32, 16) - x_BSD[0]).abs().max() / x_BSD.abs().max())
    return Answer(off == 0, f"what the experts read is off by up to {off:.0%} of the largest input")


def _gate_gradient(folder: str, rank: int) -> tuple[torch.Tensor, int]:
    """The gradient of the first router, and how many experts this process holds.

    A rank below zero stands for one process that holds all of them.
    """
    from transformers import OlmoeForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    options: dict[str, Any] = {}
    if rank >= 0:
        config = DistributedConfig(tp_size=2, enable_expert_parallel=True)
        options["distributed_config"] = config
    model = OlmoeForCausalLM.from_pretrained(folder, experts_implementation="batched_mm", **options)
    ids_BS = torch.arange(24).reshape(2, 12) + 1
    model(input_ids=ids_BS, labels=ids_BS).loss.backward()
    block = model.model.layers[0].mlp
    gradient, experts = block.gate.weight.grad, block.experts.down_proj
    held = experts.to_local() if hasattr(experts, "to_local") else experts
    summed = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return summed, held.shape[0]


@peer_case(
    "huggingface/transformers#48687",
    went_wrong="A rank's router got gradients of the slots that other ranks' experts computed.",
    wrong=FIRST_5,
    fixed=FIXED_5,
)
def a_router_has_the_same_gradient_on_two_ranks_of_experts() -> Answer:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    torch.manual_seed(5)
    config = OlmoeConfig(
        vocab_size=99, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_experts=8, num_experts_per_tok=2, norm_topk_prob=False,
        initializer_range=0.3,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        OlmoeForCausalLM(config).save_pretrained(folder)
        plain, _ = _gate_gradient(folder, -1)
        ranks = run_gloo(partial(_gate_gradient, folder), 2)
    assert [held for _, held in ranks] == [4, 4], "each rank holds half of the experts"
    off = max(float((gradient - plain).norm() / plain.norm()) for gradient, _ in ranks)
    return Answer(off < 1e-4, f"the gradient is off by {off:.1e} of its norm")
