"""Routings, balancing rules and capacity policies: those of the house and those from outside.

Legend: T tokens, E experts, K top_k.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor

from moe import MoEConfig, MoELayer
from router import (
    Assignments,
    CapacityPolicy,
    CapacityTraits,
    Losses,
    Placement,
    RoutedTokens,
    RouterConfig,
    Routing,
    RoutingTraits,
    Scored,
    StandardBalancing,
)
from router.config import BALANCINGS, ROUTINGS
from router.testing import BalancingContract, CapacityPolicyContract, RoutingContract

HERE = __name__


class Tanh(Routing):
    """As Llama and others outside might: the hyperbolic tangent of logits decides."""

    traits = RoutingTraits(top_k_in_evaluation=True)

    def preferences(self, scored: Scored) -> Tensor:
        return scored.logits_TE.tanh()

    def choose(self, preferences_TE: Tensor, token_mask_T: Tensor | None) -> Tensor:
        return preferences_TE.topk(self.config.top_k, dim=1).indices


class Proportional(StandardBalancing):
    """A bias moves in proportion to the error, and the loss is the variance of probabilities."""

    def losses(self, tokens: RoutedTokens) -> Losses:
        losses = super().losses(tokens)
        probs_TE = tokens.probs_TE
        if tokens.token_mask_T is not None:
            probs_TE = probs_TE[tokens.token_mask_T]
        variance = probs_TE.sum(0).div(max(len(probs_TE), 1)).sub(1 / probs_TE.shape[1])
        return losses._replace(total=variance.square().sum() * min(len(probs_TE), 1))

    def bias_change(self, tokens_per_expert_E: Tensor) -> Tensor:
        counts_E = tokens_per_expert_E.float()
        mean = counts_E.mean()
        return self.config.bias_update_rate * (mean - counts_E) / mean.clamp(min=1)


class AtMost(CapacityPolicy):
    """Each expert takes the first ``limit`` assignments of a call."""

    traits = CapacityTraits(depends_on_ranks=False)

    class Options(BaseModel):
        limit: int

    def max_assignments_per_expert(self, num_tokens: int) -> list[int] | None:
        return [self.config.limit] * self.num_experts

    def placed(self, asked: Assignments) -> Placement:
        indices_TK = asked.expert_indices_TK
        one_hot = torch.nn.functional.one_hot(indices_TK.flatten(), self.num_experts + 1)
        rank = one_hot.cumsum(0).gather(1, indices_TK.reshape(-1, 1)).view_as(indices_TK)
        none = torch.zeros((), dtype=torch.int64)
        return Placement(indices_TK, rank > self.config.limit, none)


class TestTopK(RoutingContract):
    fields = {"routing": "top_k"}


class TestGroupsOfExperts(RoutingContract):
    fields = {"routing": "top_k", "n_groups": 3, "topk_groups": 2}


class TestSigmoidWithBiases(RoutingContract):
    fields = {"routing": "top_k", "score_func": "sigmoid", "expert_bias": True}


class TestExpertChoice(RoutingContract):
    fields = {"routing": "expert_choice"}


class TestSinkhorn(RoutingContract):
    fields = {"routing": "sinkhorn"}


class TestForceLoadBalance(RoutingContract):
    fields = {"routing": "force_load_balance"}


class TestRoutingFromOutside(RoutingContract):
    fields = {"routing": f"{HERE}:Tanh"}


class TestStandard(BalancingContract):
    fields = {"seq_aux_loss_coeff": 0.1, "z_loss_coeff": 0.01, "expert_bias": True}


class TestQuantile(BalancingContract):
    fields = {"balancing": "quantile", "z_loss_coeff": 0.01}


class TestBalancingFromOutside(BalancingContract):
    fields = {"balancing": f"{HERE}:Proportional", "expert_bias": True}


class TestCapacityFromOutside(CapacityPolicyContract):
    fields = {"capacity": {"policy": f"{HERE}:AtMost", "limit": 9}}
    reroutes = False


def test_every_routing_has_a_contract_class():
    tested = {kind.fields["routing"] for kind in RoutingContract.__subclasses__() if kind.fields}
    assert tested >= set(ROUTINGS)


def test_every_balancing_rule_has_a_contract_class():
    tested = {
        kind.fields.get("balancing", "standard") for kind in BalancingContract.__subclasses__()
    }
    assert tested >= set(BALANCINGS)


def train(fields: dict[str, Any], steps: int = 6) -> tuple[MoELayer, list[float]]:
    torch.manual_seed(1)
    layer = MoELayer(
        MoEConfig(**{"d_model": 16, "d_ff": 24, "num_experts": 8, "top_k": 2, **fields})
    )
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-2)
    x, y = torch.randn(2, 16, 16), torch.randn(2, 16, 16)
    losses = []
    for _ in range(steps):
        hidden, aux = layer(x)
        loss = (hidden - y).square().mean() + aux.aux_loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if layer.config.expert_bias:
            counts = aux.tokens_per_expert_E if aux.margins_EM is None else aux.margins_EM
            layer.router.update_bias(counts)
        losses.append(float(loss.detach()))
    return layer, losses


def test_kinds_from_outside_train_in_a_layer():
    for fields in (
        {"routing": f"{HERE}:Tanh"},
        {"balancing": f"{HERE}:Proportional"},
        {"capacity": {"policy": f"{HERE}:AtMost", "limit": 5}},
    ):
        layer, losses = train(fields)
        assert losses[-1] < losses[0]
        assert layer.config == MoEConfig(**layer.config.model_dump())
    layer, _ = train({"capacity": {"policy": f"{HERE}:AtMost", "limit": 5}})
    assert int(layer(torch.randn(32, 16)).aux.num_dropped) >= 64 - 8 * 5
    layer, _ = train({"balancing": f"{HERE}:Proportional", "expert_bias": True}, steps=1)
    plain, _ = train({"expert_bias": True}, steps=1)
    assert not torch.equal(layer.router.expert_bias, plain.router.expert_bias)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"routing": "topk"}, r"routing \(topk\) must be top_k, expert_choice, sinkhorn, "
         r"force_load_balance or package.module:Class$"),
        ({"routing": "no.such:Module"}, r"routing \(no.such:Module\) must be importable as "
         r"package.module:Class: No module named 'no'"),
        ({"routing": f"{HERE}:Nobody"}, r"must be importable .* no attribute 'Nobody'"),
        ({"routing": f"{HERE}:HERE"}, r"a class with traits, .* Routing of package router"),
        ({"routing": f"{HERE}:AtMost"}, r"a class with traits, .* Routing of package router"),
        ({"balancing": "none"}, r"balancing \(none\) must be standard, quantile or "
         r"package.module:Class"),
        ({"capacity": {"policy": f"{HERE}:Tanh"}}, "derived from CapacityPolicy of package router"),
        ({"capacity": {"policy": f"{HERE}:AtMost"}}, r"capacity.limit .*Field required"),
        ({"capacity": {"policy": f"{HERE}:AtMost", "limit": "x"}}, r"capacity.limit \('x'\)"),
        ({"routing": f"{HERE}:Tanh", "expert_bias": True}, r"must be top_k with expert_bias"),
        ({"routing": "expert_choice", "capacity": {"policy": f"{HERE}:AtMost", "limit": 3}},
         r"AtMost\) must be dropless"),
    ],
)  # fmt: skip
def test_a_kind_that_is_not_there_is_refused_in_one_line(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        RouterConfig(num_experts=8, top_k=2, **fields)
    assert "\n" not in str(error.value)


def test_configs_and_their_tables_import_no_torch():
    program = """
import sys
from moe.config import MoEConfig
config = MoEConfig(d_model=8, d_ff=8, num_experts=8, top_k=2, routing="sinkhorn")
assert config.routing_traits.top_k_in_evaluation
assert config.dispatcher_traits.exact
assert not config.capacity.traits.bounded
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
