"""A small model with attention and MoE layers, and adapters that add something."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import moe
from moe import MoEConfig, MoELayer

D = 16
EVERYTHING = ("experts", "router", "attention", "dense")


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(D, D, bias=False)
        self.o = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.o((self.q(x) @ x.mT).softmax(-1) @ x)


class Block(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.attention = SelfAttention()
        self.moe = MoELayer(config)

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = x + self.attention(x)
        out = self.moe(x, token_mask=token_mask)
        return x + out.hidden, out.aux.aux_loss


class Model(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.embed = nn.Linear(D, D)
        self.blocks = nn.ModuleList(Block(config) for _ in range(2))
        self.head = nn.Linear(D, D)

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, losses = self.embed(x), torch.zeros(())
        for block in self.blocks:
            x, loss = block(x, token_mask)
            losses = losses + loss
        return self.head(x) * 1.0, losses


def make_model(dtype: torch.dtype = torch.float32, **fields: Any) -> Model:
    torch.manual_seed(0)
    sizes = {"d_model": D, "d_ff": 24, "num_experts": 4, "top_k": 2}
    model = Model(MoEConfig(**sizes | {"aux_loss_coeff": 0.0} | fields))
    return model.to(dtype)


def adapted(
    dtype: torch.dtype = torch.float32, on: Any = EVERYTHING, also: Any = (), **fields: Any
) -> Model:
    """With adapters whose B is not zero: all of them change the output."""
    model = make_model(dtype, **fields)
    return randomized(moe.add_lora(model, rank=3, alpha=6, on=on, also_train=also))


@torch.no_grad()
def randomized(model: Any) -> Any:
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora." in name:
            parameter.normal_(std=0.1)
    return model


def batch(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, 5, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def loss_of(out: tuple[Tensor, Tensor]) -> Tensor:
    return out[0].square().sum() / 100 + out[1]
