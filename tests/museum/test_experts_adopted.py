"""Experts lost, swapped or transposed.

These are models of transformers whose blocks Convoy's layers replace.
"""

from __future__ import annotations

import pytest
import torch

import moe
from tests.museum.cases import Edit, case
from tests.support.hf import logits_of, make_model


@case(
    "unslothai/unsloth-zoo#849",
    "Whether an expert's matrix was to be transposed for a grouped product was told by its shape; "
    "where twice the hidden size of an expert is the model's, training ran on transposed weights.",
    Edit(
        "moe/adoption/experts.py",
        "_halves(first, 2 if layout.input_first else 1, layout.interleaved)",
        "_halves(first, 2 if first.shape[1] == self.sizes[1] else 1, layout.interleaved)",
    ),
    Edit(
        "moe/adoption/experts.py",
        "        if not layout.input_first:\n            gate, up =",
        "        if first.shape[1] != self.sizes[1]:\n            gate, up =",
    ),
)
@pytest.mark.parametrize("hidden", [16, 32])
def test_adopted_experts_with_square_matrices_are_not_transposed(hidden):
    """A model of transformers whose experts have square matrices gives the same logits with
    Convoy's layers in it, whichever of the matrices is square."""
    model = make_model("qwen3_moe", moe_intermediate_size=hidden, num_hidden_layers=2)
    assert model.config.hidden_size == 32
    wanted = logits_of(model)
    for backend in ("auto", "loop"):
        adopted = moe.adopt(model, backend=backend)
        torch.testing.assert_close(logits_of(adopted), wanted, rtol=1e-4, atol=1e-4)
        moe.restore(model)


@case(
    "deepspeedai/DeepSpeed#8358",
    "A layer that replaced a block of transformers took over the bias of the choice of experts "
    "only where the bias was a parameter; in most families the bias is a buffer, and was dropped.",
    Edit(
        "moe/adoption/reading.py",
        'biased = bool(kind.correction) and value(block, f".{kind.correction}") is not None',
        'biased = "Parameter" in type(value(block, f".{kind.correction}")).__name__',
    ),
)
def test_adopted_layers_choose_experts_by_the_bias_of_the_block(tmp_path):
    """A layer in the place of a block of DeepSeek-V3 chooses by the block's bias, which is a
    buffer: the logits are those of transformers, and other ones without the bias."""
    model = make_model("deepseek_v3", num_hidden_layers=2)
    wanted = logits_of(model)
    torch.testing.assert_close(logits_of(moe.adopt(model)), wanted, rtol=1e-4, atol=1e-4)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = dict(model.named_buffers())[name]
    assert bias.any()
    bias.zero_()
    assert not torch.allclose(logits_of(model), wanted, atol=1e-3)
