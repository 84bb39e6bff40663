"""The backend ``packed``, for CPUs: each expert's GEMMs, with intermediate results in the cache.

Legend: S rows, R assignments of rows to experts, D d_model, F d_ff, E experts of this rank, n rows
of one expert.

A library's grouped product, or autograd over one product per expert, writes every intermediate to
memory and reads it back: on a CPU that costs a quarter of the time. Here a block of one expert's
rows is gathered, goes through all of its steps and is added to the output before the next block's.
No [R, D] exists; of [R, F] only the products are kept, and what is cheap to compute is computed
again in the backward. Threads share the rows out between them, as small products do not gain from
two threads inside one; which rows a thread takes depends on the counts alone, and sums have a fixed
order, so the same call with the same number of threads gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from moe.experts.activation import ACTIVATIONS, Activation
from moe.experts.weights import ExpertWeights
from moe.experts.workers import num_workers, run_workers
from moe.rows import Rows
from parallel.comm import empty_like, new_empty, zeros_like
from router import LEAST_ROWS, padded_rows, with_enough_rows

BLOCK_ROWS = 1024
_ROWS_OF_AN_EXPERT = 32
"""What reading an expert's weights and writing their gradients costs, in rows; of any size, since
both grow as D·F."""


class Block(NamedTuple):
    """Some consecutive rows of one expert."""

    expert: int
    rows: slice
    more: bool = False
    """Whether the weights' gradients are added to those of the worker's block before."""
    last: bool = False
    """Under exact sums: whether the rows are the last ones of a unit."""

    @property
    def length(self) -> int:
        """n."""
        return int(self.rows.stop - self.rows.start)


def _shares(counts: Sequence[int], workers: int) -> list[list[Block]]:
    """Cut the sorted rows into one run of blocks for each worker, of about equal work."""
    total = sum(count + _ROWS_OF_AN_EXPERT for count in counts if count)
    cuts = [total * w // workers for w in range(workers + 1)]
    shares: list[list[Block]] = [[] for _ in range(workers)]
    end = work = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        start, end, begun = end, end + count, work + _ROWS_OF_AN_EXPERT
        work = begun + count
        for worker in range(workers):
            # A cut before an expert's first row leaves all of them to the later worker.
            first, last = (
                start + min(max(cut - begun, 0), count) for cut in cuts[worker : worker + 2]
            )
            for a in range(first, last, BLOCK_ROWS):
                rows = slice(a, min(a + BLOCK_ROWS, last))
                shares[worker].append(Block(expert, rows, more=a > first))
    return shares


def _kept_in(whole_GRF: Tensor, shares: Sequence[Sequence[Block]]) -> list[list[Tensor]]:
    """Of each block the part of ``whole_GRF`` that has its products, [1 or 2, n, F]."""
    return [[whole_GRF[:, block.rows] for block in share] for share in shares]


def run_forward(
    act: Activation,
    rows: Rows,
    weights: ExpertWeights,
    shares: Sequence[Sequence[Block]],
    whole_GRF: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """[S, D] sums of each row's assignments, and the products of each block, [1 or 2, n, F]."""
    D, F = weights.w_up.shape[1:]
    new = rows.x_SD.new_empty
    if whole_GRF is None:
        # Of each block its own: pieces of few sizes are handed out again.
        kept = [
            [new_empty(rows.x_SD, 1 + act.gated, block.length, F) for block in share]
            for share in shares
        ]
    else:
        kept = _kept_in(whole_GRF, shares)
    longest = _longest(shares)
    sums = [zeros_like(rows.x_SD) for _ in shares]
    by_unit = rows.rows_per_expert_E.ndim == 2
    weights_of = ExpertWeights.aligned if by_unit else ExpertWeights.of

    def work(worker: int) -> None:
        scratch_x, scratch_y, scratch_h = new(longest, D), new(longest, D), new(longest, F)
        for block, products in zip(shares[worker], kept[worker], strict=True):
            n, w = block.length, weights_of(weights, block.expert)
            source, weight = rows.source_R[block.rows], rows.weights_R[block.rows]
            x, y, h, up = scratch_x[:n], scratch_y[:n], scratch_h[:n], products[0]
            torch.index_select(rows.x_SD, 0, source, out=x)
            _product(x, w.w_up, w.b_up, up)
            _add_adapter(x, w.up_a, w.up_b, up)
            if w.w_gate is None:
                _activate(act, up, h)
            else:
                _product(x, w.w_gate, w.b_gate, products[1])
                _add_adapter(x, w.gate_a, w.gate_b, products[1])
                _activate(act, products[1], h)
                h.mul_(up if act.lift is None else act.lift(up))
            # Weighted here, which is the same and spares keeping y for the weights' gradient.
            _product(h.mul_(weight.unsqueeze(1)), w.w_down, None, y)
            _add_adapter(h, w.down_a, w.down_b, y)
            if w.b_down is not None:
                y.addr_(weight, w.b_down)
            sums[worker].index_add_(0, source, y)

    run_workers(work, len(shares), by_unit)
    return _add_up(sums), [products for share in kept for products in share]


