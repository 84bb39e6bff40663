"""The names that ``parallel`` has; imported when the first of them is asked for."""

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
from parallel.comm_watch import (
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
from parallel.config import ParallelConfig, PipelineSchedule
from parallel.context_parallel import (
    Context,
    SpreadSequence,
    WholeSequence,
    apply_context_parallel,
    sequence_part,
    whole_sequences,
)
from parallel.delayed_weight_grad import (
    Products,
    Put,
    WeightPass,
    apply_weight_pass,
    putting_aside,
    run_products,
)
from parallel.document_mask import Documents
from parallel.dtensor import local_shard
from parallel.expert_parallel import (
    ExpertParallelModule,
    apply_expert_parallel,
    expert_modules,
    expert_parameter_names,
    moe_parameter_names,
)
from parallel.fsdp import apply_fsdp, finish_backward, free_gathered, set_gradient_sync
from parallel.gradient_compression import CompressedSum, GradientCompression
from parallel.gradients import clip_grad_norm, grad_square_sum, scale_gradients
from parallel.layout import ShardLayout, Topology, parse_topology
from parallel.mesh import ParallelDims
from parallel.recompute import Recompute, apply_activation_offload, apply_recompute
from parallel.tensor_parallel import (
    TensorParallel,
    apply_tensor_parallel,
    gather_sequence,
    scatter_sequence,
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
    "PipelineSchedule",
    "Products",
    "Put",
    "Recompute",
    "ShardLayout",
    "SpreadSequence",
    "TensorParallel",
    "Topology",
    "Traffic",
    "Waitable",
    "Watch",
    "WeightPass",
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
    "apply_weight_pass",
    "by_parallelism",
    "clip_grad_norm",
    "exchange_counts",
    "expert_modules",
    "expert_parameter_names",
    "finish_backward",
    "free_gathered",
    "gather_sequence",
    "grad_square_sum",
    "install_watch",
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
    "watch_collectives",
    "watched",
    "whole_sequences",
]
