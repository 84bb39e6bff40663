"""Steps of simulated clusters with uneven loads of experts, without copies and with 1, 2 and 4.

    python -m bench.balance_simulation --json bench/results/balance-simulated.json

Times are those of ``convoy plan`` for chips and links of its cluster files; plans of copies are
those of ``moe.copies.plan_copies`` for drawn counts. A share is the step with equal rows on all
ranks over the step with the drawn rows. Measured here is only how long a plan takes.

``relayed`` is not built: it says what transfers would take if copies passed parameters on, see
:func:`relayed`. ``ahead``, not built either: parameters travel in the backward while the attention
of the layer above has its backward.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from bench.harness import Row, arguments, finish
from convoy.plan.hardware import Cluster, load_cluster
from convoy.plan.loads import Counts, GroupLoads, LoadProfile, draw_counts, zipf_loads
from convoy.plan.shape import ModelShape
from convoy.plan.step_time import PLAN_SECONDS_PER_RANK, copy_seconds, layer_seconds, step_time
from convoy.plan.transfers import Transfers, backward_wait, forward_wait, transfers_of
from convoy.plan.work import Program, Work
from moe.copies import plan_copies
from parallel.layout import Topology

MODELS = {
    # arXiv 2412.19437, section 4.2.
    "DeepSeek-V3": ModelShape(
        d_model=7168, num_layers=61, num_heads=128, num_kv_heads=128, head_dim=192, v_head_dim=128,
        vocab_size=129280, d_ff=18432, first_k_dense=3, num_experts=256, top_k=8, expert_d_ff=2048,
        num_shared_experts=1, q_lora_rank=1536, kv_lora_rank=512, rope_head_dim=64, n_groups=8,
        topk_groups=4,
    ),
    # The published config.json; 230 billion parameters.
    "MiniMax-M2": ModelShape(
        d_model=3072, num_layers=62, num_heads=48, num_kv_heads=8, head_dim=128, v_head_dim=128,
        vocab_size=200064, d_ff=1536, num_experts=256, top_k=8, expert_d_ff=1536,
    ),
}  # fmt: skip
# 64 GPUs of a rack take part, as its cluster file says.
RACK = load_cluster("gb200").model_copy(update={"gpus_per_node": 64})
CLUSTERS = {"GB200": RACK, "H100": load_cluster("h100"), "A100": load_cluster("a100")}
RANKS = (64, 128, 256)
HOTTEST = (1.3, 2.0, 3.0, 4.0)
"""Rows of the hottest rank over the mean: from the least to the most that UltraEP had without
balancing."""
COPIES = (0, 1, 2, 4)
_PIECES = 16
"""Of an expert that copies pass on."""
_PLAN_SHARE = 0.01
"""The largest share of a step that plans should take."""
_LOADS_SEED = 1
_PUBLISHED = (
    # Case, subject, metric, value.
    ("published: 106 to 671 billion parameters, up to 256 GPUs in racks, hottest rank 1.30 to 4.01",
     "UltraEP (arXiv 2606.04101)", "share_of_balanced", 0.943),
    ("published: 106 to 671 billion parameters, up to 256 GPUs in racks, hottest rank 1.30 to 4.01",
     "UltraEP (arXiv 2606.04101)", "times_no_copies", 1.49),
    ("published: A100, at most", "LAER-MoE (arXiv 2602.11686)", "times_no_copies", 1.69),
    ("published: gpt-oss-120b, inference and fine-tuning", "LLEP (arXiv 2601.17111)",
     "times_no_copies", 1.9),
)  # fmt: skip


@lru_cache
def exponent_of(hottest: float, ranks: int) -> float:
    """Zipf's exponent with which the hottest of ``ranks`` ranks has ``hottest`` times the mean."""
    low, high = 0.0, 2.0
    for _ in range(16):
        middle = (low + high) / 2
        if zipf_loads(middle, 256, 8, 8).of_group(ranks).hottest < hottest:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def heavy_loads(ranks_per_node: int, layers: int = 8) -> LoadProfile:
    """Log-normal popularity of experts, with a standard deviation of 1: some experts are ten times
    as popular as the median."""
    draw = np.random.default_rng(_LOADS_SEED)
    counts = [draw_counts(draw.lognormal(0.0, 1.0, 256), 8, draw) for _ in range(layers)]
    return LoadProfile("log-normal 1", np.array([counts]), ranks_per_node)


