"""The report of what a step has moved."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import moe
from moe import MoELayer
from parallel import ParallelDims, Topology, apply_expert_parallel, apply_fsdp
from tests.moe.adapters.models import EVERYTHING, Model, batch, loss_of, make_model
from tests.support.ranks import run_ranks


def step(model: Model, optimizer: Any = None, **options: Any) -> moe.MovedReport:
    parameters = [p for p in model.parameters() if p.requires_grad]
    used = optimizer or torch.optim.AdamW(parameters, lr=1e-2, **options)
    watch = moe.watch_parameters(model, used)
    loss_of(model(batch(0))).backward()
    used.step()
    return watch.report()


def test_everything_has_moved():
    report = step(make_model())
    assert report.unmoved == ()
    assert report.experts == {f"blocks.{i}.moe.experts": (4, 4) for i in range(2)}
    assert (
        str(report)
        == f"{report.num_parameters} of {report.num_parameters} parameters moved, 8 of 8 experts"
    )
    report.check()


def test_what_is_frozen_or_unknown_to_the_optimizer_is_named_with_its_reason():
    model = make_model()
    experts = model.blocks[0].moe.experts
    experts.w_up.requires_grad_(False)
    left_out = model.blocks[1].attention.q.weight
    idle = nn.Linear(2, 2, bias=False)
    model.idle = idle
    optimizer = torch.optim.AdamW(
        p for p in model.parameters() if p.requires_grad and p is not left_out
    )
    report = step(model, optimizer)
    assert set(report.unmoved) == {
        moe.Unmoved("blocks.0.moe.experts.w_up", "frozen", (0, 1, 2, 3)),
        moe.Unmoved("blocks.1.attention.q.weight", "not in the optimizer", None),
        moe.Unmoved("idle.weight", "no gradient", None),
    }
    with pytest.raises(ValueError, match="3 parameters or layers do not train: ") as error:
        report.check()
    assert "blocks.0.moe.experts.w_up of experts 0, 1, 2, 3 (frozen)" in str(error.value)
    assert "\n" not in str(error.value)
    report.check(["*.w_up", "*.q.weight", "idle.*"])
    assert "no gradient (the backward never reached it): idle.weight" in str(report)


def only_expert_two(layer: MoELayer) -> None:
    layer.config = layer.router.config = layer.config.model_copy(update={"top_k": 1})
    layer.router.routing.config = layer.config
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.expert_bias.copy_(torch.tensor([0.0, 0.0, 9.0, 8.0]))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_experts_without_a_token_are_named_though_weight_decay_moves_them(weight_decay):
    model = make_model(expert_bias=True, bias_update_rate=0.0, score_func="sigmoid")
    with torch.no_grad():
        model.blocks[1].moe.router.expert_bias.copy_(torch.tensor([0.0, 0.0, 9.0, 8.0]))
    report = step(model, weight_decay=weight_decay)
    assert report.experts["blocks.1.moe.experts"] == (2, 4)
    names = {f"blocks.1.moe.experts.w_{name}" for name in ("gate", "up", "down")}
    mine = {entry for entry in report.unmoved if entry.name in names}
    assert mine == {moe.Unmoved(name, "zero gradient", (0, 1)) for name in names}
    report.check()


def test_a_layer_whose_experts_are_all_idle_is_an_error():
    model = make_model()
    model.blocks[1].moe.forward = lambda x, **_: moe.MoEOutput(x, _NoLoss)
    report = step(model)
    assert report.experts["blocks.1.moe.experts"] == (0, 4)
    with pytest.raises(ValueError, match=r"blocks.1.moe.experts \(0 of 4 experts trained\)"):
        report.check(["*.w_*", "*router*"])


class _NoLoss:
    aux_loss = torch.zeros(())


def test_a_step_that_changes_nothing():
    report = step(make_model(), lr=0.0) if False else step_with_rate_zero()
    assert {entry.reason for entry in report.unmoved} == {"unchanged by its gradient"}
    with pytest.raises(ValueError, match="unchanged by its gradient"):
        report.check()


def step_with_rate_zero() -> moe.MovedReport:
    model = make_model()
    return step(model, torch.optim.SGD(model.parameters(), lr=0.0))


def test_gradients_that_are_cleared_before_the_report():
    model = make_model()
    model.idle = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reasons = []
    for sees in (True, False):
        watch = moe.watch_parameters(model, [optimizer])
        loss_of(model(batch(0))).backward()
        if sees:
            watch.see_gradients()
        optimizer.step()
        optimizer.zero_grad()
        reasons.append({(e.name, e.reason) for e in watch.report().unmoved})
    assert reasons == [
        {("idle.weight", "no gradient")},
        {("idle.weight", "unchanged by its gradient")},
    ]


def test_adapters_first_matrices_wait_for_the_second():
    model = moe.add_lora(make_model(), on=EVERYTHING[:3])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    first, second = step(model, optimizer), step(model, optimizer)
    waits = {e.name for e in first.unmoved if e.reason == "zero gradient until b is not zero"}
    assert waits == {name for name, _ in model.named_parameters()
                     if re.search(r"lora\..*a$", name)}  # fmt: skip
    assert first.experts == {f"blocks.{i}.moe.experts": (4, 4) for i in range(2)}
    assert not [e for e in second.unmoved if e.reason != "frozen"]
    for report in (first, second):
        report.check()  # what add_lora froze was asked for
        assert "frozen by add_lora: 18 parameters" in str(report)
    model.blocks[0].moe.experts.lora.up_a.requires_grad_(False)
    with pytest.raises(ValueError, match=r"lora.up_a of experts 0, 1, 2, 3 \(frozen\)"):
        step(model, optimizer).check()


# ------------------------------------------------------------------------------------------------
# Several ranks.


def on_rank(rank: int, degrees: dict[str, int]) -> tuple[moe.MovedReport, str]:
    model = make_model(expert_bias=True, bias_update_rate=0.0, score_func="sigmoid")
    with torch.no_grad():
        model.blocks[1].moe.router.expert_bias.copy_(torch.tensor([0.0, 0.0, 9.0, 8.0]))
    model.blocks[0].moe.router.weight.requires_grad_(False)
    dims = ParallelDims.build(Topology(**degrees), "cpu")
    apply_expert_parallel(model, dims.ep_mesh)
    apply_fsdp(model, dims, blocks=list(model.blocks))
    report = step(model)
    try:
        report.check()
        return report, ""
    except ValueError as error:
        return report, str(error)


@pytest.mark.parametrize(
    "degrees",
    [{"dp_shard": 2, "ep": 2}, pytest.param({"dp_shard": 4, "ep": 2}, marks=pytest.mark.slow)],
)
def test_experts_of_other_ranks_count(degrees):
    """Rank 0 has experts 0 and 1, which get no token in the second layer."""
    for report, error in run_ranks(on_rank, degrees["dp_shard"], degrees):
        assert report.experts == {"blocks.0.moe.experts": (4, 4), "blocks.1.moe.experts": (2, 4)}
        assert {(e.name, e.reason, e.experts) for e in report.unmoved} == {
            ("blocks.0.moe.router.weight", "frozen", None),
            *((f"blocks.1.moe.experts.w_{n}", "zero gradient", (0, 1))
              for n in ("gate", "up", "down")),
        }  # fmt: skip
        assert error.startswith("1 parameters or layers do not train: blocks.0.moe.router.weight")
