"""Known corruptions, planted in a trained model: each kind as it is on disk.

Legend: L layers, E experts, D d_model, F d_ff.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tests.support.patients.trained import Case, Trained
from tests.support.patients.written import FORMATS, WITH_MOMENTS

Plant = Callable[[Trained], Trained]
EXPERTS = "layers/moe/experts/w_"
BIAS = "model/layers/moe/router/expert_bias"
ROUTER = "model/layers/moe/router/weight"
_ROLES = ("gate", "up", "down")


@dataclass(frozen=True)
class Kind:
    """One planted corruption."""

    check: str
    """What the doctor must call it."""
    plant: Plant
    formats: tuple[str, ...] = FORMATS
    """Where it can be."""
    against: bool = False
    """Whether it needs the checkpoint before."""
    patient: str = "square"
    """The trained model: ``square`` has D = F, ``half`` has D = 2F."""
    layers: tuple[int, ...] | None = None
    experts: tuple[int, ...] | None = None
    """Which the finding must name; None does not ask."""


def on_experts(
    change: Callable[[np.ndarray], np.ndarray], roles: tuple[str, ...] = _ROLES,
    only: tuple[str, ...] = ("model", "optimizer"),
) -> Plant:  # fmt: skip
    """Change the arrays of experts [L, E, in, out], and their moments."""

    def plant(trained: Trained) -> Trained:
        arrays = dict(trained.arrays)
        for name, values in trained.arrays.items():
            if EXPERTS in name and name.rpartition("_")[2] in roles and name.startswith(only):
                arrays[name] = change(values.copy())
        return replace(trained, arrays=arrays)

    return plant


def _first_rank_for_all(values: np.ndarray) -> np.ndarray:
    half = values.shape[1] // 2
    values[:, half:] = values[:, :half]
    return values


def _one_for_all(values: np.ndarray) -> np.ndarray:
    values[:] = values[:, :1]
    return values


def _twice(values: np.ndarray) -> np.ndarray:
    values[1, 5] = values[1, 2]
    return values


def _random_like(values: np.ndarray) -> np.ndarray:
    seed = int(np.ascontiguousarray(values).view(np.uint32).reshape(-1)[:4].sum())
    return np.random.default_rng(seed).normal(0, values.shape[-2] ** -0.5, values.shape)


def _never_loaded(values: np.ndarray) -> np.ndarray:
    half = values.shape[1] // 2
    values[:, half:] = _random_like(values[:, half:])
    return values


def _none_loaded(values: np.ndarray) -> np.ndarray:
    return _random_like(values)


def _never_loaded_one(values: np.ndarray) -> np.ndarray:
    values[1, 3] = _random_like(values[1, 3])
    return values


def _of_another_model(values: np.ndarray) -> np.ndarray:
    """Trained, as unequal columns and rows say."""
    other = _random_like(values[1, 3])
    seed = int(np.abs(other).sum() * 1e6)
    values[1, 3] = other * np.random.default_rng(seed).uniform(0.3, 1.7, other.shape[1])
    return values


def _transposed(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values.swapaxes(-1, -2))


def _transposed_one(values: np.ndarray) -> np.ndarray:
    values[1, 3] = values[1, 3].T.copy()
    return values


def _other_order(values: np.ndarray) -> np.ndarray:
    return np.roll(values, 1, axis=1)


def _other_order_one(values: np.ndarray) -> np.ndarray:
    values[1] = np.roll(values[1], 1, axis=0)
    return values


def _strided_order(values: np.ndarray) -> np.ndarray:
    """What a gather over ranks in the other order of the mesh makes: 0 4 1 5 2 6 3 7."""
    half = values.shape[1] // 2
    order = [e for i in range(half) for e in (i, half + i)]
    return values[:, order]


def _fewer(count: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda values: values[:, :count]


def _nan(values: np.ndarray) -> np.ndarray:
    values[1, 6, 3, 4] = np.nan
    return values


def _zero(values: np.ndarray) -> np.ndarray:
    values[0, 7] = 0.0
    return values


def _zero_units(values: np.ndarray) -> np.ndarray:
    values[0, 7, :, :4] = 0.0
    return values


def _of_bfloat16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def _cut_off(values: np.ndarray) -> np.ndarray:
    """Zeros from the middle of a row of an expert on, as the matrix is stored: [out, in]."""
    turned = values[1, 6].T.copy()
    flat = turned.reshape(-1)
    flat[flat.size // 2 + 5 :] = 0.0
    values[1, 6] = turned.T
    values[1, 7] = 0.0
    return values


def _cut_off_own(values: np.ndarray) -> np.ndarray:
    """The same in Convoy's own order: [in, out]."""
    flat = values[1, 6].reshape(-1)
    flat[flat.size // 2 + 5 :] = 0.0
    values[1, 7] = 0.0
    return values


def without(*parts: str) -> Plant:
    """Leave out the arrays whose names have all of these."""

    def plant(trained: Trained) -> Trained:
        kept = {n: v for n, v in trained.arrays.items() if not all(p in n for p in parts)}
        return replace(trained, arrays=kept)

    return plant


def without_layer(number: int, *parts: str) -> Plant:
    """Leave out a layer of the arrays whose names have all of these."""

    def plant(trained: Trained) -> Trained:
        arrays, layers = dict(trained.arrays), dict(trained.layers)
        for name, numbers in trained.layers.items():
            if number in numbers and all(part in name for part in parts):
                rows = [i for i, layer in enumerate(numbers) if layer != number]
                arrays[name] = trained.arrays[name][rows]
                layers[name] = tuple(numbers[i] for i in rows)
        return replace(trained, arrays=arrays, layers=layers)

    return plant


def _layer_twice(values: np.ndarray) -> np.ndarray:
    values[2] = values[0]
    return values


def _swapped(trained: Trained) -> Trained:
    arrays = dict(trained.arrays)
    for prefix in ("model/", "optimizer/exp_avg/", "optimizer/exp_avg_sq/"):
        a, b = (f"{prefix}{EXPERTS}{role}" for role in ("gate", "up"))
        if a in arrays:
            arrays[a], arrays[b] = arrays[b], arrays[a]
    return replace(trained, arrays=arrays)


def _drifted(trained: Trained) -> Trained:
    bias = trained.arrays[BIAS].copy()
    bias[1, 2] += 5.0
    return replace(trained, arrays={**trained.arrays, BIAS: bias})


def _other_step(trained: Trained) -> Trained:
    return replace(trained, moment_step=trained.step - 20)


def _rounded_and_trained(trained: Trained) -> Trained:
    return on_experts(_of_bfloat16, only=("model",))(trained)


def _zero_moments(trained: Trained) -> Trained:
    arrays = {n: np.zeros_like(v) if n.startswith("optimizer/") else v
              for n, v in trained.arrays.items()}  # fmt: skip
    return replace(trained, arrays=arrays)


def _one_in_bfloat16(trained: Trained) -> Trained:
    return replace(trained, dtypes={f"model/{EXPERTS}down#3": "bfloat16"})


_DISK = WITH_MOMENTS
_BY_LAYER = ("convoy", "hf", "hf-grouped", "titan", "megatron", "deepspeed", "automodel")
_FUSED = ("hf-grouped", "megatron", "megatron-stacked", "deepspeed")
_UP_ALONE = ("convoy", "titan", "megatron")
"""Formats in which up has an array of its own."""
_SECOND = "optimizer/exp_avg_sq/"


def _fused_turned(trained: Trained) -> Trained:
    """gate_up [E, 2F, D] with D = 2F as its transpose, as a rule by shapes leaves it."""
    arrays = dict(trained.arrays)
    for prefix in ("model/", "optimizer/exp_avg/", "optimizer/exp_avg_sq/"):
        names = [f"{prefix}{EXPERTS}{role}" for role in ("gate", "up")]
        if names[0] in arrays:
            stored = np.concatenate([arrays[n].swapaxes(-1, -2) for n in names], axis=-2)
            gate, up = np.split(stored.swapaxes(-1, -2), 2, axis=-2)
            arrays |= {n: half.swapaxes(-1, -2).copy()
                       for n, half in zip(names, (gate, up), strict=True)}  # fmt: skip
    return replace(trained, arrays=arrays)


_HALF = tuple(range(4, 8))
KINDS: dict[str, Kind] = {
    "one rank's experts in all places": Kind("copied-block", on_experts(_first_rank_for_all),
                                             experts=_HALF),
    "one rank's weights in all places, moments right": Kind(
        "copied-block", on_experts(_first_rank_for_all, only=("model",)), _DISK, experts=_HALF),
    "ranks of one expert": Kind("copied-block", on_experts(_one_for_all), _DISK),
    "ranks of one expert, weights alone": Kind("copied-block", on_experts(_one_for_all),
                                               ("hf", "hf-grouped"), against=True),
    "one expert twice": Kind("duplicated-expert", on_experts(_twice), layers=(1,), experts=(2, 5)),
    "ranks that were never loaded": Kind("initial-values", on_experts(_never_loaded),
                                         ("hf", "hf-grouped"), experts=_HALF),
    "ranks that were never loaded, moments right": Kind(
        "initial-values", on_experts(_never_loaded, only=("model",)), _DISK, experts=_HALF),
    "no expert was loaded": Kind("initial-values", on_experts(_none_loaded), ("hf", "hf-grouped")),
    "no expert was loaded, moments right": Kind(
        "initial-values", on_experts(_none_loaded, only=("model",)), _DISK),
    "one expert that was never loaded": Kind(
        "initial-values", on_experts(_never_loaded_one, only=("model",)), against=True,
        layers=(1,), experts=(3,)),
    "an expert of another model": Kind(
        "replaced-experts", on_experts(_of_another_model, only=("model",)), against=True,
        layers=(1,), experts=(3,)),
    "gate transposed": Kind("transposed", on_experts(_transposed, ("gate",))),
    "down transposed": Kind("transposed", on_experts(_transposed, ("down",))),
    "gate and up transposed": Kind("transposed", on_experts(_transposed, ("gate", "up"))),
    "all matrices transposed": Kind("transposed", on_experts(_transposed), _DISK),
    "all matrices transposed, weights alone": Kind("transposed", on_experts(_transposed),
                                                   ("hf", "hf-grouped"), against=True),
    "gate transposed, moments right": Kind(
        "transposed", on_experts(_transposed, ("gate",), only=("model",)), _DISK),
    "one expert transposed": Kind("transposed", on_experts(_transposed_one, ("gate", "up")), _DISK,
                                  layers=(1,), experts=(3,)),
    "gate_up of D = 2F transposed": Kind("transposed", _fused_turned, _FUSED, patient="half"),
    "experts in another order": Kind("expert-order", on_experts(_other_order), _DISK),
    "experts in the order of the other mesh": Kind("expert-order", on_experts(_strided_order),
                                                   _DISK),
    "a layer's experts in another order": Kind(
        "expert-order", on_experts(_other_order_one, only=("model",)), against=True, layers=(1,)),
    "no second moment of up": Kind("missing-moments", without(_SECOND, "w_up"), _UP_ALONE),
    "no first moments of experts": Kind("missing-moments",
                                        without("optimizer/exp_avg/", EXPERTS), _DISK),
    "no moments of down in a layer": Kind(
        "missing-moments", without_layer(1, "optimizer/", "w_down"),
        ("convoy", "titan", "megatron", "deepspeed", "automodel"), layers=(1,)),
    "moments of zeros": Kind("missing-moments", _zero_moments, _DISK),
    "moments of an older step, counted": Kind("stale-moments", _other_step,
                                              ("titan", "deepspeed")),
    "moments of fewer experts": Kind("truncated-moments",
                                     on_experts(_fewer(6), only=("optimizer",)), _DISK),
    "moments cut off": Kind("truncated-moments", on_experts(_cut_off, ("down",), (_SECOND,)),
                            ("titan", "megatron", "megatron-stacked", "deepspeed"), layers=(1,),
                            experts=(6,)),
    "moments cut off, own order": Kind("truncated-moments",
                                       on_experts(_cut_off_own, ("down",), (_SECOND,)),
                                       ("convoy", "automodel"), layers=(1,), experts=(6,)),
    "seven experts for eight rows": Kind("counts-disagree", on_experts(_fewer(7))),
    "half of the experts": Kind("partial-experts", on_experts(_fewer(4))),
    "a NaN": Kind("not-finite", on_experts(_nan, ("up",), ("model",)), layers=(1,), experts=(6,)),
    "an expert of zeros": Kind("zero-experts", on_experts(_zero, only=("model",)), layers=(0,),
                               experts=(7,)),
    "hidden units of zeros": Kind("zero-experts", on_experts(_zero_units, ("gate",), ("model",)),
                                  layers=(0,), experts=(7,)),
    "a layer that is not there": Kind("missing-layers", without_layer(1), _BY_LAYER, layers=(1,)),
    "a layer without a router": Kind("missing-layers", without_layer(1, "moe/router/weight"),
                                     _BY_LAYER, layers=(1,)),
    "a layer's experts in another layer": Kind("copied-layer", on_experts(_layer_twice),
                                               layers=(2,)),
    "masters that were rounded": Kind("rounded-master", _rounded_and_trained, _DISK),
    "a layer without biases": Kind("missing-bias", without_layer(1, "expert_bias"), _BY_LAYER,
                                   layers=(1,)),
    "no biases": Kind("missing-bias", without("expert_bias"), ("convoy", "hf", "hf-grouped")),
    "a bias that drifted": Kind("bias-drift", _drifted, ("convoy",), layers=(1,), experts=(2,)),
    "an expert of another dtype": Kind("mixed-dtypes", _one_in_bfloat16, ("hf", "automodel"),
                                       experts=(3,)),
    "gate and up swapped": Kind("gate-up-swapped", _swapped, against=True),
}  # fmt: skip
"""By what was planted."""
SQUARE = Case(
    model={"num_layers": 3, "d_model": 64},
    moe={"expert_bias": True, "score_func": "sigmoid", "d_ff": 64},
    steps=200,
)
PATIENTS = {"square": SQUARE, "half": replace(SQUARE, moe={**SQUARE.moe, "d_ff": 32})}
"""By :attr:`Kind.patient`."""
