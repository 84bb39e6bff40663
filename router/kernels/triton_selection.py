"""The kernels of :mod:`router.kernels.selection`. A program has ROWS tokens, and all experts.

E and K are the numbers of experts and of choices; WIDTH and SLOTS are the powers of two from them
up. All numbers are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _scores(logits, mask, TINY: tl.constexpr, SIGMOID: tl.constexpr):
    """Scores and probabilities, as router.scores.score has them, and the sums' logarithms."""
    infinity = float("inf")
    most = tl.max(tl.where(mask, logits, -infinity), 1)
    powers = tl.where(mask, tl.exp(logits - most[:, None]), 0.0)
    total = tl.sum(powers, 1)
    has_nan = tl.max((logits != logits).to(tl.int32), 1) > 0
    endless = (tl.abs(most) == infinity) & (has_nan == 0)
    logsumexp = tl.where(endless, most, most + tl.log(total))
    if SIGMOID:
        scores = tl.where(mask, 1 / (1 + tl.exp(-logits)), 0.0)
        total = tl.sum(scores, 1)
        low = total < TINY
        # softmax(log sigmoid(z)) does not underflow where all sigmoids do.
        logs = tl.minimum(logits, 0.0) - tl.log(1 + tl.exp(-tl.abs(logits)))
        most = tl.max(tl.where(mask, logs, -infinity), 1)
        powers = tl.where(mask, tl.exp(logs - most[:, None]), 0.0)
        exact = powers / tl.sum(powers, 1)[:, None]
        probs = tl.where(low[:, None], exact, scores / tl.where(low, 1.0, total)[:, None])
    else:
        probs = powers / total[:, None]
        scores = probs
    return scores, probs, logsumexp


@triton.jit
def _load_rows(logits, T, E: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, WIDTH)
    mask = (rows < T)[:, None] & (experts < E)[None, :]
    offsets = rows[:, None] * E + experts[None, :]
    values = tl.load(logits + offsets, mask=mask, other=0.0)
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    nonfinite = tl.max((bits >= 0x7F800000).to(tl.int32), 1) > 0
    return rows, experts, mask, offsets, values, nonfinite


