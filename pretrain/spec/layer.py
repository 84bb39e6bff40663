"""The fields of a MoE layer: those of ``[moe]``, and those that other tables of a spec say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moe import DISPATCHER


def moe_fields(spec: Mapping[str, Any]) -> Any:
    """The fields of ``MoEConfig`` that a spec says; ``moe`` itself where that is no table.

    Values that fit no field are left out: the checks of their own tables are clearer.

    Args:
        spec: tables as plain JSON; tables may be missing.
    """
    moe = spec.get("moe")
    if not isinstance(moe, dict):
        return moe
    tables: list[dict[str, Any]] = [
        table if isinstance(table := spec.get(name), dict) else {}
        for name in ("model", "batch", "data", "precision")
    ]
    model, batch, data, precision = tables
    fields = {**moe, "d_model": model.get("d_model")}
    if precision.get("experts") in ("float8", "fp8"):
        fields["gemm"] = "float8"
    sizes = [batch.get("micro_batch_size"), data.get("seq_len")]
    if all(isinstance(size, int) for size in sizes) and _takes_fixed_size(moe.get("dispatcher")):
        fields["max_tokens_per_call"] = math.prod(sizes)
    return fields


def _takes_fixed_size(dispatcher: Any) -> bool:
    try:
        return isinstance(dispatcher, str) and DISPATCHER.traits(dispatcher).fixed_size
    except ValueError:
        return False  # the check of moe.dispatcher says why
