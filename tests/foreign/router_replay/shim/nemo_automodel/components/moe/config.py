"""The config of Automodel's gate, as far as its tests of routing replay set it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from router import RouterConfig


@dataclass
class MoEConfig:
    n_routed_experts: int
    n_shared_experts: int
    n_activated_experts: int
    n_expert_groups: int
    n_limited_groups: int
    train_gate: bool
    gate_bias_update_factor: float
    aux_loss_coeff: float
    score_func: str
    route_scale: float
    dim: int
    inter_dim: int
    moe_inter_dim: int
    norm_topk_prob: bool
    dtype: torch.dtype
    enable_routing_replay: bool = False

    def of_convoy(self) -> RouterConfig:
        """The config of Convoy's router."""
        fields: dict[str, Any] = {}
        score_func, with_bias, _ = self.score_func.partition("_with_bias")
        if with_bias:
            fields |= {"expert_bias": True, "bias_update_rate": self.gate_bias_update_factor}
        elif score_func == "softmax":
            fields["softmax_after_topk"] = True  # theirs chooses among logits
        return RouterConfig(
            num_experts=self.n_routed_experts, top_k=self.n_activated_experts,
            score_func=score_func, norm_topk_prob=self.norm_topk_prob,
            route_scale=self.route_scale, aux_loss_coeff=self.aux_loss_coeff, **fields,
        )  # fmt: skip
