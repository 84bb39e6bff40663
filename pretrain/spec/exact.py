"""What ``train.exact`` does not go with: results would depend on the number of ranks."""

from __future__ import annotations

from moe import check_exact as check_exact_moe
from pretrain.spec.sections import Sections


def check_exact(spec: Sections) -> None:
    """Refuse what cannot have equal bits on every layout.

    Raises ValueError: one line that names the field, its value and the rule.
    """
    if not spec.train.exact:
        return
    parallel, memory = spec.parallel, spec.parallel.memory
    for wrong, field, value, must, why in (
        (parallel.tp > 1, "parallel.tp", parallel.tp, "1",
         "tensor parallelism cuts the sums inside products"),
        (parallel.cp > 1, "parallel.cp", parallel.cp, "1",
         "context parallelism cuts the sums inside attention"),
        (parallel.gradient_compression != "none", "parallel.gradient_compression",
         parallel.gradient_compression, "none", "the rounding is that of sums within a replica"),
        (memory.zero_stage == 1, "parallel.memory.zero_stage", 1, "2 or 3",
         "gradients of several micro-batches would be added before they are rounded"),
        (memory.offload_optimizer, "parallel.memory.offload_optimizer", "true", "false",
         "sums in host memory are not exact yet"),
        (spec.optimizer.kind == "muon", "optimizer.kind", "muon", "adamw",
         "how a product of matrices rounds depends on how many are computed together"),
        (spec.train.compile, "train.compile", "true", "false",
         "a compiled kernel depends on the shapes that were seen before"),
        (spec.precision.compute == "float16", "precision.compute", "float16",
         "float32 or bfloat16", "the loss scale moves the range of the sums"),
        (spec.precision.experts == "float8", "precision.experts", "float8", "compute",
         "a scale is of rows that other micro-batches may have brought"),
        (spec.precision.dense == "float8", "precision.dense", "float8", "compute",
         "sums of products in float8 are not by micro-batch yet"),
    ):  # fmt: skip
        if wrong:
            raise ValueError(f"{field} ({value}) must be {must} with train.exact (true): {why}")
    if spec.moe is not None:
        check_exact_moe(spec.moe)
