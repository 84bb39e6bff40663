"""The ``[moe]`` section of a job spec."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from moe.activation import ActivationName
from router import RouterConfig

Backend = Literal["auto", "loop", "grouped_mm", "packed", "megablocks"]
DispatcherName = Literal["all_to_all", "fixed_split", "all_gather", "hierarchical"]


class MoEConfig(RouterConfig):
    """Sizes of one MoE layer, beside its router's fields.

    Example: ``MoEConfig(d_model=64, d_ff=128, num_experts=8, top_k=2)``.
    """

    d_model: int = Field(ge=1)
    d_ff: int = Field(ge=1)
    """Hidden size of one expert."""
    activation: ActivationName = "swiglu"
    ffn_bias: bool = False
    """Biases in the products of experts and shared experts."""
    num_shared_experts: int = Field(default=0, ge=0)
    """Experts that every token passes through; computed as one of num_shared_experts · d_ff."""
    shared_expert_gate: bool = False
    """Multiply the shared experts' output by sigmoid(x · w), w learned (Qwen2-MoE)."""

    backend: Backend = "auto"
    """``loop``: plain products; ``grouped_mm``: one grouped product for all experts; ``packed``:
    the fastest on a CPU; ``megablocks``: its grouped GEMM, on CUDA; ``auto``: the fastest that the
    device, the dtype and the sizes allow."""
    recompute_experts: bool = False
    """Keep the experts' input alone, and compute their products again in the backward."""
    dispatcher: DispatcherName = "all_to_all"
    """How tokens reach the experts of other ranks: see :mod:`moe.dispatch`."""
    dispatch_chunks: int = Field(default=1, ge=1)
    """Cut a call's tokens into so many parts: experts compute one while the next is on its way."""
    max_tokens: int = Field(default=0, ge=0)
    """``fixed_split`` alone: the most tokens that a rank brings to one call."""

    @model_validator(mode="after")
    def _check_moe(self) -> MoEConfig:
        if self.shared_expert_gate and not self.num_shared_experts:
            raise ValueError(
                "moe.shared_expert_gate (true) must have moe.num_shared_experts (0) at least 1"
            )
        if (self.dispatcher == "fixed_split") != bool(self.max_tokens):
            raise ValueError(
                f"moe.max_tokens ({self.max_tokens}) must be above 0 with moe.dispatcher "
                f"(fixed_split), and 0 without ({self.dispatcher})"
            )
        if self.dispatch_chunks > 1 and self.dispatcher == "all_gather":
            raise ValueError(
                f"moe.dispatch_chunks ({self.dispatch_chunks}) must be 1 with moe.dispatcher "
                f"(all_gather)"
            )
        return self
