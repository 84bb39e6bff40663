"""Context parallelism in which every number has the bits of one rank.

Legend: B batch, S tokens of a sequence on this rank, W tokens of the full sequence, T tokens of the
micro-batch, D and F sizes of a row.

What a rank computes of its own tokens alone, as a product's rows, has the bits of one rank already.
Sums over tokens do not: in attention those over keys and over queries, in a parameter's gradient
those over all tokens of the micro-batch, and in a router those of its losses and of its choices.
So

- attention exchanges heads for tokens (DeepSpeed-Ulysses, arXiv 2309.14509): a rank has all tokens
  of some heads, and no sum is cut;
- a parameter's gradient is computed of the whole micro-batch. Each rank gathers the rows of all
  tokens and takes some columns of the outputs' gradient, which are rows of the weight's gradient.
  The other ranks' part of the gradient is 0, and FSDP adds the parts up;
- routers see the logits of the whole micro-batch, see :class:`router.SharedMicroBatch`.

The bits of a part of a product's columns are those of the whole product: tried on a CPU in float32
and in bfloat16, from 8 columns on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from parallel.apply.exact_sequence import ExactSequence
from parallel.apply.tensor_parallel import norm_function
from parallel.expert_parallel import expert_modules

_BLOCK = 32
"""Tokens of a sequence whose rows are summed together in the gradient of a norm's weight."""
_LEAST_COLUMNS = 8
"""Of a rank's part of a weight's gradient; with fewer one rank computes all of it."""


