"""Products in float8 by loops over single numbers: slow, literal, and without torch's float8.

The numbers of e4m3 are listed from their definition: 4 bits of exponent with bias 7, 3 of mantissa,
subnormals, no infinity, and the last code a NaN (Micikevicius et al., arXiv 2209.05433, table 1).
"""

from __future__ import annotations

import bisect
import math

import numpy as np

Matrix = list[list[float]]
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]

E4M3 = [0.0] + [m * 2.0**-9 for m in range(1, 8)] + [
    (8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
]  # fmt: skip
"""The numbers of e4m3 that are not negative, by their code."""


def rounded(value: float) -> float:
    """The nearest number of e4m3; of two, the one with an even code."""
    if math.isnan(value):
        return math.nan
    size = abs(value)
    above = bisect.bisect_left(E4M3, size)
    if above == len(E4M3):
        return math.copysign(E4M3[-1], value)
    below = max(above - 1, 0)
    low, high = size - E4M3[below], E4M3[above] - size
    code = below if low < high or (low == high and below % 2 == 0) else above
    return math.copysign(E4M3[code], value)


def quantized(x: np.ndarray, rows: int) -> tuple[Matrix, Matrix]:
    """Numbers and their scales, [M, K] each, for tiles of ``rows`` x 128."""
    M, K = x.shape
    values, scales = [[0.0] * K for _ in range(M)], [[0.0] * K for _ in range(M)]
    for top in range(0, M, rows):
        for left in range(0, K, 128):
            places = [
                (i, k)
                for i in range(top, min(top + rows, M))
                for k in range(left, min(left + 128, K))
            ]
            sizes = [abs(np.float32(x[place])) for place in places]
            amax = np.float32(math.nan) if any(map(np.isnan, sizes)) else max(sizes)
            scale = amax / np.float32(448)
            scale = np.float32(2.0**-126) if scale < np.float32(2.0**-126) else scale
            for i, k in places:
                with np.errstate(invalid="ignore"):
                    values[i][k] = rounded(float(np.float32(x[i, k]) / scale))
                scales[i][k] = float(scale)
    return values, scales


def product(a: np.ndarray, b: np.ndarray, b_rows: int) -> np.ndarray:
    """[M, K] times the transpose of [N, K], whose tiles have ``b_rows`` rows, in float32."""
    (x, x_scales), (y, y_scales) = quantized(a, 1), quantized(b, b_rows)
    out = np.zeros((len(a), len(b)), np.float32)
    for i in range(len(a)):
        for j in range(len(b)):
            total = np.float32(0)
            for left in range(0, a.shape[1], 128):
                span = range(left, min(left + 128, a.shape[1]))
                # math.fsum has the exact sum, and rounds once.
                piece = np.float32(math.fsum(x[i][k] * y[j][k] for k in span))
                scaled = piece * np.float32(x_scales[i][left]) * np.float32(y_scales[j][left])
                total = np.float32(total + scaled)
            out[i, j] = total
    return out


def linear(
    x: np.ndarray, w: np.ndarray, dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """y = x w^T, and the gradients of x and w for dy, of [T, D], [F, D] and [T, F]."""
    return product(x, w, 128), product(dy, w.T, 128), product(dy.T, x.T, 1)
