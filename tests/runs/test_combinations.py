"""Precision, recomputation, layout and exact sums, in every pair that a spec accepts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from parallel import ParallelDims, local_shard
from pretrain.checkpoint.resume import restore
from pretrain.job import build_job
from pretrain.parts.step import Action
from pretrain.runtime import Runtime
from pretrain.runtime.ranks import start
from pretrain.spec.job import JobSpec
from pretrain.train.trainer import Trainer
from tests.support.jobs import data_of, prepare_job
from tests.support.layouts import NoCheckpoints, spec_for
from tests.support.ranks import run_ranks

PRECISIONS = ["float32", "bfloat16", "float16"]
FLOAT8 = "float8"
"""Products of experts and of dense layers; everything else is in bfloat16."""
RECOMPUTE = ["none", "selective", "full", "experts"]
"""The values of ``parallel.memory.recompute``; ``experts`` is ``moe.recompute_experts``."""
LAYOUTS = ["dp_shard=2,ep=2", "dp_replicate=2", "tp=2,ep=2", "cp=2,ep=2", "pp=2"]
MORE_LAYOUTS = ["dp_shard=2", "tp=2", "cp=2", "pp=2 1f1b", "pp=2 zbv", "pp=2 dualpipev"]
EXACT = [False, True]


class Combination(NamedTuple):
    """One value of each option."""

    precision: str
    recompute: str
    layout: str
    exact: bool


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return data_of(prepare_job(tmp_path_factory.mktemp("combinations")))


def spec_of(
    combination: Combination, data: dict[str, str], folder: Path, layers: int = 2
) -> JobSpec:
    """The spec of a small model; raises ValueError where the spec is refused."""
    precision, recompute, layout, exact = combination
    experts = recompute == "experts"
    float8 = {"compute": "bfloat16", "experts": "float8", "dense": "float8"}
    formats = float8 if precision == FLOAT8 else {"compute": precision}
    # Blocks of 128 x 128 weights, of which tensor parallelism cuts none.
    sizes = {"d_model": 256, "d_ff": 256} if precision == FLOAT8 else {}
    expert_sizes = {"d_ff": 128} if precision == FLOAT8 else {}
    return spec_for(
        folder,
        data,
        layout,
        model={"num_layers": layers, "num_kv_heads": 4, **sizes},
        moe={
            "num_experts": 4,
            "num_shared_experts": 1,
            "recompute_experts": experts,
            **expert_sizes,
        },
        parallel={"memory": {"recompute": "none" if experts else recompute}},
        precision={**formats, "loss_scale": 4096},
        batch={"global_batch_size": 4},
        train={"exact": exact},
    )


def accepted(
    data: dict[str, str],
    folder: Path,
    layouts: Sequence[str],
    layers: int = 2,
    precisions: Sequence[str] = PRECISIONS,
) -> list[Combination]:
    """The combinations whose specs are accepted."""
    combinations, refused = [], []
    for values in itertools.product(precisions, RECOMPUTE, layouts, EXACT):
        combination = Combination(*values)
        try:
            spec_of(combination, data, folder, layers)
        except ValueError as error:
            refused.append(f"{combination}: {error}")
        else:
            combinations.append(combination)
    assert [line for line in refused if "with train.exact (true)" not in line] == []
    return combinations


def pairs_of(combination: Combination) -> set[tuple[Any, ...]]:
    """Its pairs of values, each with the names of the two options."""
    return set(itertools.combinations(combination._asdict().items(), 2))


def covering(combinations: Sequence[Combination]) -> list[Combination]:
    """Few combinations that have every pair of values which some combination has."""
    uncovered = set().union(*map(pairs_of, combinations))
    chosen = []
    while uncovered:
        chosen.append(max(combinations, key=lambda one: len(pairs_of(one) & uncovered)))
        uncovered -= pairs_of(chosen[-1])
    return chosen


@dataclass(frozen=True)
class Step:
    """The first step of a run on one rank."""

    loss: float
    norm: float
    parameters: list[Tensor]
    """After the step: this rank's shards."""


def first_step(spec: JobSpec, runtime: Runtime) -> Step:
    job = build_job(spec, runtime)
    decision = Trainer(job, restore(job), NoCheckpoints()).step(0)
    assert decision.action is Action.COMMIT
    parameters = [local_shard(p.detach()).clone() for p in job.model.parameters()]
    return Step(decision.loss, decision.grad_norm, parameters)


