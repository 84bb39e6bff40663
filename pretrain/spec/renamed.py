"""Former names of the spec's fields, and the present ones.

A spec file with a former name is refused, with the present name. Specs that checkpoints hold are
brought up to date by :func:`upgraded`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

# As MoEConfig.RENAMED and ParallelConfig.RENAMED, whose modules need the seconds of torch's import.
MOE_RENAMED = {
    "renormalize": "norm_topk_prob",
    "selection": "routing",
    "load_balance_weight": "aux_loss_coeff",
    "load_balance_scope": "aux_loss_scope",
    "sequence_balance_weight": "seq_aux_loss_coeff",
    "z_loss_weight": "z_loss_coeff",
    "capacity_policy": "capacity.policy",
    "capacity_factor": "capacity.capacity_factor",
    "overflow": "capacity.drop_policy",
    "max_received_rows": "capacity.max_tokens_per_rank",
    "rank_capacity_factor": "capacity.rank_capacity_factor",
    "capacity_floor": "capacity.floor",
    "capacity_ceiling": "capacity.ceiling",
    "capacity_hysteresis": "capacity.hysteresis",
    "dispatch_chunks": "overlap_chunks",
    "max_tokens": "max_tokens_per_call",
}
PARALLEL_RENAMED = {
    "pp_schedule": "pipeline.schedule",
    "pp_stages_per_rank": "pipeline.stages_per_rank",
    "zero": "memory.zero_stage",
    "prefetch": "memory.prefetch",
    "offload_optimizer": "memory.offload_optimizer",
    "offload_activations": "memory.offload_activations",
    "recompute": "memory.recompute",
    "recompute_every": "memory.recompute_layer_freq",
}

RENAMED: dict[str, str] = {
    **{f"moe.{old}": f"moe.{new}" for old, new in MOE_RENAMED.items()},
    **{f"parallel.{old}": f"parallel.{new}" for old, new in PARALLEL_RENAMED.items()},
    "train.global_batch_size": "batch.global_batch_size",
    "train.micro_batch_size": "batch.micro_batch_size",
    "train.ramp_batch_size": "batch.batch_size_rampup.start",
    "train.ramp_tokens": "batch.batch_size_rampup.tokens",
    "train.precision": "precision.compute",
    "train.loss_scale": "precision.loss_scale",
    "train.loss_scale_growth_steps": "precision.loss_scale_growth_steps",
    "train.init_from": "init.checkpoint",
    "train.init_rename": "init.rename",
    "train.init_missing": "init.strict",
    "train.eval_interval_steps": "eval.interval_steps",
    "train.eval_sequences": "eval.sequences",
    "train.replay_capacity_plans": "moe.capacity.replay_log",
    "checkpoint.keep": "checkpoint.retention.keep",
    "checkpoint.keep_every": "checkpoint.retention.keep_every",
    "checkpoint.keep_best": "checkpoint.retention.keep_best",
    "checkpoint.grace_seconds": "checkpoint.retention.grace_seconds",
    "checkpoint.memory": "checkpoint.tiers.memory",
    "checkpoint.memory_path": "checkpoint.tiers.memory_path",
    "checkpoint.peer": "checkpoint.tiers.replicate_to_peer",
    "checkpoint.linger_seconds": "checkpoint.tiers.memory_retention_seconds",
    "checkpoint.local_path": "checkpoint.tiers.local_path",
    "checkpoint.shared_every": "checkpoint.tiers.shared_interval",
    "checkpoint.read_once": "checkpoint.broadcast_on_load",
    "checkpoint.on_topology_change": "checkpoint.reshard_on_load",
}
"""Former dotted paths, with the present ones."""

VALUES: dict[str, dict[Any, Any]] = {
    "moe.routing": {"forced_balance": "force_load_balance"},
    "moe.dispatcher": {"fixed_split": "padded_all_to_all"},
    "moe.capacity.drop_policy": {"drop_by_score": "probs", "drop_by_position": "position"},
    "init.strict": {"refuse": True, "keep": False},
    "checkpoint.reshard_on_load": {"abort": False, "reshard": True},
}
"""Former values, with the present ones, by the present path of their field."""

REMOVED = {
    "moe.capacity_smoothing": "the test on speeds needs no smoothing",
    "moe.capacity.smoothing": "the test on speeds needs no smoothing",
}
"""Former fields that have no successor, with the reason."""

_OF_POLICY = {
    "dropless": ("max_tokens_per_rank",),
    "fixed": ("capacity_factor", "drop_policy"),
    "straggler_aware": (
        "capacity_factor", "rank_capacity_factor", "floor", "ceiling", "hysteresis", "replay_log",
    ),
}  # fmt: skip


def former_names(spec: Mapping[str, Any]) -> Iterator[str]:
    """One line for each former name or value in a table of sections: what the present one is."""
    for old, new in RENAMED.items():
        found, value = _look_up(spec, old)
        if found:
            mapped = VALUES.get(new, {})
            now = f" = {_toml(mapped[value])}" if _is_key(value, mapped) else ""
            yield f"{old} is now {new}{now}"
    for old, why in REMOVED.items():
        if _look_up(spec, old)[0]:
            yield f"{old} must be left out: {why}"
    for path, values in VALUES.items():
        found, value = _look_up(spec, path)
        if found and _is_key(value, values):
            yield f"{path} ({value}) is now {_toml(values[value])}"


def upgraded(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A spec that a checkpoint holds, with present names and values; the argument is unchanged.

    Args:
        spec: a resolved spec as plain JSON, of this version or of an earlier one.
    """
    new: dict[str, Any] = copy.deepcopy(dict(spec))
    capacity = _pop_capacity(new)
    for old, path in RENAMED.items():
        found, value = _look_up(new, old)
        if found:
            *sections, field = old.split(".")
            del _table(new, sections)[field]
            _put(new, path, value)
    for path, values in VALUES.items():
        found, value = _look_up(new, path)
        if found and _is_key(value, values):
            _put(new, path, values[value])
    if capacity is not None:
        new["moe"]["capacity"] = capacity
    if isinstance(new.get("optimizer"), dict):
        new["optimizer"].setdefault("kind", "adamw")  # the only one of an earlier version
    _drop_unused(new)
    return new


