"""The names that ``parallel`` has; imported when the first of them is asked for.

Who writes an own dispatcher, monitor or attention finds the inner names in the modules
``parallel.collectives``, ``parallel.comm_watch`` and ``parallel.context_parallel``.
"""

from parallel.cached_sequence import full_sequences
from parallel.collectives import all_gather_rows, all_reduce
from parallel.comm_watch import (
    CollectiveKind,
    CommMonitor,
    CommStats,
    by_parallelism,
    monitor_collectives,
)
from parallel.config import ParallelConfig, PipelineSchedule
from parallel.context_parallel import apply_context_parallel, local_sequence
from parallel.delayed_weight_grad import WeightGradStore, apply_delayed_weight_grad
from parallel.document_mask import Documents
from parallel.dtensor import local_shard
from parallel.exact import on_loss_grid
from parallel.exact_sums import ExactSums
from parallel.expert_parallel import (
    apply_expert_parallel,
    expert_parameter_names,
    moe_parameter_names,
)
from parallel.fsdp import (
    apply_fsdp,
    finish_backward,
    free_gathered,
    gradients_seen,
    set_gradient_sync,
)
from parallel.gradient_compression import CompressedSum
from parallel.gradients import clip_grad_norm, grad_square_sum, scale_gradients
from parallel.layout import ShardLayout, Topology, parse_topology
from parallel.mesh import ParallelDims
from parallel.recompute import apply_activation_offload, apply_recompute
from parallel.tensor_digest import digest
from parallel.tensor_parallel import TensorParallelStyle, apply_tensor_parallel
from parallel.whole_matrices import WholeMatrices

__all__ = [
    "CollectiveKind",
    "CommMonitor",
    "CommStats",
    "CompressedSum",
    "Documents",
    "ExactSums",
    "ParallelConfig",
    "ParallelDims",
    "PipelineSchedule",
    "ShardLayout",
    "TensorParallelStyle",
    "Topology",
    "WeightGradStore",
    "WholeMatrices",
    "all_gather_rows",
    "all_reduce",
    "apply_activation_offload",
    "apply_context_parallel",
    "apply_delayed_weight_grad",
    "apply_expert_parallel",
    "apply_fsdp",
    "apply_recompute",
    "apply_tensor_parallel",
    "by_parallelism",
    "clip_grad_norm",
    "digest",
    "expert_parameter_names",
    "finish_backward",
    "free_gathered",
    "full_sequences",
    "grad_square_sum",
    "gradients_seen",
    "local_sequence",
    "local_shard",
    "moe_parameter_names",
    "monitor_collectives",
    "on_loss_grid",
    "parse_topology",
    "scale_gradients",
    "set_gradient_sync",
]
