"""A backward in two passes: the gradient of what came in, and later those of weights.

A pipeline sends the first on as soon as it is there, and computes the second where it would else
wait (Qi et al., arXiv 2401.10241, section 2). Here the layers put the products that make their
weights' gradients aside, as DeepSeek's DualPipe has them do; whatever else a backward does is done
in the first pass, once. PyTorch's pipelines cut the graph in two and run some of its nodes again:
one that exchanges rows with other ranks, or computes both kinds of gradients together, cannot be.

Legend: T rows, D in and F out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from parallel.dtensor import local_shard

Product = Callable[[], Tensor]
"""Computes the gradient of one weight."""
Products = deque[tuple[Tensor, Product]]
"""Weights, as a forward had them, and what is put aside for each."""
Put = Callable[[Product], None]
"""Puts a weight's product aside."""


class WeightPass:
    """Where the layers of a model put products aside, for as long as they are to."""

    def __init__(self) -> None:
        self.products: Products | None = None

    @contextmanager
    def into(self, products: Products | None) -> Iterator[None]:
        """Around a forward whose backward is to have two passes, and around the first of them,
        since it may run forwards again. With None everything is as without this."""
        before, self.products = self.products, products
        try:
            yield
        finally:
            self.products = before


def apply_weight_pass(model: nn.Module) -> WeightPass:
    """Let linear layers without a bias, and modules with an attribute ``weight_pass``, know where
    to put their products aside; before :func:`apply_tensor_parallel`.

    Other weights get their gradients in the first pass: embeddings, norms, routers, and experts but
    on the ``grouped_mm`` path, since the others compute both kinds of gradients together.
    """
    weight_pass = WeightPass()
    for module in model.modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if type(module) is nn.Linear and names == ["weight"]:
            vars(module)["weight_pass"] = weight_pass
            module.forward = _forward(module)  # type: ignore[assignment]
        elif "weight_pass" in vars(module):
            vars(module)["weight_pass"] = weight_pass
    return weight_pass


def run_products(products: Products) -> None:
    """The second pass: compute what was put aside and add it to the weights' gradients.

    For FSDP, :func:`finish_backward` comes next.
    """
    while products:
        weight, product = products.popleft()
        torch.autograd.backward(weight, product())


def putting_aside(weight_pass: WeightPass | None, weight: Tensor) -> Put | None:
    """How the product of a weight is put aside, or None where it is computed at once.

    Such a weight must be taken out of the graph, by ``weight.detach()``.
    """
    products = None if weight_pass is None else weight_pass.products
    if products is None or not (torch.is_grad_enabled() and weight.requires_grad):
        return None
    return lambda product: products.append((weight, product))


def linear(x: Tensor, module: nn.Module) -> Tensor:
    """x W^T for what of a module's weight is here."""
    assert isinstance(module.weight, Tensor)
    weight = local_shard(module.weight)
    put = putting_aside(vars(module).get("weight_pass"), weight)
    if put is None:
        return F.linear(x, weight)
    # A weight's gradient hangs on its input's: nothing else calls for it.
    assert x.requires_grad
    out: Tensor = _Linear.apply(x, weight.detach(), put)
    return out


def _forward(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: linear(x, module)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, put: Put) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.put = put
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        # Detached, or it would hold the graph of whatever made it.
        grad_TF, x_TD = grads[0].flatten(0, -2), x.detach().flatten(0, -2)
        ctx.put(lambda: grad_TF.t() @ x_TD)
        return grads[0] @ weight, None, None
