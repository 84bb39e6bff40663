"""Names of the logical tree: parsed and formatted in one place, and in agreement with the model."""

from __future__ import annotations

import pytest

from convoy.convert.grown import weight_arrays
from moe import MoEConfig
from parallel import expert_parameter_names
from pretrain.model.config import ModelConfig
from pretrain.model.decoder import meta_decoder
from pretrain.state.arrays import tensors
from pretrain.state.names import (
    MODEL,
    array_path,
    dense_name,
    has_expert_dim,
    is_expert_matrix,
    name_in_layer,
    parameter_name,
    split_layer,
    weight_names,
)

MODEL_CONFIG = ModelConfig(
    vocab_size=300, num_layers=12, d_model=16, num_heads=2, num_kv_heads=2, d_ff=20, first_k_dense=2
)
MOE = MoEConfig(
    d_model=16, d_ff=12, num_experts=6, top_k=2, num_shared_experts=1, expert_bias=True,
    ffn_bias=True,
)  # fmt: skip


def test_every_parameter_has_one_place_in_the_tree_and_comes_back():
    decoder, arrays = meta_decoder(MODEL_CONFIG, MOE), weight_arrays(MODEL_CONFIG, MOE)
    experts, seen = expert_parameter_names(decoder), {}
    for name, tensor in tensors(decoder).items():
        path, layer = split_layer(array_path(name))
        array = arrays[MODEL + path]
        assert parameter_name(MODEL + path, layer) == name
        assert array.shape[layer is not None :] == tuple(tensor.shape)
        if layer is not None:
            assert name_in_layer(MODEL + path) == name.removeprefix(f"layers.{layer}.")
            seen.setdefault(MODEL + path, []).append(layer)
        of_experts = has_expert_dim(MODEL + path)
        assert of_experts == (name in experts or ".router." in name), name
        assert not of_experts or array.shape[1] == MOE.num_experts
        matrix = name in experts and tensor.ndim == 3
        assert is_expert_matrix(MODEL + path) == matrix, name
        dense = dense_name(MODEL + path)
        assert dense == MODEL + path or matrix
        if matrix:
            assert arrays[dense].shape[1:] == (20, 16) or dense.endswith("w_down/weight")
    assert seen == {n: a.attributes["layers"] for n, a in arrays.items() if a.attributes}


@pytest.mark.parametrize(
    ("path", "stacked", "layer"),
    [
        ("layers/3/norm/weight", "layers/norm/weight", 3),
        ("model/layers/10/a", "model/layers/a", 10),
        ("a/layers/1/b/layers/2/c", "a/layers/b/layers/2/c", 1),
        ("layers/1/b/layers/2/c", "layers/b/layers/2/c", 1),
        ("norm/weight", "norm/weight", None),
        ("layers/x/weight", "layers/x/weight", None),
        ("layers/03/weight", "layers/03/weight", None),  # beside layers/3 it is another one
        ("players/3/weight", "players/3/weight", None),
    ],
)
def test_the_layer_of_a_path(path, stacked, layer):
    assert split_layer(path) == (stacked, layer)


def test_weights_are_told_from_what_an_optimizer_and_ranks_have():
    names = ["embed/weight", "optimizer/exp_avg/embed/weight", "optim/x", "rng/cpu", "residual/a"]
    assert weight_names(names) == ["embed/weight"]
    assert weight_names([*names, "model/a"]) == ["model/a"]
