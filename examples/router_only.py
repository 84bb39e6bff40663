"""Convoy's router inside of an MoE module of one's own: python examples/router_only.py

The router chooses experts, weighs them and computes the balancing losses. What the experts are and
how they compute is the module's own. Four fields of RouterOutput are enough for that:

    expert_indices_TK    which experts each token takes, [tokens, top_k]; num_experts stands for an
                         assignment that was dropped by a capacity, or for padding
    expert_weights_TK    the factor of each expert's output, [tokens, top_k]; gradients reach the
                         router through them
    aux_loss             the balancing losses with their coefficients, to be added to the loss
    tokens_per_expert_E  how many assignments each expert got, for statistics and update_bias

Legend: T tokens, D d_model, F d_ff, E experts, K top_k.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from router import RouterConfig, TopKRouter

D, F, E = 16, 32, 4


class OwnMoE(nn.Module):
    """Experts of one's own, each an ordinary module, behind Convoy's router."""

    def __init__(self) -> None:
        super().__init__()
        config = RouterConfig(
            num_experts=E, top_k=2, score_func="sigmoid", expert_bias=True,
            bias_update_rate=0.01, aux_loss_coeff=0.01,
        )  # fmt: skip
        self.router = TopKRouter(D, config)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, F), nn.Tanh(), nn.Linear(F, D)) for _ in range(E)
        )

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The output [T, D], the auxiliary loss, and the assignments of each expert [E]."""
        routed = self.router(x_TD)
        out_TD = torch.zeros_like(x_TD)
        for number, expert in enumerate(self.experts):
            token, choice = (routed.expert_indices_TK == number).nonzero(as_tuple=True)
            weight = routed.expert_weights_TK[token, choice].unsqueeze(1)
            out_TD = out_TD.index_add(0, token, weight * expert(x_TD[token]))
        return out_TD, routed.aux_loss, routed.tokens_per_expert_E


def main() -> None:
    """Learn a small function, and keep the experts' loads equal."""
    torch.manual_seed(0)
    layer = OwnMoE()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    x_TD = torch.randn(256, D)
    target_TD = (x_TD @ torch.randn(D, D) / D**0.5).sin()
    for step in range(1, 101):
        optimizer.zero_grad()
        out_TD, aux_loss, tokens_per_expert_E = layer(x_TD)
        loss = (out_TD - target_TD).square().mean()
        (loss + aux_loss).backward()
        optimizer.step()
        # With expert_bias: once per step, with the counts of the whole step over all ranks.
        layer.router.update_bias(tokens_per_expert_E)
        if step % 50 == 0:
            print(f"step {step} loss {loss:.3f} loads {tokens_per_expert_E.tolist()}")


if __name__ == "__main__":
    main()
