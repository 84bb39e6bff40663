"""Quantile balancing, against quantiles of sorted margins.

Legend: T tokens, E experts, K top_k, M bins of margins.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe import MoEConfig, MoELayer
from router import Balancing, RouterConfig, TopKRouter
from router.balancing_quantile import QuantileBalancing

D, E, K = 16, 8, 2


def a_rule(num_experts: int = E, top_k: int = K) -> QuantileBalancing:
    return QuantileBalancing(
        RouterConfig(num_experts=num_experts, top_k=top_k, balancing="quantile",
                     norm_topk_prob=top_k > 1)
    )  # fmt: skip


def a_router(**fields) -> TopKRouter:
    torch.manual_seed(3)
    router = TopKRouter(
        D, RouterConfig(**{"num_experts": E, "top_k": K, "balancing": "quantile", **fields})
    )
    torch.nn.init.normal_(router.weight, std=0.4)
    return router


def sorted_margins(preferences: list[list[float]], top_k: int) -> list[list[float]]:
    """Each expert's margins, the largest first."""
    columns: list[list[float]] = [[] for _ in preferences[0]]
    for row in preferences:
        best = sorted(row, reverse=True)
        threshold = (best[top_k - 1] + best[top_k]) / 2
        for column, value in zip(columns, row, strict=True):
            column.append(value - threshold)
    return [sorted(column, reverse=True) for column in columns]


@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "scale"),
    [(64, 8, 2, 1.0), (512, 8, 2, 1e-3), (96, 6, 1, 0.2), (160, 16, 15, 1.0), (512, 64, 8, 0.02)],
)
def test_a_bias_moves_by_the_quantile_of_sorted_margins(tokens, num_experts, top_k, scale):
    generator = torch.Generator().manual_seed(tokens + top_k)
    offsets = torch.randn(num_experts, generator=generator)
    preferences = scale * (torch.rand(tokens, num_experts, generator=generator) + offsets)
    rule = a_rule(num_experts, top_k)
    change = rule.bias_change(rule.margins(preferences, None)).double()
    assert abs(change.mean()) < 1e-6 * scale
    load = tokens * top_k // num_experts
    assert load * num_experts == tokens * top_k
    columns = sorted_margins(preferences.double().tolist(), top_k)
    # Any value between these two leaves an expert as many margins above it as its part.
    bounds = torch.tensor([(column[load], column[load - 1]) for column in columns])
    # The mean that was taken off is that of moves within the bounds.
    width_E = torch.maximum(bounds.abs().amax(1) / 4, torch.tensor(2.0**-22))
    low, high = bounds[:, 0] - width_E, bounds[:, 1] + width_E
    for taken_off in torch.linspace(float(low.mean()), float(high.mean()), 200).tolist():
        quantiles = taken_off - change
        if ((quantiles >= low) & (quantiles <= high)).all():
            break
    else:
        raise AssertionError(f"{change} is not minus a quantile of {bounds}")


