"""The kernel of rotary positions in Triton's interpreter, against plain operations."""

from __future__ import annotations

import pytest
import torch

from pretrain.model.attention import build_attention
from pretrain.model.config import AttentionConfig
from pretrain.model.rotary import rope_frequencies, rotate, rotate_head, turns
from tests.pretrain.model.test_attention import LATENT
from tests.support import kernels

kernels.need_triton(interpreter=True)
pytestmark = kernels.infinities_are_quiet


@pytest.fixture(autouse=True)
def _kernels_when_asked():
    with kernels.only_when_asked():
        yield


def some_turns(size: int, length: int):
    positions = torch.arange(length) + 3
    return turns(rope_frequencies(size, 100.0, None, positions.device), positions, 1.25)


def both(compute):
    """What plain operations give, and what the kernel gives."""
    plain = compute()
    with kernels.in_use() as calls:
        fused = compute()
    assert calls["rotate"] > 0
    return plain, fused


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", [2, 6, 40, 128])
@pytest.mark.parametrize("heads", [1, 3, 32])
@pytest.mark.parametrize("cut", ["whole", "part", "heads first"])
def test_the_kernel_has_the_bits_of_plain_operations(interleaved, size, heads, cut):
    by = some_turns(size, 7)
    x = torch.randn(2, 7, heads, size + 4)
    dy = torch.randn(2, heads, 7, size)
    if cut == "heads first":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)

    def compute():
        leaf = x.clone().requires_grad_()
        part = leaf[..., 2:-2] if cut == "part" else leaf[..., :size].contiguous()
        y = rotate(part.transpose(1, 2), by, interleaved)
        y.backward(dy)
        return y, leaf.grad

    assert all(torch.equal(a, b) for a, b in zip(*both(compute), strict=True))


def test_numbers_apart_in_memory_and_turns_of_other_positions():
    by, x = some_turns(6, 5), torch.randn(1, 2, 5, 12)[..., ::2]
    plain, fused = both(lambda: rotate(x, by))
    assert torch.equal(plain, fused)
    with kernels.in_use(), pytest.raises(AssertionError, match="a turn for each position"):
        rotate(torch.randn(1, 2, 9, 6), by)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_of_precision_are_rounded_once(dtype):
    by, x = some_turns(16, 9), torch.randn(3, 2, 9, 24).to(dtype)
    plain, fused = both(lambda: rotate_head(x, by))
    assert fused.dtype == dtype
    # The interpreter rounds to bfloat16 towards 0, a device to nearest.
    tolerance = 0.0 if kernels.ON_DEVICE or dtype == torch.float16 else 2**-7
    torch.testing.assert_close(fused, plain, rtol=tolerance, atol=0)


def test_the_gradient_has_a_gradient():
    by, x = some_turns(6, 4), torch.randn(1, 2, 4, 6)

    def compute():
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(rotate(leaf, by).pow(3).sum(), leaf, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), leaf)

    plain, fused = both(compute)
    torch.testing.assert_close(fused, plain)


@pytest.mark.parametrize("fields", [{"num_kv_heads": 2}, LATENT], ids=["grouped", "latent"])
def test_attention_with_the_kernel_is_attention_without(fields):
    attention = build_attention(AttentionConfig(d_model=32, num_heads=4, **fields))
    x = torch.randn(2, 11, 32)

    def compute():
        attention.zero_grad()
        y = attention(x)
        y.square().sum().backward()
        return y, *(p.grad for p in attention.parameters())

    for a, b in zip(*both(compute), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
