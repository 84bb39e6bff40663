"""On a CPU the layer gives a token equal bits, whatever other tokens are in the call.

Legend: T tokens, D d_model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe import MoEConfig, MoELayer
from router import LEAST_ROWS, with_enough_rows

CASES: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "odd sizes": {"d_model": 40, "d_ff": 23, "num_experts": 6, "top_k": 3},
    "biases": {"ffn_bias": True, "activation": "gelu", "router_bias": True, "d_ff": 12},
    "limits": {"activation": "swiglu_oai", "activation_limit": 0.5, "weights_on_input": True},
    "sigmoid": {"score_func": "sigmoid", "expert_bias": True, "top_k": 4, "n_groups": 2},
    "softplus": {"score_func": "sqrtsoftplus", "num_experts": 6, "d_ff": 20},
}


def make_layer(case: str) -> MoELayer:
    torch.manual_seed(1)
    sizes = {"d_model": 64, "d_ff": 48, "num_experts": 8, "top_k": 2}
    return MoELayer(MoEConfig(**sizes | CASES[case]))


@pytest.mark.parametrize("case", CASES)
def test_a_token_has_equal_bits_in_any_call(case):
    layer = make_layer(case)
    x_TD = torch.randn(300, layer.config.d_model)
    with torch.no_grad():
        whole_TD = layer(x_TD).hidden
        for size in (1, 2, 5, 33, 131):
            pieces_TD = torch.cat([layer(piece).hidden for piece in x_TD.split(size)])
            assert torch.equal(pieces_TD, whole_TD), size
        order = torch.randperm(len(x_TD))
        assert torch.equal(layer(x_TD[order]).hidden, whole_TD[order])


def test_gradients_of_few_tokens_are_those_of_many():
    """Zeros below the rows change neither a row's gradient nor the weights'."""
    layer = make_layer("biases")
    x_TD = torch.randn(LEAST_ROWS, 64, requires_grad=True)
    weight_TD = torch.randn(LEAST_ROWS, 64)
    (layer(x_TD).hidden * weight_TD).sum().backward()
    wanted = {name: parameter.grad for name, parameter in layer.named_parameters()}
    layer.zero_grad(set_to_none=True)
    few_TD = x_TD.detach().requires_grad_()
    for piece_TD, weight in zip(few_TD.split(3), weight_TD.split(3), strict=True):
        (layer(piece_TD).hidden * weight).sum().backward()
    torch.testing.assert_close(few_TD.grad, x_TD.grad)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], msg=name)


def test_functions_see_enough_rows_and_no_rows_stay_none():
    sizes = []

    def doubled(x_nD: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x_nD))
        return 2 * x_nD

    for n in (0, 1, LEAST_ROWS - 1, LEAST_ROWS, 100):
        x_nD = torch.randn(n, 3)
        assert torch.equal(with_enough_rows(doubled, x_nD), 2 * x_nD)
    assert sizes == [0, LEAST_ROWS, LEAST_ROWS, LEAST_ROWS, 100]
