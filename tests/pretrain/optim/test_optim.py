"""AdamW of operations that round once each: what a slice of a tensor gets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pretrain.optim import AdamWConfig, build_adamw

N = 2400
CONFIG = AdamWConfig(lr=1e-3)


def make(rows: slice = slice(None)) -> nn.Module:
    """A vector, and matrices with rows that fill vector registers and that do not, or slices."""
    torch.manual_seed(0)
    module = nn.Module()
    for name, shape in (("vector", (N,)), ("even", (N, 32)), ("odd", (N, 3))):
        setattr(module, name, nn.Parameter(torch.randn(shape)[rows]))
    return module


def updated(rows: slice, exact: bool, steps: int = 2) -> dict[str, Tensor]:
    module = make(rows)
    optimizer = build_adamw(module, CONFIG, exact=exact)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in module.parameters():
            shape = (N, *parameter.shape[1:])
            parameter.grad = torch.randn(shape, generator=generator)[rows] * 0.01
        optimizer.step()
    states = optimizer.state.items()
    found = {
        f"moment {key} {len(p.shape)}": s[key] for p, s in states for key in s if key != "step"
    }
    return found | {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize("size", [40, 77])
def test_a_slice_gets_the_bits_of_the_whole(size: int) -> None:
    whole = updated(slice(None), exact=True)
    slices = [updated(slice(i, i + size), exact=True) for i in range(0, N, size)]
    for name, value in whole.items():
        together = torch.cat([each[name] for each in slices])
        assert torch.equal(together.view(torch.int32), value.view(torch.int32)), name


def test_the_update_is_that_of_torch() -> None:
    exact, fused = updated(slice(None), exact=True), updated(slice(None), exact=False)
    for name, value in exact.items():
        torch.testing.assert_close(value, fused[name], rtol=1e-5, atol=1e-7)
