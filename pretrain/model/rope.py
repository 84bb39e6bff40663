"""Rotary position embeddings, with YaRN scaling."""

from __future__ import annotations

import math
from typing import Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor


class YarnConfig(BaseModel):
    """The ``[model.yarn]`` section: rotary frequencies for longer sequences than were trained on.

    YaRN (Peng et al., arXiv 2309.00071, section 3), with the magnitudes of DeepSeek-V3's code.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    factor: float = Field(ge=1)
    """The new sequence length as a multiple of ``original_seq_len``."""
    original_seq_len: int = Field(ge=1)
    """Tokens of a sequence in the training before."""
    beta_fast: float = Field(default=32.0, gt=0)
    """Pairs with more rotations than this over the original length keep their frequency."""
    beta_slow: float = Field(default=1.0, gt=0)
    """Pairs with fewer rotations than this are slowed down by the whole factor."""
    mscale: float = Field(default=0.0, ge=0)
    """With latent attention: the weight of log(factor) in the magnitude of the rotary part."""
    mscale_all_dim: float = Field(default=0.0, ge=0)
    """With latent attention: the weight of log(factor) in the magnitude of all logits; above 0
    together with ``mscale``."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"model.yarn.beta_fast ({self.beta_fast}) must be above model.yarn.beta_slow "
                f"({self.beta_slow})"
            )
        if (self.mscale > 0) != (self.mscale_all_dim > 0):
            raise ValueError(
                f"model.yarn.mscale ({self.mscale}) and model.yarn.mscale_all_dim "
                f"({self.mscale_all_dim}) must both be above 0, or both 0"
            )
        return self

    @property
    def rotary_scale(self) -> float:
        """The factor of the rotary part of queries, and of the rotary part of keys."""
        if self.mscale == 0:
            return self._magnitude(1.0)
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    @property
    def logit_scale(self) -> float:
        """A further factor of attention logits."""
        return self._magnitude(self.mscale_all_dim) ** 2

    def _magnitude(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0

    def turns_dim(self, turns: float, size: int, theta: float) -> float:
        """The index of the pair that makes ``turns`` turns over ``original_seq_len`` positions.

        The index is a real number: arXiv 2309.00071, equation 17.
        """
        wavelength = self.original_seq_len / (turns * 2 * math.pi)
        return size * math.log(wavelength) / (2 * math.log(theta))


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
