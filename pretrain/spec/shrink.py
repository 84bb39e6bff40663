"""A spec of a large model, shrunk to one that trains on a laptop in a minute."""

from __future__ import annotations

import copy
from typing import Any

CORPUS = "runs/corpora/stdlib-2048"
"""The prepared corpus of all shrunk specs: the standard library's own source."""

_SIZES: dict[str, dict[str, int]] = {
    "model": {
        "d_model": 64, "d_ff": 128, "num_heads": 4, "head_dim": 16, "vocab_size": 2048,
        "first_k_dense": 1, "num_layers": 3, "kv_lora_rank": 16, "q_lora_rank": 24,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "num_mtp_layers": 1,
    },
    "moe": {
        "d_model": 64, "d_ff": 32, "num_experts": 8, "num_shared_experts": 1, "top_k": 2,
        "n_groups": 2, "topk_groups": 1,
    },
    "batch": {"global_batch_size": 8, "micro_batch_size": 2},
    "train": {"steps": 20, "log_interval_steps": 5},
    "schedule": {"warmup_steps": 4},
}  # fmt: skip
"""The largest value of a field; a smaller one stays, and a field that is left out stays so."""

_KEPT = {
    "data": {"document_mask", "mask_boundary_labels", "packing"},
    "batch": {"global_batch_size", "micro_batch_size"},
    "train": {"steps", "seed", "compile", "exact"},
    "schedule": {"kind", "warmup_steps"},
    "parallel": {"memory", "pipeline", "gradient_compression"},
    "checkpoint": {"compression", "retention"},
}
"""What stays of tables that are about the size, the text, the ranks or the machines."""
_DROPPED = ("run_dir", "init", "launch", "plan", "eval", "sample", "tracking", "metrics")


def shrink(spec: dict[str, Any]) -> dict[str, Any]:
    """The table of a spec with the kinds of everything and small sizes, for a run of a minute.

    Attention, routing, balancing, losses, precision, optimizer and memory options stay what they
    are. Sizes are at most those above. The run has 20 steps on the standard library's source, in
    RUNS/NAME-shrunk, and the degrees of the parallel axes are left to the ranks.

    Args:
        spec: as read from its file; not changed.
    """
    found = {key: copy.deepcopy(value) for key, value in spec.items() if key not in _DROPPED}
    found["name"] = f"{spec.get('name', 'run')}-shrunk"
    for table, kept in _KEPT.items():
        if isinstance(found.get(table), dict):
            found[table] = {k: v for k, v in found[table].items() if k in kept}
    heads = spec.get("model", {}).get("num_heads")
    for table, sizes in _SIZES.items():
        values = found.get(table)
        if not isinstance(values, dict):
            continue
        for field, most in sizes.items():
            if isinstance(values.get(field), int):
                values[field] = min(values[field], most)
    model = found.get("model")
    if isinstance(model, dict) and isinstance(model.get("num_kv_heads"), int):
        grouped = heads is not None and model["num_kv_heads"] < heads
        model["num_kv_heads"] = min(model["num_kv_heads"], 2 if grouped else model["num_heads"])
    if isinstance(found.get("moe"), dict) and found["moe"].get("n_groups") == 1:
        found["moe"].pop("topk_groups", None)
    found["data"] = found.get("data", {}) | {"source": "stdlib", "path": CORPUS, "seq_len": 128}
    found["train"] = found.get("train", {}) | {"log_interval_steps": 5}
    found["checkpoint"] = found.get("checkpoint", {}) | {"interval_steps": 10}
    found["eval"] = {"final_sequences": 32}
    return found
