"""What ``train.exact`` does not go with: results would depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable

from moe import check_exact as check_exact_moe
from pretrain.spec.sections import Sections
from router import LEAST_ROWS


def check_exact(spec: Sections) -> None:
    """Refuse what cannot have equal bits on every layout.

    Raises ValueError: one line that names the field, its value and the rule.
    """
    if not spec.train.exact:
        return
    parallel, memory = spec.parallel, spec.parallel.memory
    _refuse("train.exact (true)", (
        (parallel.gradient_compression != "none", "parallel.gradient_compression",
         parallel.gradient_compression, "none", "the rounding is that of sums within a replica"),
        (memory.offload_optimizer, "parallel.memory.offload_optimizer", "true", "false",
         "sums in host memory are not exact yet"),
        (spec.train.compile, "train.compile", "true", "false",
         "a compiled kernel depends on the shapes that were seen before"),
        (spec.precision.compute == "float16", "precision.compute", "float16",
         "float32 or bfloat16", "the loss scale moves the range of the sums"),
        (spec.precision.experts == "float8", "precision.experts", "float8", "compute",
         "a scale is of rows that other micro-batches may have brought"),
        (spec.precision.dense == "float8", "precision.dense", "float8", "compute",
         "sums of products in float8 are not by micro-batch yet"),
    ))  # fmt: skip
    if spec.moe is not None:
        check_exact_moe(spec.moe)
    if parallel.cp * parallel.tp > 1:
        _check_sequences(spec)


def _check_sequences(spec: Sections) -> None:
    """Refuse what cannot have one rank's bits where ranks share a sequence."""
    ranks, model, moe = spec.parallel.cp * spec.parallel.tp, spec.model, spec.moe
    rows, multiple = 2 * ranks * LEAST_ROWS, f"a multiple of {ranks}"
    heads = "attention exchanges heads for tokens"
    values = model.v_head_dim or model.qk_head_dim
    sizes = "bits of other heads depend on how many are computed together"
    given = f"train.exact (true) and parallel.cp x tp ({spec.parallel.cp} x {spec.parallel.tp})"
    _refuse(given, (
        (model.num_heads % ranks, "model.num_heads", model.num_heads, multiple, heads),
        (model.num_kv_heads % ranks, "model.num_kv_heads", model.num_kv_heads, multiple, heads),
        (model.qk_head_dim % 4, "model.qk_head_dim", model.qk_head_dim, "a multiple of 4", sizes),
        (values != model.qk_head_dim and (values % 4 or model.qk_head_dim < 12),
         "model.v_head_dim", values, f"qk_head_dim ({model.qk_head_dim}), or a multiple of 4 with "
         f"qk_head_dim of at least 12", sizes),
        (spec.data.seq_len % rows, "data.seq_len", spec.data.seq_len, f"a multiple of {rows}",
         f"how fewer rows than {LEAST_ROWS} round depends on their number, and a rank has two "
         f"pieces of a sequence"),
        (spec.data.packing == "best_fit", "data.packing", spec.data.packing, "concat",
         "padding is taken out of sums over tokens, and a rank has a part of each sequence's"),
        (spec.data.mask_boundary_labels, "data.mask_boundary_labels", "true", "false",
         "a masked last token looks like padding"),
        (moe is not None and spec.parallel.ep % ranks, "parallel.ep", spec.parallel.ep,
         multiple, "an expert's rows of a micro-batch must meet on one rank"),
        (moe is not None and moe.copies, "moe.copies", moe and moe.copies, "0",
         "a copy would have a part of a micro-batch's rows"),
        (spec.tune is not None and spec.tune.lora is not None, "tune.lora", "given", "left out",
         "adapters' gradients are not of the whole micro-batch yet"),
    ))  # fmt: skip


def _refuse(given: str, rules: Iterable[tuple[object, str, object, str, str]]) -> None:
    """Raise ValueError for the first rule that is broken: of each whether it is, the field, its
    value, what the value must be with what is ``given``, and why."""
    for broken, field, value, must, why in rules:
        if broken:
            raise ValueError(f"{field} ({value}) must be {must} with {given}: {why}")
