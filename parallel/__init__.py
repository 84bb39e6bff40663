"""Process meshes, shard layouts, collectives, and functions that apply layouts to models."""

from parallel.apply import (
    ExpertParallelModule,
    apply_expert_parallel,
    apply_fsdp,
    expert_modules,
    expert_parameter_names,
    free_gathered,
    local_shard,
    moe_parameter_names,
    set_gradient_sync,
)
from parallel.collectives import (
    Arriving,
    all_gather_rows,
    all_reduce,
    all_to_all,
    exchange_counts,
    start_all_to_all,
    start_gather_rows,
    start_scatter_sums,
)
from parallel.config import ParallelConfig
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
from parallel.recompute import apply_activation_offload, apply_recompute
from parallel.replicas import CompressedSum, GradientCompression
from parallel.tensor import (
    TensorParallel,
    apply_tensor_parallel,
    gather_sequence,
    scatter_sequence,
)
from parallel.watch import (
    PARALLELISMS,
    Kind,
    Parallelism,
    Traffic,
    Waitable,
    Watch,
    by_parallelism,
    install_watch,
    watch_collectives,
    watched,
)

__all__ = [
    "PARALLELISMS",
    "Arriving",
    "CompressedSum",
    "Context",
    "Documents",
    "ExpertParallelModule",
    "GradientCompression",
    "Kind",
    "ParallelConfig",
    "ParallelDims",
    "Parallelism",
    "ShardLayout",
    "SpreadSequence",
    "TensorParallel",
    "Topology",
    "Traffic",
    "Waitable",
    "Watch",
    "WholeSequence",
    "all_gather_rows",
    "all_reduce",
    "all_to_all",
    "apply_activation_offload",
    "apply_context_parallel",
    "apply_expert_parallel",
    "apply_fsdp",
    "apply_recompute",
    "apply_tensor_parallel",
    "by_parallelism",
    "clip_grad_norm",
    "exchange_counts",
    "expert_modules",
    "expert_parameter_names",
    "free_gathered",
    "gather_sequence",
    "grad_square_sum",
    "install_watch",
    "local_shard",
    "moe_parameter_names",
    "parse_topology",
    "scale_gradients",
    "scatter_sequence",
    "sequence_part",
    "set_gradient_sync",
    "start_all_to_all",
    "start_gather_rows",
    "start_scatter_sums",
    "watch_collectives",
    "watched",
    "whole_sequences",
]