class SharedSequence(ExactSequence):
    """Also the :class:`router.SharedMicroBatch` of routers."""

    def with_own_gradient(self, x_BSX: Tensor) -> Tensor:
        """[B, S, ...] of each rank -> [B, W, ...]. The gradient of this rank's tokens is what this
        rank makes of it: every rank computes the same of the whole."""
        out: Tensor = _WithOwnGradient.apply(x_BSX, self)
        return out

    def linear(
        self, x_BSD: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """[B, S, D], [F, D] -> [B, S, F] in ``dtype``; the gradients of ``weight`` and ``bias``,
        summed over ranks, are those of the whole micro-batch."""
        out: Tensor = _Linear.apply(x_BSD, weight, bias, dtype, self)
        return out

    def of_tokens(
        self, function: Callable[[Tensor, Tensor], Tensor], x_BSX: Tensor, vector: Tensor
    ) -> Tensor:
        """``function`` of each token's numbers and of a vector, as a norm of its weight; [B, S,
        ...]. The gradient of ``vector``, summed over ranks, is that of the whole micro-batch."""
        out: Tensor = _OfTokens.apply(x_BSX, vector, function, self)
        return out


class _WithOwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSX: Tensor, sequence: SharedSequence) -> Tensor:
        ctx.sequence = sequence
        # As for the other exchanges: a recomputation then begins and ends between collectives.
        ctx.save_for_backward(x_BSX.new_empty(0))
        return sequence.gather_tokens(x_BSX)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors
        return ctx.sequence.own(grads[0]), None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype,
        sequence: SharedSequence,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.dtype, ctx.sequence = dtype, sequence
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (x, weight), dy = ctx.saved_tensors, grads[0]
        dx = dweight = dbias = None
        if ctx.needs_input_grad[1]:
            end = _start_weight_grad(x, dy, weight, ctx.dtype, ctx.sequence)
        if ctx.needs_input_grad[0]:
            dx = (dy @ weight.to(ctx.dtype)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dweight = end()
        if ctx.needs_input_grad[2]:
            # A sum over tokens of some columns has other bits than of all.
            dbias = ctx.sequence.gather_tokens(dy).flatten(0, 1).sum(0)
            dbias = dbias if ctx.sequence.is_first else torch.zeros_like(dbias)
        return dx, dweight, dbias, None, None


def _is_cut(rows: int, sequence: ExactSequence) -> bool:
    """Whether several ranks compute the gradient of a weight of so many rows."""
    return rows >= _LEAST_COLUMNS * sequence.ranks


def _own_rows(rows: int, sequence: ExactSequence) -> tuple[int, int]:
    """The rows of a weight whose gradient this rank computes: the first, and the one after them."""
    size = -(-rows // sequence.ranks) if _is_cut(rows, sequence) else rows
    first = min(sequence.group.rank() * size, rows)
    return first, min(first + size, rows)


def _start_weight_grad(
    x_BSD: Tensor, dy_BSF: Tensor, weight_FD: Tensor, dtype: torch.dtype, sequence: SharedSequence
) -> Callable[[], Tensor]:
    """Begin the exchanges of a weight's gradient; the result waits, and gives [F, D]: this rank's
    rows of the gradient of the whole micro-batch, and zeros."""
    x_end, (first, last) = sequence.start_gather_tokens(x_BSD), _own_rows(len(weight_FD), sequence)
    cut = _is_cut(len(weight_FD), sequence)
    dy_end = (sequence.start_exchange_columns if cut else sequence.start_gather_tokens)(dy_BSF)

    def end() -> Tensor:
        x_TD, dy_TF = x_end().flatten(0, 1).to(dtype), dy_end().flatten(0, 1)
        grad_FD = torch.zeros_like(weight_FD)
        if first < last:
            grad_FD[first:last] = (dy_TF.t() @ x_TD)[: last - first]
        return grad_FD

    return end


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_BS: Tensor, weight: Tensor, sequence: SharedSequence) -> Tensor:
        ctx.save_for_backward(tokens_BS)
        ctx.rows, ctx.sequence = len(weight), sequence
        return F.embedding(tokens_BS, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[None, Tensor, None]:
        tokens_BW, dy_BWD = map(ctx.sequence.gather_tokens, (*ctx.saved_tensors, grads[0]))
        # The rows that this rank has of the gradient of a tied head: both are added before either
        # is rounded.
        first, last = _own_rows(ctx.rows, ctx.sequence)
        rows = last - first
        own_BW = tokens_BW - first
        own_BW = own_BW.where((own_BW >= 0) & (own_BW < rows), rows)
        grad = torch.ops.aten.embedding_dense_backward(dy_BWD, own_BW, rows + 1, rows, False)
        out = dy_BWD.new_zeros(ctx.rows, dy_BWD.shape[2])
        out[first:last] = grad[:rows]
        return None, out, None


class _OfTokens(torch.autograd.Function):
    """A function of each token's row and of a vector, as a norm with its weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, function: Callable[[Tensor, Tensor], Tensor],
        sequence: SharedSequence,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.function, ctx.sequence = function, sequence
        return function(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None]:
        (x, weight), sequence = ctx.saved_tensors, ctx.sequence
        with torch.enable_grad():
            # Of all tokens, on every rank: the function computes little.
            x_BWX = sequence.gather_tokens(x).requires_grad_()
            vector = weight.detach().requires_grad_()
            y = ctx.function(x_BWX, vector)
        dx, dvector = torch.autograd.grad(y, (x_BWX, vector), sequence.gather_tokens(grads[0]))
        if not sequence.is_first:
            dvector.zero_()
        return sequence.own(dx), dvector, None, None


def _start_row_sum(
    sequence: SharedSequence | None, x: Tensor, factors: Tensor
) -> Callable[[], Tensor]:
    """Begin the sum of rows [B, S, ..., D] times a factor of each row, [B, S, ..., 1]; the result
    gives [D]: of the rows of all ranks, on the first one, and zeros on the others.

    The sums of :data:`_BLOCK` tokens are added up, on one rank too: the ranks exchange these alone.
    """
    B, S, D = x.shape[0], x.shape[1], x.shape[-1]
    if x.ndim < 3 or S % _BLOCK:
        assert sequence is None, (x.shape, _BLOCK)
        total = torch.mv(x.reshape(-1, D).t(), factors.reshape(-1))
        return lambda: total
    rows = factors.numel() // max(B * S, 1) * _BLOCK
    blocks = B * S // _BLOCK
    sums = torch.bmm(factors.reshape(blocks, 1, rows), x.reshape(blocks, rows, D))
    if sequence is None:
        total = sums.flatten(0, 1).sum(0)
        return lambda: total
    return partial(
        _end_row_sum, sequence.start_gather_tokens(sums.view(B, S // _BLOCK, D)), sequence
    )


def _end_row_sum(gathered: Callable[[], Tensor], sequence: ExactSequence) -> Tensor:
    total = gathered().flatten(0, 1).sum(0)
    return total if sequence.is_first else torch.zeros_like(total)


def apply_exact_context(model: nn.Module, token_mesh: DeviceMesh) -> nn.Module:
    """As :func:`parallel.apply_context_parallel`, with the bits of one rank. To be called for one
    rank too, whose sums over tokens are then those of several.

    Every parameter outside of experts must be of an ``nn.Linear``, ``nn.Embedding`` or
    ``nn.RMSNorm``, or of a module with ``use_micro_batch(shared)``, as routers, which computes its
    parameters' gradients by it. Experts' rows must reach the rank of their expert from all of
    ``token_mesh``. Raises TypeError for another module with parameters.
    """
    shared = token_mesh.size() > 1
    sequence = SharedSequence(token_mesh.get_group()) if shared else None
    for module in model.modules():
        if hasattr(module, "row_sum"):
            vars(module)["row_sum"] = partial(_start_row_sum, sequence)
    if sequence is None:
        return model
    by_unit = {id(m) for layer in expert_modules(model) for m in layer.experts.modules()}
    for name, module in model.named_modules():
        if id(module) in by_unit:
            continue
        if callable(use := getattr(module, "use_micro_batch", None)):
            use(sequence)
        if callable(getattr(module, "use_sequence_group", None)):
            module.context = sequence
        for kind, forward in _FORWARD.items():
            if isinstance(module, kind):
                module.forward = partial(forward, module, sequence)
                if kind is nn.Embedding:
                    vars(module)["project"] = partial(_projected, sequence)
                break
        else:
            own = [parameter for parameter, _ in module.named_parameters(recurse=False)]
            if own and not callable(use):
                raise TypeError(f"{name} ({type(module).__name__}) has no exact gradient of {own}")
    return model


def _linear(module: nn.Module, sequence: SharedSequence, x_BSD: Tensor) -> Tensor:
    assert isinstance(module, nn.Linear)
    return sequence.linear(x_BSD, module.weight, module.bias, x_BSD.dtype)


def _projected(sequence: SharedSequence, x_BSD: Tensor, weight: Tensor) -> Tensor:
    return sequence.linear(x_BSD, weight, None, x_BSD.dtype)


def _embedding(module: nn.Module, sequence: SharedSequence, tokens_BS: Tensor) -> Tensor:
    out: Tensor = _Embedding.apply(tokens_BS, module.weight, sequence)
    return out


def _norm(module: nn.Module, sequence: SharedSequence, x: Tensor) -> Tensor:
    assert isinstance(module, nn.RMSNorm)
    normalize = norm_function(module)
    if getattr(module, "sums_rows", lambda _: False)(x):
        return normalize(x, module.weight)
    return sequence.of_tokens(normalize, x, module.weight)


_FORWARD: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
    nn.RMSNorm: _norm,
}
