"""Seconds of a step by part: computation, each collective, the pipeline's bubble, the optimizer.

Legend: D d_model, F hidden size, V vocab, K top_k, T tokens of a micro-batch on a rank.

Every part is of the rank with the most. docs/planning.md says how each one is modelled, and where
the model is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import cast

from convoy.plan.hardware import BYTES, Chip, Cluster, DtypeName
from convoy.plan.memory import Parts, RankParameters, moments_kept, rank_parameters
from convoy.plan.shape import Gemm
from convoy.plan.transfers import backward_wait, forward_wait, transfers_of
from convoy.plan.work import Work

PLAN_SECONDS_PER_RANK = 2.5e-6
"""Of :func:`moe.copies.plan_copies` with 256 experts, for each rank of the group: measured with 64,
128 and 256 ranks, see ``bench/results/balance-simulated.json``."""


@dataclass(frozen=True)
class StepTime(Parts):
    """Seconds of a step. The parts add up to the step; communication counts where no computation
    hides it."""

    gemms: float
    """GEMMs of the forward and the backward."""
    attention: float
    """Scores, softmax and the sum of values."""
    elementwise: float
    """What is as slow as memory: norms, activations, rows put in order, the loss."""
    recompute: float
    """The forward again, in the backward."""
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    """The all-to-alls."""
    stages: float
    """Activations on their way between stages."""
    data_parallel: float
    """FSDP's gathers and reductions, and sums over replicas."""
    imbalance: float
    """Experts that wait for the busiest rank's, and for parameters and gradients of copies."""
    bubble: float
    """The pipeline's exposed communication: waiting for other stages."""
    optimizer: float


@dataclass(frozen=True)
class _Pass:
    """Seconds of one micro-batch, forward and backward apart; ``even`` without imbalance."""

    gemms: float
    gemms_backward: float
    even: float
    attention: float
    attention_backward: float
    elementwise: float
    tensor: float
    context: float
    expert: float
    waits: float
    """For the parameters of copies, in the forward."""
    waits_backward: float
    """For their parameters and their gradients, in the backward."""


def _gemms(gemms: list[Gemm], work: Work, chip: Chip) -> tuple[float, float]:
    """Seconds of GEMMs in the forward, and of the two of each in the backward."""
    forward = backward = 0.0
    for g in gemms:
        dtype = work.program.router_dtype if g.router else work.program.dtype
        forward += chip.gemm_seconds(g.m, g.n, g.k, dtype, g.copies)
        backward += chip.gemm_seconds(g.m, g.k, g.n, dtype, g.copies)
        backward += chip.gemm_seconds(g.k, g.n, g.m, dtype, g.copies)
    return forward, backward


def _attention(work: Work, chip: Chip) -> tuple[float, float]:
    """Seconds of one layer's attention without projections, forward and backward."""
    shape, t, program = work.shape, work.topology, work.program
    heads = 1 / t.tp
    if program.fused_attention:
        flops = work.tokens * shape.scores_flops(work.seq_len, causal=True) * heads
        forward = chip.attention_seconds(flops, work.seq_len / 2, program.dtype)
        return forward, 2.5 * forward  # the backward computes the scores again
    # All pairs; scores are written and read: by two GEMMs, a softmax and a dropout.
    S, count = work.seq_len, work.micro_batch_size * shape.num_heads * heads
    forward = chip.gemm_seconds(S / t.cp, S, shape.head_dim, program.dtype, count)
    forward += chip.gemm_seconds(S / t.cp, shape.v_head_dim, S, program.dtype, count)
    scores = count * S * S / t.cp * program.activation_bytes
    return forward + chip.stream_seconds(6.5 * scores), 2 * forward + chip.stream_seconds(
        9.5 * scores
    )


def _elementwise(work: Work, layer: int, chip: Chip) -> float:
    """Seconds of a layer's forward in operations that are as slow as memory."""
    shape, program = work.shape, work.program
    T, D, fused = work.local_tokens, shape.d_model, program.fused_elementwise
    elements = T * (4 + 6) * D  # two norms and two sums, read and written
    heads = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    elements += T * heads * (2 if fused else 6)  # the rotation
    act = 3 if fused else 5
    if shape.is_moe(layer):
        rows = T * shape.top_k * work.busiest
        elements += rows * (4 * D + act * shape.expert_d_ff) + T * D
        elements += T * act * shape.num_shared_experts * shape.expert_d_ff
    else:
        elements += T * act * shape.d_ff
    count = 12 if fused else 30  # kernels
    return chip.stream_seconds(elements * program.activation_bytes) + (
        count * chip.gemm.launch_microseconds * 1e-6
    )


