"""The ``[precision]`` section of the spec: the dtype of compute, and the loss scale of float16."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import field_validator

from pretrain.section import OnResume, Section

DtypeName = Literal["float32", "bfloat16", "float16"]
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class PrecisionConfig(Section):
    """The ``[precision]`` section: mixed precision (Micikevicius et al., arXiv 1710.03740)."""

    on_resume = OnResume.FREE

    compute: Annotated[DtypeName, OnResume.FIXED_IF_EXACT] = "float32"
    """The dtype of GEMMs and of what ranks exchange; ``fp32``, ``bf16`` and ``fp16`` are accepted
    too. Parameters, gradient sums, moments, routers and the loss are in float32 in any case."""
    loss_scale: int = 1 << 16
    """For float16: the initial factor on the loss before the backward, a power of two from 1 to
    2^127. The factor is halved where gradients overflow, and doubles after 2000 steps in a row
    without an overflow."""

    experts: Literal["compute", "float8"] = "compute"
    """What the GEMMs of routed experts compute in: ``compute``, the dtype above, or ``float8``,
    e4m3 with scales of tiles of 128 (DeepSeek-V3, arXiv 2412.19437, section 3.3); ``fp8`` is
    accepted too."""
    dense: Literal["compute", "float8"] = "compute"
    """As ``experts``, for the GEMMs of attention's projections, of dense layers and of shared
    experts."""

    @field_validator("experts", "dense", mode="before")
    @classmethod
    def _check_gemms(cls, value: Any) -> Any:
        return "float8" if value == "fp8" else value

    @field_validator("compute", mode="before")
    @classmethod
    def _check_compute(cls, value: Any) -> Any:
        if value in ("float8", "fp8"):
            raise ValueError(
                f"precision.compute ({value}) must be float32, bfloat16 or float16: float8 is for "
                f"precision.experts and precision.dense, beside it"
            )
        return _SHORT.get(value, value) if isinstance(value, str) else value

    @field_validator("loss_scale")
    @classmethod
    def _check_loss_scale(cls, value: int) -> int:
        # The largest power of two in float32, which the loss is in.
        if value.bit_count() != 1 or not 1 <= value <= 1 << 127:
            raise ValueError(
                f"precision.loss_scale ({value}) must be a power of two from 1 to 2^127, as 65536 "
                f"is: a division of gradients by a power of two rounds nothing"
            )
        return value

    @property
    def first_loss_scale(self) -> float | None:
        """The loss scale of the first step; None for dtypes other than float16."""
        return float(self.loss_scale) if self.compute == "float16" else None
