"""The ``[moe]`` section of a job spec."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from router import RouterConfig

Backend = Literal["auto", "loop", "grouped_mm", "packed"]


class MoEConfig(RouterConfig):
    """Sizes of one MoE layer, beside its router's fields.

    Example: ``MoEConfig(d_model=64, d_ff=128, num_experts=8, top_k=2)``.
    """

    d_model: int = Field(ge=1)
    d_ff: int = Field(ge=1)
    """Hidden size of one expert."""
    num_shared_experts: int = Field(default=0, ge=0)
    """Experts that every token passes through; computed as one of num_shared_experts · d_ff."""
    backend: Backend = "auto"
    """``loop``: plain products; ``grouped_mm``: one grouped product for all experts; ``packed``:
    the fastest on a CPU; ``auto``: the fastest that the device, the dtype and the sizes allow."""
