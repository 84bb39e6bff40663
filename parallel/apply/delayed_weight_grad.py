"""Delayed weight gradients: a backward computes the inputs' gradients first, the weights' later.

A pipeline stage sends the gradient of its input to the stage before as soon as that gradient is
there, and computes the gradients of its weights when the rank would otherwise wait (Qi et al.,
arXiv 2401.10241, section 2). Layers put the GEMMs of their weights' gradients into a
:class:`WeightGradStore`, as in DeepSeek's DualPipe; everything else of a backward runs once, in the
first pass. PyTorch's own pipelines split the autograd graph instead and run some of its nodes
twice. That does not work for a node that exchanges rows with other ranks, nor for a node that
computes both kinds of gradients.

Legend: T rows, D input size, F output size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from parallel.dtensor import local_shard

ComputeGrad = Callable[[], Tensor]
"""Computes the gradient of one weight."""
PutGrad = Callable[[ComputeGrad], None]
"""Stores the computation of one weight's gradient for later."""


class WeightGradStore:
    """The delayed weight gradients of one model, by a key for each backward.

    Layers of the model hold the store, see :func:`apply_delayed_weight_grad`. Outside
    :meth:`collect` the layers compute their weights' gradients at once.
    """

    def __init__(self) -> None:
        self._delayed: dict[Hashable, deque[tuple[Tensor, ComputeGrad]]] = {}
        self._collecting: deque[tuple[Tensor, ComputeGrad]] | None = None

    @contextmanager
    def collect(self, key: Hashable | None) -> Iterator[None]:
        """Delay the weight gradients of forwards inside the ``with`` block, under ``key``.

        Wrap the forward, and the backward too: activation recomputation runs forwards inside the
        backward. With None nothing is delayed.
        """
        before = self._collecting
        self._collecting = None if key is None else self._delayed.setdefault(key, deque())
        try:
            yield
        finally:
            self._collecting = before

    def put_for(self, weight: Tensor) -> PutGrad | None:
        """How a layer's forward delays the gradient of ``weight``; None: compute it at once.

        A layer that gets a function must compute with ``weight.detach()``.
        """
        delayed = self._collecting
        if delayed is None or not (torch.is_grad_enabled() and weight.requires_grad):
            return None
        return lambda compute: delayed.append((weight, compute))

    def count(self, key: Hashable) -> int:
        """The number of weight gradients delayed under ``key``."""
        return len(self._delayed.get(key, ()))

    def compute(self, key: Hashable) -> None:
        """Compute the weight gradients delayed under ``key``, and add them to the weights.

        Under FSDP, :func:`parallel.finish_backward` must come next.
        """
        delayed = self._delayed.pop(key, deque())
        while delayed:
            weight, compute = delayed.popleft()
            torch.autograd.backward(weight, compute())


def apply_delayed_weight_grad(model: nn.Module) -> WeightGradStore:
    """Let the layers of ``model`` delay their weights' gradients; returns the store that they use.

    Layers that can: linear layers, and modules with an attribute ``weight_grad_store``. All other
    parameters get their gradients in the first pass: biases, embeddings, norms, routers, and
    experts except on the ``grouped_mm`` path, because the other paths compute both kinds of
    gradients together. Call before :func:`parallel.apply_tensor_parallel`.
    """
    store = WeightGradStore()
    for module in model.modules():
        names = {name for name, _ in module.named_parameters(recurse=False)}
        linear_layer = type(module) is nn.Linear or hasattr(module, "product")
        if linear_layer and "weight" in names <= {"weight", "bias"}:
            vars(module)["weight_grad_store"] = store
            # A deep copy of a partial has the copied module; a closure would have this one.
            module.forward = partial(linear, module=module)
        elif "weight_grad_store" in vars(module):
            vars(module)["weight_grad_store"] = store
    return store


def linear(x: Tensor, module: nn.Module) -> Tensor:
    """x W^T + b with the local shards of the module's weight and, where it has one, bias."""
    bias = module.bias
    return linear_product(x, module, None if bias is None else local_shard(cast(Tensor, bias)))


def linear_product(x: Tensor, module: nn.Module, bias: Tensor | None = None) -> Tensor:
    """x W^T + ``bias`` with the local shard of the module's weight.

    A module with a method ``product(x, weight, put)`` computes both kinds of products itself.
    """
    assert isinstance(module.weight, Tensor)
    weight = local_shard(module.weight)
    store: WeightGradStore | None = vars(module).get("weight_grad_store")
    # Autograd calls a delayed backward only for the gradient of x. An x without one, as behind
    # frozen embeddings, leaves the weight's gradient to be computed at once.
    put = None if store is None or not x.requires_grad else store.put_for(weight)
    product: Callable[..., Tensor] | None = getattr(module, "product", None)
    if product is not None:
        y = product(x, weight, put)
        return y if bias is None else y + bias.to(y.dtype)
    if put is None:
        return F.linear(x, weight, bias)
    out: Tensor = _Linear.apply(x, weight.detach(), bias, put)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, put: PutGrad) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.put = put
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        # Without detach() the stored function would keep the graph that made x.
        grad_TF, x_TD = grads[0].flatten(0, -2), x.detach().flatten(0, -2)
        ctx.put(lambda: grad_TF.t() @ x_TD)
        dbias = grad_TF.sum(0) if ctx.needs_input_grad[2] else None
        return grads[0] @ weight, None, dbias, None
