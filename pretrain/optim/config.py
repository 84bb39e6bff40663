"""The ``[optimizer]`` section of the spec: what every optimizer has, and a config for each kind."""

from __future__ import annotations

import pkgutil
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from pretrain.section import OnResume, Section
from router import fields_of_others

Product = tuple[float, float, float]
"""m, n and k of a product [m, k] x [k, n]."""
ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"
NEWTON_SCHULZ_STEPS = 5
"""Steps of the iteration that orthogonalizes a matrix in Muon (Jordan et al., 2024)."""


class OptimizerFields(Section):
    """The fields of every kind of optimizer. A kind is a subclass with a ``kind`` of its own and
    the class variables below; :mod:`pretrain.optim.registry` has what builds its optimizer."""

    on_resume = OnResume.FREE

    matrix_moments: ClassVar[tuple[str, ...]]
    """What is kept in the shape of a hidden matrix, see :func:`pretrain.model.is_hidden_matrix`."""
    other_moments: ClassVar[tuple[str, ...]]
    """What is kept in the shape of any other parameter."""

    kind: Annotated[str, OnResume.FIXED]
    """Names this variant."""
    lr: float = Field(gt=0)
    """The peak learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the mean of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's decay of the mean of squared gradients."""
    eps: float = Field(default=1e-8, gt=0)
    """Added by AdamW to the root of the mean of squared gradients."""
    weight_decay: float = Field(default=0.1, ge=0)
    """The decoupled weight decay of matrices; norms and biases have none."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this global norm; 0 leaves gradients unscaled."""

    def matrix_products(self, rows: float, columns: float) -> list[Product]:
        """The matrix products of the update of one hidden matrix; none for an update of each number
        by itself."""
        return []

    def products_dtype(self, compute: str) -> str:
        """The dtype of these products, by ``precision.compute``."""
        return compute


class AdamWConfig(OptimizerFields):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    matrix_moments: ClassVar[tuple[str, ...]] = ADAMW_MOMENTS
    other_moments: ClassVar[tuple[str, ...]] = ADAMW_MOMENTS

    kind: Annotated[Literal["adamw"], OnResume.FIXED] = "adamw"
    """Names this variant."""


class MuonConfig(OptimizerFields):
    """Muon for matrices inside the network (Jordan et al., 2024), with the weight decay and the
    scale of Moonlight (Liu et al., arXiv 2502.16982); AdamW for embedding, head, norms and biases,
    with the same ``lr`` and ``weight_decay``."""

    matrix_moments: ClassVar[tuple[str, ...]] = (MOMENTUM,)
    other_moments: ClassVar[tuple[str, ...]] = ADAMW_MOMENTS

    kind: Annotated[Literal["muon"], OnResume.FIXED] = "muon"
    """Names this variant."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """The decay of the mean of gradients of a matrix; the update looks one step ahead
    (Nesterov)."""

    def matrix_products(self, rows: float, columns: float) -> list[Product]:
        """Three products a step; of the two sides the longer one is in two of them."""
        short, long = min(rows, columns), max(rows, columns)
        step = [(short, short, long), (short, short, short), (short, long, short)]
        return step * NEWTON_SCHULZ_STEPS

    def products_dtype(self, compute: str) -> str:
        """Float32 with compute in float32, and bfloat16 otherwise, as Jordan et al. have it."""
        return "float32" if compute == "float32" else "bfloat16"


OUTSIDE = "package.module:Class"


def optimizer_class(path: str) -> Any:
    """The class of an optimizer from outside, by ``package.module:Class``.

    Raises ValueError, one line, where there is no such class, or where the class does not say what
    it keeps.
    """
    try:
        named = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"optimizer.kind ({path}) must be importable as {OUTSIDE}: {error}"
        ) from None
    missing = [m for m in ("matrix_moments", "other_moments") if not hasattr(named, m)]
    if not isinstance(named, type) or missing:
        raise ValueError(
            f"optimizer.kind ({path}) must be a class with {' and '.join(missing) or OUTSIDE}, as "
            f"pretrain.optim.testing says"
        )
    return named


class OtherOptimizerConfig(OptimizerFields):
    """An optimizer from outside this repository: a ``torch.optim.Optimizer`` made as
    ``Class(model, config, surroundings)``, see ``pretrain.optim.testing.OptimizerContract``."""

    matrix_moments = property(lambda self: optimizer_class(self.kind).matrix_moments)
    other_moments = property(lambda self: optimizer_class(self.kind).other_moments)

    kind: Annotated[str, OnResume.FIXED] = OUTSIDE
    """The class."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further settings, of which the class knows the meaning."""

    @field_validator("kind")
    @classmethod
    def _check_class(cls, kind: str) -> str:
        if ":" not in kind:
            raise ValueError(f"optimizer.kind ({kind}) must be adamw, muon or {OUTSIDE}")
        optimizer_class(kind)
        return kind


def kind(optimizer: Any) -> str:
    """Which variant a table or a config is; named as the field that says so."""
    name = optimizer.get("kind") if isinstance(optimizer, dict) else optimizer.kind
    return name if isinstance(name, str) and name in KINDS else OUTSIDE


OptimizerConfig = Annotated[
    Annotated[AdamWConfig, Tag("adamw")]
    | Annotated[MuonConfig, Tag("muon")]
    | Annotated[OtherOptimizerConfig, Tag(OUTSIDE)],
    Field(discriminator=Discriminator(kind)),
]
"""The ``[optimizer]`` section, one variant for each ``kind``; ``adamw`` where it has no kind."""

KINDS: dict[str, type[OptimizerFields]] = {"adamw": AdamWConfig, "muon": MuonConfig}
"""The config of each kind of this repository."""


def with_kind(optimizer: Any) -> Any:
    """The table of an optimizer with its kind, which is ``adamw`` where the table has none.

    Raises ValueError, one line, for a field that only other kinds have.
    """
    if not isinstance(optimizer, dict):
        return optimizer
    name = optimizer.get("kind", "adamw")
    for field, others in fields_of_others(optimizer, name, KINDS):
        raise ValueError(
            f"optimizer.{field} ({optimizer[field]}) must be left out with optimizer.kind "
            f"({name}); kind {' or '.join(others)} has it"
        )
    return {"kind": name, **optimizer}
