"""A for-loop MoE: slow, literal, and sharing no code with the layer under test.

Legend: T tokens, D d_model, F d_ff, E experts, K top_k.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def moe_forward(
    x_TD: Tensor,
    router_ED: Tensor,
    w_gate_EDF: Tensor,
    w_up_EDF: Tensor,
    w_down_EFD: Tensor,
    top_k: int,
    score_func: str = "softmax",
    norm_topk_prob: bool = True,
    shared: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Returns y_TD, the load-balancing loss, the z-loss and the assignments of every expert."""
    T, E = x_TD.shape[0], router_ED.shape[0]
    rows, probs, zs = [], [], []
    counts = [0] * E
    for t in range(T):
        x_D = x_TD[t]
        logits = [torch.dot(x_D, router_ED[e]) for e in range(E)]
        largest = max(float(z.detach()) for z in logits)
        exps = [torch.exp(z - largest) for z in logits]
        total = sum(exps[1:], exps[0])
        zs.append((torch.log(total) + largest) ** 2)
        if score_func == "softmax":
            scores = [v / total for v in exps]
            prob = scores
        else:
            scores = [1 / (1 + torch.exp(-z)) for z in logits]
            norm = sum(scores[1:], scores[0])
            prob = [s / norm for s in scores]
        probs.append(prob)
        chosen = sorted(range(E), key=lambda e: (-float(scores[e].detach()), e))[:top_k]
        weights = [scores[e] for e in chosen]
        if norm_topk_prob:
            norm = sum(weights[1:], weights[0])
            weights = [w / norm for w in weights]
        y_D = torch.zeros_like(x_D)
        for e, w in zip(chosen, weights, strict=True):
            counts[e] += 1
            gate, up = x_D @ w_gate_EDF[e], x_D @ w_up_EDF[e]
            y_D = y_D + w * ((gate / (1 + torch.exp(-gate)) * up) @ w_down_EFD[e])
        if shared is not None:
            gate, up = shared[0] @ x_D, shared[1] @ x_D
            y_D = y_D + shared[2] @ (gate / (1 + torch.exp(-gate)) * up)
        rows.append(y_D)
    zero = (router_ED * 0).sum()
    balance, z = zero, zero
    for e in range(E):
        mean_prob = sum((p[e] for p in probs), zero) / max(T, 1)
        balance = balance + E * (counts[e] / max(T * top_k, 1)) * mean_prob
    for value in zs:
        z = z + value / T
    y_TD = torch.stack(rows) if rows else x_TD * 0
    assert math.isfinite(float(balance.detach()))
    return y_TD, balance, z, counts