@lru_cache(1 << 14)
def _layer_pass(work: Work, layer: int, cluster: Cluster) -> _Pass:
    shape, t, program, chip = work.shape, work.topology, work.program, cluster.chip
    projections = shape.attention_gemms(work.tokens, t.tp)
    ffn = shape.ffn_gemms(layer, work.tokens, t.tp, t.ep, work.busiest)
    forward, backward = _gemms([*projections, *ffn], work, chip)
    even = forward + backward
    if shape.is_moe(layer) and work.busiest > 1:
        flat = shape.ffn_gemms(layer, work.tokens, t.tp, t.ep)
        even = sum(_gemms([*projections, *flat], work, chip))
    attention, attention_backward = _attention(work, chip)
    size = program.activation_bytes
    hidden = work.tokens * shape.d_model * size
    tensor = context = expert = 0.0
    if t.tp > 1:
        # Sequence parallelism: an all-gather before and a reduce-scatter after a part whose
        # matrices tp divides; MoE layers have none, their tokens stay where they are.
        parts = 1 if shape.is_moe(layer) else 2
        tensor = parts * 2 * cluster.gather_seconds(hidden, t.tp, 1)
    if t.cp > 1:
        wide = shape.num_kv_heads * (shape.head_dim + shape.v_head_dim) / t.tp
        if shape.kv_lora_rank:
            wide = shape.kv_lora_rank + shape.rope_head_dim
        context = cluster.gather_seconds(work.tokens * t.cp * wide * size, t.cp, t.tp)
    if t.ep > 1 and shape.is_moe(layer):
        rows = work.local_tokens * shape.top_k * work.busiest * shape.d_model
        share = 1.0
        _, nodes = cluster.group_shape(t.ep, 1)
        if program.sends_once_per_node and nodes > 1:
            share = min(1.0, shape.nodes_of_token(nodes) / shape.top_k)
        there = rows * (program.dispatch_bytes or size)
        expert = cluster.exchange_seconds(there, t.ep, share)
        expert += cluster.exchange_seconds(rows * size, t.ep, share)
    waits, waits_backward = _copy_waits(work, layer, cluster)
    return _Pass(
        gemms=forward, gemms_backward=backward, even=even,
        attention=attention, attention_backward=attention_backward,
        elementwise=_elementwise(work, layer, chip),
        tensor=tensor, context=context, expert=expert,
        waits=waits, waits_backward=waits_backward,
    )  # fmt: skip


def _copy_waits(work: Work, layer: int, cluster: Cluster) -> tuple[float, float]:
    """Seconds of a layer's forward and backward in which no rank computes because of copies.

    In the forward ranks also gather the counts of all experts, and every rank makes the plan.
    """
    group, shape = work.group_loads, work.shape
    if group is None or not work.copies or not shape.is_moe(layer):
        return 0.0, 0.0
    ep = work.topology.ep
    forward, backward, _ = layer_seconds(work, cluster)
    transfers = transfers_of(group, *copy_seconds(work, cluster))
    counts = cluster.gather_seconds(8.0 * shape.num_experts * ep, ep, 1)
    planned = counts + PLAN_SECONDS_PER_RANK * ep
    return (
        planned + forward_wait(group, transfers, forward),
        backward_wait(group, transfers, backward),
    )


def layer_seconds(work: Work, cluster: Cluster) -> tuple[float, float, float]:
    """Seconds of one layer's routed experts on a rank with the mean rows, forward and backward, and
    of its attention's backward."""
    shape, t = work.shape, work.topology
    _, *gemms = shape.ffn_gemms(shape.num_layers - 1, work.tokens, t.tp, t.ep)
    forward, backward = _gemms(gemms[: shape.expert_products], work, cluster.chip)
    return forward, backward, _attention(work, cluster.chip)[1]


def copy_seconds(work: Work, cluster: Cluster) -> tuple[float, float]:
    """Seconds in which one expert travels within a node, and between nodes."""
    size = work.shape.expert_parameters * work.program.activation_bytes
    near, far = (
        size / link.all_to_all_rate + link.latency_microseconds * 1e-6
        for link in (cluster.intra_node, cluster.inter_node)
    )
    return near, far


def step_time(work: Work, cluster: Cluster) -> StepTime:
    """The seconds of a step, by part."""
    return max((_of_place(work, p, cluster) for p in work.places), key=lambda step: step.total)


def least_seconds(work: Work, cluster: Cluster) -> float:
    """Seconds that no recomputation, ZeRO stage or division into stages beats.

    Without recomputation and data parallelism, with layers divided evenly over stages.
    """
    shape, m, key = work.shape, work.micro_batches, _key(work)
    dense = len(shape.all_layers) - shape.num_moe_layers
    seconds = 0.0
    for layer, count in ((0, dense), (shape.num_layers - 1, shape.num_moe_layers)):
        if not count:
            continue
        took = _layer_pass(key, layer, cluster)
        compute = took.gemms + took.gemms_backward + took.attention + took.attention_backward
        compute += 3 * took.elementwise
        sent = 2 * (took.tensor + took.context)
        sent += max(0.0, 2 * took.expert * (1 - work.program.hides_dispatch))
        seconds += count * (compute + sent)
    return seconds * m / work.topology.pp / (1 - bubble_share(work))


def _of_place(work: Work, pp_rank: int, cluster: Cluster) -> StepTime:
    shape, t, program, chip = work.shape, work.topology, work.program, cluster.chip
    m = work.micro_batches
    parts = dict.fromkeys((field.name for field in fields(StepTime)), 0.0)
    key = _key(work)
    for (layer, how), count in work.kinds_of(pp_rank).items():
        # A layer of multi-token prediction is as the last one.
        took = _layer_pass(key, min(layer, shape.num_layers - 1), cluster)
        parts["gemms"] += count * took.even
        parts["imbalance"] += count * (took.gemms + took.gemms_backward - took.even)
        parts["imbalance"] += count * (took.waits + took.waits_backward)
        parts["attention"] += count * (took.attention + took.attention_backward)
        parts["elementwise"] += count * 3 * took.elementwise
        again = 0.0
        match how:
            case "full":
                again = took.gemms + took.attention + took.elementwise + took.waits
            case "selective":
                again = took.elementwise
        parts["recompute"] += count * again
        # Both kinds of recomputation run the forward's collectives again.
        passes = count * (2 if how == "none" else 3)
        parts["tensor_parallel"] += passes * took.tensor
        parts["context_parallel"] += passes * took.context
        parts["expert_parallel"] += passes * took.expert
    if work.num_stages - 1 in work.stages_of(pp_rank):
        heads = shape.head_gemms(work.tokens, t.tp)
        # The head is computed in bfloat16 where layers are in float8.
        plain = work
        if program.dtype == "float8":
            plain = work.with_(program=replace(program, dtype="bfloat16"))
        parts["gemms"] += sum(_gemms(heads, plain, chip))
        passes_bytes = 8 if program.fused_elementwise else 24
        logits = (1 + shape.num_mtp_layers) * heads[0].m * heads[0].n
        parts["elementwise"] += chip.stream_seconds(logits * passes_bytes)
    if program.communication_units:
        units = chip.gemm.units
        for name in ("gemms", "attention", "recompute", "imbalance"):
            parts[name] *= units / (units - program.communication_units)
    compute = sum(parts[name] for name in ("gemms", "attention", "elementwise", "recompute"))
    hidden = min(parts["expert_parallel"], compute) * program.hides_dispatch
    hidden *= chip.kernels != "cpu"
    parts["expert_parallel"] -= hidden
    if t.pp > 1:
        parts["stages"] = _stages_seconds(work, cluster)
    fsdp, once = _data_parallel(work, pp_rank, cluster)
    # Ranks of a CPU compute and communicate on one core: neither hides the other.
    if program.hides_data_parallel and chip.kernels != "cpu":
        exposed = max(0.0, fsdp - compute)
        # What is sent once a step is sent beside the first forward and the last backward of a
        # stage, and hides behind the computation which the micro-batch's own collectives leave.
        # The stages of a rank begin and end one after another, so that each has such a time.
        spread = min(m, t.pp) if t.pp > 1 and work.stages_per_rank > 1 else 1
        once = max(0.0, once - max(0.0, compute - fsdp) * spread)
    else:
        exposed = fsdp
    parts = {name: seconds * m for name, seconds in parts.items()}
    busy = sum(parts.values()) + exposed * m
    parts["data_parallel"] = exposed * m + once
    share = bubble_share(work)
    parts["bubble"] = busy * share / (1 - share)
    parts["optimizer"] = _optimizer(work, pp_rank, cluster)
    return StepTime(**parts)


def _key(work: Work) -> Work:
    """The same work with what a layer's time does not depend on set to one value."""
    return work.with_(
        global_batch_size=work.micro_batch_size, schedule="1f1b", stages_per_rank=1, zero_stage=3,
        recompute="none", recompute_layer_freq=1,
        topology=type(work.topology)(1, 1, max(1, work.topology.ep), work.topology.cp,
                                     work.topology.tp, work.topology.ep),
    )  # fmt: skip


def bubble_share(work: Work) -> float:
    """The share of a step in which a rank waits for other stages; see
    :func:`pretrain.parallelize.bubble`."""
    if work.topology.pp == 1:
        return 0.0
    idle = work.topology.pp - 1
    folded = work.schedule in ("zbv", "dualpipev")
    passes = 6 * work.micro_batches if folded else work.stages_per_rank * work.micro_batches
    return idle / (passes + idle)


def _stages_seconds(work: Work, cluster: Cluster) -> float:
    """Sends of a micro-batch that a rank waits for: one each way for each of its stages. With
    multi-token prediction the embeddings travel beside the hidden states."""
    if work.program.hides_stages:
        return 0.0
    t = work.topology
    sent = work.local_tokens * work.shape.d_model * work.program.activation_bytes
    sent *= 1 + work.shape.num_mtp_layers
    seconds = cluster.send_seconds(sent, t.world // t.pp)
    return 2 * work.stages_per_rank * seconds


def _data_parallel(work: Work, pp_rank: int, cluster: Cluster) -> tuple[float, float]:
    """Seconds of FSDP's collectives of one micro-batch, and of those once a step."""
    t, program = work.topology, work.program
    n = rank_parameters(work, pp_rank)
    size = BYTES["bfloat16"] if program.dtype == "float8" else BYTES[program.dtype]

    layers = work.layers_of(pp_rank)
    moe = sum(work.shape.is_moe(layer) for layer in layers)

    def gather(bytes_each: float, *, root: bool = True) -> float:
        # A collective for each layer, and one for embedding and head.
        parameters = n.dense if root else n.dense - n.root
        pieces = len(layers) + root
        dense = cluster.gather_seconds(parameters * bytes_each, t.fsdp, t.tp, pieces)
        beside = cluster.gather_seconds(n.beside * bytes_each, t.fsdp_tp, 1)
        experts = cluster.gather_seconds(n.experts * bytes_each, t.efsdp, t.ep, max(1, moe))
        # FSDP copies what it has gathered, or what it reduces, to or from one buffer.
        copied = parameters * (t.fsdp > 1) + n.beside * (t.fsdp_tp > 1) + n.experts * (t.efsdp > 1)
        copies = cluster.chip.stream_seconds(2 * copied * bytes_each)
        return dense + beside + experts + copies

    reduced, gathered = gather(program.gradient_bytes), gather(size)
    once = cluster.reduce_seconds(n.stored * program.gradient_bytes, t.dp_replicate, t.fsdp_tp)
    if work.zero_stage == 3:
        # Layers are gathered again in the backward; embedding and head stay gathered for it.
        return reduced + gathered + gather(size, root=False), once
    # What is gathered stays for the whole step.
    if work.zero_stage == 2:
        return reduced, once + gathered
    return 0.0, once + reduced + gathered


def _optimizer(work: Work, pp_rank: int, cluster: Cluster) -> float:
    """AdamW reads a weight, its gradient and two moments and writes three of them; the gradients'
    norm reads them once more and is summed over all ranks. What needs whole matrices puts them
    together and takes them apart besides: see :class:`parallel.WholeMatrices`."""
    n, program, chip = rank_parameters(work, pp_rank), work.program, cluster.chip
    moved = n.stored * (12 + 2 * program.gradient_bytes)
    moved += 2 * program.moment_bytes * moments_kept(work, n)
    seconds = chip.stream_seconds(moved) + cluster.reduce_seconds(4, work.topology.world, 1)
    if program.optimizer.matrix_products(2, 2):
        seconds += _whole_matrices(work, pp_rank, n, cluster)
    return seconds


def _whole_matrices(work: Work, pp_rank: int, n: RankParameters, cluster: Cluster) -> float:
    """The products of updates of whole matrices, divided over the ranks of a stage, and the
    all-to-alls before and after them, exposed."""
    t, program, chip = work.topology, work.program, cluster.chip
    dtype = cast(DtypeName, program.optimizer.products_dtype(program.dtype))
    ranks, layers = t.world // t.pp, work.layers_of(pp_rank)
    total = longest = 0.0
    for is_moe in (False, True):
        like = [layer for layer in layers if work.shape.is_moe(layer) == is_moe]
        for matrix in work.shape.hidden_matrices(like[0]) if like else []:
            products = program.optimizer.matrix_products(matrix.n, matrix.k)
            count = len(like) * matrix.copies
            total += sum(chip.gemm_seconds(*product, dtype, count) for product in products)
            alone = sum(chip.gemm_seconds(*product, dtype) for product in products)
            longest = max(longest, alone)
    # A slice is read and sent, put in its place, taken out again, sent back, and added.
    copied = chip.stream_seconds(n.matrices * (6 * BYTES[dtype] + 12))
    cut = t.fsdp_tp * t.dp_replicate > 1
    there = n.matrices * BYTES[dtype] / t.dp_replicate * cut
    back = n.matrices * BYTES[dtype] * cut
    sent = sum(cluster.exchange_seconds(slices, ranks) for slices in (there, back))
    return max(total / ranks, longest) + copied + sent
