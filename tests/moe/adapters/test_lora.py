"""Adapters in one process, against the weights that they stand for.

Legend: T tokens, D d_model, F d_ff, E experts, L rank.
"""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import moe
from moe import MoEConfig, MoELayer
from moe.adapters.matrices import ExpertsAdapter
from tests.moe.adapters.models import (
    EVERYTHING,
    D,
    adapted,
    batch,
    loss_of,
    make_model,
    randomized,
)

SCALE = 2.0  # alpha 6 over rank 3


def explicit_weights(model: nn.Module, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every weight of the model without adapters as W + s · B A, from the adapters' leaves."""
    weights = {n: p.detach() for n, p in model.named_parameters() if ".lora." not in n}
    for name, a in leaves.items():
        if re.search(r"_a$|\.a$", name):
            b, (owner, which) = leaves[f"{name[:-1]}b"], name.split(".lora.")
            if "experts.lora" in name:
                weights[f"{owner}.w_{which[:-2]}"] = (
                    weights[f"{owner}.w_{which[:-2]}"] + SCALE * a @ b.mT
                )
            else:
                weights[f"{owner}.weight"] = weights[f"{owner}.weight"] + SCALE * b @ a
    return weights


def near(got: Tensor, wanted: Tensor, name: str = "", to: float = 1e-5) -> None:
    assert (got - wanted).norm() <= to * wanted.norm(), name


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"backend": "loop"},
        {"backend": "grouped_mm"},
        {"backend": "packed"},
        {"backend": "packed", "activation": "relu2", "ffn_bias": True},
        {"backend": "grouped_mm", "activation": "gelu", "ffn_bias": True},
        {"backend": "packed", "recompute_experts": True},
        {"backend": "grouped_mm", "num_shared_experts": 1},
        {"backend": "packed", "capacity": {"policy": "fixed", "capacity_factor": 0.8}},
        {"backend": "loop", "overlap_chunks": 2},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_outputs_and_gradients_are_those_of_the_whole_weights(fields, padded):
    double = torch.float64 if fields["backend"] != "grouped_mm" else torch.float32
    on = EVERYTHING if "num_shared_experts" in fields else EVERYTHING[:3]
    model, plain = adapted(double, on, **fields), make_model(double, **fields)
    x = batch(0, double)
    mask = (torch.arange(5) >= torch.tensor([[0], [2], [4]])) if padded else None
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    leaves = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()
              if n in names}  # fmt: skip
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    got = model(inputs[0], mask)
    wanted = functional_call(plain, explicit_weights(model, leaves), (inputs[1], mask))
    near(got[0], wanted[0])
    loss_of(got).backward()
    loss_of(wanted).backward()
    near(inputs[0].grad, inputs[1].grad)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (name in names), name
        if name in names:
            near(parameter.grad, leaves[name].grad, name)
            assert parameter.grad.any(), name

    moe.merge_lora(model)
    near(model(x, mask)[0], wanted[0])
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]


def test_nothing_changes_before_a_step_and_frozen_weights_have_no_gradients():
    plain, model = make_model(), make_model()
    before = {name: id(p) for name, p in model.named_parameters()}
    assert moe.add_lora(model, rank=3, on=EVERYTHING[:3]) is model
    assert torch.equal(model(batch(0))[0], plain(batch(0))[0])
    after = {name: id(p) for name, p in model.named_parameters()}
    assert after.items() >= before.items()
    assert all(p.requires_grad == (".lora." in name) for name, p in model.named_parameters())
    layer = model.blocks[0].moe
    shapes = {n: tuple(p.shape) for n, p in layer.experts.lora.named_parameters()}
    assert shapes == {"gate_a": (4, D, 3), "gate_b": (4, 24, 3), "up_a": (4, D, 3),
                      "up_b": (4, 24, 3), "down_a": (4, 24, 3), "down_b": (4, D, 3)}  # fmt: skip
    assert layer.experts.lora.gate_a.abs().max() <= D**-0.5
    assert layer.experts.lora.gate_a.std().item() == pytest.approx((3 * D) ** -0.5, rel=0.2)


@pytest.mark.parametrize("backend", ["loop", "packed", "grouped_mm"])
def test_no_dense_product_of_an_adapter_is_made(backend):
    """Of the adapters' sizes only: nothing of [E, D, F] or of one expert's [D, F] comes to be."""
    from torch.utils._python_dispatch import TorchDispatchMode

    E, d_model, F = 4, 24, 40
    layer = MoELayer(MoEConfig(d_model=d_model, d_ff=F, num_experts=E, top_k=2, backend=backend))
    randomized(moe.add_lora(layer, rank=8, on=["experts"]))
    x = torch.randn(7, d_model, requires_grad=True)
    made = []

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            storages = {t.untyped_storage().data_ptr() for t in layer.parameters()}
            tensors = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
            made.extend(
                tuple(t.shape) for t in tensors if t.untyped_storage().data_ptr() not in storages
            )
            return out

    with Shapes():
        layer(x).hidden.sum().backward()
    dense = {d_model, F}
    assert (7 * 2, F) in made or any(shape[-1:] == (F,) for shape in made)
    assert not [shape for shape in made if set(shape[-2:]) == dense]