def run_backward(
    act: Activation,
    rows: Rows,
    weights: ExpertWeights,
    shares: Sequence[Sequence[Block]],
    kept: Sequence[Tensor],
    dy_SD: Tensor,
    grads: Grads,
) -> tuple[Tensor, Tensor]:
    """The gradients of the rows and of the assignments' weights; the others go to ``grads``."""
    D, F = weights.w_up.shape[1:]
    new = rows.x_SD.new_empty
    longest = _longest(shares)
    sums = [zeros_like(rows.x_SD) for _ in shares]
    dweights_R = torch.zeros_like(rows.weights_R)
    weights_of = ExpertWeights.aligned if grads.one_thread else ExpertWeights.of
    firsts = [sum(map(len, shares[:worker])) for worker in range(len(shares))]

    def work(worker: int) -> None:
        wide, narrow = new(3, longest, F), new(2, longest, D)
        for number, block in enumerate(shares[worker], firsts[worker]):
            n, w, more = block.length, weights_of(weights, block.expert), block.more
            to = grads.of(worker, block.expert)
            source, weight = rows.source_R[block.rows], rows.weights_R[block.rows]
            dh, a, b = wide[:, :n].unbind(0)
            x, dy = narrow[:, :n].unbind(0)
            up, gate = kept[number][0], kept[number][-1]
            lifted = up if act.lift is None else act.lift(up)
            torch.index_select(rows.x_SD, 0, source, out=x)
            torch.index_select(dy_SD, 0, source, out=dy)
            torch.mm(dy, w.w_down.t(), out=dh)
            _add_adapter(dy, w.down_b, w.down_a, dh)
            # b becomes h, first without its weights, whose gradient is h's product with dh.
            if act.gated:
                _activate(act, gate, a)
                torch.mul(a, lifted, out=b)
            else:
                _activate(act, up, b)
            dweight = dweights_R[block.rows]
            torch.linalg.vecdot(dh, b, out=dweight)
            if w.b_down is not None:
                dweight.addmv_(dy, w.b_down)
                _accumulate(dy, weight, to.b_down, more)
            weight = weight.unsqueeze(1)
            _accumulate(b.mul_(weight), dy, to.w_down, more)
            _accumulate_adapter(b, dy, (w.down_a, w.down_b), (to.down_a, to.down_b), more)
            # b becomes the gradient of up, and a that of gate.
            dh.mul_(weight)
            if act.gated:
                torch.mul(dh, a, out=b)
                if act.lift is not None:
                    b = act.up_backward(b, up)
                act.backward_out(dh.mul_(lifted), gate, grad_input=a)
            else:
                act.backward_out(dh, up, grad_input=b)
            _accumulate(x, b, to.w_up, more)
            _accumulate_adapter(x, b, (w.up_a, w.up_b), (to.up_a, to.up_b), more)
            torch.mm(b, w.w_up.t(), out=dy)  # no longer needed: it becomes the gradient of x
            _add_adapter(b, w.up_b, w.up_a, dy)
            if to.b_up is not None:
                _accumulate(b, torch.ones_like(weight[:, 0]), to.b_up, more)
            if w.w_gate is not None:
                _accumulate(x, a, to.w_gate, more)
                _accumulate_adapter(x, a, (w.gate_a, w.gate_b), (to.gate_a, to.gate_b), more)
                dy.addmm_(a, w.w_gate.t())
                _add_adapter(a, w.gate_b, w.gate_a, dy)
                if to.b_gate is not None:
                    _accumulate(a, torch.ones_like(weight[:, 0]), to.b_gate, more)
            sums[worker].index_add_(0, source, dy)
            if block.last:
                grads.end_unit(worker, block.expert)

    run_workers(work, len(shares), grads.one_thread)
    return _add_up(sums), dweights_R


