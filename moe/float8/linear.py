"""Products in float8 by tiles of 128, forward and backward: DeepSeek-V3's recipe.

The recipe is that of arXiv 2412.19437, section 3.3. All operands are e4m3. Activations and output
gradients have a scale for each 1 x 128 tile along the inner dim of a product, weights one for each
128 x 128 block. The tiles of the product that gives a weight's gradient are 128 consecutive rows,
which are tokens. Each 128 of the inner dim are summed by themselves; the sum is multiplied by its
two scales and added in float32.

Legend: T rows (tokens), D inputs, F outputs, M x K and N x K the operands of a product, P pieces of
128 of K, Q blocks of 128 of N.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from parallel.apply import PutGrad
from router import autocast_dtype

TILE = 128
E4M3_MAX = 448.0
"""The largest number of torch.float8_e4m3fn."""
_LEAST_SCALE = 2.0**-126
"""The smallest normal float32: a scale of 0 would divide by 0."""

FLOAT8_OPERANDS = ("inputs", "weights", "gradients")
"""The operands of products that a :class:`Float8Tally` tells apart."""


class Quantized(NamedTuple):
    """A matrix in float8, with zeros up to a multiple of 128 along its inner dim."""

    values: Tensor
    """[M, 128 P] float8_e4m3fn; with blocks [128 Q, 128 P]."""
    scales: Tensor
    """[M, P] float32, what values are multiplied by; with blocks [Q, P]."""
    in_blocks: bool = False
    """Whether a scale is of 128 rows, and not of one."""

    def t(self) -> Quantized:
        """The transpose of a matrix in blocks, which has the same blocks."""
        assert self.in_blocks, "the tiles of a transpose are others"
        return Quantized(self.values.t(), self.scales.t(), in_blocks=True)


def _scales_of(amax: Tensor) -> Tensor:
    """The scale of a tile is amax / 448 in float32, without rounding to a power of two. A tile with
    a NaN or an infinity gets a scale that is not finite, and all of its products are NaN."""
    return (amax / E4M3_MAX).clamp_min(_LEAST_SCALE)


def _up(size: int) -> int:
    return -(-size // TILE) * TILE


def quantize_tiles(x_MK: Tensor) -> Quantized:
    """Float8 with a scale for each 1 x 128 tile; the last tile of a row may be shorter."""
    M, K = x_MK.shape
    x_MPt = F.pad(x_MK.float(), (0, _up(K) - K)).reshape(M, _up(K) // TILE, TILE)
    scales_MP = _scales_of(x_MPt.abs().amax(2))
    values = (x_MPt / scales_MP.unsqueeze(2)).to(torch.float8_e4m3fn)
    return Quantized(values.reshape(M, _up(K)), scales_MP)


def quantize_blocks(w_NK: Tensor) -> Quantized:
    """Float8 with a scale for each 128 x 128 block; the last blocks may be smaller."""
    N, K = w_NK.shape
    padded = F.pad(w_NK.float(), (0, _up(K) - K, 0, _up(N) - N))
    w_QtPt = padded.reshape(_up(N) // TILE, TILE, _up(K) // TILE, TILE)
    scales_QP = _scales_of(w_QtPt.abs().amax((1, 3)))
    values = (w_QtPt / scales_QP[:, None, :, None]).to(torch.float8_e4m3fn)
    return Quantized(values.reshape(_up(N), _up(K)), scales_QP, in_blocks=True)


def why_no_float8(device: torch.device) -> str:
    """Why a device has no products in float8, in words; "" where it has them.

    A CPU emulates them. A CUDA device needs the products with scales of 1 x 128 tiles and
    128 x 128 blocks of torch.nn.functional.scaled_mm, which torch 2.13 has for Hopper alone
    (compute capability 9.0), built with CUDA 12.9 or later.
    """
    if device.type != "cuda":
        return "" if device.type in ("cpu", "meta") else f"there are none on {device.type}"
    return _why_no_cuda(device)


@cache
def _why_no_cuda(device: torch.device) -> str:
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return (
            f"torch has them for compute capability 9.0 (H100, H200), and "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}"
        )
    if not hasattr(F, "scaled_mm") or version < (12, 9):
        return f"they need torch built with CUDA 12.9; torch is {torch.__version__}"
    return ""


def scaled_product(a: Quantized, b: Quantized, columns: int, dtype: torch.dtype) -> Tensor:
    """[M, K] times the transpose of [N, K] -> [M, columns], rounded to ``dtype`` at the end.

    ``columns`` is N without the rows that complete a block. ``a`` has tiles; ``b`` has tiles or
    blocks. Raises ValueError for a device without such products.
    """
    device = a.values.device
    if why := why_no_float8(device):
        raise ValueError(f"products in float8 must have a device that has them: {why}")
    product = scaled_product_cuda if device.type == "cuda" else scaled_product_plain
    return product(a, b, columns, dtype)


def scaled_product_plain(a: Quantized, b: Quantized, columns: int, dtype: torch.dtype) -> Tensor:
    """The definition of :func:`scaled_product`.

    The sum over 128 products of two e4m3 numbers has at most 43 bits: float64 has it exactly, in
    any order. So a result's bits depend on its row and column alone, and not on the sizes of the
    product, threads or the machine.
    """
    out = torch.zeros(len(a.values), columns, device=a.values.device)
    scales_NP = b.scales
    if b.in_blocks:
        scales_NP = scales_NP.repeat_interleave(TILE, 0)[:columns]
    for p in range(a.scales.shape[1]):
        at = slice(p * TILE, (p + 1) * TILE)
        piece = a.values[:, at].double() @ b.values[:columns, at].double().t()
        out += piece.float() * a.scales[:, p : p + 1] * scales_NP[:, p]
    return out.to(dtype)


def scaled_product_cuda(a: Quantized, b: Quantized, columns: int, dtype: torch.dtype) -> Tensor:
    """:func:`scaled_product` by cuBLAS.

    The scales of 1 x 128 tiles must lie column by column, those of 128 x 128 blocks so too, with
    their number of rows a multiple of 4 (aten/src/ATen/native/cuda/ScaledBlas.cpp).
    """
    M, K = a.values.shape
    if not (M and K and columns):
        return torch.zeros(M, columns, dtype=dtype, device=a.values.device)
    kinds = F.ScalingType
    a_values, a_scales = _whole_tiles(a)
    if b.in_blocks:
        kind, b_values = kinds.BlockWise128x128, b.values
        Q, P = b.scales.shape
        b_scales = F.pad(b.scales, (0, -P % 4)).contiguous().t()
        if Q == 1:  # a stride of a dim of one place is not to be relied on
            b_scales = b_scales.as_strided(b_scales.shape, (1, len(b_scales)))
    else:
        kind = kinds.BlockWise1x128
        b_values, b_scales = _whole_tiles(b)
    out = F.scaled_mm(
        a_values,
        b_values.contiguous().t(),
        a_scales,
        kinds.BlockWise1x128,
        b_scales,
        kind,
        output_dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32,
    )
    return out[:M, :columns].to(dtype)


def _whole_tiles(x: Quantized) -> tuple[Tensor, Tensor]:
    """Values and scales with rows of zeros up to a multiple of 128, the scales column by column."""
    (M, _), P = x.values.shape, x.scales.shape[1]
    # Bytes, since zeros can be padded to them; the byte of 0 is 0.
    values = F.pad(x.values.view(torch.uint8), (0, 0, 0, _up(M) - M)).view(torch.float8_e4m3fn)
    scales = x.scales.new_empty(0).new_empty_strided((_up(M), P), (1, _up(M)))
    scales[:M].copy_(x.scales)
    scales[M:].fill_(1.0)
    return values.contiguous(), scales


class Float8Tally:
    """Counts of what float8 lost in backwards, by operand of :data:`FLOAT8_OPERANDS`.

    Backwards count and forwards do not, since recomputation runs a forward twice, and an evaluation
    runs forwards alone. Modules add to the tally that they were given; whoever made it reads it.
    """

    def __init__(self) -> None:
        self.counts_underflow = True
        """Whether numbers that become 0 are counted, which takes a pass over each operand. Tiles
        that are not finite are counted in any case."""
        self._counts: dict[str, Tensor] = {}

    def add(self, operand: str, x: Tensor, quantized: Quantized) -> None:
        """Count one operand, before and after its rounding."""
        bad = (~quantized.scales.isfinite()).sum()
        nonzero = flushed = torch.zeros_like(bad)
        if self.counts_underflow:
            # Zeros that complete a tile are zeros before and after. A NaN is not zero.
            nonzero = x.count_nonzero()
            flushed = nonzero - (quantized.values.view(torch.uint8) & 127).count_nonzero()
        counts = torch.stack((nonzero, flushed, bad))
        before = self._counts.get(operand)
        self._counts[operand] = counts if before is None else before + counts

    def take(self) -> Tensor:
        """[3, 3] int64 on the host, and begin anew: for each operand the numbers that were not 0,
        those of them that became 0, and the tiles or blocks with a NaN or an infinity."""
        none = torch.zeros(3, dtype=torch.int64)
        taken = torch.stack([self._counts.get(name, none).cpu() for name in FLOAT8_OPERANDS])
        self._counts.clear()
        return taken


class _Linear(torch.autograd.Function):
    """y = x w^T, dx = dy w and dw = dy^T x, each in float8."""

    @staticmethod
    def forward(
        x_TD: Tensor, w_FD: Tensor, tally: Float8Tally | None, put: PutGrad | None
    ) -> Tensor:
        return scaled_product(
            quantize_tiles(x_TD), quantize_blocks(w_FD), len(w_FD), dtype=x_TD.dtype
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.tally, ctx.put = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x_TD, w_FD = ctx.saved_tensors
        (dy_TF,), tally = grads, ctx.tally
        dx_TD = dw_FD = None
        if ctx.needs_input_grad[0]:
            dy, w = quantize_tiles(dy_TF), quantize_blocks(w_FD)
            dx_TD = scaled_product(dy, w.t(), x_TD.shape[1], dtype=x_TD.dtype)
            if tally is not None:
                tally.add("gradients", dy_TF, dy)
                tally.add("weights", w_FD, w)
        compute = partial(_weight_grad, x_TD.detach(), dy_TF, w_FD.dtype, tally)
        if ctx.put is not None:
            ctx.put(compute)
        elif ctx.needs_input_grad[1]:
            dw_FD = compute()
        return dx_TD, dw_FD, None, None


def _weight_grad(
    x_TD: Tensor, dy_TF: Tensor, dtype: torch.dtype, tally: Float8Tally | None
) -> Tensor:
    """dy^T x, [F, D], whose inner dim is the tokens."""
    dy_FT, x_DT = dy_TF.t(), x_TD.t()
    dy, x = quantize_tiles(dy_FT), quantize_tiles(x_DT)
    if tally is not None:
        tally.add("gradients", dy_FT, dy)
        tally.add("inputs", x_DT, x)
    return scaled_product(dy, x, len(x_DT), dtype=dtype)


def float8_linear(
    x: Tensor, w_FD: Tensor, tally: Float8Tally | None = None, put: PutGrad | None = None
) -> Tensor:
    """x w^T in float8, [..., D] -> [..., F], of the dtype of ``x``; no second derivatives.

    Args:
        x: [..., D], with any number of rows, also none.
        w_FD: the weight, as nn.Linear has it.
        tally: what the backward adds its counts to.
        put: stores the computation of the weight's gradient for later, see
            :meth:`parallel.WeightGradStore.put_for`; ``w_FD`` is then detached.
    """
    out = cast(Tensor, _Linear.apply(x.reshape(-1, x.shape[-1]), w_FD, tally, put))
    return out.view(*x.shape[:-1], len(w_FD))


Product = Callable[[Tensor, Tensor], Tensor]
"""(x_nD, w_DF) -> [n, F]."""


def float8_matmul(x_nD: Tensor, w_DF: Tensor, tally: Float8Tally | None = None) -> Tensor:
    """:func:`float8_linear` for a weight that lies as experts have it."""
    return float8_linear(x_nD, w_DF.t(), tally)


class Float8Linear(nn.Linear):
    """A linear layer whose three products are in float8; its parameters are those of nn.Linear."""

    tally: Float8Tally | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., F]."""
        y = self.product(x, self.weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def product(self, x: Tensor, weight: Tensor, put: PutGrad | None = None) -> Tensor:
        """x w^T with a weight, or a shard of it, that the caller has; ``parallel``'s functions for
        linear layers call this method where there is one."""
        x = x.to(autocast_dtype(x.device.type) or x.dtype)
        return float8_linear(x, weight if put is None else weight.detach(), self.tally, put)


def use_float8(module: nn.Module, tally: Float8Tally | None = None) -> nn.Module:
    """Compute all linear layers of a module in float8; the module is changed and returned.

    Parameters keep their names, dtype and values. Call before ``apply_tensor_parallel`` and
    ``apply_fsdp``, with what the recipe keeps out of float8 (routers, the head) outside ``module``.

    Args:
        module: an attention or feed-forward layer, as a MoE layer's ``shared_experts``.
        tally: what backwards add their counts to.

    Raises ValueError for a linear layer of another class, or one that is changed already.
    """
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        if type(layer) is not nn.Linear or "forward" in vars(layer):
            raise ValueError(
                f"{name or 'module'} ({type(layer).__name__}) must be a plain nn.Linear, which no "
                f"apply function has changed; call use_float8 first, and once"
            )
        layer.__class__ = Float8Linear
        vars(layer)["tally"] = tally
    return module
