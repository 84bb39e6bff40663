"""The low-rank matrices of adapters, as modules beside the weights that they adapt.

A weight W is computed with as W + (alpha / rank) · B A (LoRA, Hu et al., arXiv 2106.09685, section
4.1). A is drawn at random and B is zero: at the start nothing changes.

Legend: E experts, D the inputs of a matrix, F its outputs, L rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe.experts import GroupedExperts
from moe.float8 import Float8Linear
from parallel.dtensor import local_shard


class Adapter(nn.Module):
    """The adapters of one module, which has them as its child ``lora``.

    Args:
        rank: L.
        alpha: the scale is alpha / rank.
    """

    is_adapter = True

    def __init__(self, rank: int, alpha: float) -> None:
        super().__init__()
        self.rank, self.alpha = rank, alpha

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank

    def extra_repr(self) -> str:
        """The fields that ``print`` shows."""
        return f"rank={self.rank}, alpha={self.alpha}"

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """A uniform within fan_in ** -0.5, which are Kaiming's bounds for a slope of sqrt(5); B
        zero."""
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("b"):
                nn.init.zeros_(parameter)
            else:
                bound = self.fan_in(parameter) ** -0.5
                nn.init.uniform_(parameter, -bound, bound)

    @staticmethod
    def fan_in(a: Tensor) -> int:
        """The inputs of a matrix, from its A."""
        return a.shape[1]

    def merge(self, module: nn.Module) -> None:
        """Add the scaled product to the weights of ``module``, in place."""
        raise NotImplementedError

    def check_views(self, module: nn.Module) -> None:
        """Raise ValueError where :meth:`merge` would write into copies of the weights."""


class ExpertsAdapter(Adapter):
    """The adapters of one layer's experts: for each matrix A [E, D, L] and B [E, F, L].

    Both have the expert first and a size of the model second: expert parallelism and FSDP cut them
    as they cut the experts' weights, whatever the rank is.
    """

    def __init__(
        self, experts: GroupedExperts, rank: int, alpha: float, dtype: torch.dtype
    ) -> None:
        super().__init__(rank, alpha)
        weights = experts.local_weights()
        for name in _MATRICES:
            weight: Tensor | None = getattr(weights, f"w_{name}")
            if weight is not None:
                E, D, F = weight.shape
                for part_name, size in (("a", D), ("b", F)):
                    values = torch.empty(E, size, rank, dtype=dtype, device=weight.device)
                    self.register_parameter(f"{name}_{part_name}", nn.Parameter(values))
        self.reset_parameters()

    def forward(self, compute: Callable[..., Tensor], *args: Any) -> Tensor:
        """``compute(matrices, *args)``, with this rank's matrices by name."""
        matrices = {}
        for name, parameter in self.named_parameters(recurse=False):
            local = local_shard(parameter)
            matrices[name] = local * self.scale if name.endswith("b") else local
        return compute(matrices, *args)

    def check_views(self, module: nn.Module) -> None:
        """See :meth:`Adapter.check_views`."""
        assert isinstance(module, GroupedExperts)
        own = {local_shard(p).untyped_storage().data_ptr() for p in module.parameters()}
        views = (weight for weight in module.local_weights() if weight is not None)
        if any(weight.untyped_storage().data_ptr() not in own for weight in views):
            raise ValueError(
                f"{type(module).__name__} must compute with views of its parameters to be merged"
            )

    @torch.no_grad()
    def merge(self, module: nn.Module) -> None:
        """See :meth:`Adapter.merge`. The dense product exists for one expert and one matrix."""
        assert isinstance(module, GroupedExperts)
        weights = module.local_weights()
        own = {name: local_shard(p) for name, p in self.named_parameters(recurse=False)}
        for name in _MATRICES:
            if f"{name}_a" in own:
                stacked: Tensor = getattr(weights, f"w_{name}")
                pairs = zip(own[f"{name}_a"], own[f"{name}_b"], strict=True)
                for weight_DF, (a_DL, b_FL) in zip(stacked, pairs, strict=True):
                    _add_rounded_once(weight_DF, a_DL, b_FL, self.scale)


_MATRICES = ("gate", "up", "down")


def _add_rounded_once(weight: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """weight += scale · left right^T, in float32 or wider until the sum is rounded."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    delta = (left.to(wide) @ right.to(wide).t()).mul_(scale)
    weight.copy_(delta.add_(weight))


class MatrixAdapter(Adapter):
    """The adapter of one weight [F, D]: A [L, D] and B [F, L].

    Called with a tensor [..., D] it gives what the adapter adds to its product, [..., F].
    """

    def __init__(self, weight: Tensor, rank: int, alpha: float, dtype: torch.dtype) -> None:
        super().__init__(rank, alpha)
        F, D = weight.shape
        self.a = nn.Parameter(torch.empty(rank, D, dtype=dtype, device=weight.device))
        self.b = nn.Parameter(torch.empty(F, rank, dtype=dtype, device=weight.device))
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., F], in the dtype of ``x``."""
        low = nn.functional.linear(x, _own_part(self.a).to(x.dtype))
        return nn.functional.linear(low, _own_part(self.b).to(x.dtype)) * self.scale

    @torch.no_grad()
    def merge(self, module: nn.Module) -> None:
        """See :meth:`Adapter.merge`."""
        weight = local_shard(module.get_parameter("weight"))
        _add_rounded_once(weight, local_shard(self.b), local_shard(self.a).t(), self.scale)


def _own_part(parameter: Tensor) -> Tensor:
    """What this rank computes with. Under tensor parallelism a replicated matrix sees some tokens,
    or some columns: its gradient is a partial sum."""
    if not hasattr(parameter, "to_local"):
        return parameter
    from torch.distributed.tensor import DTensor, Partial

    assert isinstance(parameter, DTensor)
    grads = [Partial() if p.is_replicate() else p for p in parameter.placements]
    local: Tensor = parameter.to_local(grad_placements=grads)
    return local


class RouterAdapter(MatrixAdapter):
    """The adapter of a router's weight [E, D], which is small: its product is made."""

    def forward(self, weight_ED: Tensor) -> Tensor:
        """[E, D] -> [E, D], the weight to compute logits with."""
        wide = weight_ED.dtype
        return weight_ED + (self.b.to(wide) @ self.a.to(wide)) * self.scale


class LoRALinear(nn.Linear):
    """A linear layer with an adapter, its child ``lora``. The names of its own parameters stay."""

    lora: MatrixAdapter

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., F]."""
        y = super().forward(x)
        out: Tensor = y + self.lora(x.to(y.dtype))
        return out

    def product(self, x: Tensor, weight: Tensor, put: Any = None) -> Tensor:
        """x W^T with a weight, or a shard of it, that the caller has, and the adapter's product;
        ``parallel``'s functions for linear layers call this method. The weight's gradient, where it
        is wanted, is not delayed."""
        y = nn.functional.linear(x, weight)
        out: Tensor = y + self.lora(x.to(y.dtype))
        return out


class LoRAFloat8Linear(Float8Linear):
    """As :class:`LoRALinear`, where the weight's products are in float8, and the adapter's not."""

    lora: MatrixAdapter

    def product(self, x: Tensor, weight: Tensor, put: Any = None) -> Tensor:
        """See :meth:`LoRALinear.product`."""
        y = super().product(x, weight, put)
        out: Tensor = y + self.lora(x.to(y.dtype))
        return out


LORA_LINEARS: dict[type[nn.Linear], type[nn.Linear]] = {
    nn.Linear: LoRALinear,
    Float8Linear: LoRAFloat8Linear,
}
"""The class that a linear layer of each class gets with an adapter."""