def _longest(shares: Sequence[Sequence[Block]]) -> int:
    """Of the blocks, in rows; a multiple of 32, so that each scratch matrix begins at a cache
    line's start, as bits of a product may depend on that."""
    longest = max((block.length for share in shares for block in share), default=0)
    return -(-longest // LEAST_ROWS) * LEAST_ROWS


def _add_up(sums: Sequence[Tensor]) -> Tensor:
    for other in sums[1:]:
        sums[0].add_(other)
    return sums[0]


def _product(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if len(a) < LEAST_ROWS:
        out.copy_(with_enough_rows(lambda x: x @ b if bias is None else torch.addmm(bias, x, b), a))
    elif bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def _add_adapter(x: Tensor, a: Tensor | None, b: Tensor | None, out: Tensor) -> None:
    """out += (x a) b^T; nothing for a matrix without an adapter."""
    if a is not None and b is not None:
        if 0 < len(x) < LEAST_ROWS:
            out.copy_(padded_rows(out).addmm_(padded_rows(x) @ a, b.t())[: len(x)])
        else:
            out.addmm_(x @ a, b.t())


def _activate(act: Activation, x_nF: Tensor, out_nF: Tensor) -> None:
    """The activation, with equal bits of a number at any place.

    PyTorch computes what is left behind the last whole vector by other instructions.
    """
    left = len(x_nF) % LEAST_ROWS if x_nF.shape[1] % LEAST_ROWS else 0
    cut = len(x_nF) - left
    act.forward_out(x_nF[:cut], out=out_nF[:cut])
    if left:
        x = padded_rows(x_nF[cut:])
        out = torch.empty_like(x)
        act.forward_out(x, out=out)
        out_nF[cut:] = out[:left]


_Pair = tuple[Tensor | None, Tensor | None]


def _accumulate_adapter(x: Tensor, dy: Tensor, pair: _Pair, to: _Pair, more: bool) -> None:
    """The gradients of an adapter's a and b, whose product with x is (x a) b^T."""
    a, b = pair
    if a is not None and b is not None:
        _accumulate(x, dy @ b, to[0], more)
        _accumulate(dy, x @ a, to[1], more)


def _accumulate(a: Tensor, b: Tensor, to: Tensor | None, more: bool) -> None:
    """to = a^T b, or to += a^T b; b is a matrix or a vector. Nothing for a frozen parameter, which
    has no ``to``."""
    if to is None:
        return
    if b.ndim == 1:
        torch.addmv(to, a.t(), b, beta=int(more), out=to)
    else:
        torch.addmm(to, a.t(), b, beta=int(more), out=to)


class Grads(Protocol):
    """Where the backward writes the parameters' gradients."""

    one_thread: bool
    """Compute each product in one thread, whatever the number of workers."""

    def of(self, worker: int, expert: int) -> ExpertWeights:
        """Where a worker adds up what its rows of an expert give."""
        ...

    def end_unit(self, worker: int, expert: int) -> None:
        """Called after a block whose ``last`` is true."""
        ...


class _Grads:
    """The parameters' gradients, written by several workers without their meeting."""

    one_thread = False

    def __init__(
        self, weights: ExpertWeights, counts: Sequence[int], shares: Sequence[Sequence[Block]]
    ) -> None:
        self.whole = weights.map(empty_like)
        for expert, count in enumerate(counts):
            if not count:
                self.whole.of(expert).map(Tensor.zero_)
        # An expert whose rows began with an earlier worker has a part here, added at the end.
        self.parts: dict[tuple[int, int], ExpertWeights] = {}
        seen: set[int] = set()
        for worker, share in enumerate(shares):
            experts = {block.expert for block in share}
            for expert in experts & seen:
                self.parts[worker, expert] = self.whole.of(expert).map(torch.empty_like)
            seen |= experts

    def of(self, worker: int, expert: int) -> ExpertWeights:
        """Where a worker adds up what its rows give."""
        return self.parts.get((worker, expert)) or self.whole.of(expert)

    def end_unit(self, worker: int, expert: int) -> None:
        """Nothing: the rows of all units are added up together."""

    def add_up(self) -> ExpertWeights:
        """The whole, in the order of workers."""
        for (_, expert), part in self.parts.items():
            for grad, more in zip(self.whole.of(expert), part, strict=True):
                if grad is not None and more is not None:
                    grad.add_(more)
        return self.whole


_Shares = tuple[tuple[Block, ...], ...]
NUM_INPUTS = 4 + len(ExpertWeights._fields)
"""Of rows and parameters, as autograd has them."""


class _Packed(torch.autograd.Function):
    """Gives the products as well: under torch.func a Function keeps inputs and outputs alone."""

    @staticmethod
    def forward(name: str, shares: _Shares, *inputs: Any) -> tuple[Tensor, ...]:
        rows, weights = Rows(*inputs[:4]), ExpertWeights(*inputs[4:])
        out, products = run_forward(ACTIVATIONS[name], rows, weights, shares)
        return out, *products

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name, ctx.shares, *tensors = inputs
        products = output[1:]
        ctx.mark_non_differentiable(*products)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *products)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        if grads[0] is None:  # no gradient comes to the output
            return (None,) * (2 + NUM_INPUTS)
        trainable = ctx.needs_input_grad[2 + 4 :]
        dx_SD, dweights_R, *dparameters = _Gradients.apply(
            ctx.name, ctx.shares, trainable, grads[0], *ctx.saved_tensors
        )
        return None, None, dx_SD, None, dweights_R, None, *dparameters


class _Gradients(torch.autograd.Function):
    """The backward of :class:`_Packed`, whose own backward is an error.

    ``once_differentiable`` does not do: it leaves a second derivative wrong without a word where
    only the weights, and not the gradient, depend on what is differentiated.
    """

    @staticmethod
    def forward(
        name: str,
        shares: _Shares,
        trainable: tuple[bool, ...],
        dy_SD: Tensor,
        *saved: Any,
    ) -> Any:
        rows, weights = Rows(*saved[:4]), ExpertWeights(*saved[4:NUM_INPUTS])
        kept = saved[NUM_INPUTS:]
        # Of a frozen parameter no gradient is computed, and none has memory.
        with_grad = (p if t else None for p, t in zip(weights, trainable, strict=True))
        counts = rows.rows_per_expert_E.tolist()
        grads = _Grads(ExpertWeights._make(with_grad), counts, shares)
        dx_SD, dweights_R = run_backward(
            ACTIVATIONS[name], rows, weights, shares, kept, dy_SD.contiguous(), grads
        )
        return dx_SD, dweights_R, *grads.add_up()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise RuntimeError("moe.backend (packed) has no second derivatives: use loop")


def _shares_of(rows: Rows, weights: ExpertWeights) -> _Shares:
    counts = rows.rows_per_expert_E.tolist()
    shares = _shares(counts, num_workers(sum(counts), *weights.w_up.shape[1:]))
    return tuple(map(tuple, shares))


def experts_packed(rows: Rows, weights: ExpertWeights, activation: str) -> Tensor:
    """See :data:`moe.experts.paths.ExpertsFn`. Keeps the [R, F] products; no second derivatives."""
    out: Tensor = _Packed.apply(activation, _shares_of(rows, weights), *rows[:4], *weights)[0]
    return out


def packed_forward(rows: Rows, weights: ExpertWeights, activation: str) -> tuple[Tensor, Tensor]:
    """The output, and the products as one tensor [1 or 2, R, F], for :func:`packed_backward`."""
    act = ACTIVATIONS[activation]
    whole_GRF = rows.x_SD.new_empty(1 + act.gated, len(rows.source_R), weights.w_up.shape[2])
    out, _ = run_forward(act, rows, weights, _shares_of(rows, weights), whole_GRF)
    return out, whole_GRF


def packed_backward(
    rows: Rows, weights: ExpertWeights, activation: str, dy_SD: Tensor, whole_GRF: Tensor
) -> tuple[Tensor, Tensor, ExpertWeights]:
    """The gradients of the rows, of the assignments' weights and of the parameters."""
    shares = _shares_of(rows, weights)
    kept = [products for share in _kept_in(whole_GRF, shares) for products in share]
    grads = _Grads(weights, rows.rows_per_expert_E.tolist(), shares)
    dx_SD, dweights_R = run_backward(
        ACTIVATIONS[activation], rows, weights, shares, kept, dy_SD, grads
    )
    return dx_SD, dweights_R, grads.add_up()
