"""The reference decoder laid out over meshes: what is applied when, and what of it tensor
parallelism cuts.

Attention heads, hidden sizes of dense layers and the vocabulary are cut. A MoE layer is not: it
finds on each rank tokens that are there alone, routes each once, and its experts are spread by
expert parallelism, over these ranks too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from moe import MoEConfig
from parallel import (
    ParallelConfig,
    ParallelDims,
    PipelineSchedule,
    ShardLayout,
    TensorParallel,
    Topology,
    apply_activation_offload,
    apply_context_parallel,
    apply_expert_parallel,
    apply_fsdp,
    apply_recompute,
    apply_tensor_parallel,
    apply_weight_pass,
)
from pretrain.model import Decoder, DecoderLayer, ModelConfig, meta_decoder
from pretrain.parallelize.pipeline import Pipeline
from pretrain.parallelize.schedule import place_of
from pretrain.parallelize.stages import stage_layers
from pretrain.state import parameter_layouts


@dataclass(frozen=True)
class LaidOut:
    """A model over ranks, as one of them has it."""

    whole: Decoder
    """On the meta device: all names, shapes and dtypes."""
    model: Decoder
    """What of it is here."""
    parts: dict[int, Decoder]
    """The same by pipeline stage; these are called."""
    layouts: dict[str, ShardLayout]
    """Of every parameter and buffer, here or not, by name."""
    pipeline: Pipeline | None
    """Where there is more than one stage."""


def lay_out(
    config: ModelConfig,
    moe: MoEConfig | None,
    parallel: ParallelConfig,
    dims: ParallelDims,
    seq_len: int,
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
) -> LaidOut:
    """Build on the meta device what this rank has of a decoder; ``to_empty`` its parts next.

    What cuts parameters comes before FSDP, which shards what is left of them, and recomputation
    before FSDP too, so that what is gathered for a layer serves both of its forwards.

    Products are computed in ``dtype``; parameters are in float32. With ``compiled``, regions of
    the layers go through torch.compile, see :func:`compile_regions`.

    Raises ValueError where there are fewer layers than stages, or experts are not a multiple of
    their ranks.
    """
    memory = parallel.memory
    pp, schedule = dims.topology.pp, parallel.pipeline.schedule
    num_stages = pp * parallel.pipeline.stages_per_rank if pp > 1 else 1
    stages = stage_layers(config, moe, seq_len, num_stages)
    here = dims.pp_mesh.get_local_rank()
    mine = [stage for stage in range(num_stages) if place_of(stage, pp, schedule) == here]
    whole = meta_decoder(config, moe)
    with torch.device("meta"):
        model = Decoder(config, moe, chain.from_iterable(stages[stage] for stage in mine))
    parts = {0: model} if num_stages == 1 else {s: model.part(stages[s]) for s in mine}
    weight_pass = apply_weight_pass(model) if schedule.folds_into_v else None
    apply_expert_parallel(model, dims.ep_mesh, dims.ep_node_meshes)
    apply_tensor_parallel(model, dims.tp_mesh, tensor_parallel_plan(model))
    apply_context_parallel(model, dims.cp_mesh, dims.token_mesh)
    blocks = list(model.blocks.values())
    if compiled:
        compile_regions(blocks, dims.topology)
    apply_recompute(blocks, memory.recompute, memory.recompute_layer_freq)
    if memory.offload_activations:
        apply_activation_offload(blocks)
    compute_dtype = None if dtype == torch.float32 else dtype
    for part in parts.values():
        apply_fsdp(
            part, dims, list(part.blocks.values()), memory.zero_stage == 3, compute_dtype,
            parallel.gradient_compression == "none", memory.prefetch, memory.offload_optimizer,
        )  # fmt: skip
    layouts = decoder_layouts(whole, stages, dims.topology, schedule)
    pipeline = None
    if num_stages > 1:
        pipeline = Pipeline(parts, num_stages, schedule, dims.pp_mesh, moe, dtype, weight_pass)
    return LaidOut(whole, model, parts, layouts, pipeline)


def compile_regions(blocks: Sequence[DecoderLayer], topology: Topology) -> None:
    """Let torch.compile have attention and dense layers, each by itself, where no collective is
    within them: it would break the region in two.

    A MoE layer stays as it is: how many rows an expert gets changes with every call.
    """
    for block in blocks:
        if topology.tp == topology.cp == 1:
            block.attention.compile()
        if topology.tp == 1 and block.ffn is not None:
            block.ffn.compile()
        if block.moe is not None and block.moe.shared_experts is not None:
            block.moe.shared_experts.compile()


def decoder_layouts(
    whole: Decoder, stages: Sequence[range], topology: Topology, schedule: PipelineSchedule
) -> dict[str, ShardLayout]:
    """Who holds which slice of every parameter and buffer, by name: plain arithmetic.

    Args:
        whole: the model, on any device.
        stages: the layers of every pipeline stage.
        topology: the degrees.
        schedule: says where along pp each stage is.
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
        return place[0] if first == "embed" else place[whole.config.num_layers - 1]

    return parameter_layouts(whole, topology, tp_dim, place_of_name)


def tensor_parallel_plan(model: Decoder) -> dict[str, TensorParallel]:
    """By module name: all but the MoE layers, which find a part of the tokens on each rank."""
    plan: dict[str, TensorParallel] = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if ".moe" in name:
            continue
        if isinstance(module, nn.RMSNorm):
            plan[name] = "norm"
        elif last in _HOW:
            plan[name] = _HOW[last]
    return plan


def tp_dim(name: str) -> int | None:
    """The dim of a parameter outside MoE layers that tensor parallelism cuts, by its name."""
    how = _HOW.get(name.removesuffix(".weight").rpartition(".")[2])
    return {None: None, "shared": None, "rows": 1}.get(how, 0)


_HOW: dict[str, TensorParallel] = {
    "embed": "embedding", "head": "logits", "attention": "gathered", "ffn": "gathered",
    "wq": "columns", "wk": "columns", "wv": "columns", "wo": "rows",
    "wq_a": "shared", "wq_b": "columns", "wkv_a": "shared", "wkv_b": "columns",
    "w_gate": "columns", "w_up": "columns", "w_down": "rows",
}  # fmt: skip
