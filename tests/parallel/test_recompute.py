"""Activations computed again: the same bits, fewer of them kept, no more work than said."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from moe import MoEConfig, MoELayer
from parallel import apply_activation_offload, apply_recompute
from pretrain.model.config import ModelConfig
from pretrain.model.decoder import Decoder
from pretrain.model.flops import forward_flops
from router import TopK

B, S = 2, 24
MODEL = ModelConfig(vocab_size=300, d_model=32, num_layers=4, num_heads=4, num_kv_heads=2,
                    d_ff=40, first_k_dense=2)  # fmt: skip
MOE = MoEConfig(d_model=32, d_ff=24, num_experts=6, top_k=2, num_shared_experts=1, backend="loop",
                aux_loss_coeff=0.1, seq_aux_loss_coeff=0.1, z_loss_coeff=0.1,
                input_jitter=0.01)  # fmt: skip


OURS = ("flops", "kept", "storages")


def forward_backward(
    how: str, every: int = 1, offload: bool = False, **fields: object
) -> dict[str, torch.Tensor]:
    """Gradients, and under names of their own the loss, operations and bytes kept between."""
    torch.manual_seed(3)
    model = Decoder(MODEL, MOE.model_copy(update=fields))
    apply_recompute(list(model.blocks.values()), how, every)
    if offload:
        apply_activation_offload(list(model.blocks.values()))
    tokens = torch.randint(300, (B, S), generator=torch.Generator().manual_seed(5))
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    counter = FlopCounterMode(display=False)
    # Plain products, all of which torch counts.
    with counter, sdpa_kernel(SDPBackend.MATH):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(tokens)
            loss = out.logits.square().mean() + sum(aux.aux_loss for aux in out.aux)
        loss.backward()
    result = {name: p.grad for name, p in model.named_parameters()}
    return result | {
        "loss": loss.detach(),
        "flops": torch.tensor(counter.get_total_flops()),
        "kept": torch.tensor(sum(kept.values())),
        "storages": torch.tensor([p.untyped_storage().data_ptr() for p in model.parameters()]),
    }


@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "packed"])
@pytest.mark.parametrize(("how", "every"), [("full", 1), ("full", 3), ("selective", 1)])
def test_gradients_have_the_same_bits(how, every, backend):
    plain = forward_backward("none", backend=backend)
    again = forward_backward(how, every, backend=backend)
    for name, value in plain.items():
        assert name in OURS or torch.equal(value, again[name]), name


@pytest.mark.parametrize("how", ["none", "full"])
def test_what_is_kept_on_the_host_has_the_same_bits(how, monkeypatch):
    plain = forward_backward("none")
    moved: list[int] = []
    storages: list[int] = []
    to_host = torch.Tensor.cpu

    def cpu(tensor):  # nobody else asks for it here
        moved.append(tensor.numel() * tensor.element_size())
        storages.append(tensor.untyped_storage().data_ptr())
        return to_host(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    again = forward_backward(how, offload=True)
    for name, value in plain.items():
        assert name in OURS or torch.equal(value, again[name]), name
    # Of a layer that is computed again its input alone goes, and of none a parameter.
    inputs = MODEL.num_layers * B * S * MODEL.d_model * 4
    assert sum(moved) == inputs if how == "full" else sum(moved) > inputs
    assert not set(again["storages"].tolist()) & set(storages)


def test_what_is_kept_and_what_is_done_again():
    plain, full = forward_backward("none"), forward_backward("full")
    some, selective = forward_backward("full", every=2), forward_backward("selective")
    assert full["kept"] < some["kept"] < plain["kept"]
    assert full["kept"] < 0.5 * plain["kept"]
    # Every product of the layers once more, but not the head's; selective: not one.
    flops = forward_flops(MODEL, MOE, S, causal=False)
    again = B * S * (flops.total - flops.head)
    assert full["flops"] - plain["flops"] == pytest.approx(again, rel=1e-6)
    assert plain["flops"] < some["flops"] < full["flops"]
    assert selective["flops"] == plain["flops"]


def test_evaluation_keeps_nothing_and_runs_once():
    model = Decoder(MODEL, MOE)
    apply_recompute(list(model.blocks.values()), "full")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(B, S, dtype=torch.int64))
    assert counter.get_total_flops() > 0


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_torch_compile_takes_selective_recomputation():
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.SiLU(), torch.nn.Linear(8, 4))
    x = torch.randn(3, 4)
    expected = torch.autograd.grad(block(x).square().sum(), list(block.parameters()))
    apply_recompute([block], "selective")
    for run in (block, torch.compile(block, backend="aot_eager")):
        found = torch.autograd.grad(run(x).square().sum(), list(block.parameters()))
        for gradient, plain in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, plain)


def test_a_second_backward_through_the_same_forward_says_so():
    """Each recomputation counts the kept products from the first one on."""
    block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SiLU())
    apply_recompute([block], "selective")
    loss = block(torch.ones(2, 4)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward an extra time"):
        loss.backward()


class Turning(TopK):
    """Breaks ties otherwise at every call, as a device may that computes a layer again."""

    turned = False

    def choose(self, preferences_TE, token_mask_T):
        self.turned = not self.turned
        chosen_TK = super().choose(preferences_TE.flip(-1) if self.turned else preferences_TE, None)
        return preferences_TE.shape[1] - 1 - chosen_TK if self.turned else chosen_TK


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize(
    "capacity", [{}, {"policy": "fixed", "capacity_factor": 1.0}], ids=["dropless", "fixed"]
)
def test_a_recomputed_router_takes_the_experts_of_its_first_forward(how, capacity):
    config = MoEConfig(
        d_model=16, d_ff=24, num_experts=6, top_k=2, capacity=capacity,
        routing=f"{__name__}:Turning", z_loss_coeff=0.1,
    )  # fmt: skip
    found = []
    for way in ("none", how):
        torch.manual_seed(3)
        layer = MoELayer(config)
        layer.router.weight.data.zero_()
        apply_recompute([layer], way)
        copied = copy.deepcopy(layer)
        hidden, aux = copied(torch.randn(40, 16))
        (hidden.square().sum() + aux.aux_loss).backward()
        assert layer.router.kept_choices is copied.router.kept_choices is None
        found.append({name: p.grad for name, p in copied.named_parameters()})
        assert all(p.grad is None for p in layer.parameters())
    for name, wanted in found[0].items():
        assert torch.equal(found[1][name], wanted), name


def test_a_graph_that_is_kept_takes_its_choices_twice():
    config = MoEConfig(d_model=16, d_ff=24, num_experts=6, top_k=2, routing=f"{__name__}:Turning")
    layer = MoELayer(config)
    layer.router.weight.data.zero_()
    apply_recompute([layer], "full")
    loss = layer(torch.randn(40, 16)).hidden.square().sum()
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in layer.named_parameters()}
    loss.backward()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(p.grad, 2 * once[name])
