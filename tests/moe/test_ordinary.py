"""What PyTorch users do to a module, in one process: copies, dtypes, transforms, checkpointing."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from moe import MoEConfig, MoELayer
from parallel import apply_activation_offload, apply_recompute
from tests.moe.test_layer import D, E, make_layer

BACKENDS = ["loop", "grouped_mm", "packed"]
EVERYTHING = {
    "num_shared_experts": 1, "shared_expert_gate": True, "ffn_bias": True, "expert_bias": True,
    "z_loss_coeff": 0.1, "capacity": {"policy": "fixed", "capacity_factor": 1.1},
}  # fmt: skip


def loss_of(out) -> torch.Tensor:
    return out.hidden.float().square().mean() + out.aux.aux_loss


def gradients(layer: nn.Module, *args) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    loss_of(layer(*args)).backward()
    return {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}


# ------------------------------------------------------------------------------------------------
# Import, copies, construction.

IMPORT = """
import sys, torch
before = set(sys.modules)
import moe
moe.MoELayer(moe.MoEConfig(d_model=4, d_ff=4, num_experts=2, top_k=2))(torch.ones(3, 4))
print(*sorted(name for name in set(sys.modules) - before))
"""


def test_the_import_and_a_forward_load_no_part_of_torch_and_no_sympy():
    out = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    loaded = out.stdout.split()
    assert "moe.layer" in loaded
    heavy = ("torch.", "sympy", "parallel.apply.fsdp", "moe.uncompiled")
    assert [name for name in loaded if name.startswith(heavy)] == []


def saved_and_loaded(layer: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, saved_and_loaded, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_compute_the_same_and_share_nothing(copied):
    layer, x = make_layer(**EVERYTHING), torch.randn(20, D)
    other = copied(layer)
    expected, actual = gradients(layer, x), gradients(other, x)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.add_(1)
    assert not any(map(torch.equal, layer.parameters(), other.parameters()))
    again = gradients(layer, x)
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_a_copy_of_a_recomputed_block_computes_with_its_own_parameters():
    block = nn.Sequential(nn.Linear(D, D))
    apply_recompute([block], "full")
    apply_activation_offload([block])
    x = torch.randn(3, D)
    for copied in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(copied(x), block(x))
        nn.init.zeros_(copied[0].weight)
        nn.init.zeros_(copied[0].bias)
        assert copied(x).abs().sum() == 0


def test_a_layer_from_the_meta_device_is_initialized_as_the_constructor_does():
    config = MoEConfig(**{"d_model": D, "d_ff": 24, "num_experts": E, "top_k": 2, **EVERYTHING})
    torch.manual_seed(7)
    expected = MoELayer(config).state_dict()
    with torch.device("meta"):
        layer = MoELayer(config)
    layer.to_empty(device="cpu")
    for tensor in (*layer.parameters(), *layer.buffers()):
        nn.init.constant_(tensor, 9.0)
    torch.manual_seed(7)
    layer.reset_parameters()
    actual = layer.state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


# ------------------------------------------------------------------------------------------------
# Dtypes.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_keeps_the_routers_weight_and_bias_in_float32(dtype):
    layer = make_layer(**EVERYTHING)
    before = layer.router.weight.detach().clone()
    for cast in (layer.to(dtype), copy.deepcopy(layer).to(dtype)):
        assert torch.equal(cast.router.weight, before)
        assert cast.router.expert_bias.dtype == torch.float32
        others = [p for name, p in cast.named_parameters() if name != "router.weight"]
        assert {p.dtype for p in others} == {dtype}
    assert layer.double().router.weight.dtype == torch.float64
    assert layer.float().router.weight.dtype == torch.float32


@pytest.mark.parametrize("backend", ["auto", "loop", "grouped_mm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["cast", "autocast"])
def test_half_precision_is_the_float32_layer_up_to_rounding(backend, dtype, how):
    plain, x = make_layer(backend=backend, num_shared_experts=1), torch.randn(40, D)
    out = plain(x.to(dtype).float())
    layer = copy.deepcopy(plain)
    if how == "cast":
        actual = layer.to(dtype)(x.to(dtype))
        assert actual.hidden.dtype == dtype
    else:
        with torch.autocast("cpu", dtype=dtype):
            actual = layer(x.to(dtype).float())
        assert actual.hidden.dtype == torch.float32
    assert torch.equal(actual.aux.topk_indices_TK, out.aux.topk_indices_TK)
    torch.testing.assert_close(actual.aux.aux_loss, out.aux.aux_loss, rtol=0, atol=0)
    assert (actual.hidden.float() - out.hidden).norm() < 0.03 * out.hidden.norm()
    loss_of(actual).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
        assert parameter.grad.isfinite().all(), name


# ------------------------------------------------------------------------------------------------
# torch.func.


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fields", [{}, EVERYTHING, {"recompute_experts": True}])
def test_func_grad_of_a_functional_call_is_the_backward(backend, fields):
    layer, x = make_layer(backend=backend, **fields), torch.randn(20, D)
    parameters = dict(layer.named_parameters())

    def loss(parameters: dict, x: torch.Tensor) -> torch.Tensor:
        return loss_of(functional_call(layer, parameters, (x,)))

    actual, dx = grad(loss, argnums=(0, 1))(parameters, x)
    leaf = x.clone().requires_grad_()
    expected = gradients(layer, leaf)
    torch.testing.assert_close(dx, leaf.grad, rtol=1e-5, atol=1e-7)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-7)
        assert expected[name].abs().sum() > 0


def test_second_derivatives_are_right_or_refused():
    x = torch.randn(3, D, dtype=torch.float64, requires_grad=True)

    def hidden(x: torch.Tensor) -> torch.Tensor:
        return layer(x).hidden

    layer = make_layer(backend="loop").double()
    assert torch.autograd.gradgradcheck(hidden, (x,))
    layer = make_layer(backend="packed").double()
    (dx,) = torch.autograd.grad(hidden(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^moe.backend \(packed\) has no second derivatives"):
        dx.sum().backward()


def test_vmap_is_refused_in_one_line_inside_other_transforms_too():
    layer, x = make_layer(), torch.randn(3, 5, D)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return layer(x).hidden.sum()

    for call in (vmap(loss), vmap(grad(loss))):
        with pytest.raises(ValueError, match=r"cannot run under torch\.vmap: ") as error:
            call(x)
        assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------
# Activation checkpointing.


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_both_kinds_of_checkpointing_give_the_same_gradients(backend, use_reentrant):
    layer = make_layer(backend=backend, **EVERYTHING)
    x = torch.randn(20, D, requires_grad=True)

    def block(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = layer(x)
        return x + out.hidden, out.aux.aux_loss

    results = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=use_reentrant)):
        layer.zero_grad()
        x.grad = None
        y, aux_loss = run(x)
        (y.square().mean() + aux_loss).backward()
        results.append([y, aux_loss, x.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_reentrant_checkpointing_of_the_layer_itself_drops_the_gradient_of_aux():
    x = torch.randn(20, D, requires_grad=True)
    assert make_layer()(x).aux.aux_loss.requires_grad
    hidden, aux = checkpoint(make_layer(), x, use_reentrant=True)
    assert hidden.requires_grad
    assert not aux.aux_loss.requires_grad


# ------------------------------------------------------------------------------------------------
# Wrong inputs.


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(2, 5), r"last dim \(5\) must be d_model \(16\)"),
        (torch.tensor(1.0), r"last dim \(none\) must be d_model \(16\)"),
        (torch.ones(2, D, dtype=torch.int64), r"dtype \(torch.int64\) must be a floating one: .*"),
        (torch.ones(2, D, dtype=torch.complex64), r"dtype \(torch.complex64\) must be a floating"),
        (
            torch.ones(2, D, dtype=torch.float64),
            r"dtype \(torch.float64\) must be the layer's \(torch.float32\), or .*x.to\(torch.fl",
        ),
        (torch.ones(2, D).to(torch.float8_e5m2), r"dtype \(torch.float8_e5m2\) must be the layer"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_input_gets_one_line_of_its_own(x, message, backend):
    with pytest.raises(ValueError, match=rf"^the input's {message}") as error:
        make_layer(backend=backend)(x)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 7}, r"top_k \(7\) must be at most num_experts \(6\)"),
        ({"topk": 2}, r"there is no field topk; did you mean top_k\?"),
        ({"d_ff": "wide"}, r"d_ff \('wide'\): Input should be a valid integer"),
        ({"capacity": {"capacity_factor": 2.0}}, r"capacity.capacity_factor \(2.0\) must be left"),
    ],
)
def test_a_wrong_config_is_one_line_with_the_names_of_the_call(fields, message):
    with pytest.raises(ValueError, match=f"^MoEConfig: {message}") as error:
        make_layer(**fields)
    assert "\n" not in str(error.value)


def test_a_missing_field_of_a_config_is_named():
    with pytest.raises(ValueError, match=r"^MoEConfig: there must be a value of d_model, d_ff$"):
        MoEConfig(num_experts=4, top_k=2)
