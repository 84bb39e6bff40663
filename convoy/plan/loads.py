"""How unevenly the rows of MoE layers are divided over experts, and over the ranks that have them.

Legend: S samples in time, L layers, E experts, K top_k, G ranks of an expert group, N calls (of a
layer in a micro-batch) = S·L, C copies of all calls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe import read_trace
from moe.copies import plan_copies
from pretrain.errors import InputError
from pretrain.observe import IntervalEnded, Summary, read_log

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

TOKENS = 1 << 18
"""Tokens of a drawn call: those of 64 ranks with a sequence of 4,096 tokens each."""
_LAYERS = 8
_SEED = 0
_MOST_EXPONENT = 4.0
_MOST_CALLS = 256


@dataclass(frozen=True, eq=False)
class LoadProfile:
    """The rows of each expert in some calls, of which a planned run's are taken to be alike.

    Only shares count: a call of a planned layout has rows of its own number.
    """

    source: str
    """Where the counts come from, for people."""
    counts_SLE: Counts
    """[S, L, E] the rows of each expert. In time the experts of a layer keep their order."""
    ranks_per_node: int
    """Consecutive ranks of a node, between which copies are cheap."""

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.counts_SLE.shape[2])

    def of_group(
        self, ep: int, copies: int = 0, capacity_factor: float = 0.0, reroutes: bool = False
    ) -> GroupLoads:
        """The loads of a group of ``ep`` ranks.

        Args:
            ep: G, divides E.
            copies: the most copies of one rank, as ``moe.copies``.
            capacity_factor: rows of an expert as a multiple of the mean, at most; 0 for no bound.
            reroutes: whether rows beyond the bound go to experts that have room; else they are
                dropped.
        """
        return _of_group(self, ep, copies, capacity_factor, reroutes)


@dataclass(frozen=True, eq=False)
class GroupLoads:
    """What the ranks of an expert group compute and send, for each call of a profile.

    Rows are multiples of the mean of the group's ranks.
    """

    samples: int
    """S."""
    own_NG: Floats
    """[N, G] rows of own experts."""
    copied_NG: Floats
    """[N, G] rows that a rank computes as copies of other ranks' experts."""
    call_C: Counts
    """[C] the call of each copy."""
    expert_C: Counts
    """[C] the expert."""
    owner_C: Counts
    """[C] the rank that sends the expert."""
    taker_C: Counts
    """[C] the rank that computes the copy."""
    is_near_C: NDArray[np.bool_]
    """[C] whether both ranks are on one node."""

    @cached_property
    def rows_NG(self) -> Floats:
        """[N, G] all rows of a rank."""
        return self.own_NG + self.copied_NG

    @cached_property
    def hottest(self) -> float:
        """Rows of the rank with the most, in the mean over calls: ranks wait for each other in
        every call."""
        return float(self.rows_NG.max(axis=1).mean())

    @cached_property
    def hottest_call(self) -> float:
        """The most rows of a rank in any call."""
        return float(self.rows_NG.max())

    def hottest_stage(self, layers: int) -> float:
        """The most rows that a rank has in the mean of ``layers`` layers that follow each other:
        a rank keeps the rows of all its layers, and is seldom the hottest in all of them."""
        rows_SLG = self.rows_NG.reshape(self.samples, -1, self.rows_NG.shape[1])
        every = rows_SLG.shape[1]
        width = max(1, min(layers, every))
        starts = [min(start, every - width) for start in range(0, every, width)]
        return float(max(rows_SLG[:, s : s + width].mean(axis=1).max() for s in starts))

    def per_rank(self, rank_C: Counts, weight_C: Floats) -> Floats:
        """[N, G] the sum of ``weight_C`` over the copies of each rank, as owner or as taker."""
        sums_NG = np.zeros_like(self.own_NG)
        np.add.at(sums_NG, (self.call_C, rank_C), weight_C)
        return sums_NG

    @cached_property
    def most_lent(self) -> int:
        """The most experts that one rank sends in a call, an expert once for each of its copies."""
        return int(self.per_rank(self.owner_C, np.ones(len(self.call_C))).max())

    @cached_property
    def most_borrowed(self) -> int:
        """The most copies that one rank has in a call."""
        return int(self.per_rank(self.taker_C, np.ones(len(self.call_C))).max())


