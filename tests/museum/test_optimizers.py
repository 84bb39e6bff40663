"""Optimizers, schedules and loss scales.

Legend: E experts, D d_model, F d_ff.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moe import MoEConfig, MoELayer
from pretrain.optim import AdamWConfig, MuonConfig, build_optimizer
from tests.museum.cases import Edit, case
from tests.museum.shared_numbers import Step, batch_of, error, full, on_ranks, plain_decoder
from tests.museum.shared_runs import Run, run
from tests.support.jobs import data_of, prepare_job
from tests.support.layouts import spec_for

MUON = MuonConfig(lr=0.02, weight_decay=0.0)
APPLY = "self._whole.apply(_one_by_one if self.exact else _together, ahead, update)"


@pytest.fixture
def in_float32(monkeypatch) -> None:
    """torch's own Muon computes in bfloat16: here it is the reference in float32."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)


def muon_of_torch(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """One step of torch.optim.Muon on one matrix."""
    parameter = nn.Parameter(weight.clone())
    parameter.grad = gradient.clone()
    muon = torch.optim.Muon(
        [parameter], lr=MUON.lr, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    muon.step()
    return parameter.detach()


def _updated_experts(gradient_EDF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of experts before and after a step of Muon."""
    layer = MoELayer(MoEConfig(d_model=16, d_ff=24, num_experts=4, top_k=2))
    before = layer.experts.w_up.detach().clone()
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    layer.experts.w_up.grad = gradient_EDF
    build_optimizer(layer, MUON).step()
    return before, layer.experts.w_up.detach()


@case(
    "AI-Hypercomputer/maxtext#4798",
    "In some model families the experts' axis of stacked weights was taken for a side of the "
    "matrix that Muon orthogonalizes, so that updates mixed experts.",
    Edit(
        "pretrain/optim/muon.py",
        APPLY,
        "self._whole.apply(\n"
        "            lambda x: orthogonalized(\n"
        "                x.transpose(0, 1), NEWTON_SCHULZ_STEPS\n"
        "            ).transpose(0, 1),\n"
        "            ahead,\n"
        "            update,\n"
        "        )",
    ),
)
def test_muon_updates_each_expert_by_itself(in_float32):
    """Muon's update of stacked experts is torch's update of each expert's matrix."""
    gradient_EDF = torch.randn(4, 16, 24)
    before, after = _updated_experts(gradient_EDF)
    for e in range(4):
        expected = muon_of_torch(before[e], gradient_EDF[e])
        assert error(after[e] - before[e], expected - before[e]) < 1e-3


@case(
    "marin-community/marin#8621",
    "A norm that is meant for each matrix was taken over all experts together, so that experts "
    "grew and shrank at each other's cost.",
    Edit("pretrain/optim/muon.py", "dim=(1, 2), keepdim=True", "dim=(0, 1, 2), keepdim=True"),
)
def test_a_quiet_expert_gets_as_long_an_update_as_a_loud_one():
    """An expert whose gradient is a thousand times smaller than another's gets an update of equal
    length."""
    gradient_EDF = torch.randn(4, 16, 24)
    gradient_EDF[1] *= 1e-3
    before, after = _updated_experts(gradient_EDF)
    lengths = (after - before).flatten(1).norm(dim=1)
    assert float(lengths[1] / lengths[0]) == pytest.approx(1, rel=0.1)


@case(
    "deepspeedai/DeepSpeed#8437",
    "Under tensor parallelism Muon orthogonalized the slice of each rank, so that the update "
    "depended on the number of ranks: 39 % from that of the matrix.",
    Edit(
        "pretrain/optim/muon.py",
        APPLY,
        "for name in self.matrices:\n"
        "            direction = orthogonalized(ahead(name, slice(None)), NEWTON_SCHULZ_STEPS)\n"
        "            update(name, slice(None), direction)",
    ),
)
def test_muon_orthogonalizes_matrices_and_not_slices(in_float32):
    """Two ranks that share GEMMs update a projection as torch's Muon updates the matrix."""
    step = Step("tp=2", ((batch_of([16, 16]), batch_of([16, 16], 1)),), optimizer=MUON)
    name = "layers.0.attention.wq.weight"
    before = full(plain_decoder(step).get_parameter(name).detach())
    for outcome in on_ranks(step):
        expected = muon_of_torch(before, outcome.gradients[name])
        assert error(outcome.updated[name] - before, expected - before) < 1e-3


@case(
    "ServiceNow/Fast-LLM#545",
    "After a refactoring weight decay was applied to the weights of norms and to biases.",
    Edit("pretrain/optim/adamw.py", '"weight_decay": 0.0}', '"weight_decay": config.weight_decay}'),
)
def test_norms_and_biases_do_not_decay():
    """A step without gradients shrinks matrices, and leaves norms and biases as they are."""
    model = plain_decoder(Step("", ((),), moe={"ffn_bias": True, "router_bias": True}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    build_optimizer(model, AdamWConfig(lr=0.1, weight_decay=0.5)).step()
    kept = {name for name, p in model.named_parameters() if bool((p == 1).all())}
    wanted = {
        n for n, p in model.named_parameters() if p.ndim == 1 or n.rsplit(".")[-1][:2] == "b_"
    }
    assert kept == wanted
    assert len(kept) >= 9


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    return data_of(prepare_job(tmp_path_factory.mktemp("optimizers")))


def _run(folder: Path, data: dict[str, str], steps: int = 2, **options: Any) -> Run:
    scale = options.pop("loss_scale", None)
    return run(spec_for(folder, data, "", model={"num_layers": 2}, **options), steps, scale)


@case(
    "Lightning-AI/pytorch-lightning#1476",
    "The learning rate advanced with every forward, so that a warm-up over 16,000 steps with "
    "sixteen accumulated batches was over after 1,000.",
    Edit(
        "pretrain/train/trainer.py",
        "learning_rate(job.spec, before.step)",
        "learning_rate(job.spec, before.step * len(attempt.batches))",
    ),
)
def test_the_schedule_counts_updates_and_not_micro_batches(data, tmp_path):
    """With four micro-batches a step, a warm-up over eight steps takes eight updates."""
    made = _run(tmp_path, data, 3, schedule={"warmup_steps": 8}, train={"steps": 20})
    assert [event.lr for event in made.committed] == pytest.approx(
        [0.003 * (i + 1) / 8 for i in range(3)]
    )


@case(
    "huggingface/accelerate#4242",
    "A step that overflowed in float16 was not seen as skipped with a fused optimizer, and the "
    "learning-rate schedule went on without an update.",
    Edit(
        "pretrain/train/trainer.py",
        "self.progress = self.progress.after_overflow()",
        "self.progress = replace(self.progress.after_overflow(), step=before.step + 1)",
    ),
)
def test_the_schedule_does_not_advance_in_a_step_that_overflows(data, tmp_path):
    """Updates after some overflows have the learning rates of the first updates."""
    made = _run(tmp_path, data, schedule={"warmup_steps": 6}, loss_scale=2.0**75)
    assert made.overflows > 1
    assert [event.step for event in made.committed] == [1, 2]
    assert [event.lr for event in made.committed] == pytest.approx([0.003 / 6, 0.003 / 3])


@case(
    "Lightning-AI/pytorch-lightning#9599",
    "Gradients were clipped before the loss scale was divided out, so that nearly every step was "
    "clipped to almost nothing.",
    Edit(
        "pretrain/train/trainer.py",
        "grad_square_sum=self.job.grad_square_sum() / scale**2",
        "grad_square_sum=self.job.grad_square_sum()",
    ),
)
def test_gradients_are_clipped_without_their_loss_scale(data, tmp_path):
    """Norms of gradients with a loss scale of 1024 are the norms without one."""
    plain, scaled = (_run(tmp_path, data, loss_scale=scale) for scale in (None, 1024.0))
    norms = [[event.grad_norm for event in made.committed] for made in (plain, scaled)]
    assert norms[0] == norms[1]


@case(
    "THUDM/slime#1842",
    "Gradients of float16 were divided by the loss scale twice, once ahead of the optimizer and "
    "once in it, and nearly vanished.",
    Edit(
        "pretrain/train/trainer.py",
        "scale_gradients(job.model, factor / (decision.loss_scale or 1.0))",
        "scale_gradients(job.model, factor / (decision.loss_scale or 1.0) ** 2)",
    ),
)
def test_gradients_are_divided_by_the_loss_scale_once(data, tmp_path):
    """Moments and parameters after steps with a loss scale of 1024 have the bits of those without
    one."""
    plain, scaled = (_run(tmp_path, data, loss_scale=scale) for scale in (None, 1024.0))
    for moment, by_name in plain.moments.items():
        for name, value in by_name.items():
            assert torch.equal(scaled.moments[moment][name], value), (moment, name)
    assert all(torch.equal(scaled.parameters[n], value) for n, value in plain.parameters.items())