def test_of_many_margins_the_quantile_is_closer_than_a_bin():
    preferences = torch.rand(8192, 8, generator=torch.Generator().manual_seed(1))
    preferences += torch.linspace(-1, 1, 8)
    rule = a_rule()
    change = rule.bias_change(rule.margins(preferences, None)).double()
    columns = sorted_margins(preferences.double().tolist(), K)
    quantiles = torch.tensor([column[8192 * K // 8] for column in columns]).double()
    assert quantiles.abs().max() > 0.5
    torch.testing.assert_close(change, quantiles.mean() - quantiles, rtol=0, atol=4e-3)


def test_what_an_expert_has_its_part_of_is_not_moved():
    """Of the whole histogram, whatever is far from the threshold."""
    rule = a_rule(4, 1)
    preferences = torch.eye(4).repeat(3, 1) + torch.rand(12, 4) * 0.1
    assert not rule.bias_change(rule.margins(preferences, None)).any()


@pytest.mark.parametrize("score_func", ["sigmoid", "softmax", "sqrtsoftplus"])
def test_a_few_steps_balance_fixed_tokens_without_a_rate(score_func):
    router = a_router(score_func=score_func)
    x_TD = torch.randn(1024, D) + torch.randn(D)
    loads = []
    for _ in range(8):
        routed = router(x_TD)
        counts_E = routed.tokens_per_expert_E
        assert torch.equal(routed.margins_EM[:, 96:].sum(1), counts_E), "margins above 0 are chosen"
        loads.append(float(counts_E.max()) * E / (1024 * K))
        router.update_bias(routed.margins_EM)
    assert loads[0] > 1.9
    assert loads[-1] < 1.03
    assert router.expert_bias.mean().abs() < 1e-6


def test_margins_are_of_training_and_are_in_no_state():
    router, x_TD = a_router(), torch.randn(24, D)
    before = {name: value.clone() for name, value in router.state_dict().items()}
    assert router.eval()(x_TD).margins_EM is None
    margins_EM = router.train()(x_TD).margins_EM
    assert int(margins_EM.sum()) == 24 * E
    assert not margins_EM.requires_grad
    assert a_router(bias_update_rate=0.0)(x_TD).margins_EM is None, "biases that do not move"
    assert before.keys() == router.state_dict().keys()
    assert all(torch.equal(before[name], v) for name, v in router.state_dict().items())


def test_a_recomputed_call_is_counted_once():
    layer = MoELayer(MoEConfig(d_model=D, d_ff=8, num_experts=E, top_k=K, balancing="quantile"))
    x = torch.randn(2, 6, D, requires_grad=True)
    plain, recomputed = layer(x), checkpoint(layer, x, use_reentrant=False)
    recomputed.hidden.sum().backward()
    assert torch.equal(recomputed.aux.margins_EM, plain.aux.margins_EM)
    assert int(plain.aux.margins_EM.sum()) == 12 * E


def test_one_line_balances_by_biases_alone():
    config = RouterConfig(num_experts=E, top_k=K, balancing="quantile")
    assert config.expert_bias
    assert config.aux_loss_coeff == 0
    assert RouterConfig(num_experts=E, top_k=K).aux_loss_coeff == 0.01
    both = RouterConfig(num_experts=E, top_k=K, balancing="quantile", aux_loss_coeff=0.02)
    assert both.aux_loss_coeff == 0.02
    assert RouterConfig(**both.model_dump()) == both


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expert_bias": False}, r"expert_bias \(false\) must be true with balancing \(quantile\)"),
        ({"bias_update_rate": 0.01}, r"bias_update_rate \(0.01\) must be left out, or 0 to freeze"),
        ({"n_groups": 2}, r"n_groups \(2\) must be 1 with balancing \(quantile\)"),
        ({"top_k": E}, r"top_k \(8\) must be below num_experts \(8\) with balancing"),
        (
            {"routing": "sinkhorn"},
            r"routing \(sinkhorn\) must be top_k with balancing \(quantile\)",
        ),
        ({"routing": "expert_choice"}, r"must be top_k with balancing \(quantile\)"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        RouterConfig(**{"num_experts": E, "top_k": K, "balancing": "quantile", **fields})
    assert "\n" not in str(error.value)


def test_loads_are_refused_in_the_place_of_margins():
    router = a_router()
    routed = router(torch.randn(5, D))
    message = r"margins_EM \(\[8\]\) must be \[8, 192\], the sum of the step's aux.margins_EM"
    with pytest.raises(ValueError, match=message):
        router.update_bias(routed.tokens_per_expert_E)
    with pytest.raises(ValueError, match=r"margins_EM \(int\) must be"):
        router.update_bias(3)


class WithoutMargins(QuantileBalancing):
    """Has bins, and no histogram of its own."""

    margins = Balancing.margins


def test_a_rule_with_bins_and_without_margins_is_told_so():
    router = a_router(balancing=f"{__name__}:WithoutMargins")
    with pytest.raises(ValueError, match="WithoutMargins must have a method margins"):
        router(torch.randn(5, D))
