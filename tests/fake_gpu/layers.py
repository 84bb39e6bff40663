"""MoE layers on a fake GPU: what a forward and a backward launch, move and wait for.

The cases have the sizes of Qwen3-30B-A3B's layer and 4,096 tokens a rank.
"""

from __future__ import annotations

from typing import Any

import torch

from moe import MoEConfig, MoELayer
from parallel import ParallelDims, Topology, apply_expert_parallel
from tests.support.fake_gpu import shapes

SIZES = {"d_model": 2048, "d_ff": 768, "num_experts": 128, "top_k": 8}
TOKENS = 4096

# The options of a layer, and `dtype` where it is not bfloat16.
ALONE: dict[str, dict[str, Any]] = {
    "plain": {},
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "loop": {"backend": "loop", "num_experts": 16},
    "recompute_experts": {"recompute_experts": True},
    "ffn_bias": {"ffn_bias": True},
    "geglu": {"activation": "geglu"},
    "gelu": {"activation": "gelu"},
    "relu2": {"activation": "relu2"},
    "shared experts with a gate": {"num_shared_experts": 2, "shared_expert_gate": True},
    "float8 experts": {"gemm": "float8", "num_experts": 16},
    "float8 dispatch": {"dispatch_dtype": "float8"},
    "DeepSeek-V3": {
        "score_func": "sigmoid", "expert_bias": True, "n_groups": 8, "topk_groups": 4,
        "topk_per_group": 2, "norm_topk_prob": True, "route_scale": 2.5, "seq_aux_loss_coeff": 1e-4,
    },
    "expert_choice": {"routing": "expert_choice"},
    "sinkhorn": {"routing": "sinkhorn"},
    "force_load_balance": {"routing": "force_load_balance"},
    "softmax_after_topk": {"softmax_after_topk": True},
    "jitter": {"input_jitter": 0.01},
    "z loss": {"z_loss_coeff": 1e-3},
    "fixed, probs": {"capacity": {"policy": "fixed", "drop_policy": "probs"}},
    "fixed, position": {"capacity": {"policy": "fixed", "drop_policy": "position"}},
    "fixed, reroute": {"capacity": {"policy": "fixed", "drop_policy": "reroute"}},
    "max_tokens_per_rank": {
        "capacity": {"policy": "dropless", "max_tokens_per_rank": 2 * TOKENS * 8}
    },
    "straggler_aware": {"capacity": {"policy": "straggler_aware"}},
    "previous_step": {"aux_loss_scope": "previous_step"},
    "global_batch": {"aux_loss_scope": "global_batch"},
}  # fmt: skip
PADDED = {"dispatcher": "padded_all_to_all", "max_tokens_per_call": TOKENS}
EXPERT_PARALLEL: dict[str, dict[str, Any]] = {
    "all_to_all": {},
    "all_to_all, float8 on the wire": {"dispatch_dtype": "float8"},
    "all_to_all, 4 chunks": {"overlap_chunks": 4},
    "all_to_all, float32": {"dtype": "float32"},
    "all_to_all, float8 experts": {"gemm": "float8"},
    "padded": PADDED,
    "padded, fixed capacity": PADDED
    | {"capacity": {"policy": "fixed", "drop_policy": "probs", "capacity_factor": 1.25}},
    "padded, 2 chunks": PADDED | {"overlap_chunks": 2},
    "all_gather": {"dispatcher": "all_gather"},
    "hierarchical": {"dispatcher": "hierarchical"},
    "hierarchical, float8 on the wire, 2 chunks": {
        "dispatcher": "hierarchical", "dispatch_dtype": "float8", "overlap_chunks": 2,
    },
    "max_tokens_per_rank": {
        "capacity": {"policy": "dropless", "max_tokens_per_rank": 2 * TOKENS * 8}
    },
    "even rows, with copies": {"copies": 2},
    "straggler_aware": {"capacity": {"policy": "straggler_aware"}},
}  # fmt: skip
ONE_NODE = {name: each for name, each in EXPERT_PARALLEL.items() if "hierarchical" not in name}

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"1 rank: {name}": (1, options) for name, options in ALONE.items()},
    **{f"ep 8: {name}": (8, options) for name, options in ONE_NODE.items()},
    **{f"ep 64: {name}": (64, options) for name, options in EXPERT_PARALLEL.items()},
}
"""By name: the ranks, all of which share the experts, and the layer's options."""


def measure(name: str) -> dict[str, Any]:
    """The counts of a case's forward and backward."""
    world, options = CASES[name]
    options = dict(options)
    dtype = getattr(torch, options.pop("dtype", "bfloat16"))
    shapes.start(world)
    dims = ParallelDims.build(Topology(dp_shard=world, ep=world), "cuda", shapes.DEVICES)
    with shapes.machine() as tally:
        with torch.device("cuda"):
            layer = MoELayer(MoEConfig(**(SIZES | options)))
            x = torch.randn(TOKENS, SIZES["d_model"], dtype=dtype, requires_grad=True)
        shapes.cast(layer, dtype)
        if world > 1:
            apply_expert_parallel(layer, dims.ep_mesh, dims.ep_node_meshes)
        tally.take()
        out = layer(x)
        forward = tally.take()
        (out.hidden.float().sum() + out.aux.aux_loss).backward()
        return {"forward": forward, "backward": tally.take()}
