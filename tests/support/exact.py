"""Specs that cover ``train.exact``: variants of the model, and the layouts that each is run on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from pretrain.spec.job import JobSpec
from tests.support.layouts import spec_for

# Four micro-batches, the last one short, of numbers of tokens that are no powers of two; a bias,
# several losses, and shared experts.
MOE = {
    "num_experts": 8, "num_shared_experts": 1, "expert_bias": True, "z_loss_coeff": 0.01,
    "aux_loss_coeff": 0.02, "seq_aux_loss_coeff": 0.02,
}  # fmt: skip
LATENT = {
    "num_kv_heads": 4, "qk_norm": "none", "kv_lora_rank": 8, "q_lora_rank": 12,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
FEATURES: dict[str, Any] = {
    "attention_bias": "all", "qk_rope_head_dim": 4, "rope_interleaved": True, "norm_after": True,
    "multipliers": {"embedding": 3.0, "attention": 0.3, "residual": 0.7, "logits": 1.5},
}  # fmt: skip
"""What the decoder has for model families alone, see convoy/convert/hf/."""
VARIANTS: dict[str, dict[str, Any]] = {
    "top_k 2": {},
    "top_k 4": {"moe": {"top_k": 4}},
    "copies": {"moe": {"top_k": 4, "copies": 2}},
    "latent attention": {"model": LATENT, "moe": {"score_func": "sigmoid", "top_k": 3}},
    "document masks": {"data": {"document_mask": True}},
    "capacity that reroutes": {"moe": {"capacity": {"policy": "fixed", "capacity_factor": 1.0}}},
    "capacity that drops": {
        "moe": {
            "top_k": 3,
            "capacity": {"policy": "fixed", "capacity_factor": 0.7, "drop_policy": "probs"},
        }
    },
    "biases, gates, odd sizes": {
        "model": {"d_model": 40, "d_ff": 46, "qk_norm": "all_heads"},
        "moe": {
            "ffn_bias": True, "activation": "gelu", "shared_expert_gate": True, "d_ff": 12,
            "aux_loss_scope": "previous_step",
        },
    },
    "features of families": {"model": FEATURES},
    "recomputed layers": {"parallel": {"memory": {"recompute": "full"}}},
    "recomputed products": {"parallel": {"memory": {"recompute": "selective"}}},
    "recomputed experts": {"moe": {"recompute_experts": True}},
    "gathered parameters kept": {"parallel": {"memory": {"zero_stage": 2}}},
    "gradients kept": {"parallel": {"memory": {"zero_stage": 1}}},
    "muon": {"optimizer": {"kind": "muon"}},
    "muon in bfloat16": {
        "optimizer": {"kind": "muon"}, "precision": {"compute": "bfloat16"}, "model": LATENT,
    },
    "loop": {"moe": {"backend": "loop", "top_k": 3, "ffn_bias": True}},
    "multi-token prediction": {
        "model": {"num_mtp_layers": 2}, "data": {"document_mask": True},
    },
    "weights on inputs": {
        "moe": {"weights_on_input": True, "activation": "swiglu_oai", "activation_limit": 0.5,
                "ffn_bias": True, "router_bias": True},
    },
    "experts choose": {"moe": {"routing": "expert_choice", "expert_bias": False}},
    "sinkhorn": {"moe": {"routing": "sinkhorn", "expert_bias": False}},
    "bfloat16": {"precision": {"compute": "bfloat16"}, "moe": {"top_k": 3}},
    "bfloat16, top_k 2": {"precision": {"compute": "bfloat16"}},
}  # fmt: skip
LAYOUTS = [
    "pp=2", "dp_shard=2", "dp_replicate=2", "dp_shard=2,ep=2", "dp_shard=3,ep=3",
    "dp_replicate=3", "dp_shard=4", "dp_shard=4,ep=2", "dp_shard=4,ep=4",
    "dp_replicate=2,dp_shard=2,ep=2", "pp=2,dp_shard=2,ep=2", "pp=2,dp_replicate=2",
]  # fmt: skip
FEW = ["dp_shard=2,ep=2", "dp_shard=3,ep=3", "dp_shard=4,ep=2", "pp=2,dp_replicate=2"]
"""For variants other than the first three."""
SCHEDULED = ["pp=2", "pp=2,dp_shard=2,ep=2", "pp=2,dp_replicate=2"]
SCHEDULES = ["gpipe", "1f1b", "zbv", "dualpipev"]
SHARED = [
    "cp=2,ep=2", "tp=2,ep=2", "dp_shard=2,cp=2,ep=2", "dp_shard=2,tp=2,ep=4",
    "pp=2,cp=2,ep=2", "dp_replicate=2,tp=2,ep=2", "cp=2,tp=2,ep=4", "tp=4,ep=4",
]  # fmt: skip
"""Layouts in which ranks share sequences."""
FEW_SHARED = ["cp=2,ep=2", "dp_shard=2,tp=2,ep=4", "cp=2,tp=2,ep=4"]
"""For variants other than the first two."""
SCHEDULED_SHARED = ["pp=2,cp=2,ep=2", "pp=2,tp=2,ep=2"]
# Four ranks divide the heads, and the pieces of a sequence have enough tokens.
OF_SHARED = {"model": {"num_kv_heads": 4}, "data": {"seq_len": 256}}
# Three ranks divide the experts and the sizes.
BY_THREE = {"model": {"d_model": 48, "d_ff": 48}, "moe": {"num_experts": 12}}


CELLS = [
    *((variant, layout) for variant in list(VARIANTS)[:3] for layout in LAYOUTS),
    *((variant, layout) for variant in list(VARIANTS)[3:] for layout in FEW),
    ("multi-token prediction", "pp=2,dp_shard=2,ep=2 zbv"),
    *(("top_k 2", f"{layout} {schedule}") for layout in SCHEDULED for schedule in SCHEDULES),
    *((variant, layout) for variant in list(VARIANTS)[:2] for layout in SHARED),
    *((variant, layout) for variant in list(VARIANTS)[3:] for layout in FEW_SHARED),
    *(("top_k 2", f"{layout} {schedule}") for layout in SCHEDULED_SHARED for schedule in SCHEDULES),
]
"""Variants and layouts whose bits are compared with one process."""


def sections_of(variant: str, layout: str) -> tuple[str, dict[str, Any]]:
    """The sections of a variant on a layout, and a name for what one process does with them."""
    if "cp=" in layout or "tp=" in layout:
        return f"{variant} in shared sequences", sections_of_shared(variant)
    if "=3" in layout:
        return f"{variant} by three", _over(BY_THREE, variant)
    return variant, copy.deepcopy(VARIANTS[variant])


def sections_of_shared(variant: str) -> dict[str, Any]:
    """The sections of a variant, of sizes that ranks divide which share sequences."""
    sections = _over(OF_SHARED, variant)
    if sections["model"].get("d_model") == 40:
        sections["model"]["head_dim"] = 12  # heads of 10 are refused
    return sections


def _over(sizes: dict[str, Any], variant: str) -> dict[str, Any]:
    """The sections of a variant, laid over ``sizes``."""
    sections = copy.deepcopy(VARIANTS[variant])
    for section, values in sizes.items():
        sections[section] = {**values, **sections.get(section, {})}
    return sections


def exact_spec(folder: Path, data: dict[str, str], layout: str, /, **sections: Any) -> JobSpec:
    """The spec of a run with exact sums, under ``folder``, with sections laid over it."""
    s: dict[str, Any] = {
        "train": {"exact": True, "steps": 60}, "model": {"num_layers": 4},
        "batch": {"global_batch_size": 10, "micro_batch_size": 3},
        "checkpoint": {"reshard_on_load": True},
    }  # fmt: skip
    for name, values in [("moe", MOE), *copy.deepcopy(sections).items()]:
        s[name] = {**s.get(name, {}), **values}
    folder.mkdir(exist_ok=True)
    return spec_for(folder, {**data, **s.pop("data", {})}, layout, **s)
