"""Process meshes, shard layouts, collectives, and functions that apply layouts to models."""

from parallel.apply import (
    ExpertParallelModule,
    apply_expert_parallel,
    apply_fsdp,
    expert_modules,
    expert_parameter_names,
    finish_backward,
    free_gathered,
    local_shard,
    moe_parameter_names,
    set_gradient_sync,
)
from parallel.collectives import (
    Arriving,
    all_gather_rows,
    all_to_all,
    exchange_counts,
    start_all_to_all,
    start_gather_rows,
    start_scatter_sums,
)
from parallel.config import ParallelConfig, PipelineSchedule
from parallel.context import (
    Context,
    SpreadSequence,
    WholeSequence,
    apply_context_parallel,
    sequence_part,
    whole_sequences,
)
from parallel.documents import Documents
from parallel.gradients import clip_grad_norm, grad_square_sum, scale_gradients
from parallel.layout import ShardLayout, Topology, parse_topology
from parallel.mesh import ParallelDims
from parallel.recompute import apply_recompute
from parallel.tensor import (
    TensorParallel,
    apply_tensor_parallel,
    gather_sequence,
    scatter_sequence,
)
from parallel.weight_pass import (
    Products,
    Put,
    WeightPass,
    apply_weight_pass,
    putting_aside,
    run_products,
)

__all__ = [
    "Arriving",
    "Context",
    "Documents",
    "ExpertParallelModule",
    "ParallelConfig",
    "ParallelDims",
    "PipelineSchedule",
    "Products",
    "Put",
    "ShardLayout",
    "SpreadSequence",
    "TensorParallel",
    "Topology",
    "WeightPass",
    "WholeSequence",
    "all_gather_rows",
    "all_to_all",
    "apply_context_parallel",
    "apply_expert_parallel",
    "apply_fsdp",
    "apply_recompute",
    "apply_tensor_parallel",
    "apply_weight_pass",
    "clip_grad_norm",
    "exchange_counts",
    "expert_modules",
    "expert_parameter_names",
    "finish_backward",
    "free_gathered",
    "gather_sequence",
    "grad_square_sum",
    "local_shard",
    "moe_parameter_names",
    "parse_topology",
    "putting_aside",
    "run_products",
    "scale_gradients",
    "scatter_sequence",
    "sequence_part",
    "set_gradient_sync",
    "start_all_to_all",
    "start_gather_rows",
    "start_scatter_sums",
    "whole_sequences",
]
