"""Rotary position embedding (Su et al., arXiv 2104.09864), with YaRN's frequencies.

Legend: B batch, S tokens, H heads; sizes of a head: C of a query or key, P of its rotary part.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.kernels import has_kernel
from pretrain.kernels import rotate as rotate_in_one_pass
from pretrain.model.config import AttentionConfig, YarnConfig


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


class Turns(NamedTuple):
    """By how much pairs are turned at each position."""

    cos_SP: Tensor
    """[S, P / 2] float32: the cosine of each pair's angle, times the config's magnitude."""
    sin_SP: Tensor
    """[S, P / 2] float32: the sine, likewise."""


def turns(frequencies: Tensor, positions_S: Tensor, scale: float = 1.0) -> Turns:
    """The turns of pairs with some frequencies (arXiv 2104.09864, eq. 34), times ``scale``."""
    angles_SP = torch.outer(positions_S.float(), frequencies)
    cos_SP, sin_SP = angles_SP.cos(), angles_SP.sin()
    return Turns(cos_SP, sin_SP) if scale == 1.0 else Turns(cos_SP * scale, sin_SP * scale)


def turns_of(config: AttentionConfig, positions_S: Tensor) -> Turns:
    """The turns of a config: its frequencies and magnitude, and the rotary part of its heads."""
    size = config.qk_rope_head_dim or config.qk_head_dim
    frequencies = rope_frequencies(size, config.rope_theta, config.yarn, positions_S.device)
    scale = 1.0 if config.yarn is None else config.yarn.rotary_scale
    return turns(frequencies, positions_S, scale)


def rotate(x_BHSP: Tensor, by: Turns, interleaved: bool = False) -> Tensor:
    """Queries or keys, turned by their positions.

    Pairs are (i, i + P/2), or with ``interleaved`` (2i, 2i + 1). In both cases the first half of
    the result has the first members of the pairs. Queries and keys are permuted in the same way,
    and their inner products do not change.
    """
    # In memory a token's heads stay together, as in projections: attention's output has the layout
    # of its queries, and needs no copy before the output's projection.
    x_BSHP = x_BHSP.transpose(-3, -2)
    if has_kernel(x_BSHP):
        return rotate_in_one_pass(x_BSHP, *by, interleaved).transpose(-3, -2)
    cos, sin = by.cos_SP.unsqueeze(1), by.sin_SP.unsqueeze(1)
    x = x_BSHP.float()
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BHSP.dtype)
    return rotated.transpose(-3, -2)


def rotate_head(x_BHSC: Tensor, by: Turns, interleaved: bool = False) -> Tensor:
    """The same of the first numbers of a head, as many as ``by`` has turns for."""
    rotary = 2 * by.cos_SP.shape[-1]
    if rotary == x_BHSC.shape[-1]:
        return rotate(x_BHSC, by, interleaved)
    x_BHSP, rest = x_BHSC.tensor_split((rotary,), dim=-1)
    # In memory a token's heads stay together, as in `rotate`.
    parts = rotate(x_BHSP, by, interleaved).transpose(-3, -2), rest.transpose(-3, -2)
    return torch.cat(parts, dim=-1).transpose(-3, -2)