@dataclass(frozen=True)
class Outcome:
    """A first step, held against the same step without recomputation."""

    loss: float
    norm: float
    changed: str
    """What recomputation changed; empty where nothing."""


def outcomes_on_rank(specs: dict[Combination, JobSpec], rank: int) -> dict[Combination, Outcome]:
    """The first step of each spec; all specs have one topology."""
    runtime = start(120.0)
    # Every gloo group has threads of its own, so the groups are made once.
    ParallelDims.build = staticmethod(cache(ParallelDims.build))  # type: ignore[method-assign]
    plain: dict[Combination, Step] = {}
    outcomes = {}
    for combination in sorted(specs, key=lambda one: one.recompute != "none"):
        try:
            step = first_step(specs[combination], runtime)
        except Exception as error:
            raise AssertionError(str(combination)) from error
        expected = plain.setdefault(combination._replace(recompute="none"), step)
        outcomes[combination] = Outcome(step.loss, step.norm, difference(step, expected))
    runtime.close()
    return outcomes


def difference(step: Step, expected: Step) -> str:
    """Which figures of two steps have other bits; empty where none."""
    parameters = all(map(torch.equal, step.parameters, expected.parameters))
    same = {
        "loss": step.loss == expected.loss,
        "norm": step.norm == expected.norm,
        "parameters": parameters,
    }
    return ", ".join(name for name, equal in same.items() if not equal)


def check(
    combinations: Sequence[Combination], data: dict[str, str], folder: Path, layers: int
) -> None:
    """Train each combination for one step. Recomputation must change no bit. A layout must change
    only the rounding, and not one bit of exact sums."""

    def outcomes(some: Iterable[Combination], ranks: int) -> list[dict[Combination, Outcome]]:
        specs = {one: spec_of(one, data, folder, layers) for one in some}
        return run_ranks(partial(outcomes_on_rank, specs), ranks, group=False)

    alone = {one._replace(recompute="none", layout="") for one in combinations}
    (expected,) = outcomes(alone, 1)
    by_topology = sorted(combinations, key=topology)
    for _, same_topology in itertools.groupby(by_topology, key=topology):
        for by_combination in outcomes(same_topology, 2):
            check_outcomes(by_combination, expected)


def topology(combination: Combination) -> str:
    """Its layout without the pipeline's schedule."""
    return combination.layout.partition(" ")[0]


def check_outcomes(
    outcomes: dict[Combination, Outcome], expected: dict[Combination, Outcome]
) -> None:
    assert {one: it.changed for one, it in outcomes.items() if it.changed} == {}
    for one, it in outcomes.items():
        alone = expected[one._replace(recompute="none", layout="")]
        rounding = 0.0 if one.exact else ROUNDING[one.precision]
        assert it.loss == pytest.approx(alone.loss, rel=rounding / 5, abs=0.0), one
        assert it.norm == pytest.approx(alone.norm, rel=rounding, abs=0.0), one


ROUNDING = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3, FLOAT8: 5e-2}
"""Relative, of the gradients' norm."""


def test_every_pair_trains_as_one_process_does(data: dict[str, str], tmp_path: Path) -> None:
    check(covering(accepted(data, tmp_path, LAYOUTS)), data, tmp_path, layers=2)


ALL_LAYOUTS = [*LAYOUTS, *MORE_LAYOUTS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "layouts"),
    # Emulated products in float8 take their time: a test for each layout.
    [
        *((precision, ALL_LAYOUTS) for precision in PRECISIONS),
        *((FLOAT8, [layout]) for layout in ALL_LAYOUTS),
    ],
    ids=str,
)
def test_every_combination_trains_as_one_process_does(
    precision: str, layouts: list[str], data: dict[str, str], tmp_path: Path
) -> None:
    chosen = accepted(data, tmp_path, layouts, layers=4, precisions=[precision])
    check(chosen, data, tmp_path, layers=4)


def test_recomputation_in_one_process_changes_nothing(data: dict[str, str], tmp_path: Path) -> None:
    """In one process FSDP is there for ``bfloat16`` and ``float16`` alone."""
    pairs = accepted(data, tmp_path, [""])
    specs = {one: spec_of(one, data, tmp_path) for one in pairs if one.precision != "float16"}
    (found,) = run_ranks(partial(outcomes_on_rank, specs), 1, group=False)
    assert {one: it.changed for one, it in found.items() if it.changed} == {}