def _pop_capacity(spec: dict[str, Any]) -> dict[str, Any] | None:
    """The capacity of an earlier version's spec, with the fields of its policy only."""
    moe, train = spec.get("moe"), spec.get("train")
    replay = train.pop("replay_capacity_plans", "") if isinstance(train, dict) else ""
    if not isinstance(moe, dict) or "capacity_policy" not in moe:
        return None
    fields = {
        new.removeprefix("capacity."): moe.pop(old)
        for old, new in MOE_RENAMED.items()
        if new.startswith("capacity.") and old in moe
    }
    fields["replay_log"] = replay or None
    if "drop_policy" in fields:
        drop = VALUES["moe.capacity.drop_policy"]
        fields["drop_policy"] = drop.get(fields["drop_policy"], fields["drop_policy"])
    names = ("policy", *_OF_POLICY[fields["policy"]])
    return {name: fields[name] for name in names if name in fields}


def _drop_unused(spec: dict[str, Any]) -> None:
    """Remove former fields without a successor, and a ramp-up of 0 sequences and 0 tokens, by which
    an earlier version said that there is none."""
    for old in REMOVED:
        if _look_up(spec, old)[0]:
            *sections, field = old.split(".")
            del _table(spec, sections)[field]
    batch = spec.get("batch")
    ramp = batch.get("batch_size_rampup") if isinstance(batch, dict) else None
    if isinstance(batch, dict) and ramp is not None and not ramp.get("start"):
        batch["batch_size_rampup"] = None


def _look_up(spec: Mapping[str, Any], path: str) -> tuple[bool, Any]:
    """Whether a table of sections has a field, and its value."""
    value: Any = spec
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False, None
        value = value[part]
    return True, value


def _table(spec: dict[str, Any], sections: list[str]) -> dict[str, Any]:
    table = spec
    for section in sections:
        table = table.setdefault(section, {})
    return table


def _put(spec: dict[str, Any], path: str, value: Any) -> None:
    *sections, field = path.split(".")
    _table(spec, sections)[field] = value


def _is_key(value: Any, values: Mapping[Any, Any]) -> bool:
    return isinstance(value, str) and value in values


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
