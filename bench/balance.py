"""What copies of experts do for hot experts: time, loads of ranks, memory, and planning.

    python -m bench.balance [--quick] [--samples N] [--json FILE] [--only CASE]

Time: a MoE layer's forward and backward on 2 ranks, each on a core of its own, with routes that are
drawn before. ``limit`` is the layer under forced balance, where every expert has equally many rows.
Cases are Zipf's law with an exponent of 1.2, all rows on one rank's experts, and the routes of a
trace. Subjects take turns. The time of a step is that of the rank that ends last.

Loads: the plans of every call of the traces in bench/traces, on 2, 4 and 8 ranks: how long the
slowest rank takes over the mean, with copies and without, and with the plan of the call before.

Memory: the bytes that the layer keeps for its backward, on the rank that keeps most, over the mean.

Planning: host time of a call's plan and places for 256 experts on 64 ranks.

Legend: T tokens of a rank, D d_model, E experts, K top_k, G ranks.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench.harness import Row, arguments, finish
from moe import MoEConfig, MoELayer
from moe.copies import CopyPlan, plan_copies, slowest
from moe.copies.places import places_of
from moe.testing import run_ranks
from moe.traces import read_trace
from parallel import ParallelDims, Topology, all_gather_rows, apply_expert_parallel
from parallel.dtensor import local_shard

SIZES: dict[str, int] = {"d_model": 512, "d_ff": 1024, "num_experts": 16, "top_k": 4}
T, RANKS, COPIES = 4096, 2, 4
TRACES = Path(__file__).parent / "traces"


def drawn_routes(weights_E: np.ndarray, tokens: int, top_k: int, seed: int) -> torch.Tensor:
    """[T, K]: each token draws different experts, in proportion to their weights (Gumbel's
    trick)."""
    rng = np.random.default_rng(seed)
    keys_TE = np.log(weights_E + 1e-12) + rng.gumbel(size=(tokens, len(weights_E)))
    return torch.from_numpy(np.argsort(-keys_TE, axis=1)[:, :top_k].copy())


def forced_routes(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    """[T, K]: experts in turn."""
    return torch.arange(tokens * top_k).view(tokens, top_k) % experts


def cases() -> dict[str, np.ndarray]:
    """The weights of experts by case."""
    E, K = SIZES["num_experts"], SIZES["top_k"]
    order = np.random.default_rng(0).permutation(E)
    zipf = (1 / np.arange(1, E + 1) ** 1.2)[order]
    worst = np.where(np.arange(E) < max(E // RANKS, K), 1.0, 0.0)
    trace = read_trace(TRACES / "none.npz")
    counts = trace.counts_CLSE[-1].sum(1)  # [L, E] of the last call
    hottest = counts[(counts.max(1) / counts.mean(1)).argmax()]
    return {"Zipf 1.2": zipf, "one rank's experts": worst, "natural": hottest / hottest.sum()}


class Subject:
    """One layer with the routes of a case on this rank."""

    def __init__(self, dims: ParallelDims, routes_TK: torch.Tensor, experts: int, copies: int):
        torch.manual_seed(0)
        sizes = {**SIZES, "num_experts": experts, "top_k": routes_TK.shape[1]}
        fields = {"norm_topk_prob": sizes["top_k"] > 1}
        self.layer = MoELayer(MoEConfig(**sizes, **fields, copies=copies))
        apply_expert_parallel(self.layer, dims.ep_mesh)
        self.routes_TK, self.kept = routes_TK, 0

    def step(self, x_TD: torch.Tensor) -> float:
        """Forward, backward and barrier: the seconds of the slower rank."""
        began = time.perf_counter()
        hidden, aux = self.layer(x_TD.detach().requires_grad_(), self.routes_TK)
        (hidden.square().mean() + aux.aux_loss).backward()
        dist.barrier()
        seconds = time.perf_counter() - began
        for parameter in self.layer.parameters():
            parameter.grad = None
        return float(all_gather_rows(torch.tensor([seconds], dtype=torch.float64)).max())

    def kept_bytes(self, x_TD: torch.Tensor) -> list[float]:
        """By rank the bytes of tensors that a forward keeps for its backward, parameters not
        counted."""
        own = {local_shard(p).untyped_storage().data_ptr() for p in self.layer.parameters()}
        kept: dict[int, torch.UntypedStorage] = {}

        def count(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            out = self.layer(x_TD.detach().requires_grad_(), self.routes_TK)
        # Here, and not in count: parameters of copies are given back at the forward's end.
        number = float(sum(storage.nbytes() for storage in kept.values()))
        mine = torch.tensor([number], dtype=torch.float64)
        (out.hidden.square().mean() + out.aux.aux_loss).backward()
        return [float(n) for n in all_gather_rows(mine).flatten()]


def on_rank(rank: int, weights: dict[str, np.ndarray], samples: int) -> dict[str, Any]:
    """Seconds of each case's subjects, and what they keep."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dims = ParallelDims.build(Topology(dp_shard=RANKS, ep=RANKS), "cpu")
    x_TD = torch.randn(T, SIZES["d_model"], generator=torch.Generator().manual_seed(rank))
    results: dict[str, Any] = {}
    for case, weights_E in weights.items():
        E = len(weights_E)
        K = min(SIZES["top_k"], E // 4)
        routes = drawn_routes(weights_E, T, K, rank)
        subjects = {
            "limit": Subject(dims, forced_routes(T, E, K), E, 0),
            "no copies": Subject(dims, routes, E, 0),
            "copies": Subject(dims, routes, E, COPIES),
        }
        kept = {name: subject.kept_bytes(x_TD) for name, subject in subjects.items()}
        times: dict[str, list[float]] = {name: [] for name in subjects}
        for turn in range(samples + 1):  # the first warms up
            for name, subject in subjects.items():
                seconds = subject.step(x_TD)
                if turn:
                    times[name].append(seconds)
        results[case] = {"times": times, "kept": kept}
    return results


def timed(samples: int, only: str) -> list[Row]:
    """Seconds of steps, and bytes that are kept."""
    weights = {case: w for case, w in cases().items() if only in case}
    results: dict[str, Any] = run_ranks(on_rank, RANKS, weights, samples)[0] if weights else {}
    rows = []
    for case, result in results.items():
        medians = {name: statistics.median(times) for name, times in result["times"].items()}
        rows += [
            Row(case, name, "step_seconds", value, "s", medians["limit"] / value,
                result["times"][name])
            for name, value in medians.items()
        ]  # fmt: skip
        for name, kept in result["kept"].items():
            most = max(kept) / statistics.mean(kept)
            rows.append(Row(case, name, "kept_bytes", most, "max / mean", 1 / most, [most]))
    return rows


def times_of_trace(counts_CE: np.ndarray, ranks: int) -> dict[str, list[float]]:
    """For the calls of one layer: the slowest rank's time over the mean, by way of planning."""
    equal, E = [1] * ranks, counts_CE.shape[1]
    before: tuple[CopyPlan, list[int]] | None = None
    times: dict[str, list[float]] = {"no copies": [], "copies": [], "plan of the call before": []}
    for counts_E in counts_CE:
        rows: list[int] = counts_E.tolist()
        plan = plan_copies(rows, equal, COPIES)
        times["no copies"].append(slowest(CopyPlan.without(E, ranks).loads(rows), equal))
        times["copies"].append(slowest(plan.loads(rows), equal))
        if before is not None:
            times["plan of the call before"].append(slowest(_as_before(*before, rows), equal))
        before = plan, rows
    return times


def _as_before(plan: CopyPlan, rows_before: list[int], rows: list[int]) -> list[int]:
    """Loads where each expert's rows are divided as in the call before."""
    divided = {}
    for expert, by_rank in plan.rows.items():
        shares = [rows[expert] * n // rows_before[expert] for n in by_rank.values()]
        shares[0] += rows[expert] - sum(shares)
        divided[expert] = dict(zip(by_rank, shares, strict=True))
    return CopyPlan(plan.num_experts, plan.copies, divided).loads(rows)


def loads() -> list[Row]:
    """Loads of ranks on all traces."""
    rows = []
    for path in sorted(TRACES.glob("*.npz")):
        trace = read_trace(path)
        counts_CLE = trace.counts_CLSE.sum(2)
        for ranks in (2, 4, 8):
            if trace.num_experts % ranks:
                continue
            times: dict[str, list[float]] = {}
            for layer in range(counts_CLE.shape[1]):
                for way, values in times_of_trace(counts_CLE[:, layer], ranks).items():
                    times.setdefault(way, []).extend(values)
            for way, values in times.items():
                for metric, value in (
                    ("mean", statistics.mean(values)),
                    ("p99", float(np.quantile(values, 0.99))),
                ):
                    rows.append(Row(f"{path.stem} on {ranks} ranks", way, f"{metric}_of_slowest",
                                    value, "over mean", 1 / value, values))  # fmt: skip
    return rows


def planning(samples: int) -> list[Row]:
    """Host milliseconds of one call's plan and places, 256 experts on 64 ranks."""
    E, G, K, tokens = 256, 64, 8, 4096
    weights = (1 / np.arange(1, E + 1) ** 1.2)[np.random.default_rng(0).permutation(E)]
    routes = [drawn_routes(weights, tokens, K, seed) for seed in range(4)]
    counts = torch.stack([torch.bincount(routes[r % 4].flatten(), minlength=E) for r in range(G)])
    layer = MoELayer(MoEConfig(d_model=8, d_ff=8, num_experts=E, top_k=K))
    routed = layer.router(torch.randn(tokens, 8), None, routes[0])
    parts: dict[str, list[float]] = {"plan": [], "places": [], "routing": []}
    for _ in range(samples * 5):
        began = time.perf_counter()
        plan = plan_copies(counts.sum(0).tolist(), [1] * G, COPIES)
        planned = time.perf_counter()
        places = places_of(plan, counts, 0)
        placed = time.perf_counter()
        places.routed(routed)
        done = time.perf_counter()
        for name, seconds in (("plan", planned - began), ("places", placed - planned),
                              ("routing", done - placed)):  # fmt: skip
            parts[name].append(1000 * seconds)
    return [
        Row("256 experts on 64 ranks", name, "milliseconds", statistics.median(values), "ms",
            1.0, values)
        for name, values in parts.items()
    ]  # fmt: skip


def main() -> None:
    """Measure, print, and write JSON where asked."""
    args = arguments(__doc__ or "")
    torch.set_num_threads(1)
    samples = 3 if args.quick else args.samples
    rows = timed(samples, args.only)
    if not args.only:
        rows += [*loads(), *planning(samples)]
    finish("balance", rows, ["numpy"], args.json)


if __name__ == "__main__":
    main()
