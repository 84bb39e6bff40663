"""The reference decoder, parallelized: the order of the apply_* functions, and tensor parallelism.

Tensor parallelism shards attention heads, hidden sizes of dense layers and the vocabulary. It does
not shard MoE layers: sequence parallelism gives each tp rank other tokens, a MoE layer routes each
token once, and expert parallelism shards the experts over tp ranks as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import nn

from moe import Float8Tally, MoEConfig, use_float8
from parallel import (
    ExactSums,
    ParallelConfig,
    ParallelDims,
    PipelineSchedule,
    ShardLayout,
    TensorParallelStyle,
    Topology,
    WeightGradStore,
    apply_activation_offload,
    apply_context_parallel,
    apply_delayed_weight_grad,
    apply_expert_parallel,
    apply_fsdp,
    apply_recompute,
    apply_tensor_parallel,
)
from parallel.apply import apply_exact_context
from pretrain.model import Block, Decoder, ModelConfig, meta_decoder
from pretrain.parallelize.layouts import parameter_layouts
from pretrain.parallelize.pipeline import Pipeline
from pretrain.parallelize.schedule import place_of
from pretrain.parallelize.stages import stage_layers
from pretrain.tune import TuneConfig, tune


@dataclass(frozen=True)
class ParallelModel:
    """One rank's part of a parallelized decoder."""

    meta_model: Decoder
    """The full model on the meta device: all names, global shapes and dtypes."""
    local_model: Decoder
    """The layers of all stages of this rank."""
    stages: dict[int, Decoder]
    """The layers of each stage of this rank, by the stage's number; forwards call these modules,
    which share their parameters with ``local_model``."""
    layouts: dict[str, ShardLayout]
    """The layout of every parameter and buffer of the full model, by name."""
    pipeline: Pipeline | None
    """None for one stage."""
    exact: ExactSums | None = None
    """The sums of gradients, where they are exact."""
    float8: Mapping[str, Float8Tally] = field(default_factory=dict)
    """The counts of products in float8, by ``experts`` and ``dense``: of each part that the config
    computes in float8, also where this rank has no such layer."""


def parallelize(
    config: ModelConfig,
    moe: MoEConfig | None,
    *,
    parallel: ParallelConfig,
    dims: ParallelDims,
    seq_len: int,
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
    exact_units: int | None = None,
    dense_float8: bool = False,
    tuned: TuneConfig | None = None,
) -> ParallelModel:
    """Build this rank's part of a decoder, parallelized, on the meta device.

    The caller then calls ``to_empty`` on each of ``stages`` and gives the parameters values.

    Args:
        config: the decoder.
        moe: its MoE layers; None without.
        parallel: what is applied.
        dims: the meshes of ``parallel``'s degrees.
        seq_len: tokens of a full sequence, for the stages' costs.
        dtype: dtype of GEMMs and of activations between ranks; parameters are in float32.
        compiled: compile regions of the layers, see :func:`compile_regions`.
        exact_units: sum gradients exactly, of at most so many micro-batches in a step; None sums
            in float32.
        dense_float8: compute attention's projections, dense layers and shared experts in float8.
        tuned: which parameters learn; None for all.

    Raises ValueError where the model has fewer layers than stages, or where the number of experts
    is not a multiple of the ranks.
    """
    pp, schedule = dims.topology.pp, parallel.pipeline.schedule
    num_stages = pp * parallel.pipeline.stages_per_rank if pp > 1 else 1
    layers = stage_layers(
        config,
        moe,
        seq_len=seq_len,
        pp=pp,
        stages_per_rank=num_stages // pp,
        schedule=schedule,
        dense_float8=dense_float8,
    )
    final = num_stages - 1
    place = dims.pp_mesh.get_local_rank()
    local = [stage for stage in range(num_stages) if place_of(stage, pp, schedule) == place]
    meta_model = meta_decoder(config, moe)
    with torch.device("meta"):
        numbers = chain.from_iterable(layers[stage] for stage in local)
        model = Decoder(config, moe, numbers, first=0 in local, last=final in local)
    float8 = _use_float8(model, moe, dense_float8)
    # After that: an adapter's products are not in float8.
    tune(meta_model, tuned, whole_model=True)
    tune(model, tuned, whole_model=False)
    stages = {0: model}
    if num_stages > 1:
        stages = {s: model.part(layers[s], first=s == 0, last=s == final) for s in local}
    exact = None if exact_units is None else ExactSums(exact_units)
    weight_grads = _apply_layouts(model, stages, parallel, dims, dtype, compiled, exact)
    pipeline = None
    if num_stages > 1:
        pipeline = Pipeline(
            stages,
            num_stages,
            schedule=schedule,
            pp_mesh=dims.pp_mesh,
            moe=moe,
            dtype=dtype,
            weight_grads=weight_grads,
        )
    return ParallelModel(
        meta_model=meta_model,
        local_model=model,
        stages=stages,
        layouts=decoder_layouts(meta_model, layers, dims.topology, schedule, exact is not None),
        pipeline=pipeline,
        exact=exact,
        float8=float8,
    )


