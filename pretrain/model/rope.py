"""Rotary position embeddings, with YaRN scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pretrain.model.config import YarnConfig


def rope_frequencies(
    size: int, theta: float, yarn: YarnConfig | None, device: torch.device
) -> Tensor:
    """Radians per position of every pair of a rotary part, [size / 2] float32.

    Pair i has theta ** (-2i / size) (Su et al., arXiv 2104.09864, section 3.2.2). With ``yarn`` the
    frequencies of slow pairs are divided by ``yarn.factor``, those of fast pairs are kept, and a
    linear ramp blends both for the pairs between (arXiv 2309.00071, section 3.2). The ends of the
    ramp are integers, as in the authors' code.
    """
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    frequencies = 1.0 / theta**exponents
    if yarn is None:
        return frequencies
    low: float = max(math.floor(yarn.turns_dim(yarn.beta_fast, size, theta)), 0)
    high: float = min(math.ceil(yarn.turns_dim(yarn.beta_slow, size, theta)), size - 1)
    if low == high:
        high += 0.001
    dims = torch.arange(size // 2, dtype=torch.float32, device=device)
    slowed = ((dims - low) / (high - low)).clamp(0, 1)
    return frequencies / yarn.factor * slowed + frequencies * (1 - slowed)


def rotate(
    x_BHSP: Tensor,
    frequencies: Tensor,
    scale: float = 1.0,
    interleaved: bool = False,
    positions_S: Tensor | None = None,
) -> Tensor:
    """Rotary position embedding (Su et al., arXiv 2104.09864, eq. 34), times ``scale``.

    Pairs are (i, i + P/2), or with ``interleaved`` (2i, 2i + 1). In both cases the first half of
    the result has the first members of the pairs. Queries and keys are permuted in the same way,
    and their inner products do not change. Positions are 0 to S - 1 where ``positions_S`` is None.
    """
    if positions_S is None:
        positions_S = torch.arange(x_BHSP.shape[-2], device=x_BHSP.device)
    angles_SP = torch.outer(positions_S.float(), frequencies)
    cos, sin = angles_SP.cos() * scale, angles_SP.sin() * scale
    x = x_BHSP.float()
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BHSP.dtype)
