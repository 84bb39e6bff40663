"""Healthy checkpoints that a careless doctor would accuse: 200 and more states of real trainings.

Legend: E experts, D d_model, F d_ff.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tests.support.patients.trained import Case, Trained, train
from tests.support.patients.written import FORMATS, WITH_MOMENTS

_SIGMOID = {"expert_bias": True, "score_func": "sigmoid"}
_FIXED = {**_SIGMOID, "bias_update_rate": 0.0}
_SMALL = {"steps": 40}
CASES: dict[str, Case] = {
    "plain": Case(steps=150),
    "sigmoid with biases": Case(moe=_SIGMOID, steps=150),
    "square and wide": Case(model={"d_model": 64}, moe={"d_ff": 64}, steps=150),
    "half as wide": Case(model={"d_model": 64}, moe={"d_ff": 32}, seed=3, steps=150),
    "a high rate": Case(lr=5e-2, seed=4, steps=150),
    "a low rate": Case(lr=1e-5, seed=5),
    "one expert": Case(moe={"num_experts": 1, "top_k": 1, "norm_topk_prob": False}, seed=6),
    "two experts": Case(moe={"num_experts": 2, "top_k": 1, "norm_topk_prob": False}, seed=7),
    "three experts": Case(moe={"num_experts": 3, "top_k": 2}, seed=8),
    "four experts": Case(moe={"num_experts": 4, "top_k": 2}, seed=9),
    "16 experts": Case(moe={"num_experts": 16, "top_k": 4}, seed=10),
    "32 experts": Case(moe={"num_experts": 32, "top_k": 2, "d_ff": 16}, seed=11),
    "64 experts": Case(moe={"num_experts": 64, "top_k": 2, "d_ff": 16}, seed=12),
    "64 experts, few tokens": Case(
        moe={"num_experts": 64, "top_k": 1, "norm_topk_prob": False, "d_ff": 16,
             "aux_loss_coeff": 0.0}, seed=13),
    "a shared expert": Case(moe={"num_shared_experts": 1}, seed=14),
    "tied embeddings": Case(model={"tie_embeddings": True}, seed=15),
    "a dense layer first": Case(model={"num_layers": 3, "first_k_dense": 1, "d_ff": 48}, seed=16),
    "one layer": Case(model={"num_layers": 1}, seed=17),
    "six layers": Case(model={"num_layers": 6}, seed=18, **_SMALL),
    "groups of experts": Case(
        moe={**_SIGMOID, "num_experts": 16, "n_groups": 4, "topk_groups": 1}, seed=19),
    "the first group of experts alone": Case(moe=_FIXED, seed=20, starved="group"),
    "experts without tokens": Case(moe=_FIXED, seed=21, starved="some", steps=150),
    "Muon": Case(optimizer="muon", seed=22),
    "upcycled": Case(upcycled=True, seed=23, steps=100),
    "upcycled, a low rate": Case(upcycled=True, seed=24, lr=1e-5),
    "upcycled, first rate 0": Case(upcycled=True, warm=True, seed=25),
    "upcycled, experts frozen": Case(upcycled=True, frozen="experts.", seed=26, steps=100),
    "upcycled, experts without tokens": Case(
        upcycled=True, moe=_FIXED, seed=27, starved="some", steps=100),
    "experts frozen": Case(frozen="experts.", seed=28),
    "a router frozen": Case(frozen="router", seed=29),
    "a layer frozen": Case(frozen="layers.0.", seed=30),
    "attention frozen": Case(frozen="attention", seed=31),
    "imported from bfloat16": Case(rounded=True, seed=32),
    "imported from bfloat16, first rate 0": Case(rounded=True, warm=True, seed=33),
    "imported, experts frozen": Case(rounded=True, frozen="experts.", seed=34),
    "wide experts": Case(moe={"d_ff": 96}, seed=35),
    "a second seed": Case(seed=36, steps=100),
    "a third seed, square": Case(model={"d_model": 48}, moe={"d_ff": 48}, seed=37, steps=100),
    "a fourth seed, sigmoid": Case(moe={**_SIGMOID, "d_ff": 32}, seed=38, steps=100),
    "a fifth seed, high rate, sigmoid": Case(moe=_SIGMOID, lr=3e-2, seed=39, steps=100),
}  # fmt: skip
KEEP = (0, 1, 2, 10, 25)


def states(names: list[str] | None = None) -> Iterator[tuple[str, Trained]]:
    """Every state of every training, with its moments."""
    for name in CASES if names is None else names:
        for step, trained in train(CASES[name], KEEP).items():
            yield f"{name}, step {step}", trained


def checkpoints(name: str, trained: Trained, number: int) -> Iterator[tuple[str, str, Trained]]:
    """A name, the format, and what to write: by turns all formats, and all dtypes of weights."""
    form = FORMATS[number % len(FORMATS)]
    dtype = ("float32", "float32", "bfloat16", "float16")[number // len(FORMATS) % 4]
    shown = trained
    if form not in WITH_MOMENTS or number % 7 == 0:
        shown = trained.without_moments()
        if dtype != "float32":
            shown = shown.stored_in(dtype)
    yield f"{name}, {form}", form, shown


def deeper(trained: Trained) -> Trained:
    """A model of twice the layers, each twice: depth up-scaling as it begins."""
    arrays, layers = dict(trained.arrays), {}
    for name, numbers in trained.layers.items():
        arrays[name] = np.concatenate([trained.arrays[name]] * 2)
        layers[name] = (*numbers, *(trained.model.num_layers + n for n in numbers))
    model = trained.model.model_copy(update={"num_layers": 2 * trained.model.num_layers})
    return replace(trained, model=model, arrays=arrays, layers=layers).without_moments()


def more_experts(trained: Trained) -> Trained:
    """Each expert and its row of the router twice, as ``convoy reshard surgery`` makes them."""
    arrays = {}
    for name, values in trained.arrays.items():
        by_expert = "moe/experts/" in name or "moe/router/" in name
        arrays[name] = np.concatenate([values, values], axis=1) if by_expert else values
    moe = trained.moe.model_copy(update={"num_experts": 2 * trained.moe.num_experts})
    return replace(trained, moe=moe, arrays=arrays).without_moments()
