"""Random exact runs: a variant of the model, and a history of layouts that it is resized through,
have the bits of one process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.exact import VARIANTS, exact_spec, sections_of_shared
from tests.support.jobs import data_of, prepare_job
from tests.support.layouts import Trained, bits_that_differ, train

SEEDS = range(40)
STEPS = 2
"""On each layout of a history."""
HISTORY = 3


class Drawn(NamedTuple):
    """One run of the fuzz."""

    variant: str
    layouts: list[str]


def layout(draw: random.Random, shares: bool) -> str:
    """A layout on at most four ranks; with ``shares`` ranks may share sequences."""
    while True:
        degrees = {axis: draw.choice((1, 1, 2, 4)) for axis in ("dp_replicate", "dp_shard", "pp")}
        shared = {axis: draw.choice((1, 2, 4)) if shares else 1 for axis in ("cp", "tp")}
        degrees |= shared
        world = 1
        for degree in degrees.values():
            world *= degree
        inner = degrees["dp_shard"] * shared["cp"] * shared["tp"]
        least = shared["cp"] * shared["tp"]
        experts = [ep for ep in (1, 2, 4) if inner % ep == 0 and ep % least == 0]
        if 1 < world <= 4 and experts:
            degrees["ep"] = draw.choice(experts)
            text = ",".join(f"{axis}={degree}" for axis, degree in degrees.items())
            schedules = ("", " gpipe", " 1f1b", " zbv", " dualpipev")
            return text + (draw.choice(schedules) if degrees["pp"] == 2 else "")


def drawn(seed: int) -> Drawn:
    """What a seed stands for."""
    draw = random.Random(seed)
    variant = draw.choice(list(VARIANTS))
    return Drawn(variant, [layout(draw, variant != "copies") for _ in range(HISTORY)])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return data_of(prepare_job(tmp_path_factory.mktemp("fuzz")))


@pytest.fixture(scope="module")
def alone() -> dict[str, Trained]:
    """What one process does with each variant."""
    return {}


def test_the_seeds_have_all_kinds_of_layouts() -> None:
    runs = [drawn(seed) for seed in SEEDS]
    layouts = [layout for run in runs for layout in run.layouts]
    for part in ("cp=2", "cp=4", "tp=2", "tp=4", "pp=2", "pp=4", "dp_replicate=2", "zbv"):
        assert any(part in layout for layout in layouts), part
    assert len({run.variant for run in runs}) > 15


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_history_has_the_bits_of_one_process(
    seed: int, data: dict[str, str], alone: dict[str, Trained], tmp_path: Path
) -> None:
    run = drawn(seed)
    sections = sections_of_shared(run.variant)
    if run.variant not in alone:
        spec = exact_spec(tmp_path / "alone", data, "", **sections)
        alone[run.variant] = train(spec, STEPS * HISTORY)
    expected = alone[run.variant]
    losses, norms, digests = [], [], []
    for resized in run.layouts:
        spec = exact_spec(tmp_path / "resized", data, resized, **sections)
        last = train(spec, STEPS, save_at=STEPS)
        losses += last.losses
        norms += last.norms
        digests += last.digests
    state = Trained(losses, norms, expected.gradients, last.state, {}, [], last.progress, digests)
    assert bits_that_differ(state, expected) == [], run