def loads_of(ranks: int, ranks_per_node: int) -> Iterator[tuple[str, LoadProfile]]:
    """The loads of a group, by name."""
    for hottest in HOTTEST:
        exponent = exponent_of(hottest, ranks)
        yield f"hottest {hottest:g}", zipf_loads(exponent, 256, 8, ranks_per_node)
    yield "zipf 1.2", zipf_loads(1.2, 256, 8, ranks_per_node)
    yield "log-normal", heavy_loads(ranks_per_node)


def work_of(shape: ModelShape, ranks: int) -> Work:
    """Eight micro-batches of one sequence of 4,096 tokens on each rank of one expert group."""
    return Work(
        shape=shape,
        topology=Topology(dp_shard=ranks, ep=ranks),
        seq_len=4096,
        global_batch_size=8 * ranks,
        micro_batch_size=1,
        recompute="selective",
        program=Program(sends_once_per_node=True),
    )


def relayed(group: GroupLoads, near: float, far: float, ranks_per_node: int) -> Transfers:
    """Transfers of which no rank sends an expert more than once over a link.

    The copies of an expert are a chain: each passes on what has come, in pieces. The first copy of
    a node passes the expert to the next node, and within its own. Gradients add up along the chain
    on their way back.
    """
    links = {"near": np.zeros_like(group.own_NG), "far": np.zeros_like(group.own_NG)}
    received = {name: np.zeros_like(link) for name, link in links.items()}
    seconds = {"near": near, "far": far}
    chains = []
    for (call, _, owner), takers in takers_by_expert(group).items():
        by_node = defaultdict(list)
        for rank in sorted(takers):
            by_node[rank // ranks_per_node].append(rank)
        head, begun, steps = owner, 0.0, []
        home = owner // ranks_per_node
        for node in sorted(by_node, key=lambda node: (node != home, node)):
            last, here = head, begun
            for position, rank in enumerate(by_node[node]):
                link = "far" if position == 0 and node != home else "near"
                source = head if link == "far" else last
                links[link][call, source] += seconds[link]
                received[link][call, rank] += seconds[link]
                here += seconds[link] / _PIECES
                if link == "far":
                    head, begun = rank, here
                steps.append((rank, here))
                last = rank
        chains.append((call, owner, steps))
    busy_NG = np.maximum.reduce([*links.values(), *received.values()])
    arrived_NG = np.zeros_like(busy_NG)
    ends_NG = busy_NG.copy()
    for call, owner, steps in chains:
        slowest = max(busy_NG[call, rank] for rank in (owner, *(rank for rank, _ in steps)))
        for rank, later in steps:
            arrived_NG[call, rank] = max(arrived_NG[call, rank], slowest + later)
            ends_NG[call, owner] = max(ends_NG[call, owner], slowest + later)
    return Transfers(ends_NG, arrived_NG)


def takers_by_expert(group: GroupLoads) -> dict[tuple[int, int, int], list[int]]:
    """The ranks with copies, by call, expert and owner."""
    takers = defaultdict(list)
    columns = (group.call_C, group.expert_C, group.owner_C, group.taker_C)
    for call, expert, owner, taker in zip(*(c.tolist() for c in columns), strict=True):
        takers[call, expert, owner].append(taker)
    return takers


@dataclass(frozen=True)
class Steps:
    """Seconds of steps of one model on one cluster with ``ranks`` ranks."""

    shape: ModelShape
    cluster: Cluster
    ranks: int

    @property
    def work(self) -> Work:
        """The step's work with equal rows."""
        return work_of(self.shape, self.ranks)

    @property
    def balanced(self) -> float:
        """With equal rows on all ranks."""
        return step_time(self.work, self.cluster).total

    def planned(self, loads: LoadProfile, copies: int) -> float:
        """As ``convoy plan`` says."""
        return step_time(self.work.with_(loads=loads, copies=copies), self.cluster).total

    def with_transfers(self, loads: LoadProfile, copies: int, relay: bool, ahead: bool) -> float:
        """The planned step with other transfers in place of those of the plan."""
        work = self.work.with_(loads=loads, copies=copies)
        group = work.group_loads
        assert group is not None
        sent = copy_seconds(work, self.cluster)
        own = transfers_of(group, *sent)
        node = self.cluster.gpus_per_node
        other = relayed(group, *sent, node) if relay else own
        forward, backward, attention = layer_seconds(self.work, self.cluster)
        begun = attention if ahead else 0.0
        saved = forward_wait(group, own, forward) - forward_wait(group, other, forward)
        saved += backward_wait(group, own, backward)
        saved -= backward_wait(group, other, backward, begun)
        layers = self.shape.num_moe_layers * work.micro_batches
        return self.planned(loads, copies) - layers * saved


def steps_rows(name: str, steps: Steps, loads_name: str, loads: LoadProfile) -> Iterator[Row]:
    """Shares of the balanced step."""
    case = f"{name}, ep {steps.ranks}, {loads_name}"
    balanced = steps.balanced

    def row(subject: str, seconds: float) -> Row:
        share = balanced / seconds
        return Row(case, subject, "share_of_balanced", share, "ratio", share, [])

    for copies in COPIES:
        yield row(f"copies {copies}", steps.planned(loads, copies))
    for relay, ahead in ((True, False), (False, True), (True, True)):
        subject = "copies 2" + ", relayed" * relay + ", ahead" * ahead
        yield row(subject, steps.with_transfers(loads, 2, relay, ahead))


def hottest_rows(ranks: int, loads_name: str, loads: LoadProfile) -> Iterator[Row]:
    """Rows of the hottest rank over the mean."""
    node = loads.ranks_per_node
    for copies in COPIES:
        group = loads.of_group(ranks, copies)
        case = f"nodes of {node}, ep {ranks}, {loads_name}"
        hottest, every = group.hottest, group.rows_NG.max(axis=1).tolist()
        yield Row(case, f"copies {copies}", "hottest_rank", hottest, "ratio", 1 / hottest, every)
    lent = loads.of_group(ranks, 2).most_lent
    yield Row(case, "copies 2", "most_sent_by_a_rank", lent, "experts", 1.0, [])


def planning_rows(samples: int) -> Iterator[Row]:
    """Seconds of one plan, measured here, and as a share of a layer's time in the planned step."""
    for ranks in RANKS:
        for exponent in (0.4, 1.2):
            loads = zipf_loads(exponent, 256, 8, 8)
            took = [_plan_seconds(rows_E, ranks) for rows_E in loads.counts_SLE[0]]
            for _ in range(samples - 1):
                took += [_plan_seconds(rows_E, ranks) for rows_E in loads.counts_SLE[0]]
            value = statistics.median(took)
            case = f"plan, 256 experts, ep {ranks}, zipf {exponent:g}"
            yield Row(case, "convoy", "plan_seconds", value, "s", 1.0, took)
            for name, cluster in CLUSTERS.items():
                steps = Steps(MODELS["DeepSeek-V3"], cluster, ranks)
                calls = steps.work.micro_batches * steps.shape.num_moe_layers
                share = value * calls / steps.balanced
                yield Row(f"{case}, DeepSeek-V3, {name}", "convoy", "plan_share_of_step", share,
                          "ratio", min(1.0, _PLAN_SHARE / share), [])  # fmt: skip


def _plan_seconds(rows_E: Counts, ranks: int) -> float:
    rows, shares = rows_E.tolist(), [1] * ranks
    began = time.process_time()
    plan_copies(rows, shares, 2, 8)
    return time.process_time() - began


def main() -> None:
    """Simulate, print the shares, and where asked write the rows."""
    args = arguments(__doc__ or "")
    rows = [*planning_rows(args.samples)]
    ranks_of = RANKS[:1] if args.quick else RANKS
    for ranks in ranks_of:
        for node in (8, 64):
            for loads_name, loads in loads_of(ranks, node):
                rows += hottest_rows(ranks, loads_name, loads)
                for cluster_name, cluster in CLUSTERS.items():
                    if cluster.gpus_per_node != node:
                        continue
                    for model, shape in MODELS.items():
                        if cluster_name == "A100" and (ranks, model) != (64, "DeepSeek-V3"):
                            continue
                        steps = Steps(shape, cluster, ranks)
                        name = f"{model}, {cluster_name}"
                        rows += steps_rows(name, steps, loads_name, loads)
    for case, subject, metric, value in _PUBLISHED:
        rows.append(Row(case, subject, metric, value, "ratio", 0.0, []))
    rows = [row for row in rows if args.only in row.case]
    for row in rows:
        if row.unit != "s":
            print(f"{row.case:<52}  {row.subject:<28} {row.metric:<18} {row.value:8.4f}")
    print(f"the planner takes {PLAN_SECONDS_PER_RANK * 64:.2g} s for a plan of 64 ranks")
    finish("balance simulation", rows, ["numpy"], args.json)


if __name__ == "__main__":
    main()
