"""RMSNorm against its definition in float64."""

from __future__ import annotations

import pytest
import torch

from pretrain.model.norm import RMSNorm

EPS = 1e-5


def by_definition(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def tensors(shape: tuple[int, ...], layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """An input and a gradient."""
    generator = torch.Generator().manual_seed(3)
    x, dy = torch.randn((2, *shape), generator=generator)
    if layout == "transposed":
        x, dy = x.transpose(0, 1), dy.transpose(0, 1)
    elif layout == "broadcast gradient":
        dy = dy[..., :1].expand_as(x)
    elif layout == "a part":
        x = x[..., 1:]
        dy = dy[..., 1:]
    return x, dy


@pytest.mark.parametrize("shape", [(5, 7, 32), (3, 4, 2, 16), (6, 24), (0, 7, 32)])
@pytest.mark.parametrize("layout", ["plain", "transposed", "broadcast gradient", "a part"])
def test_values_and_gradients_are_those_of_the_definition(shape, layout):
    x, dy = tensors(shape, layout)
    norm = RMSNorm(x.shape[-1], EPS)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1, 2, x.shape[-1]))
    x.requires_grad_()
    y = norm(x)
    y.backward(dy)
    exact, weight = x.detach().double().requires_grad_(), norm.weight.detach().double()
    weight.requires_grad_()
    wanted = by_definition(exact, weight)
    wanted.backward(dy.double())
    assert y.shape == x.shape
    for found, value in ((y, wanted), (x.grad, exact.grad), (norm.weight.grad, weight.grad)):
        torch.testing.assert_close(found.double(), value, rtol=1e-5, atol=1e-5)


def test_rows_of_very_different_sizes():
    x = torch.randn(4, 64) * torch.tensor([1e-12, 1e-3, 1.0, 1e6]).unsqueeze(1)
    norm = RMSNorm(64, EPS)
    torch.testing.assert_close(norm(x).double(), by_definition(x.double(), torch.ones(64).double()),
                               rtol=1e-5, atol=1e-9)  # fmt: skip
    zero = torch.zeros(2, 64, requires_grad=True)
    norm(zero).sum().backward()
    torch.testing.assert_close(zero.grad, torch.full((2, 64), EPS**-0.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_pytorchs(dtype):
    x, norm = torch.randn(3, 32).to(dtype), RMSNorm(32, EPS).to(dtype)
    expected = torch.nn.functional.rms_norm(x, (32,), norm.weight, EPS)
    assert torch.equal(norm(x), expected)


def test_a_second_derivative_is_an_error():
    x = torch.randn(3, 32, requires_grad=True)
    (grad,) = torch.autograd.grad(RMSNorm(32, EPS)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_nan_and_infinity_stay_in_their_rows():
    x = torch.randn(3, 32)
    x[1, 4] = torch.inf
    y = RMSNorm(32, EPS)(x)
    assert y[[0, 2]].isfinite().all()
    assert not y[1].isfinite().all()
