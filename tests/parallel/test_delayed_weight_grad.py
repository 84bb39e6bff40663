"""A backward in two passes: the same bits as in one, and which gradients wait for the second."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from moe import MoEConfig
from parallel import apply_delayed_weight_grad, apply_recompute
from pretrain.model.config import ModelConfig
from pretrain.model.decoder import Decoder, DecoderOutput

MODEL = ModelConfig(vocab_size=300, d_model=32, num_layers=3, num_heads=4, num_kv_heads=2,
                    d_ff=40, first_k_dense=1)  # fmt: skip
LATENT = MODEL.model_copy(update={
    "num_kv_heads": 4, "qk_norm": "none", "kv_lora_rank": 16, "q_lora_rank": 12,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
})  # fmt: skip
MOE = MoEConfig(d_model=32, d_ff=24, num_experts=6, top_k=2, num_shared_experts=1,
                shared_expert_gate=True, aux_loss_coeff=0.1, z_loss_coeff=0.1)  # fmt: skip


def loss_of(out: DecoderOutput) -> Tensor:
    return out.logits.square().sum() + sum(aux.aux_loss for aux in out.aux)


def batches(sizes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(300, (size, 16), generator=generator) for size in sizes]


def decoder(model: ModelConfig, how: str, **fields: object) -> Decoder:
    torch.manual_seed(3)
    made = Decoder(model, MOE.model_copy(update=fields))
    apply_recompute(list(made.blocks.values()), how)
    return made


@pytest.mark.parametrize("how", ["none", "full", "selective"])
@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (MODEL, {"backend": "packed"}),
        (MODEL, {"backend": "loop"}),
        (MODEL, {"backend": "grouped_mm"}),
        (MODEL, {"backend": "grouped_mm", "recompute_experts": True, "activation": "gelu"}),
        (MODEL, {"backend": "grouped_mm", "ffn_bias": True}),
        (LATENT, {"backend": "grouped_mm"}),
        (MODEL.model_copy(update={"attention_bias": "all"}), {"backend": "loop"}),
    ],
)
def test_two_passes_give_the_bits_of_one(model, fields, how):
    plain = decoder(model, how, **fields)
    for tokens in batches((2, 0, 1)):
        loss_of(plain(tokens)).backward()

    later = decoder(model, how, **fields)
    store = apply_delayed_weight_grad(later)
    for key, tokens in enumerate(batches((2, 0, 1))):
        with store.collect(key):
            loss_of(later(tokens)).backward()
    waiting = {name for name, p in later.named_parameters() if p.grad is None}
    assert waiting == {
        f"{name}.{weight}"
        for name, module in later.named_modules()
        for weight, p in module.named_parameters(recurse=False)
        if (type(module) is nn.Linear and weight == "weight")
        or (name.endswith("experts") and p.ndim == 3 and fields["backend"] == "grouped_mm")
    }
    assert waiting
    for key in range(3):
        assert store.count(key) == len(waiting)
        store.compute(key)
        assert not store.count(key)
    for (name, p), q in zip(later.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def test_a_deep_copy_computes_with_its_own_weights():
    model = decoder(MODEL, "none")
    apply_delayed_weight_grad(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        (tokens,) = batches((2,))
        assert not other(tokens).logits.any()
        assert model(tokens).logits.any()
        loss_of(other(tokens)).backward()
        assert all(p.grad is None for p in model.parameters())


def test_outside_collect_no_gradient_is_delayed():
    plain, later = decoder(MODEL, "none"), decoder(MODEL, "none")
    store = apply_delayed_weight_grad(later)
    with store.collect("key"):
        pass
    (tokens,) = batches((2,))
    for model in (plain, later):
        loss_of(model(tokens)).backward()
    with store.collect("key"), torch.no_grad():
        later(tokens)
    assert not store.count("key")
    for p, q in zip(later.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
