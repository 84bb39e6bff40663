"""No healthy checkpoint is accused, however much it looks like a corrupted one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import ckpt
from convoy.commands.command_line import main
from convoy.commands.pretrain import main as pretrain
from convoy.doctor import examine, open_patient
from tests.support.jobs import prepare_job, write_spec
from tests.support.patients.healthy import (
    CASES,
    KEEP,
    checkpoints,
    deeper,
    more_experts,
    states,
)
from tests.support.patients.trained import Trained, train
from tests.support.patients.written import FORMATS, WITH_MOMENTS, write
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
SHORT = ("upcycled", "experts without tokens", "imported from bfloat16, first rate 0")


def accusations(form: str, trained: Trained, folder: Path, other: Path | None = None) -> list[str]:
    path = write(form, trained, folder / f"iter_{trained.step:07d}")
    against = None if other is None else open_patient(str(other))
    return [finding.line() for finding in examine(open_patient(str(path)), against)]


@pytest.mark.parametrize("name", SHORT)
def test_some_healthy_checkpoints_are_not_accused(name, tmp_path):
    number = 2 * SHORT.index(name)
    for step, trained in train(replace(CASES[name], steps=20), (0, 1)).items():
        form = FORMATS[number % len(FORMATS)]
        shown = trained if form in WITH_MOMENTS else trained.without_moments()
        assert accusations(form, shown, tmp_path / str(step)) == [], (name, step, form)
        number += 1


def test_duplicated_experts_and_a_deeper_model_are_not_accused(tmp_path):
    trained = train(replace(CASES["plain"], steps=10))[10]
    assert accusations("hf", deeper(trained), tmp_path / "deeper") == []
    assert accusations("titan", more_experts(trained), tmp_path / "more") == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_200_healthy_checkpoints_are_not_accused(tmp_path):
    count, wrong = 0, []
    for number, (name, trained) in enumerate(states()):
        for label, form, shown in checkpoints(name, trained, number):
            lines = accusations(form, shown, tmp_path / f"{number}-{form}")
            wrong += [f"{label}: {line}" for line in lines]
            count += 1
        if number % 5 == 0 and not trained.model.first_k_dense:
            for made in (deeper, more_experts):
                folder = tmp_path / f"{number}-{made.__name__}"
                wrong += [f"{name}: {line}" for line in accusations("hf", made(trained), folder)]
                count += 1
    assert wrong == []
    assert count >= 200
    assert len(CASES) * (len(KEEP) + 1) >= 200


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "a high rate", "upcycled", "Muon", "64 experts"])
def test_no_step_of_a_run_is_accused_against_another(name, tmp_path):
    run = train(CASES[name], KEEP)
    first, last = (
        write("convoy", run[step], tmp_path / f"other-{step}") for step in (min(run), max(run))
    )
    for step, trained in run.items():
        for other in (first, last):
            assert accusations("titan", trained, tmp_path / f"{step}{other.name}", other) == []


def _train(rank: int, spec: str) -> int:
    return pretrain([spec])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_of_the_house_is_healthy(optimizer, tmp_path):
    """Every step of a run on two ranks with half of the experts each, its export, and what
    ``convoy convert move`` makes of it."""
    prepare_job(tmp_path)
    moe = {"num_experts": 4, "expert_bias": True, "score_func": "sigmoid", "num_shared_experts": 1}
    spec = write_spec(
        tmp_path, moe=moe, parallel={"ep": 2}, train={"steps": 30},
        optimizer={"kind": optimizer}, checkpoint={"interval_steps": 10, "retention": {"keep": 9}},
    )  # fmt: skip
    assert run_ranks(_train, 2, str(spec), group=False) == [0, 0]
    root = tmp_path / "run" / "checkpoints"
    steps = ckpt.committed_steps(root)
    assert len(steps) > 1
    for step in steps:
        assert main("inspect", ["doctor", str(root), "--step", str(step)]) == 0
        words = ["doctor", str(root), "--against", str(root), "--other-step", str(step)]
        assert main("inspect", words) == 0
    assert main("convert", ["export", str(root), str(tmp_path / "hf")]) == 0
    assert main("inspect", ["doctor", str(tmp_path / "hf"), "--against", str(root)]) == 0
