"""The optimizer and the learning-rate schedules."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from parallel import local_shard
from pretrain.model import is_bias


class OptimizerConfig(BaseModel):
    """The ``[optimizer]`` section: AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    lr: float = Field(gt=0)
    """The peak learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """The decay of the mean of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """The decay of the mean of squared gradients."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the mean of squared gradients."""
    weight_decay: float = Field(default=0.1, ge=0)
    """The decoupled weight decay of matrices; norms and biases have none."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this global norm; 0 leaves gradients unscaled."""


class ScheduleConfig(BaseModel):
    """The ``[schedule]`` section: the learning rate over the steps."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How the learning rate falls after the warm-up. ``cosine``: along half a cosine (Loshchilov
    and Hutter, arXiv 1608.03983). ``linear``: along a line. ``constant``: not at all. ``wsd``:
    along a line over the last ``decay_steps`` (Hu et al., arXiv 2404.06395)."""
    warmup_steps: int = Field(default=0, ge=0)
    """The first steps, over which the learning rate rises linearly to its peak."""
    decay_steps: int = Field(default=0, ge=0)
    """For ``wsd``: the last steps, over which the learning rate falls linearly."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """The learning rate at the end as a ratio to the peak; ``constant`` ignores this field."""

    @model_validator(mode="after")
    def _check(self) -> ScheduleConfig:
        if (self.kind == "wsd") != (self.decay_steps > 0):
            raise ValueError(
                f"schedule.decay_steps ({self.decay_steps}) must be above 0 for wsd and 0 for the "
                f"others; schedule.kind is {self.kind}"
            )
        return self

    def ratio(self, step: int, total_steps: int) -> float:
        """The learning rate of the update that makes step ``step + 1``, as a ratio to the peak.

        Linear from 1 / warmup_steps; then to min_lr_ratio at total_steps along half a cosine
        (Loshchilov and Hutter, arXiv 1608.03983, eq. 5) or a line, or 1 throughout, or 1 with a
        linear fall over the last decay_steps (Hu et al., arXiv 2404.06395, eq. 1).
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        low = self.min_lr_ratio
        if self.kind == "constant":
            return 1.0
        if self.kind == "wsd":
            left = min(max(total_steps - step, 0) / self.decay_steps, 1.0)
            return low + (1 - low) * left
        progress = (step - self.warmup_steps) / max(total_steps - self.warmup_steps, 1)
        progress = min(progress, 1.0)
        if self.kind == "linear":
            return low + (1 - low) * (1 - progress)
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))


class ElementwiseAdamW(torch.optim.AdamW):
    """AdamW in which a number's update has equal bits in every slice of a tensor.

    A fused kernel computes the last numbers of a slice, which fill no vector register, with other
    instructions, and these round differently: a reshard then changes bits. Here the fused kernel
    gets slices whose length is a multiple of 16, where every slice of the tensor has one; all
    others get operations that round once each.
    """

    _CHUNK = 1 << 14
    """Numbers of one operation: of a core's cache, and too few to be cut over threads."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient (Loshchilov and Hutter, arXiv 1711.05101,
        algorithm 2)."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] += 1
                tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                flat = [local_shard(t).view(-1) for t in tensors]
                chunks = [t.split(self._CHUNK) for t in flat]
                # No layout cuts the rows of a matrix; biases of experts are cut.
                if parameter.ndim > 1 and group["weight_decay"] and not parameter.shape[-1] % 16:
                    self._update_fused(chunks, state["step"], group)
                else:
                    self._update(chunks, float(state["step"]), group)

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
    model: nn.Module, config: OptimizerConfig, exact: bool = False
) -> torch.optim.AdamW:
    """AdamW over all parameters, with its moments made at once, as zeros.

    With ``exact`` a :class:`ElementwiseAdamW`.

    torch makes the moments in the first step. Made here, a checkpoint has the same arrays at any
    step, and can be loaded before the first one. Matrices decay; norms and biases do not, and
    neither do the biases of experts.
    """
    parameters = list(model.parameters())
    decays = {
        parameter: parameter.ndim >= 2 and not is_bias(name)
        for name, parameter in model.named_parameters()
    }
    optimizer = (ElementwiseAdamW if exact else torch.optim.AdamW)(
        [
            {
                "params": [p for p in parameters if decays[p]],
                "weight_decay": config.weight_decay,
            },
            {"params": [p for p in parameters if not decays[p]], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=not exact,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of the next update."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def moments(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """By name of a moment and of a parameter: whatever the optimizer keeps in a parameter's shape.

    All parameters have the same moments, and have the moments before the first step: a checkpoint
    then has the same arrays at any step. Checkpoints ask nothing else of an optimizer.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state[parameter].items()):
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
                found.setdefault(key, {})[name] = value
    return found


def set_update_count(optimizer: torch.optim.Optimizer, count: int) -> None:
    """Set the number of updates of every parameter, where the optimizer counts updates."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(count)