@lru_cache(256)
def _of_group(
    profile: LoadProfile, ep: int, copies: int, factor: float, reroutes: bool
) -> GroupLoads:
    S, L, E = profile.counts_SLE.shape
    assert E % ep == 0, f"{ep} ranks do not divide {E} experts"
    counts_NE = profile.counts_SLE.reshape(S * L, E)
    mean_N = counts_NE.sum(axis=1).clip(min=1) / ep
    if factor:
        most_N = np.ceil(mean_N * ep / E * factor).astype(np.int64)
        counts_NE = _bounded(counts_NE, most_N, reroutes)
    own_NG = counts_NE.reshape(S * L, ep, E // ep).sum(axis=2).astype(np.float64)
    copied_NG = np.zeros_like(own_NG)
    node = profile.ranks_per_node
    sent: list[tuple[int, int, int, int]] = []
    for call, rows_E in enumerate(counts_NE.tolist() if copies else []):
        plan = plan_copies(rows_E, [1] * ep, copies, node if ep % node == 0 else 0)
        for expert, by_rank in plan.rows.items():
            owner = expert // plan.block
            for rank, rows in by_rank.items():
                if rank != owner:
                    own_NG[call, owner] -= rows
                    copied_NG[call, rank] += rows
                    sent.append((call, expert, owner, rank))
    call_C, expert_C, owner_C, taker_C = np.array(sent, np.int64).reshape(-1, 4).T
    return GroupLoads(
        samples=S,
        own_NG=own_NG / mean_N[:, None],
        copied_NG=copied_NG / mean_N[:, None],
        call_C=call_C,
        expert_C=expert_C,
        owner_C=owner_C,
        taker_C=taker_C,
        is_near_C=owner_C // node == taker_C // node,
    )


def _bounded(counts_NE: Counts, most_N: Counts, reroutes: bool) -> Counts:
    """[N, E] at most ``most_N`` rows of an expert. What is beyond goes to other experts in
    proportion to their room, as far as there is room."""
    kept_NE = np.minimum(counts_NE, most_N[:, None])
    if not reroutes:
        return kept_NE
    beyond_N = (counts_NE - kept_NE).sum(axis=1)
    room_NE = (most_N[:, None] - kept_NE).cumsum(axis=1)
    moved_N = np.minimum(beyond_N, room_NE[:, -1])
    # Differences of whole parts of a running sum: their sum is moved_N.
    taken_NE = room_NE * moved_N[:, None] // room_NE[:, -1:].clip(min=1)
    return np.asarray(kept_NE + np.diff(taken_NE, axis=1, prepend=0))


# ------------------------------------------------------------------------------------------------
# Draws.


def zipf_weights(exponent: float, num_experts: int) -> Floats:
    """[E] the popularity of experts by Zipf's law, the most popular first."""
    return np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent


def choice_probabilities(weights_E: Floats, top_k: int) -> Floats:
    """[E] the probability that a token chooses each expert, where it chooses ``top_k`` different
    ones one after another in proportion to their weights; the sum is ``top_k``.

    Weighted draws without replacement are the first ``top_k`` of clocks that ring after exponential
    times with the weights as rates (Efraimidis and Spirakis 2006). With many experts the moment t
    of the last of them is the same for all tokens: p = 1 - exp(-t w).
    """
    if top_k >= len(weights_E):
        return np.ones_like(weights_E)
    low, high = -60.0, 60.0  # logarithms of t over the mean weight's
    for _ in range(80):
        middle = (low + high) / 2
        chosen = -np.expm1(-math.exp(middle) * weights_E / weights_E.mean())
        low, high = (middle, high) if chosen.sum() < top_k else (low, middle)
    return np.asarray(chosen * top_k / chosen.sum())


def draw_counts(
    weights_E: Floats, top_k: int, draw: np.random.Generator, tokens: int = TOKENS
) -> Counts:
    """[E] how many of ``tokens`` tokens choose each expert; see :func:`choice_probabilities`."""
    chosen = choice_probabilities(weights_E, top_k).clip(max=1.0)
    return np.asarray(draw.binomial(tokens, chosen), np.int64)


def zipf_loads(
    exponent: float, num_experts: int, top_k: int, ranks_per_node: int, layers: int = _LAYERS
) -> LoadProfile:
    """Loads by Zipf's law, with another order of experts in each layer. Equal arguments give equal
    loads."""
    draw = np.random.default_rng(_SEED)
    weights_E = zipf_weights(exponent, num_experts)
    counts = [draw_counts(draw.permutation(weights_E), top_k, draw) for _ in range(layers)]
    return LoadProfile(f"zipf:{exponent:g}", np.array([counts]), ranks_per_node)


# ------------------------------------------------------------------------------------------------
# What a person names.


def load_profile(text: str, num_experts: int, top_k: int, ranks_per_node: int) -> LoadProfile:
    """The profile that ``--loads`` names: ``zipf:EXPONENT``, a routing trace, a run's folder or
    ``log.jsonl``, or a run's ``summary.json``.

    A trace has the counts of every call, those of all senders together. A log has of each layer the
    largest load of an expert over the mean. The profile has loads by Zipf's law with that largest
    load, for the newest log intervals. A summary has the counts of each expert in the held-out
    sequences.

    Args:
        text: what a person gave.
        num_experts: E of the planned layers.
        top_k: K of the planned layers.
        ranks_per_node: consecutive ranks of a node.

    Raises InputError: one line that names the value and the rule.
    """
    kind, _, value = text.partition(":")
    if not text:
        raise InputError(
            "--loads () must be zipf:EXPONENT, a routing trace, or a run's log.jsonl or "
            "summary.json"
        )
    if kind == "zipf":
        try:
            exponent = float(value)
        except ValueError:
            exponent = math.nan
        if not 0 <= exponent <= _MOST_EXPONENT:
            raise InputError(
                f"--loads ({text}) must have an exponent from 0 to {_MOST_EXPONENT:g}, as zipf:1.2"
            )
        return zipf_loads(exponent, num_experts, top_k, ranks_per_node)
    path = Path(text)
    if path.is_dir() and (path / "log.jsonl").exists():
        path = path / "log.jsonl"
    if path.suffix == ".npz" or path.is_dir():
        counts_SLE = _trace_counts(path, top_k)
    elif path.suffix == ".json":
        counts_SLE = _summary_counts(path)
    else:
        counts_SLE = _log_counts(path, num_experts, top_k)
    if counts_SLE.shape[2] != num_experts:
        raise InputError(
            f"--loads ({path}) has the loads of {counts_SLE.shape[2]} experts, and moe.num_experts "
            f"is {num_experts}: take a run with as many experts, or its log.jsonl"
        )
    return LoadProfile(text, counts_SLE, ranks_per_node)


def _trace_counts(path: Path, top_k: int) -> Counts:
    try:
        trace = read_trace(path)
    except (OSError, ValueError) as error:
        raise InputError(f"--loads ({path}) must be a routing trace: {error}") from None
    if trace.top_k != top_k:
        raise InputError(
            f"--loads ({path}) has the choices of {trace.top_k} experts by a token, and moe.top_k "
            f"is {top_k}: take a trace of a model with the planned top_k, or zipf:EXPONENT"
        )
    counts_SLE: Counts = trace.counts_CLSE.sum(axis=2)
    if not counts_SLE.any():
        raise InputError(f"--loads ({path}) must have calls with tokens: no expert has a row")
    newest: Counts = counts_SLE[-max(1, _MOST_CALLS // counts_SLE.shape[1]) :]
    return newest


def _summary_counts(path: Path) -> Counts:
    summary = Summary.read(path)
    if summary is None or not summary.tokens_per_expert:
        raise InputError(
            f"--loads ({path}) must be the summary.json of a run with MoE layers, a log.jsonl, a "
            f"routing trace, or zipf:EXPONENT"
        )
    return np.array([summary.tokens_per_expert], np.int64)


def _log_counts(path: Path, num_experts: int, top_k: int) -> Counts:
    try:
        events = read_log(path).events
    except OSError as error:
        raise InputError(
            f"--loads ({path}) must be a routing trace, a run's log.jsonl or summary.json, or "
            f"zipf:EXPONENT: {error.strerror}"
        ) from None
    rows = [e.layer_imbalances for e in events if isinstance(e, IntervalEnded)]
    hottest = [row for row in rows if row]
    hottest = [row for row in hottest if len(row) == len(hottest[-1])]
    if not hottest:
        raise InputError(
            f"--loads ({path}) has no log interval with MoE layers: take the log of a run that has "
            f"passed train.log_interval_steps, or zipf:EXPONENT"
        )
    hottest_SL = np.array(hottest[-max(1, _MOST_CALLS // len(hottest[0])) :])
    return _counts_like(hottest_SL, num_experts, top_k)


def _counts_like(hottest_SL: Floats, num_experts: int, top_k: int) -> Counts:
    """[S, L, E] the counts by Zipf's law whose largest over the mean are ``hottest_SL``."""
    grid = np.linspace(0.0, _MOST_EXPONENT, 161)
    largest = np.array(
        [choice_probabilities(zipf_weights(s, num_experts), top_k)[0] for s in grid]
    ) * (num_experts / top_k)
    exponents_SL = np.interp(hottest_SL, largest, grid)
    draw = np.random.default_rng(_SEED)
    orders = [draw.permutation(num_experts) for _ in range(hottest_SL.shape[1])]
    return np.array([
        [
            draw_counts(zipf_weights(s, num_experts)[order], top_k, draw)
            for s, order in zip(exponents_L, orders, strict=True)
        ]
        for exponents_L in exponents_SL
    ])  # fmt: skip