def test_bfloat16_weights_and_float32_adapters():
    model, wide = adapted(torch.bfloat16), adapted(torch.bfloat16).float()
    lora = [p for name, p in model.named_parameters() if ".lora." in name]
    assert {p.dtype for p in lora} == {torch.float32}
    assert model.blocks[0].moe.experts.w_up.dtype == torch.bfloat16
    got, wanted = model(batch(0, torch.bfloat16)), wide(batch(0, torch.bfloat16).float())
    assert got[0].dtype == torch.bfloat16
    near(got[0].float(), wanted[0], to=0.03)
    loss_of(got).backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in lora)


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputed_blocks_and_autocast(recompute):
    model, twin = adapted(), adapted()
    if recompute:
        for block in model.blocks:
            inner = block.forward
            block.forward = lambda *a, inner=inner: checkpoint(inner, *a, use_reentrant=False)
        loss_of(model(batch(0))).backward()
        loss_of(twin(batch(0))).backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch(0))
        loss_of(out).backward()
        near(out[0].float(), twin(batch(0))[0], to=0.05)


@pytest.mark.filterwarnings("default")  # torch warns of itself while it compiles
def test_a_compiled_layer_computes_its_adapters():
    layer = randomized(moe.add_lora(MoELayer(MoEConfig(
        d_model=D, d_ff=24, num_experts=4, top_k=2)), rank=3, on=["experts"]))  # fmt: skip
    x = torch.randn(9, D)
    wanted = layer(x).hidden
    compiled = torch.compile(layer, backend="eager")
    assert torch.equal(compiled(x).hidden, wanted)


def test_copies_and_pickles_have_their_own_adapters():
    model = adapted()
    wanted = model(batch(0))[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(batch(0))[0], wanted)
        with torch.no_grad():
            other.blocks[0].moe.experts.lora.up_b.add_(1)
        assert not torch.equal(other(batch(0))[0], wanted)
    assert torch.equal(model(batch(0))[0], wanted)


def test_the_state_dict_of_adapters_is_enough_beside_the_base():
    model = adapted(expert_bias=True, bias_update_rate=0.0)
    model.blocks[1].moe.router.expert_bias.add_(0.1)
    state = moe.lora_state_dict(model)
    assert {re.sub(r".*(lora\.|expert_bias)", r"\1", name) for name in state} == {
        *(f"lora.{m}_{x}" for m in ("gate", "up", "down") for x in "ab"),
        "lora.a", "lora.b", "expert_bias",
    }  # fmt: skip
    fresh = moe.add_lora(
        make_model(expert_bias=True, bias_update_rate=0.0), rank=3, alpha=6, on=EVERYTHING
    )
    moe.load_lora_state_dict(fresh, state)
    assert torch.equal(fresh(batch(0))[0], model(batch(0))[0])


def test_parameters_that_are_trained_whole_are_in_the_state_dict():
    model = moe.add_lora(make_model(), on=["experts"], also_train=["*.router.weight"])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {"blocks.0.moe.router.weight", "blocks.1.moe.router.weight"} < trained
    assert all(".lora." in name or name.endswith("router.weight") for name in trained)
    assert set(moe.lora_state_dict(model)) == trained


def test_adapters_on_meta_get_values_later():
    with torch.device("meta"):
        model = moe.add_lora(make_model(), on=EVERYTHING[:3])
    model.to_empty(device="cpu")
    for block in model.blocks:
        block.moe.reset_parameters()
    adapter = model.blocks[0].moe.experts.lora
    assert isinstance(adapter, ExpertsAdapter)
    assert adapter.up_a.any()
    assert not adapter.up_b.any()


def one_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    (line,) = str(error.value).splitlines()
    return line


REFUSED = [
    ({"rank": 0}, "rank (0) must be at least 1"),
    ({"alpha": 0}, "alpha (0) must be above 0"),
    ({"on": ["expert"]}, "on (expert) must be experts or router or attention or dense that"),
    ({"on": ["*.k_proj"]}, "here: embed, blocks.0.attention.q, blocks.0.attention.o, blocks.1"),
    ({"also_train": ["*.gate"]}, "also_train (*.gate) must be a pattern of a parameter's name"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_cannot_be_is_refused_and_nothing_is_changed(options, message):
    model = make_model()
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        moe.add_lora(model, **options)
    one_line(error)
    assert all(p.requires_grad for p in model.parameters())
    assert list(model.state_dict()) == list(make_model().state_dict())


def test_a_second_time_and_none_are_refused():
    with pytest.raises(ValueError, match="must have no adapter: call add_lora once") as error:
        moe.add_lora(adapted(), on=["experts"])
    one_line(error)
    for function in (moe.merge_lora, moe.lora_state_dict):
        with pytest.raises(ValueError, match="must have adapters: call") as error:
            function(make_model())
        one_line(error)


def test_backends_without_adapters_are_refused():
    with pytest.raises(ValueError, match=r"moe.backend \(megablocks\) has no products of") as error:
        moe.add_lora(make_model(backend="megablocks"), on=["experts"])
    one_line(error)
    layer = adapted(on=["experts"]).blocks[0].moe
    layer.experts.unit_sums = object()
    with pytest.raises(ValueError, match=r"adapters of experts must have .* train.exact") as error:
        layer(batch(0))
    one_line(error)


def test_a_state_dict_of_other_adapters_is_refused():
    model, state = adapted(), moe.lora_state_dict(adapted())
    before = moe.lora_state_dict(model, full=True)
    name = "blocks.0.moe.experts.lora.up_a"
    for wrong, message in (
        ({n: t for n, t in state.items() if n != name}, f"lacks {name} (1 such names)"),
        (state | {"x": torch.zeros(())}, "has unknown x (1 such names)"),
        (state | {name: torch.zeros(4, D, 2)}, f"{name} ([4, {D}, 2]) must have the model's shape"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            moe.load_lora_state_dict(model, wrong)
        one_line(error)
    assert all(torch.equal(t, before[n]) for n, t in moe.lora_state_dict(model).items())