def _apply_layouts(
    model: Decoder,
    stages: dict[int, Decoder],
    parallel: ParallelConfig,
    dims: ParallelDims,
    dtype: torch.dtype,
    compiled: bool,
    exact: ExactSums | None,
) -> WeightGradStore | None:
    """Apply the layouts to this rank's layers, ``model``, and FSDP to each of their ``stages``.

    Returns what delays the weights' gradients; None where nothing does.
    """
    # Expert and tensor parallelism come before FSDP, which shards local shards further. Activation
    # recomputation comes before FSDP as well: then FSDP gathers a layer's parameters once for the
    # recomputed forward and the backward.
    memory = parallel.memory
    # Exact sums take each micro-batch's gradients at the end of its backward.
    delays = parallel.pipeline.schedule.folds_into_v and exact is None
    weight_grads = apply_delayed_weight_grad(model) if delays else None
    apply_expert_parallel(model, dims.ep_mesh, dims.ep_node_meshes, allow_no_experts=True)
    if exact is None:
        apply_tensor_parallel(model, dims.tp_mesh, tensor_parallel_plan(model))
        apply_context_parallel(model, dims.cp_mesh, dims.token_mesh)
    else:
        apply_exact_context(model, dims.token_mesh)
    blocks = list(model.blocks.values())
    if compiled:
        compile_regions(blocks, dims.topology)
    apply_recompute(blocks, memory.recompute, memory.recompute_layer_freq)
    if memory.offload_activations:
        apply_activation_offload(blocks)
    for stage in stages.values():
        apply_fsdp(
            stage,
            dims,
            blocks=list(stage.blocks.values()),
            reshard_after_forward=memory.zero_stage == 3,
            compute_dtype=None if dtype == torch.float32 else dtype,
            sum_replicas=parallel.gradient_compression == "none",
            offload=memory.offload_optimizer,
            exact=exact,
        )
    return weight_grads


def _use_float8(model: Decoder, moe: MoEConfig | None, dense: bool) -> dict[str, Float8Tally]:
    """Let the dense products of ``model`` be in float8, and give each part its tally."""
    tallies = {"dense": Float8Tally()} if dense else {}
    if moe is not None and moe.gemm == "float8":
        tallies["experts"] = Float8Tally()
    for block in model.blocks.values():
        shared = None
        if block.moe is not None:
            block.moe.experts.float8_tally = tallies.get("experts")
            shared = block.moe.shared_experts
        for part in (block.attention, block.ffn, shared):
            if dense and part is not None:
                use_float8(part, tallies["dense"])
    return tallies


def compile_regions(blocks: Sequence[Block], topology: Topology) -> None:
    """Compile attention, dense layers and shared experts with torch.compile, each by itself.

    A region with a collective inside is not compiled: the collective would break the graph. Routed
    experts are not compiled: their numbers of rows change with every call.
    """
    for block in blocks:
        if topology.tp == topology.cp == 1:
            block.attention.compile()
        if topology.tp == 1 and block.ffn is not None:
            block.ffn.compile()
        if block.moe is not None and block.moe.shared_experts is not None:
            block.moe.shared_experts.compile()


def decoder_layouts(
    model: Decoder,
    stages: Sequence[range],
    topology: Topology,
    schedule: PipelineSchedule,
    exact: bool = False,
) -> dict[str, ShardLayout]:
    """The layout of every parameter and buffer, by name; without process groups.

    Args:
        model: the full model, on any device.
        stages: the layers of every pipeline stage.
        topology: the degrees.
        schedule: decides the place along pp of each stage.
        exact: of an exact run, in which FSDP shards parameters over tensor-parallel ranks too.
    """
    place = {
        i: place_of(stage, topology.pp, schedule)
        for stage, layers in enumerate(stages)
        for i in layers
    }

    def place_of_name(name: str) -> int:
        first, number = name.split(".")[:2]
        if first == "layers":
            return place[int(number)]
        return place_of(0 if first == "embed" else len(stages) - 1, topology.pp, schedule)

    return parameter_layouts(model, topology, None if exact else tp_dim, place_of_name)


def tensor_parallel_plan(model: Decoder) -> dict[str, TensorParallelStyle]:
    """The style of each sharded module outside MoE layers, by the module's name."""
    plan: dict[str, TensorParallelStyle] = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if ".moe" in name:
            continue
        if isinstance(module, nn.RMSNorm):
            plan[name] = "norm"
        elif last in _STYLES:
            plan[name] = _STYLES[last]
    return plan


def tp_dim(name: str) -> int | None:
    """The dim that tensor parallelism shards of a parameter outside MoE layers, by its name; None
    where the parameter is replicated."""
    adapted, _, matrix = name.partition(".lora.")
    if matrix:  # a has the columns of the weight, and b has its rows
        style = _STYLES.get(adapted.rpartition(".")[2])
        cut = {"rows": ("a", 1), "columns": ("b", 0)}.get(style or "")
        return cut[1] if cut is not None and cut[0] == matrix else None
    module, _, parameter = name.rpartition(".")
    style = _STYLES.get(module.rpartition(".")[2])
    rows = None if parameter == "bias" else 1
    return {None: None, "shared": None, "rows": rows}.get(style, 0)


_STYLES: dict[str, TensorParallelStyle] = {
    "embed": "embedding", "head": "logits", "attention": "gathered", "ffn": "gathered",
    "wq": "columns", "wk": "columns", "wv": "columns", "wo": "rows",
    "wq_a": "shared", "wq_b": "columns", "wkv_a": "shared", "wkv_b": "columns",
    "w_gate": "columns", "w_up": "columns", "w_down": "rows", "projection": "shared",
}  # fmt: skip
