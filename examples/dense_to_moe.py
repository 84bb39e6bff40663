"""A dense model becomes a mixture of experts: python examples/dense_to_moe.py

``moe.replace_mlp`` puts new MoE layers in the place of a model's feed-forward modules, and
``moe.upcycle`` layers whose experts are copies of these modules: the model then begins where the
dense one is. Both take any model of ``transformers``, and plain modules as here.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import moe

D = 32


class Block(nn.Module):
    """A dense block: the feed-forward module is what becomes a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.ffn = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        out: Tensor = x + self.ffn(self.norm(x))
        return out


def train(model: nn.Module, x: Tensor, target: Tensor, steps: int) -> float:
    """The loss after some steps; the auxiliary losses of MoE layers are added to it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        with moe.collect_aux(model) as auxes:
            loss = (model(x) - target).square().mean()
        (loss + sum(aux.aux_loss for aux in auxes)).backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    """Replace, upcycle, train, and see that every expert was trained."""
    torch.manual_seed(0)
    dense = nn.Sequential(*(Block() for _ in range(3)))
    x = torch.randn(8, 16, D)
    target = (x @ torch.randn(D, D) / D**0.5).sin()

    # New experts, smaller ones, in all blocks but the first.
    fresh = moe.replace_mlp(
        copy.deepcopy(dense), first_k_dense=1, num_experts=8, top_k=2, d_ff=D, aux_loss_coeff=0.01
    )
    print(f"replaced: loss {train(fresh, x, target, 50):.3f}")

    # Copies of the dense module in the last block: the first output is the dense model's.
    model = moe.upcycle(copy.deepcopy(dense), modules="2.*", num_experts=4, top_k=2)
    print(f"upcycled: differs by {(model(x) - dense(x)).abs().max():.0e}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = moe.watch_parameters(model, optimizer)
    (model(x) - target).square().mean().backward()
    optimizer.step()
    report = watch.report()
    report.check()  # an error where a parameter silently stays as it is
    print(report)
    print(f"upcycled: loss {train(model, x, target, 50):.3f}")


if __name__ == "__main__":
    main()
