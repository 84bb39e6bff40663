"""The parameters of MegaBlocks' dMoE, without MegaBlocks; tests/interop/test_megablocks.py has it.

Legend: D d_model, F d_ff, E experts.
"""

from __future__ import annotations

import pytest
import torch

import moe
from moe import MoEConfig, MoELayer

D, F, E = 8, 12, 4


def make_layer(**fields) -> MoELayer:
    return MoELayer(MoEConfig(num_experts=E, top_k=2, d_model=D, d_ff=F, **fields))


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_parameters_go_out_and_in_bit_for_bit(activation):
    layer, other = make_layer(activation=activation), make_layer(activation=activation)
    state = moe.megablocks_state_dict(layer, "ffn.")
    names = ["w1", "w2"] if activation == "gelu" else ["w1", "v1", "w2"]
    assert list(state) == ["ffn.router.layer.weight", *(f"ffn.experts.mlp.{n}" for n in names)]
    assert all(tensor.is_contiguous() for tensor in state.values())
    # Row 2 F + 1 is of the hidden unit 1 of expert 2.
    first = layer.experts.w_up if activation == "gelu" else layer.experts.w_gate
    assert torch.equal(state["ffn.experts.mlp.w1"][2 * F + 1], first[2, :, 1])
    assert torch.equal(state["ffn.experts.mlp.w2"][2 * F + 1], layer.experts.w_down[2, 1])
    moe.load_megablocks_state_dict(other, {**state, "norm.weight": torch.ones(D)}, "ffn.")
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
    # They are copies.
    state["ffn.experts.mlp.w2"].zero_()
    assert layer.experts.w_down.abs().min() > 0


def test_other_names_and_shapes_are_refused_and_nothing_changes():
    layer = make_layer()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    state = {name: tensor + 1 for name, tensor in moe.megablocks_state_dict(layer).items()}
    for wrong, message in (
        ({"experts.bias": torch.zeros(D)}, "too many are experts.bias"),
        ({"experts.mlp.w2": torch.zeros(E * F, D + 1)},
         rf"experts.mlp.w2 \(\[{E * F}, {D + 1}\]\) must be \[{E * F}, {D}\] for this layer"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            moe.load_megablocks_state_dict(layer, state | wrong)
    state.pop("experts.mlp.v1")
    with pytest.raises(ValueError, match=r"missing are experts.mlp.v1, .*too many are none"):
        moe.load_megablocks_state_dict(layer, state)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ffn_bias": True}, r"moe.ffn_bias \(True\) must be False"),
        ({"num_shared_experts": 1}, r"moe.num_shared_experts \(1\) must be 0"),
        ({"score_func": "sigmoid"}, r"moe.score_func \(sigmoid\) must be softmax"),
    ],
)
def test_a_layer_that_dmoe_has_no_parameters_for_is_refused(fields, message):
    layer = make_layer(**fields)
    with pytest.raises(ValueError, match=message):
        moe.megablocks_state_dict(layer)
    with pytest.raises(ValueError, match=message):
        moe.load_megablocks_state_dict(layer, {})
