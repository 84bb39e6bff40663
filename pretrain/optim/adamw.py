"""AdamW."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from parallel import local_shard
from parallel.exact import chunk_length
from pretrain.model import is_bias
from pretrain.optim.config import OptimizerFields


class ElementwiseAdamW(torch.optim.AdamW):
    """AdamW in which a number's update has equal bits in every slice of a tensor.

    A fused kernel computes the last numbers of a slice, which fill no vector register, with other
    instructions, and these round differently: a reshard then changes bits. Here the fused kernel
    gets slices whose length is a multiple of 16, where every slice of the tensor has one; all
    others get operations that round once each.
    """

    _CHUNK = 1 << 14
    """Numbers of one operation on a CPU: of a core's cache, and too few to be cut over threads."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient (Loshchilov and Hutter, arXiv 1711.05101,
        algorithm 2)."""
        assert closure is None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            steps = [self.state[p]["step"] for p in parameters]
            for step in steps:
                step += 1
            # One copy to the host for all of them.
            counts = torch.stack(steps).tolist() if steps else []
            for parameter, step, count in zip(parameters, steps, counts, strict=True):
                state = self.state[parameter]
                tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                flat = [local_shard(t).view(-1) for t in tensors]
                chunks = [t.split(chunk_length(t.device, self._CHUNK)) for t in flat]
                # No layout cuts the rows of a matrix; biases of experts are cut.
                if parameter.ndim > 1 and group["weight_decay"] and not parameter.shape[-1] % 16:
                    self._update_fused(chunks, step, group)
                else:
                    self._update(chunks, count, group)

    @staticmethod
    def _update_fused(chunks: list[Any], step: Tensor, group: dict[str, Any]) -> None:
        x, grad, mean, square = map(list, chunks)
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            x, grad, mean, square, [], [step] * len(x), amsgrad=False, lr=group["lr"],
            beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"],
            maximize=False, grad_scale=None, found_inf=None,
        )  # fmt: skip

    @staticmethod
    def _update(chunks: list[Any], count: float, group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        decay, rate = 1 - lr * group["weight_decay"], lr / (1 - beta1**count)
        root = math.sqrt(1 - beta2**count)
        for x, grad, mean, square in zip(*chunks, strict=True):
            x.mul_(decay)
            mean.mul_(beta1).add_(grad * (1 - beta1))
            square.mul_(beta2).add_((grad * grad).mul_(1 - beta2))
            denominator = square.sqrt().div_(root).add_(group["eps"])
            x.sub_((mean / denominator).mul_(rate))


def build_adamw(
    model: nn.Module,
    config: OptimizerFields,
    exact: bool = False,
    without: Collection[str] = (),
) -> torch.optim.AdamW:
    """AdamW over the parameters of a model, with its moments made at once, as zeros.

    Matrices decay; norms and biases do not, and neither do the biases of experts.

    Args:
        model: on its device.
        config: of AdamW, or of an optimizer that leaves some parameters to AdamW.
        exact: make a :class:`ElementwiseAdamW`.
        without: names of the parameters that are left out.
    """
    decays = {
        parameter: parameter.ndim >= 2 and not is_bias(name)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name not in without
    }
    optimizer = (ElementwiseAdamW if exact else torch.optim.AdamW)(
        [
            {
                "params": [p for p in decays if decays[p]],
                "weight_decay": config.weight_decay,
            },
            {"params": [p for p in decays if not decays[p]], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=not exact,
    )
    for parameter in decays:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer
