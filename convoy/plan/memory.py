"""Bytes of a rank by part, as this code base lays them out.

Legend: T tokens of a micro-batch on a rank between GEMMs, D d_model, H heads, G key-value heads,
C size of a query's head, V of a value's, F hidden size, K top_k.

State is exact arithmetic over :mod:`parallel.layout`. Activations are the tensors that autograd
saves in a layer's forward, one by one; docs/planning.md has the list and what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from operator import mul
from typing import NamedTuple

from convoy.plan.hardware import BYTES, Chip
from convoy.plan.shape import ModelShape
from convoy.plan.work import Recompute, Work
from parallel.layout import Topology
from pretrain.parallelize import CHUNK, CHUNK_OF_DEVICES


@dataclass(frozen=True)
class Parts:
    """Numbers that add up to a whole."""

    @cached_property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(self.as_dict().values())

    def as_dict(self) -> dict[str, float]:
        """By part."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Memory(Parts):
    """Bytes at the peak of a step, of the rank with the most."""

    weights: float
    """Stored shards of parameters."""
    gradients: float
    """Shards, or with ZeRO-1 whole gradients of the rank's layers."""
    optimizer: float
    """The optimizer's moments."""
    gathered: float
    """Whole parameters of the layers that compute, and the buffers that FSDP reduces from."""
    activations: float
    """What the layers keep for the backward of one micro-batch, with what recomputation rebuilds
    of one layer."""
    pipeline: float
    """The same for further micro-batches that are in the pipeline."""
    dispatch: float
    """Rows on their way to experts and back."""
    loss: float
    """Logits, their softmax and their gradients."""

    def largest(self) -> str:
        """The name of the largest part."""
        return max(self.as_dict().items(), key=lambda item: item[1])[0]


@dataclass(frozen=True)
class RankParameters:
    """Numbers of parameters of one place along pp, before and after FSDP."""

    dense: float
    """Divided by tp, not by FSDP: attention, norms, dense layers, embedding and head."""
    beside: float
    """Routers and shared experts, divided by nothing."""
    experts: float
    """Divided by ep."""
    root: float
    """Of ``dense``: embedding, head and last norm."""
    largest_block: float
    """The layer with the most parameters, as gathered."""
    block_experts: float
    """Of ``largest_block``: its experts."""
    stored: float
    """All of them after FSDP."""
    matrices: float
    """Of ``stored``: hidden matrices, see :func:`pretrain.model.is_hidden_matrix`."""


def rank_parameters(work: Work, pp_rank: int) -> RankParameters:
    """The parameters of a place along pp; tp divides matrices, FSDP and ep divide the rest."""
    stages = work.stages_of(pp_rank)
    ends = 0 in stages, work.num_stages - 1 in stages
    return _parameters(work.shape, work.topology, work.layers_of(pp_rank), ends)


@lru_cache(4096)
def _parameters(
    shape: ModelShape, t: Topology, layers: tuple[int, ...], ends: tuple[bool, bool]
) -> RankParameters:
    """Of these layers; ``ends`` says whether the first and the last stage are among theirs."""
    dense = beside = experts = 0.0
    norms = gates = 0.0
    largest = (0.0, 0.0)
    for layer in layers:
        replicated = shape.attention_replicated + 2 * shape.d_model + shape.mtp_parameters(layer)
        norms += shape.attention_vectors(t.tp)
        norms += (2 if layer < shape.num_layers else 5) * shape.d_model
        own = (shape.attention_parameters - shape.attention_replicated) / t.tp + replicated
        others = here = 0.0
        if shape.is_moe(layer):
            others = shape.beside_experts
            gates += shape.d_model * shape.shared_expert_gate
            here = shape.num_experts * shape.expert_parameters / t.ep
        else:
            own += shape.dense_parameters / t.tp
        dense, beside, experts = dense + own, beside + others, experts + here
        largest = max(largest, (own + others + here, here))
    root = 0.0
    if ends[0]:
        root += shape.vocab_size * shape.d_model / t.tp
    if ends[1]:
        root += shape.d_model
        if not shape.tie_embeddings:
            root += shape.vocab_size * shape.d_model / t.tp
    stored = (dense + root) / t.fsdp + beside / t.fsdp_tp + experts / t.efsdp
    return RankParameters(
        dense=dense + root,
        beside=beside,
        experts=experts,
        root=root,
        largest_block=largest[0],
        block_experts=largest[1],
        stored=stored,
        matrices=stored - (norms + root) / t.fsdp - gates / t.fsdp_tp,
    )


def moments_kept(work: Work, n: RankParameters) -> float:
    """Numbers that the optimizer keeps on a rank."""
    optimizer = work.program.optimizer
    matrices = n.matrices * len(optimizer.matrix_moments)
    return matrices + (n.stored - n.matrices) * len(optimizer.other_moments)


def kept_elements(
    work: Work, layer: int, how: Recompute, kernels: str, busiest: float | None = None
) -> float:
    """Elements that a layer keeps for the backward of one micro-batch on one rank.

    ``busiest`` has the rows of the rank's experts as a multiple of the mean; None takes
    :attr:`Work.busiest_in_stage`.

    ``none``, for a token: the inputs and outputs of both norms (4 D); queries and keys before and
    after rotation where they are normed, once where not, values, and the output of attention; a
    dense layer's four (gate, silu(gate), up, their product) or two tensors of F; of an expert's row
    its input and the results of its GEMMs. silu(gate) is not kept where one kernel makes the
    product: its backward computes it again. ``selective``: the layer's input and the results of
    GEMMs and of attention. ``full``: the layer's input. A layer of multi-token prediction has two
    inputs, their norms, and one norm more.
    """
    shape, t = work.shape, work.topology
    T, D = work.local_tokens, shape.d_model
    if layer >= shape.num_layers:
        more = {"full": 1, "selective": 2, "none": 8 if kernels == "cpu" else 5}[how]
        last = kept_elements(work, shape.num_layers - 1, how, kernels, busiest)
        return last + more * T * D
    if how == "full":
        return T * D
    q, v = shape.num_heads * shape.head_dim, shape.num_heads * shape.v_head_dim
    g = shape.num_heads if shape.kv_lora_rank else shape.num_kv_heads
    keys, values = g * shape.head_dim, g * shape.v_head_dim
    # Heads are divided by tp and see all tokens of the tp ranks: per local token they count whole.
    # With context parallelism a rank has the keys and values of the whole sequence.
    keys, values = keys * t.cp, values * t.cp
    latents = 0.0
    if shape.kv_lora_rank:
        latents = 2 * (shape.q_lora_rank + shape.kv_lora_rank) + shape.rope_head_dim
    cpu = kernels == "cpu"
    rows = (work.busiest_in_stage if busiest is None else busiest) * shape.top_k
    F, two = shape.expert_d_ff, shape.products - 1
    wide = shape.num_shared_experts * F
    if how == "selective":
        kept = D + q + keys + values + v + D + latents
        if not shape.is_moe(layer):
            return T * (kept + two * shape.d_ff + D)
        if wide:
            kept += (shape.expert_products - 1) * wide + D
        experts = 0 if cpu else rows * ((shape.expert_products - 1) * F + D)
        return T * (kept + shape.num_experts + experts)
    normed = 2 if shape.qk_norm != "none" and not shape.kv_lora_rank else 1
    kept = 4 * D + normed * (q + keys) + values + v + latents
    if shape.kv_lora_rank:
        kept += keys + values  # heads before the rotary part is put to them
    gated = 3 if work.program.fused_elementwise else 4
    if not shape.is_moe(layer):
        return T * (kept + (gated if shape.products == 3 else 2) * shape.d_ff)
    per_expert = (shape.expert_products - 1) * F
    kept += shape.num_experts + (gated if shape.expert_products == 3 else 2) * wide
    return T * (kept + rows * (per_expert + (0 if cpu else D)))


def in_flight(work: Work, pp_rank: int) -> list[tuple[int, ...]]:
    """Micro-batches whose activations a place along pp holds, for each stage of
    :meth:`Work.stages_of`: the counts at every moment that can be the peak.

    Without interleaving min(m, p - place) (Narayanan et al., arXiv 2104.04473, section 2.2).
    Interleaved, 2 (p - place - 1) + (v - 1) p + 1 forwards run before the first backward ends; then
    forwards and backwards take turns, each through groups of p micro-batches, the forwards from the
    first stage on and the backwards from the last one. ZB-V holds 2 p stages' activations (arXiv
    2401.10241, section 6), DualPipeV one more, and most of them are of the place's first stage.
    """
    pp, m, v = work.topology.pp, work.micro_batches, work.stages_per_rank
    if pp == 1:
        return [(1,)]
    if work.schedule in ("zbv", "dualpipev"):
        first = 2 * pp - pp_rank
        counts = {(first, pp_rank + 1)}
        if work.schedule == "zbv":
            counts = {(first - 1, pp_rank + 1), (first, pp_rank)}
        return sorted((min(m, a), min(m, b)) for a, b in counts)
    if work.schedule == "gpipe":
        return [(m,) * v]
    return _interleaved(pp, v, m, pp_rank) if v > 1 else [(min(m, pp - pp_rank),)]


@lru_cache(4096)
def _interleaved(pp: int, stages: int, micro_batches: int, pp_rank: int) -> list[tuple[int, ...]]:
    forwards = stages * micro_batches
    ahead = min(forwards, 2 * (pp - pp_rank - 1) + (stages - 1) * pp + 1)
    kept = [0] * stages
    for i in range(ahead):
        kept[i // pp % stages] += 1
    moments = {tuple(kept)}
    # After a group of each stage the counts repeat.
    for i in range(min(forwards - ahead, pp * stages)):
        kept[stages - 1 - i // pp % stages] -= 1
        kept[(ahead + i) // pp % stages] += 1
        moments.add(tuple(kept))
    return sorted(moments)


def loss_bytes(work: Work, micro_batches: int = 1, kernels: str = "cpu") -> float:
    """Logits and what their loss makes of them, at the peak of its backward.

    The logits of ``micro_batches`` and the gradients of one's, and a chunk in float32. Where tp
    divides the vocabulary, and in programs whose loss takes all logits at once: also all
    log-probabilities and their gradient, and with tp the probabilities, in the loss's dtype.
    """
    shape, program, tp = work.shape, work.program, work.topology.tp
    logits, own = work.tokens * shape.vocab_size / tp, program.activation_bytes
    heads = 1 + shape.num_mtp_layers
    if tp == 1 and program.loss_dtype is None:
        chunk = min(logits, CHUNK if kernels == "cpu" else CHUNK_OF_DEVICES)
        return logits * own * heads * (micro_batches + 1) + chunk * 4 * (1 if own == 4 else 2)
    size = BYTES[program.loss_dtype or "float32"]
    # A gradient in another dtype than the loss's is a copy.
    gradient = own if own != size and tp == 1 else 0
    return logits * (heads * micro_batches * (own + size) + size * (2 if tp == 1 else 3) + gradient)


def memory(work: Work, chip: Chip) -> Memory:
    """The memory of the rank with the most."""
    plans = [memory_of_place(work, pp_rank, chip) for pp_rank in work.places]
    return max(plans, key=lambda used: used.total)


def memory_of_place(work: Work, pp_rank: int, chip: Chip) -> Memory:
    """The memory of a rank at a place along pp.

    There are two moments that can be the peak: the loss, when no layer computes, and the backward
    of a layer, when there are no logits.
    """
    shape, t, program = work.shape, work.topology, work.program
    n = rank_parameters(work, pp_rank)
    T, size = work.local_tokens, program.activation_bytes
    fsdp = _fsdp_bytes(work, n)
    layers = work.layers_of(pp_rank)
    by_stage = _kept_by_stage(work, pp_rank, chip.kernels)
    kept = sum(by_stage)
    flights = in_flight(work, pp_rank)
    most = max(sum(map(mul, by_stage, counts)) for counts in flights)
    working = 0.0
    if layers:  # a rank may have only the embedding, or only the head
        # One layer at a time: what recomputation brings back, and its gradients.
        last = max(layers)
        most_rows = work.busiest_in_layer
        first = kept_elements(work, layers[0], work.recompute, chip.kernels)
        rebuilt = max(
            kept_elements(work, i, "none", chip.kernels, most_rows) - first
            for i in {layers[0], last}
        )
        widest = float(shape.products * shape.d_ff)
        if shape.is_moe(last):
            widest = shape.top_k * most_rows * (shape.expert_d_ff * 2 + shape.d_model)
        working = T * (widest + 2 * shape.d_model)
        if work.recompute != "none":
            working += max(rebuilt, 0)
    dispatch = 0.0
    if t.ep > 1 and any(shape.is_moe(layer) for layer in layers):
        dispatch = T * shape.top_k * shape.d_model * size * (1 + work.busiest_in_layer)
    loss = 0.0
    if work.num_stages - 1 in work.stages_of(pp_rank):
        # Only GPipe's last stage holds more than the micro-batch whose backward comes next.
        count = work.micro_batches if t.pp > 1 and work.schedule == "gpipe" else 1
        heads = 1 + shape.num_mtp_layers
        loss = loss_bytes(work, count, chip.kernels) + heads * count * T * 2 * shape.d_model * size
    gradients = fsdp.gradients if work.zero_stage == 1 else n.stored * program.gradient_bytes
    always = Memory(
        weights=n.stored * program.parameter_bytes,
        gradients=gradients,
        optimizer=program.moment_bytes * moments_kept(work, n),
        gathered=fsdp.always,
        activations=kept * size,
        pipeline=max(most - kept, 0.0) * size,
        dispatch=0.0,
        loss=0.0,
    )
    in_layer = replace(
        always,
        gathered=fsdp.always + fsdp.in_layer + _copies_bytes(work) * (dispatch > 0),
        activations=(kept + working) * size,
        dispatch=dispatch,
    )
    return max(replace(always, loss=loss), in_layer, key=lambda used: used.total)


def _copies_bytes(work: Work) -> float:
    """Copies of experts while a layer computes: a rank that has copies holds their parameters and,
    in the backward, their gradients and what it sends of these; an owner has a buffer of what it
    sends, or of what comes back."""
    group = work.group_loads
    if group is None:
        return 0.0
    expert = work.shape.expert_parameters * work.program.activation_bytes
    return expert * max(3 * group.most_borrowed, group.most_lent)


def _kept_by_stage(work: Work, pp_rank: int, kernels: str) -> list[float]:
    """What each stage of a place keeps for the backward of one micro-batch, in elements."""
    of_kind = {
        kind: kept_elements(work, *kind, kernels)
        for kinds in work.kinds_by_stage(pp_rank)
        for kind in kinds
    }
    by_stage = [
        sum(count * of_kind[kind] for kind, count in kinds.items())
        for kinds in work.kinds_by_stage(pp_rank)
    ]
    if work.topology.pp > 1:  # each stage is given the embeddings for multi-token prediction
        given = work.shape.num_mtp_layers * work.local_tokens * work.shape.d_model
        by_stage = [kept + given for kept in by_stage]
    return by_stage


class _FSDPBytes(NamedTuple):
    """Bytes of a rank's parameters as FSDP has them."""

    always: float
    """Gathered from a micro-batch's forward to its backward."""
    in_layer: float
    """Gathered for a layer's backward, and its reduction."""
    gradients: float
    """Whole gradients, as ZeRO-1 keeps them."""


def _fsdp_bytes(work: Work, n: RankParameters) -> _FSDPBytes:
    """Two layers are gathered at once, the one that computes and the next; embedding and head stay
    gathered from a micro-batch's forward to its backward. One layer's gradients wait as they were
    computed, and once more in float32 for the reduction.
    """
    t, program = work.topology, work.program
    casts = program.dtype != "float32"
    size = BYTES[program.dtype] if BYTES[program.dtype] > 1 else 2
    alone = t.efsdp * t.dp_replicate == 1 and not casts
    experts = 0.0 if alone else n.experts
    gathered = (n.dense + n.beside + experts) * size
    grads = (n.dense + n.beside + n.experts) * program.gradient_bytes
    if not grads or (t.world == t.pp and not casts):
        return _FSDPBytes(0.0, 0.0, grads)
    block = n.largest_block - (n.block_experts if alone else 0)
    reducing = block * (size + program.gradient_bytes)
    if work.zero_stage != 3:
        return _FSDPBytes(gathered, reducing, grads)
    root = min(gathered, n.root * size)
    return _FSDPBytes(root, min(gathered - root, 2 * block * size) + reducing, grads)
