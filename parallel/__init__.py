"""Process meshes, shard layouts, collectives, and functions that apply layouts to models."""

from parallel.apply import (
    ExpertParallelModule,
    apply_expert_parallel,
    apply_fsdp,
    expert_modules,
    expert_parameter_names,
    free_gathered,
    local_shard,
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
from parallel.config import ParallelConfig
from parallel.context import (
    Context,
    SpreadSequence,
    WholeSequence,
    apply_context_parallel,
    sequence_part,
    whole_sequences,
)
from parallel.layout import ShardLayout, Topology, parse_topology
from parallel.mesh import ParallelDims
from parallel.recompute import apply_recompute

__all__ = [
    "Arriving",
    "Context",
    "ExpertParallelModule",
    "ParallelConfig",
    "ParallelDims",
    "ShardLayout",
    "SpreadSequence",
    "Topology",
    "WholeSequence",
    "all_gather_rows",
    "all_to_all",
    "apply_context_parallel",
    "apply_expert_parallel",
    "apply_fsdp",
    "apply_recompute",
    "exchange_counts",
    "expert_modules",
    "expert_parameter_names",
    "free_gathered",
    "local_shard",
    "parse_topology",
    "sequence_part",
    "set_gradient_sync",
    "start_all_to_all",
    "start_gather_rows",
    "start_scatter_sums",
    "whole_sequences",
]
