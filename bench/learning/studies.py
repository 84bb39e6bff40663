"""The runs of each study.

Every run is the tiny recipe, or one named here, with some settings. Runs of one study take equal
samples in equal order, and equal seeds have equal initial weights where shapes are equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from bench.recipe_runs import RECIPE, ROOT

HALF_HOUR = ROOT / "tools/recipes/stdlib-half-hour.toml"


@dataclass(frozen=True)
class Start:
    """One start of a run: it goes on from the checkpoint that is there."""

    ranks: int = 2
    stop_after: int | None = None
    """Steps after which the start ends; None for the run's last step."""


@dataclass(frozen=True)
class Subject:
    """What is compared."""

    name: str
    settings: tuple[str, ...] = ()
    """``section.field=value`` over the recipe."""
    without: tuple[str, ...] = ()
    """Tables of the recipe that are left out, with all settings of them."""
    starts: tuple[Start, ...] = (Start(),)


@dataclass(frozen=True)
class Study:
    """Subjects on one or more cases, each with some seeds."""

    title: str
    subjects: tuple[Subject, ...]
    cases: dict[str, tuple[str, ...]]
    """Settings of each case, before a subject's."""
    recipe: Path = RECIPE
    seeds: tuple[int, ...] = (0, 1, 2)
    compares_losses: bool = False
    """Whether the losses of steps are to be equal: the rows have their largest differences."""
    settings: tuple[str, ...] = field(
        default=("eval.interval_steps=40", "eval.sequences=64", "train.log_interval_steps=10")
    )


_SMALL = ("model.d_model=128", "model.num_layers=3", "model.num_heads=4", "model.d_ff=384",
          "moe.d_ff=192", "eval.final_sequences=1000")  # fmt: skip
_TINY = ("eval.final_sequences=1000",)
_DENSE = Subject("dense, equal active FLOPs", ("parallel.ep=1",), without=("moe",))
_ONCE = ("eval.interval_steps=40", "eval.sequences=64", "train.log_interval_steps=1")
_BIAS = Subject(
    "bias",
    (
        "moe.aux_loss_coeff=0.0",
        "moe.score_func=sigmoid",
        "moe.expert_bias=true",
        "moe.bias_update_rate=0.01",
    ),
)

STUDIES = {
    "half-hour": Study(
        "MoE, and dense at equal active FLOPs",
        # Two experts of a token are as wide as the dense layer.
        (Subject("MoE, 16 experts, top_k 2"), _DENSE),
        {"half an hour on two cores": ()},
        HALF_HOUR,
        seeds=(0,),
        settings=(),
    ),
    "moe-dense": Study(
        "MoE and dense at equal active FLOPs and equal tokens",
        # Two experts of a token are as wide as the dense layer.
        (Subject("MoE, 8 experts, top_k 2"), _DENSE),
        {"d_model 128, 3 layers": _SMALL, "d_model 192, 4 layers": _TINY},
    ),
    "balancing": Study(
        "Load balancing: quality and balance",
        (
            Subject("none", ("moe.aux_loss_coeff=0.0",)),
            Subject("Switch loss", ("moe.aux_loss_coeff=0.01",)),
            Subject("global batch", ("moe.aux_loss_coeff=0.01", "moe.aux_loss_scope=global_batch")),
            _BIAS,
        ),
        {"tiny recipe": _TINY},
    ),
    "quantile": Study(
        "Biases of experts: moved at a rate, or by quantiles",
        (
            _BIAS,
            Subject("quantile", ("moe.score_func=sigmoid", "moe.balancing=quantile")),
        ),
        {"tiny recipe": _TINY},
    ),
    "one-curve": Study(
        "One run: undisturbed, stopped and resumed, on other ranks",
        (
            Subject("undisturbed"),
            Subject(
                "stopped at 60 and 120, resumed",
                starts=(Start(stop_after=60), Start(stop_after=120), Start()),
            ),
            Subject("2, then 1, then 4 ranks", starts=(Start(2, 60), Start(1, 120), Start(4))),
        ),
        {
            "tiny recipe": (
                "train.steps=180",
                "eval.final_sequences=1000",
                "batch.micro_batch_size=2",
            )
        },
        seeds=(0,),
        compares_losses=True,
        settings=_ONCE,
    ),
}
