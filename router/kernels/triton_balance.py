"""The kernels of :mod:`router.kernels.balance`. All numbers are float32.

A piece is STEPS · ROWS tokens. ``partial`` is [pieces, E + 3]: of a piece's tokens the sums of the
probabilities, of squares of the logarithms, of entropies, and the tokens that are not finite. WIDTH
is the power of two from E up.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_pieces(
    probs, logsumexp, entropy, nonfinite, partial, T,
    E: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The sums of one piece."""
    piece = tl.program_id(0)
    experts = tl.arange(0, WIDTH)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    entropies = tl.zeros((ROWS,), tl.float32)
    bad = tl.zeros((ROWS,), tl.float32)
    for step in range(STEPS):
        rows = (piece.to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        here = rows < T
        mask = here[:, None] & (experts < E)[None, :]
        sums += tl.load(probs + rows[:, None] * E + experts[None, :], mask=mask, other=0.0)
        logs = tl.load(logsumexp + rows, mask=here, other=0.0)
        squares += logs * logs
        entropies += tl.load(entropy + rows, mask=here, other=0.0)
        bad += tl.load(nonfinite + rows, mask=here, other=0).to(tl.float32)
    out = partial + piece * (E + 3)
    tl.store(out + experts, tl.sum(sums, 0), mask=experts < E)
    tl.store(out + E, tl.sum(squares, 0))
    tl.store(out + E + 1, tl.sum(entropies, 0))
    tl.store(out + E + 2, tl.sum(bad, 0))


@triton.jit
def losses(
    partial, counts, load_balance, z, total, entropy, num_nonfinite, sequence, no_tokens, pieces,
    tokens, of_balance, of_z, E: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The losses and means of all tokens, in one program."""
    experts = tl.arange(0, WIDTH)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    entropies = tl.zeros((ROWS,), tl.float32)
    bad = tl.zeros((ROWS,), tl.int64)
    for first in range(0, pieces, ROWS):
        rows = first + tl.arange(0, ROWS)
        here, starts = rows < pieces, partial + rows * (E + 3)
        mask = here[:, None] & (experts < E)[None, :]
        sums += tl.load(starts[:, None] + experts[None, :], mask=mask, other=0.0)
        squares += tl.load(starts + E, mask=here, other=0.0)
        entropies += tl.load(starts + E + 1, mask=here, other=0.0)
        bad += tl.load(starts + E + 2, mask=here, other=0.0).to(tl.int64)
    amounts = tl.load(counts + experts, mask=experts < E, other=0).to(tl.float32)
    fractions = amounts / tl.maximum(tl.sum(amounts, 0), 1.0)
    balance = E * tl.sum(fractions * (tl.sum(sums, 0) / tokens), 0)
    mean_square = tl.sum(squares, 0) / tokens
    tl.store(load_balance, balance)
    tl.store(z, mean_square)
    tl.store(total, of_balance * balance + of_z * mean_square)
    tl.store(entropy, tl.sum(entropies, 0) / tokens)
    tl.store(num_nonfinite, tl.sum(bad, 0))
    tl.store(sequence, 0.0)
    tl.store(no_tokens, 0)


@triton.jit
def losses_gradient(
    counts, logsumexp, dbalance, dz, dtotal, dprobs, dlogsumexp, T, tokens, of_balance, of_z,
    E: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradients of a token's probabilities, equal for all tokens, and of the logarithms."""
    if tl.program_id(0) == 0:
        factor = 0.0
        if dbalance is not None:
            factor += tl.load(dbalance)
        if dtotal is not None:
            factor += of_balance * tl.load(dtotal)
        experts = tl.arange(0, WIDTH)
        amounts = tl.load(counts + experts, mask=experts < E, other=0).to(tl.float32)
        fractions = amounts / tl.maximum(tl.sum(amounts, 0), 1.0)
        tl.store(dprobs + experts, factor * E * fractions / tokens, mask=experts < E)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slope = 0.0
    if dz is not None:
        slope += tl.load(dz)
    if dtotal is not None:
        slope += of_z * tl.load(dtotal)
    logs = tl.load(logsumexp + rows, mask=rows < T, other=0.0)
    tl.store(dlogsumexp + rows, 2 * logs * slope / tokens, mask=rows < T)
