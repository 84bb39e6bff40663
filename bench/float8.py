"""Products in float8 beside those of the compute dtype: a linear layer, and experts.

    OMP_NUM_THREADS=1 python -m bench.float8 [--quick] [--json FILE]

Forward and backward of a linear layer and of 8 experts, with gradients of the input and of all
weights. On a CUDA device (compute capability 9.0) the limit is bfloat16, and ``plain`` is the
definition in plain operations on the same device, which float8 must agree with to 1 %, and experts
to 3 %: the kernel's last bits change what is rounded to float8 next. On a CPU the limit is float32,
and float8 is the emulation, whose slowness is what is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness import Row, arguments, finish, interleave
from moe import MoEConfig, MoELayer, use_float8, why_no_float8
from moe.float8 import linear as float8

CUDA_SIZES = {"tokens": 16384, "d_model": 4096, "d_ff": 2048}
CPU_SIZES = {"tokens": 1024, "d_model": 512, "d_ff": 512}
QUICK_SIZES = {"tokens": 256, "d_model": 256, "d_ff": 256}


NEAR = {"linear": 1e-2, "experts": 3e-2}
"""How far float8 may be from its definition, as a share of the norm."""


def subjects(
    name: str, make: Callable[[bool], nn.Module], x: Tensor, dy: Tensor, device: torch.device
) -> dict[str, Callable[[], None]]:
    """``limit``, ``float8`` and on CUDA ``plain``: a forward and a backward of each."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, dy = x.to(device, dtype).requires_grad_(), dy.to(device, dtype)

    def run(module: nn.Module) -> list[Tensor]:
        module.zero_grad()
        x.grad = None
        out: Any = module(x)
        hidden = out if isinstance(out, Tensor) else out.hidden
        hidden.backward(dy)
        return [hidden.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]

    plain, rough = make(False).to(device, dtype), make(True).to(device, dtype)

    def by_definition() -> list[Tensor]:
        kernel, float8.scaled_product_cuda = float8.scaled_product_cuda, float8.scaled_product_plain
        try:
            return run(rough)
        finally:
            float8.scaled_product_cuda = kernel

    found: dict[str, Callable[[], Any]] = {
        "limit": lambda: run(plain),
        "float8": lambda: run(rough),
    }
    if device.type == "cuda":
        found["plain"] = by_definition
        for ours, right in zip(run(rough), by_definition(), strict=True):
            error = float((ours.float() - right.float()).norm() / right.float().norm())
            if not error < NEAR[name]:
                raise SystemExit(
                    f"{name}: float8 differs from its definition by {error} of the norm"
                )
    return found


def linear(sizes: dict[str, int], in_float8: bool) -> nn.Module:
    """A linear layer."""
    torch.manual_seed(0)
    layer = nn.Linear(sizes["d_model"], sizes["d_ff"], bias=False)
    return use_float8(layer) if in_float8 else layer


def experts(sizes: dict[str, int], in_float8: bool) -> nn.Module:
    """A layer of 8 experts, of which a token takes 2."""
    torch.manual_seed(0)
    gemm = "float8" if in_float8 else "compute"
    fields = {"d_model": sizes["d_model"], "d_ff": sizes["d_ff"], "num_experts": 8, "top_k": 2}
    return MoELayer(MoEConfig.model_validate({**fields, "gemm": gemm}))


def main() -> int:
    args = arguments(__doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if why := why_no_float8(device):
        print(f"there are no products in float8: {why}")
        return 77  # bench.gpu leaves this bench out
    sizes = CUDA_SIZES if device.type == "cuda" else CPU_SIZES
    sizes = QUICK_SIZES if args.quick else sizes
    rows: list[Row] = []
    for name, make in (("linear", linear), ("experts", experts)):
        case = f"{name}, {sizes['tokens']} x {sizes['d_model']} x {sizes['d_ff']}"
        torch.manual_seed(1)
        x = torch.randn(sizes["tokens"], sizes["d_model"])
        dy = torch.randn(sizes["tokens"], sizes["d_ff" if name == "linear" else "d_model"])
        made = subjects(name, lambda in_float8, make=make: make(sizes, in_float8), x, dy, device)  # type: ignore[misc]
        rows += interleave(case, "forward and backward", made, 3 if args.quick else args.samples)
    finish("float8", rows, ["torch"], args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
