"""What grouped_gemm 0.3.0 compiles with CUDA (``csrc/grouped_gemm.cu``, built without CUTLASS), on
a CPU: a product for each expert, with the checks that it has.

Two differ. Tensors are on the CPU. The compiled one takes bfloat16 alone; here ``DTYPES`` has
float32 too, for as long as a test puts it there, so that sums can be compared closely.
"""

import torch
from torch import Tensor

DTYPES = {torch.bfloat16}
"""What is taken."""
CALLS: list[tuple[Tensor, bool]] = []
"""The tensors of weights, or of gradients of outputs, as they came, and ``trans_b``."""


def _check(held: bool, what: str) -> None:
    if not held:
        raise RuntimeError(f"grouped_gemm_backend: {what}")


def gmm(a: Tensor, b: Tensor, c: Tensor, sizes: Tensor, trans_a: bool, trans_b: bool) -> None:
    """c = a b for each expert's rows; with ``trans_a`` a^T b, for each expert a matrix of c."""
    CALLS.append((b, trans_b))
    _check(not (trans_a and trans_b), "not both transposed")
    _check(sizes.device.type == "cpu" and sizes.dtype == torch.int64, "int64 sizes on the host")
    _check(sizes.ndim == 1 and a.ndim == 2, "one size for each expert, rows of two dims")
    _check({a.dtype, b.dtype, c.dtype} <= DTYPES, f"{a.dtype}, {b.dtype}, {c.dtype}")
    _check(a.is_contiguous() and b.is_contiguous() and c.is_contiguous(), "contiguous")
    _check(int(sizes.sum()) == len(a), "all rows have an expert")
    counts = sizes.tolist()
    if trans_a:
        _check(b.ndim == 2 and len(b) == len(a), "as many rows")
        _check(c.shape == (len(counts), a.shape[1], b.shape[1]), "the shape of c")
        for out, x, y in zip(c, a.split(counts), b.split(counts), strict=True):
            torch.matmul(x.t(), y, out=out)
        return
    _check(b.ndim == 3 and len(b) == len(counts), "one matrix for each expert")
    w = b.mT if trans_b else b
    _check(w.shape[1] == a.shape[1], "rows of the matrices' length")
    _check(c.shape == (len(a), w.shape[2]), "the shape of c")
    for out, x, matrix in zip(c.split(counts), a.split(counts), w, strict=True):
        torch.matmul(x, matrix, out=out)