@triton.jit
def select(
    logits, bias, probs, indices, weights, counts, nonfinite, entropy, logsumexp, T, scale,
    E: tl.constexpr, K: tl.constexpr, TINY: tl.constexpr, SIGMOID: tl.constexpr,
    AFTER_TOPK: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Scores, choice, weights, counts and statistics of ROWS tokens."""
    rows, experts, mask, offsets, z, bad = _load_rows(logits, T, E, ROWS, WIDTH)
    scores, p, lse = _scores(z, (experts < E)[None, :], TINY, SIGMOID)
    tl.store(probs + offsets, p, mask=mask)
    logs = tl.log(tl.where(p < TINY, TINY, p))
    tl.store(entropy + rows, -tl.sum(tl.where(mask, p * logs, 0.0), 1), mask=rows < T)
    tl.store(logsumexp + rows, lse, mask=rows < T)
    tl.store(nonfinite + rows, bad, mask=rows < T)

    if bias is not None:
        even = 0.5 if SIGMOID else 1.0 / E
        added = tl.load(bias + experts, mask=experts < E, other=0.0)
        preferences = tl.where(bad[:, None], even, scores) + added[None, :]
    elif AFTER_TOPK:
        preferences = tl.where(bad[:, None], 0.0, z)
    else:
        preferences = tl.where(bad[:, None], 0.0, scores)
    # Whole numbers in the order of floats, with -0 as 0; below them the expert, lowest first.
    keys = tl.where(preferences == 0, 0.0, preferences).to(tl.int32, bitcast=True)
    keys = keys ^ ((keys >> 31) & 0x7FFFFFFF)
    keys = (keys.to(tl.int64) << 32) | (WIDTH - 1 - experts).to(tl.int64)[None, :]
    least = tl.full((ROWS, WIDTH), -(1 << 63), tl.int64)
    keys = tl.where((experts < E)[None, :], keys, least)

    slots = tl.arange(0, SLOTS)[None, :]
    chosen = tl.zeros((ROWS, SLOTS), tl.int64)
    values = tl.zeros((ROWS, SLOTS), tl.float32)
    taken = tl.zeros((ROWS, WIDTH), tl.int32)
    for k in tl.static_range(K):
        best = WIDTH - 1 - (tl.max(keys, 1) & 0xFFFFFFFF)
        hit = experts[None, :] == best[:, None]
        value = tl.sum(tl.where(hit, z if AFTER_TOPK else scores, 0.0), 1)
        chosen = tl.where(slots == k, best[:, None], chosen)
        values = tl.where(slots == k, value[:, None], values)
        keys = tl.where(hit, least, keys)
        taken += hit.to(tl.int32)

    used = slots < K
    if AFTER_TOPK:
        most = tl.max(tl.where(used, values, -float("inf")), 1)
        values = tl.where(used, tl.exp(values - most[:, None]), 0.0)
        values = values / tl.sum(values, 1)[:, None]
    elif NORM:
        values = values / tl.maximum(tl.sum(values, 1), TINY)[:, None]
    values = tl.where(bad[:, None], float("nan"), values * scale)
    here = (rows < T)[:, None] & used
    tl.store(indices + rows[:, None] * K + slots, chosen, mask=here)
    tl.store(weights + rows[:, None] * K + slots, values, mask=here)
    amounts = tl.sum(tl.where(mask, taken, 0), 0)
    tl.atomic_add(counts + experts, amounts.to(tl.int64), mask=(experts < E) & (amounts > 0))


@triton.jit
def select_gradient(
    logits, indices, dprobs, dweights, dlogsumexp, dlogits, T, scale,
    E: tl.constexpr, K: tl.constexpr, TINY: tl.constexpr, SIGMOID: tl.constexpr,
    AFTER_TOPK: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    EQUAL: tl.constexpr,
):  # fmt: skip
    """The gradient of logits from those of probabilities, weights and logarithms of sums. With
    EQUAL the probabilities of all tokens have one gradient, [E]."""
    rows, experts, mask, offsets, z, bad = _load_rows(logits, T, E, ROWS, WIDTH)
    scores, p, lse = _scores(z, (experts < E)[None, :], TINY, SIGMOID)
    dz = tl.zeros((ROWS, WIDTH), tl.float32)
    dp = tl.zeros((ROWS, WIDTH), tl.float32)
    if dprobs is not None:
        places = tl.broadcast_to(experts[None, :], (ROWS, WIDTH)) if EQUAL else offsets
        dp = tl.load(dprobs + places, mask=mask, other=0.0)
    if dweights is not None:
        dw = tl.zeros((ROWS, WIDTH), tl.float32)
        taken = tl.zeros((ROWS, WIDTH), tl.int32)
        for k in tl.static_range(K):
            expert = tl.load(indices + rows * K + k, mask=rows < T, other=0)
            grad = tl.load(dweights + rows * K + k, mask=rows < T, other=0.0)
            hit = experts[None, :] == expert[:, None]
            dw += tl.where(hit, tl.where(bad, 0.0, grad * scale)[:, None], 0.0)
            taken += hit.to(tl.int32)
        if AFTER_TOPK:
            most = tl.max(tl.where(taken > 0, z, -float("inf")), 1)
            w = tl.where(taken > 0, tl.exp(z - most[:, None]), 0.0)
            w = w / tl.sum(w, 1)[:, None]
            dz += w * (dw - tl.sum(dw * w, 1)[:, None])
        else:
            ds = dw
            if NORM:
                total = tl.sum(tl.where(taken > 0, scores, 0.0), 1)
                mean = tl.where(total >= TINY, tl.sum(dw * scores, 1) / total, 0.0)
                ds = tl.where(taken > 0, (dw - mean[:, None]) / tl.maximum(total, TINY)[:, None], 0)
            if SIGMOID:
                dz += ds * scores * (1 - scores)
            else:
                dp += ds
    inner = p * (dp - tl.sum(tl.where(mask, dp * p, 0.0), 1)[:, None])
    # Of sigmoids: d log sigmoid(z) = 1 - sigmoid(z), whether or not their sum underflows.
    dz += inner * (1 - scores) if SIGMOID else inner
    if dlogsumexp is not None:
        grad = tl.load(dlogsumexp + rows, mask=rows < T, other=0.0)
        dz += grad[:, None] * tl.exp(z - lse[:, None])
    tl.store(dlogits + offsets, dz, mask=mask)
