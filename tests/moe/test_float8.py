"""Products in float8: the definition against loops, the layer, and what goes with it."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe import (
    FLOAT8_OPERANDS,
    FeedForward,
    Float8Linear,
    Float8Tally,
    MoEConfig,
    MoELayer,
    float8_linear,
    use_float8,
    why_no_float8,
)
from moe.float8 import linear as float8
from moe.float8.linear import quantize_blocks, quantize_tiles, scaled_product, scaled_product_cuda
from moe.float8.rows import Float8Rows
from parallel import (
    ParallelDims,
    Topology,
    apply_delayed_weight_grad,
    apply_expert_parallel,
    apply_recompute,
)
from parallel.comm import collectives
from tests.support import float8 as oracle
from tests.support.ranks import run_ranks


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Of very different sizes, some of which float8 loses, with tiles of zeros."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-14, 3, shape, generator=g))
    x[:: max(shape[0] // 2, 1), :128] = 0
    return x


def same(a: Tensor, b: np.ndarray) -> None:
    """Bit for bit, but for the signs of zeros and the payload of NaNs."""
    np.testing.assert_array_equal(a.detach().numpy(), b)


@pytest.mark.parametrize("scale", [1.0, 1e-36, 1e30])
@pytest.mark.parametrize("shape", [(3, 300), (130, 129), (1, 128), (2, 1)])
def test_tiles_and_blocks_are_rounded_as_defined(shape, scale):
    x = numbers(*shape) * scale
    for quantize, rows in ((quantize_tiles, 1), (quantize_blocks, 128)):
        found = quantize(x)
        values, scales = oracle.quantized(x.numpy(), rows)
        M, K = shape
        same(found.values.float()[:M, :K], np.float32(values))
        whole = found.scales.repeat_interleave(rows, 0).repeat_interleave(128, 1)
        same(whole[:M, :K], np.float32(scales))
        assert not found.values.float()[M:].any()
        assert not found.values.float()[:, K:].any()


def test_every_number_of_float8_stays_what_it_is():
    x = torch.tensor([oracle.E4M3, oracle.E4M3]) * torch.tensor([[1.0], [-1.0]])
    values = quantize_tiles(x).values.float()[:, : x.shape[1]]
    assert torch.equal(values, x)
    # The mean of two neighbours goes to the even code, which torch's float8 must do as well.
    middle = (x[:, 1:] + x[:, :-1]) / 2
    middle = torch.cat([middle, torch.full((2, 1), 448.0)], 1)  # keeps the scale 1
    same(quantize_tiles(middle).values.float()[:, : middle.shape[1]],
         np.float32([[oracle.rounded(float(v)) for v in row] for row in middle]))  # fmt: skip


@pytest.mark.parametrize("sizes", [(5, 200, 7), (131, 40, 130), (0, 9, 3), (1, 128, 1)])
def test_the_three_products_are_those_of_the_loops(sizes):
    T, D, width = sizes
    x, w, dy = numbers(T, D, seed=1), numbers(width, D, seed=2), numbers(T, width, seed=3)
    x, w = x.requires_grad_(), w.requires_grad_()
    y = float8_linear(x, w)
    y.backward(dy)
    expected = oracle.linear(x.detach().numpy(), w.detach().numpy(), dy.numpy())
    for found, right in zip((y, x.grad, w.grad), expected, strict=True):
        same(found, right)


def test_a_row_does_not_depend_on_the_rows_beside_it():
    x, w = numbers(70, 384), numbers(96, 384, seed=1)
    whole = float8_linear(x, w)
    for start, stop in ((0, 1), (3, 17), (64, 70)):
        assert torch.equal(float8_linear(x[start:stop], w), whole[start:stop])


def test_results_are_rounded_once_to_the_dtype_of_the_input():
    x, w = numbers(9, 256).bfloat16().requires_grad_(), numbers(33, 256).bfloat16().requires_grad_()
    y = float8_linear(x, w)
    y.backward(torch.ones_like(y))
    exact = float8_linear(x.detach().float(), w.detach().float())
    assert y.dtype == x.grad.dtype == w.grad.dtype == torch.bfloat16
    assert torch.equal(y, exact.bfloat16())


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -float("inf")])
def test_a_bad_number_makes_its_row_nan_and_is_counted(bad):
    x, w, tally = numbers(4, 256), numbers(5, 256), Float8Tally()
    x[2, 130] = bad
    x.requires_grad_()
    y = float8_linear(x, w.requires_grad_(), tally)
    assert y[2].isnan().all()
    assert y[[0, 1, 3]].isfinite().all()
    y.backward(torch.ones_like(y))
    assert w.grad[:, 130].isnan().all()
    counts = dict(zip(FLOAT8_OPERANDS, tally.take().tolist(), strict=True))
    # The tile of one column of tokens; nothing else is out of bounds.
    assert [counts[name][2] for name in FLOAT8_OPERANDS] == [1, 0, 0]


def test_numbers_that_become_zero_are_counted_by_operand():
    x, w, tally = torch.ones(2, 8), torch.ones(3, 8), Float8Tally()
    x[0, 0] = 2.0**-10 / 448 * 0.9  # tiles of the weight's gradient are along the rows
    w[1, 2], w[1, 3] = 2.0**-30, 0.0
    y = float8_linear(x.requires_grad_(), w.requires_grad_(), tally)
    assert not tally.take().any()  # the forward counts nothing
    y.backward(torch.ones_like(y))
    assert tally.take().tolist() == [[16, 1, 0], [23, 1, 0], [12, 0, 0]]
    assert not tally.take().any()
    tally.counts_underflow = False
    float8_linear(x, w, tally).sum().backward()
    assert not tally.take().any()


SIZES: dict[str, Any] = {"d_model": 160, "d_ff": 136, "num_experts": 4, "top_k": 2}


def layer_of(seed: int = 0, **fields: Any) -> MoELayer:
    torch.manual_seed(seed)
    return MoELayer(MoEConfig(**{**SIZES, "gemm": "float8", "aux_loss_coeff": 0.0, **fields}))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def test_the_layer_is_a_loop_over_experts_with_products_of_loops():
    D, tokens = 12, 5
    layer = layer_of(d_model=D, d_ff=132, num_experts=3)
    x, dy = torch.randn(tokens, D), torch.randn(tokens, D)
    out = layer(x)
    (out.hidden * dy).sum().backward()
    indices, e = out.aux.topk_indices_TK, layer.experts
    scores = (x @ layer.router.weight.detach().t()).softmax(1).gather(1, indices)
    weights = scores / scores.sum(1, keepdim=True)
    y = torch.zeros(tokens, D)
    for i in range(3):
        rows, places = (indices == i).nonzero(as_tuple=True)
        weight = weights[rows, places].unsqueeze(1)
        w_gate, w_up, w_down = (p.detach()[i].t().numpy() for p in (e.w_gate, e.w_up, e.w_down))
        gate = torch.from_numpy(oracle.product(x[rows].numpy(), w_gate, 128))
        up = torch.from_numpy(oracle.product(x[rows].numpy(), w_up, 128))
        h = F.silu(gate) * up * weight
        down, dh, dw_down = map(
            torch.from_numpy, oracle.linear(h.numpy(), w_down, dy[rows].numpy())
        )
        y.index_add_(0, rows, down)
        dh = dh * weight
        sigmoid = gate.sigmoid()
        dgate = dh * up * (sigmoid * (1 + gate * (1 - sigmoid)))
        for grad, d in ((e.w_gate.grad, dgate), (e.w_up.grad, dh * F.silu(gate))):
            dw = torch.from_numpy(oracle.product(d.t().numpy(), x[rows].t().numpy(), 1))
            # A last bit of the activation may round to the next number of float8.
            assert (grad[i].t() - dw).norm() < 1e-2 * dw.norm()
        torch.testing.assert_close(e.w_down.grad[i].t(), dw_down, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.hidden, y, rtol=1e-5, atol=1e-6)


def test_experts_without_tokens_and_batches_without_tokens():
    layer = layer_of()
    with torch.no_grad():
        layer.router.weight[:] = 0
        layer.router.weight[0, 0] = layer.router.weight[1, 0] = 1
    x = torch.randn(5, 160).abs().requires_grad_()
    layer(x).hidden.sum().backward()
    assert layer(x).aux.tokens_per_expert_E.tolist() == [5, 5, 0, 0]
    for weight in layer.experts.parameters():
        assert weight.grad[:2].abs().sum() > 0
        assert not weight.grad[2:].any()
    layer.zero_grad()
    empty = layer(torch.empty(0, 160, requires_grad=True))
    assert empty.hidden.shape == (0, 160)
    empty.hidden.sum().backward()
    assert not any(p.grad.any() for p in layer.experts.parameters())


def test_it_is_near_the_layer_in_float32_and_is_not_it():
    x = torch.randn(64, 160)
    exact, rough = layer_of(gemm="compute"), layer_of()
    difference = (exact(x).hidden - rough(x).hidden).norm() / exact(x).hidden.norm()
    assert 1e-3 < difference < 0.1


def run(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    out = model(x)
    hidden = out if isinstance(out, Tensor) else out.hidden
    hidden.square().sum().backward()
    return {**gradients(model), "x": x.grad, "y": hidden.detach()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


class Block(nn.Module):
    """A MoE layer and a dense one, as a model has them."""

    def __init__(self, tally: Float8Tally | None = None, **fields: Any) -> None:
        super().__init__()
        self.moe = layer_of(num_shared_experts=1, **fields)
        self.moe.experts.float8_tally = tally
        self.ffn = FeedForward(160, 136)
        use_float8(self.moe.shared_experts, tally)
        use_float8(self.ffn, tally)

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(x + self.moe(x).hidden)


@pytest.mark.parametrize("how", ["full", "selective", "experts", "deepcopy"])
def test_recomputation_changes_neither_numbers_nor_counts(how):
    x, counts, results = torch.randn(40, 160), [], []
    for changed in (False, True):
        tally = Float8Tally()
        block = Block(tally, recompute_experts=changed and how == "experts")
        if changed and how in ("full", "selective"):
            apply_recompute([block], how)
        if changed and how == "deepcopy":
            block = copy.deepcopy(block)
            tally = block.ffn.w_up.tally
        results.append(run(block, x))
        counts.append(tally.take())
    equal(*results)
    assert torch.equal(*counts)
    assert counts[0][:, 0].min() > 0


def test_a_delayed_weight_gradient_is_the_same():
    x = torch.randn(10, 160)
    plain, delayed = Block(), Block()
    store = apply_delayed_weight_grad(delayed)
    expected = run(plain, x)
    y = x.clone().requires_grad_()
    with store.collect("a"):
        hidden = delayed(y)
        hidden.square().sum().backward()
    names = [name for name, _ in plain.named_parameters() if "ffn" in name or "shared" in name]
    assert store.count("a") == len(names) == 6
    assert not any(name in gradients(delayed) for name in names)
    store.compute("a")
    equal(expected, {**gradients(delayed), "x": y.grad, "y": hidden.detach()})


def test_functional_gradients_are_the_same():
    layer, x = layer_of(), torch.randn(7, 160)
    weights = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x,)).hidden.square().sum()

    found = torch.func.grad(loss)(weights)
    layer(x).hidden.square().sum().backward()
    for name, grad in gradients(layer).items():
        # The activation's last bit is another there, and may round to the next number of float8.
        assert (found[name] - grad).norm() < 1e-3 * grad.norm()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch warns of itself while it compiles
def test_compiled_the_experts_run_in_eager_mode():
    layer, x = layer_of(), torch.randn(7, 160)
    expected = run(layer, x)
    layer.zero_grad()
    found = run(torch.compile(layer, backend="eager"), x)
    equal(expected, {name.removeprefix("_orig_mod."): value for name, value in found.items()})


def test_autocast_rounds_the_input_and_never_the_sums():
    x, module = torch.randn(6, 160), use_float8(FeedForward(160, 136, bias=True))
    with torch.autocast("cpu", torch.bfloat16):
        y = module.w_up(x)
    weight, bias = module.w_up.weight, module.w_up.bias
    expected = float8_linear(x.bfloat16(), weight) + bias.bfloat16()
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)


def on_ranks(rank: int, tokens: list[int]) -> tuple[Tensor, ...]:
    dims = ParallelDims.build(Topology(dp_shard=2, ep=2), "cpu")
    layer = layer_of()
    apply_expert_parallel(layer, dims.ep_mesh)
    x = numbers(sum(tokens), 160, seed=5).split(tokens)[rank].clone().requires_grad_()
    out = layer(x).hidden
    out.square().sum().backward()
    return out.detach(), x.grad, *(p.grad.to_local() for p in layer.experts.parameters())


@pytest.mark.parametrize("tokens", [[13, 20], [0, 9]])
def test_two_expert_parallel_ranks_have_the_bits_of_one_process(tokens):
    ranks = run_ranks(on_ranks, 2, tokens)
    one = layer_of()
    x = numbers(sum(tokens), 160, seed=5).requires_grad_()
    out = one(x).hidden
    out.square().sum().backward()
    assert torch.equal(torch.cat([r[0] for r in ranks]), out)
    torch.testing.assert_close(torch.cat([r[1] for r in ranks]), x.grad, rtol=1e-6, atol=1e-7)
    for place, weight in enumerate(one.experts.parameters(), 2):
        assert torch.equal(torch.cat([r[place] for r in ranks]), weight.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_with_powers_of_two_and_packing_again_loses_nothing(dtype):
    x = numbers(6, 200).to(dtype)
    x[1] *= 2.0**60
    x[2, 0], x[3, 150], x[4, :128] = torch.inf, torch.nan, 448 * 2.0**-12
    rows, found = Float8Rows(), torch.empty_like(x)
    packed = rows.pack(x)
    assert (packed.shape, packed.dtype) == ((6, 202), torch.uint8)
    rows.unpack(packed, found)
    for i in range(6):
        for left, right in ((0, 128), (128, 200)):
            tile = x[i, left:right].double().tolist()
            expected = [float("nan")] * len(tile)
            if all(map(math.isfinite, tile)):
                amax = max(map(abs, tile))
                scale = 2.0 ** math.ceil(math.log2(amax / 448)) if amax else 1.0
                expected = [oracle.rounded(v / scale) * scale for v in tile]
            same(found[i, left:right].double(), np.array(expected))
    again = torch.empty_like(x)
    rows.unpack(rows.pack(found), again)
    assert torch.equal(found.nan_to_num(7.0), again.nan_to_num(7.0))
    rows.unpack(rows.pack(x[:0]), found[:0])


def sent_on_rank(rank: int) -> list[tuple[torch.dtype, int]]:
    dims, seen = ParallelDims.build(Topology(dp_shard=2, ep=2), "cpu"), []
    layer = layer_of(dispatch_dtype="float8")
    apply_expert_parallel(layer, dims.ep_mesh)
    exchange = collectives.exchange_rows

    def spy(out: Tensor, x: Tensor, *others: Any) -> Any:
        seen.append((x.dtype, x.shape[-1]))
        return exchange(out, x, *others)

    collectives.exchange_rows = spy
    layer(torch.randn(5, 160, requires_grad=True)).hidden.sum().backward()
    return seen


def test_rows_travel_to_experts_in_float8_and_nothing_else_does():
    for seen in run_ranks(sent_on_rank, 2):
        wide = [sent for sent in seen if sent[1] >= 160]
        # There in bytes with two scales, back as a sum, and both gradients.
        assert wide == [(torch.uint8, 162)] + [(torch.float32, 160)] * 3


def test_linear_layers_keep_names_and_values():
    plain = FeedForward(8, 16, bias=True)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    changed = use_float8(copy.deepcopy(plain))
    assert isinstance(changed.w_up, Float8Linear)
    equal(before, changed.state_dict())
    with pytest.raises(ValueError, match=r"w_gate \(Float8Linear\) must be a plain nn.Linear"):
        use_float8(changed)


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"backend \(packed\) must be auto or loop with gemm"):
        MoEConfig(**SIZES, gemm="float8", backend="packed")
    with pytest.raises(ValueError, match=r"moe.gemm \(float8\) must be compute with train.exact"):
        layer_of().use_exact_sums(None)
    assert "gemm=float8" in repr(layer_of())


@pytest.mark.parametrize(
    ("capability", "cuda", "why"),
    [((9, 0), "12.9", ""), ((9, 0), "13.0", ""), ((9, 0), "12.8", "CUDA 12.9"),
     ((8, 0), "12.9", "Some GPU has 8.0"), ((10, 0), "13.0", "Some GPU has 10.0")],
)  # fmt: skip
def test_devices_without_such_products_are_told_in_a_line(capability, cuda, why, monkeypatch):
    float8._why_no_cuda.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = why_no_float8(torch.device("cuda"))
    float8._why_no_cuda.cache_clear()
    assert why in found
    assert bool(found) == bool(why)
    assert "none on xpu" in why_no_float8(torch.device("xpu"))


@pytest.mark.parametrize("sizes", [(5, 200, 7), (256, 128, 128), (1, 1, 1), (130, 700, 300)])
@pytest.mark.parametrize("quantize", [quantize_tiles, quantize_blocks])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_operands_lie_as_the_kernel_of_cuda_wants_them(sizes, quantize, dtype):
    # torch checks shapes and strides of scales here by the rules of its kernel, without a device.
    M, K, N = sizes
    a = quantize_tiles(torch.empty(M, K, device="meta"))
    b = quantize(torch.empty(N, K, device="meta"))
    out = scaled_product_cuda(a, b, N, dtype)
    assert (out.shape, out.dtype) == ((M, N), dtype)
    wrong = b._replace(scales=torch.empty(len(b.scales) + 1, b.scales.shape[1], device="meta"))
    with pytest.raises((RuntimeError, ValueError)):
        scaled_product_cuda(a, wrong, N, dtype)


def test_a_product_of_nothing_is_zeros():
    a, b = quantize_tiles(torch.empty(3, 0)), quantize_tiles(torch.empty(2, 0))
    for product in (scaled_product, scaled_product_cuda):
        assert torch.equal(product(a, b, 2, torch.float32), torch.zeros(3, 2))


@pytest.mark.parametrize("exponent", [-100, -3, 0, 7, 119])
def test_the_scale_of_a_row_is_the_least_power_of_two_that_holds_its_largest_number(exponent):
    largest = torch.tensor(448 * 2.0**exponent)
    rows = torch.stack([largest, torch.nextafter(largest, torch.tensor(torch.inf))]).view(2, 1)
    assert Float8Rows().pack(rows)[:, -1].tolist() == [127 + exponent, 128 + exponent]
