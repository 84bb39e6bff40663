"""Routers whose logits a case gives, and layers in plain loops.

Legend: T tokens, D d_model, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe import MoEConfig, MoELayer
from router import RouterConfig, RouterOutput, TopK, TopKRouter


def router_of(num_experts: int, **fields: Any) -> TopKRouter:
    """A router whose logits are its input: the input's size is the number of experts."""
    router = TopKRouter(num_experts, RouterConfig(num_experts=num_experts, **fields))
    router.weight.data.copy_(torch.eye(num_experts))
    return router


def routed(logits_TE: Tensor, bias: list[float] | None = None, **fields: Any) -> RouterOutput:
    """What a router makes of logits, with biases of the choice."""
    router = router_of(logits_TE.shape[1], expert_bias=bias is not None, **fields)
    if bias is not None:
        assert router.expert_bias is not None
        router.expert_bias.copy_(torch.tensor(bias))
    return router(logits_TE)


def layer_of(**fields: Any) -> MoELayer:
    """A small layer with the values of one seed, biases too."""
    torch.manual_seed(0)
    layer = MoELayer(
        MoEConfig(**{"d_model": 16, "d_ff": 24, "num_experts": 4, "top_k": 2} | fields)
    )
    for name, parameter in layer.named_parameters():
        if ".b_" in name:
            parameter.data.normal_()
    return layer


def tokens(count: int = 24, d_model: int = 16, seed: int = 1) -> Tensor:
    """Random tokens of one seed."""
    return torch.randn(count, d_model, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def one_expert(layer: MoELayer, expert: int, x_D: Tensor) -> Tensor:
    """What an expert with SwiGLU gives for one token."""
    w = layer.experts
    gate, up = x_D @ w.w_gate[expert], x_D @ w.w_up[expert]
    if w.b_up is not None:
        gate, up = gate + w.b_gate[expert], up + w.b_up[expert]
    y_D = (F.silu(gate) * up) @ w.w_down[expert]
    return y_D if w.b_down is None else y_D + w.b_down[expert]


@torch.no_grad()
def by_loops(layer: MoELayer, x_TD: Tensor, weight_of: Any) -> Tensor:
    """The sum over each token's best experts, with ``weight_of(scores, chosen, expert)``."""
    rows = []
    for x_D in x_TD:
        scores = (layer.router.weight @ x_D).softmax(0)
        chosen = sorted(range(len(scores)), key=lambda e: -float(scores[e]))
        chosen = chosen[: layer.config.top_k]
        parts = [weight_of(scores, chosen, e) * one_expert(layer, e, x_D) for e in chosen]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


def normalized(scores: Tensor, chosen: list[int], expert: int) -> Tensor:
    """The part of an expert's score in the sum of the chosen experts' scores."""
    return scores[expert] / sum(scores[e] for e in chosen)


class Turning(TopK):
    """Top-k on a device that breaks ties of scores otherwise at every call."""

    turned = False

    def choose(self, preferences_TE: Tensor, token_mask_T: Tensor | None) -> Tensor:
        """The last of tied experts, and at the next call the first."""
        self.turned = not self.turned
        if not self.turned:
            return super().choose(preferences_TE, token_mask_T)
        return preferences_TE.shape[1] - 1 - super().choose(preferences_TE.flip(-1), token_mask_T)
