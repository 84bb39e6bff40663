"""Optimizers against their contract, and one from outside that trains and resumes a run."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from pydantic import ValidationError
from torch import nn

import ckpt
from convoy.commands import main
from pretrain.optim import OptimizerFields, Surroundings
from pretrain.optim.testing import OptimizerContract
from tests.support.jobs import data_of, events, make_spec, prepare_job, write_spec

KIND = f"{__name__}:Lion"


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., arXiv 2302.06675): the sign of a mean of gradients."""

    matrix_moments: ClassVar[tuple[str, ...]] = ("mean",)
    other_moments: ClassVar[tuple[str, ...]] = ("mean",)

    def __init__(self, model: nn.Module, config: OptimizerFields, around: Surroundings) -> None:
        self.beta = config.options.get("beta", 0.9)
        super().__init__(model.parameters(), {"lr": config.lr})
        for parameter in model.parameters():
            self.state[parameter]["mean"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter]["mean"]
                    update = (mean * self.beta + parameter.grad * (1 - self.beta)).sign()
                    parameter.sub_(update * group["lr"])
                    mean.mul_(0.99).add_(parameter.grad * 0.01)


class TestAdamW(OptimizerContract):
    config: ClassVar[dict[str, Any]] = {"lr": 1e-2}


class TestMuon(OptimizerContract):
    config: ClassVar[dict[str, Any]] = {"kind": "muon", "lr": 1e-2}


class TestLion(OptimizerContract):
    config: ClassVar[dict[str, Any]] = {"kind": KIND, "lr": 1e-2, "options": {"beta": 0.8}}


def losses(folder) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(folder / "run", "step")}


def test_an_optimizer_from_outside_trains_and_resumes_a_run(tmp_path):
    job = prepare_job(tmp_path / "job")
    optimizer = {"kind": KIND, "lr": 1e-2, "options": {"beta": 0.8}}
    for name, stops in (("whole", ["6"]), ("resumed", ["3", "6"])):
        folder = tmp_path / name
        folder.mkdir()
        spec = write_spec(folder, data=data_of(job), optimizer=optimizer)
        for steps in stops:
            words = [str(spec), "--set", f"train.steps={steps}", "--set", "schedule.kind=constant"]
            assert main("pretrain", words) == 0
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
    assert losses(tmp_path / "whole")[6] < losses(tmp_path / "whole")[1]
    manifest = ckpt.read_manifest(tmp_path / "whole/run/checkpoints", 6)
    assert any(array.name.startswith("optimizer/mean") for array in manifest.arrays)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("sgd", r"optimizer.kind \(sgd\) must be adamw, muon or package.module:Class"),
        ("nowhere:Lion", r"must be importable as package.module:Class: No module named 'nowhere'"),
        ("torch.optim:SGD", r"must be a class with matrix_moments and other_moments"),
    ],
)
def test_a_wrong_kind_is_one_line(tmp_path, kind, why):
    with pytest.raises((ValidationError, ValueError), match=why):
        make_spec(tmp_path, optimizer={"kind": kind, "lr": 1e-3})
