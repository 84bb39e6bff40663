"""The kernels of the layer in Triton's interpreter, against plain operations."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from moe import GroupedExperts, MoEConfig
from moe import kernels as moe_kernels
from moe.config import GATED
from moe.experts.activate import activate, activate_backward
from moe.float8.rows import Float8Rows
from moe.kernels.rows import columns_of
from moe.rows import RowMap, row_map, rows_of, sum_rows, take_rows
from tests.moe.test_dispatch import DispatcherContract
from tests.moe.test_layer import D, make_layer
from tests.support import kernels

kernels.need_triton(interpreter=True)
pytestmark = kernels.infinities_are_quiet
of_ranks = pytest.mark.skipif(kernels.ON_DEVICE, reason="ranks have tensors of a CPU")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _kernels_when_asked():
    with kernels.only_when_asked():
        yield


@pytest.fixture
def _kernels_in_use(_kernels_when_asked):
    with kernels.in_use():
        yield


def kernels_from_now_on(world: int) -> None:
    del world
    kernels.in_use().__enter__()


@of_ranks
class TestAllToAllWithKernels(DispatcherContract):
    fields = {"backend": "grouped_mm"}
    world = 4
    prepare = staticmethod(kernels_from_now_on)


@of_ranks
class TestHierarchicalWithKernels(DispatcherContract):
    fields = {"dispatcher": "hierarchical", "backend": "grouped_mm"}
    world, nodes = 4, 2
    prepare = staticmethod(kernels_from_now_on)


def both(compute):
    """What plain operations give, and what kernels give."""
    plain = compute()
    with kernels.in_use():
        return plain, compute()


def sums_in_float32(y: torch.Tensor, index: RowMap, num_real: int) -> torch.Tensor:
    """The definition: one term after another, rounded once."""
    ends, out = index.ends_S1.tolist(), []
    for start, end in pairwise(ends):
        total = torch.zeros(y.shape[1])
        for place in index.order_R[start:end].tolist():
            if place < num_real:
                total += y[place].float()
        out.append(total)
    return rounded(torch.stack(out), y.dtype)


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As the interpreter rounds: to bfloat16 towards 0, where a device rounds to nearest."""
    if dtype == torch.bfloat16 and not kernels.ON_DEVICE:
        x = (x.view(torch.int32) & ~0xFFFF).view(torch.float32)
    return x.to(dtype)


@pytest.mark.usefixtures("_kernels_in_use")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 64, 300, 1028])
@pytest.mark.parametrize("real", [30, 37, 0])
def test_rows_are_taken_and_summed_without_those_past_the_end(dtype, width, real):
    x = torch.randn(12, width).to(dtype)
    index = row_map(torch.randint(11, (37,)), 12)  # nobody takes the last row
    taken = take_rows(x, index, torch.tensor(real, dtype=torch.int32))
    assert torch.equal(taken[:real], x[index.source_R[:real]])
    assert not taken[real:].any()
    y = torch.randn(37, width).to(dtype)
    y[real:] = torch.nan
    summed = sum_rows(y, index, torch.tensor(real, dtype=torch.int32))
    assert torch.equal(summed, sums_in_float32(y, index, real))


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_of_rows_have_the_bits_of_plain_operations(dtype):
    # As exact sums ask for: a run goes on where Triton is, or is not.
    x, source = torch.randn(12, 40).to(dtype), torch.randint(12, (37,))

    def compute():
        index = row_map(source, 12)
        return *index, take_rows(x, index), sum_rows(x[source].float(), index)

    assert all(torch.equal(a, b) for a, b in zip(*both(compute), strict=True))


@pytest.mark.usefixtures("_kernels_in_use")
def test_no_rows_and_no_sources():
    x, none = torch.randn(4, 8), torch.empty(0, dtype=torch.int64)
    index = row_map(none, 4)
    assert take_rows(x, index).shape == (0, 8)
    assert torch.equal(sum_rows(x[:0], index), torch.zeros(4, 8))
    assert sum_rows(x[:0], row_map(none, 0)).shape == (0, 8)


@pytest.mark.usefixtures("_kernels_in_use")
def test_rows_have_gradients_of_gradients():
    index = row_map(torch.tensor([3, 0, 3, 1, 2]), 5)
    num_real = torch.tensor(4)
    for function, shape in ((take_rows, (5, 3)), (sum_rows, (5, 3))):
        x = torch.randn(shape, requires_grad=True)
        y = function(x.sin(), index, num_real)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(dx.square().sum(), x)
        matrix = torch.zeros(5, 5)
        matrix[torch.arange(4), index.source_R[:4]] = 1
        matrix = matrix if function is take_rows else matrix.t()
        z = x.detach().clone().requires_grad_()
        (dz,) = torch.autograd.grad((matrix @ z.sin()).square().sum(), z, create_graph=True)
        (expected,) = torch.autograd.grad(dz.square().sum(), z)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", moe_kernels.NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "real"), [(96, 30), (7, 37), (300, 0), (1030, 5)])
def test_the_activation_and_its_gradients(name, dtype, width, real):
    gated, num_real = name in GATED, torch.tensor(real, dtype=torch.int32)
    gate, up, dh = (torch.randn(37, width).to(dtype) for _ in range(3))
    weights = torch.rand(37, 1).to(dtype)
    wide = [t.double().requires_grad_() for t in (gate, up, weights)]
    h = activate(name, wide[0] if gated else None, *wide[1:], num_real)
    h[:real].backward(dh[:real].double())
    for rows in (gate, up, dh, weights):
        rows[real:] = torch.nan  # what a grouped GEMM leaves past its last group
    with kernels.in_use(), torch.no_grad():
        inputs = gate if gated else None, up, weights, num_real
        again = activate(name, *inputs)
        dgate, dup, dweights, h_again = activate_backward(name, dh, *inputs)
    assert torch.equal(again, h_again)
    assert (dgate is None) is not gated
    # One rounding to the dtype, of the interpreter towards 0.
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    for found, tensor in (
        (again, h), (dup, wide[1].grad), (dweights, wide[2].grad), (dgate, wide[0].grad)
    ):  # fmt: skip
        if found is not None:
            assert found.dtype == dtype
            torch.testing.assert_close(found[:real].double(), tensor[:real], rtol=rtol, atol=1e-5)
            assert not found[real:].any()


@pytest.mark.parametrize("name", ["relu2", "geglu"])  # torch has none of SiLU
def test_the_gradient_of_the_activation_has_a_gradient(name):
    up, gate, dh = (torch.randn(5, 8) for _ in range(3))
    weights = torch.rand(5, 1)

    def compute():
        inputs = [t.clone().requires_grad_() for t in (gate, up, weights)]
        first = activate_backward(
            name, dh, inputs[0] if name in GATED else None, *inputs[1:], torch.tensor(5)
        )
        total = sum(grad.square().sum() for grad in first[:3] if grad is not None)
        return torch.autograd.grad(total, inputs, allow_unused=True)

    for a, b in zip(*both(compute), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def some_rows(dtype=torch.float32):
    """Rows of experts 4 to 8 of 12; nobody takes expert 5, and places are left over."""
    x = torch.randn(23, 16).to(dtype)
    indices = torch.stack([torch.randperm(12)[:3] for _ in range(23)])
    indices[indices == 5] = 12
    weights = torch.rand(23, 3).to(dtype)
    return x, indices, weights


@pytest.mark.parametrize("activation", ["swiglu", "relu2", "swiglu_oai"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_compute_as_without_kernels(activation, bias, dtype):
    if kernels.ON_DEVICE and dtype == torch.float32:
        pytest.skip("torch has no grouped product of float32 there")
    x, indices, weights = some_rows(dtype)
    config = MoEConfig(
        d_model=16, d_ff=24, num_experts=5, top_k=2, activation=activation, ffn_bias=bias,
        backend="grouped_mm",
    )  # fmt: skip
    torch.manual_seed(0)
    experts = GroupedExperts(config).to(dtype)
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.3)

    def compute():
        experts.zero_grad()
        inputs = x.clone().requires_grad_(), weights.clone().requires_grad_()
        rows = rows_of(inputs[0], indices, inputs[1], range(4, 9), length=69)
        y = experts(*rows)
        y.float().square().sum().backward()
        return [y, *(t.grad for t in (*inputs, *experts.parameters())), *rows[:4]]

    plain, fused = both(compute)
    assert int(plain[-1].sum()) < 69
    assert not plain[-1][1]
    for a, b in zip(fused, plain, strict=True):
        if a.dtype == torch.int64:
            assert torch.equal(a, b)
        else:
            error = (a - b).float().norm() / b.float().norm().clamp(min=1e-9)
            assert error < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("length", [None, 69])
def test_the_sort_of_rows_gives_the_index_that_is_sorted_without_it(length):
    x, indices, weights = some_rows()
    with kernels.in_use():
        rows = rows_of(x, indices, weights, range(4, 9), length)
        taken = take_rows(x, rows.sorted.to_rows)
    R = int(rows.rows_per_expert_E.sum())
    plain = row_map(rows.source_R, len(x))
    # Without a length the host knows the number of rows on a CPU alone.
    assert len(rows.source_R) == (length or (indices.numel() if kernels.ON_DEVICE else R))
    assert torch.equal(rows.sorted.ends_E, rows.rows_per_expert_E.cumsum(0).int())
    index = rows.sorted.to_rows
    for row, ends in enumerate(pairwise(index.ends_S1.tolist())):
        places = index.order_R[slice(*ends)]
        expected = plain.order_R[plain.ends_S1[row] : plain.ends_S1[row + 1]]
        assert torch.equal(places[places < len(rows.source_R)], expected)
    # Numbers past the rows are skipped: by the kernel, and where no kernel takes a dtype.
    expected = sum_rows(taken, plain)
    with kernels.in_use():
        assert torch.equal(sum_rows(taken, index), expected)
        wide = sum_rows(taken.double(), index)
    torch.testing.assert_close(wide, expected.double())


@pytest.mark.parametrize("fields", [{}, {"score_func": "sigmoid", "expert_bias": True}])
def test_a_layer_computes_as_without_kernels(fields):
    x = torch.randn(3, 11, D)
    backend = "auto" if kernels.ON_DEVICE else "grouped_mm"  # of float32 there is none on CUDA

    def compute():
        layer = make_layer(aux_loss_coeff=0.1, backend=backend, **fields)
        out = layer(x)
        (out.hidden.square().sum() + out.aux.aux_loss).backward()
        return [out.hidden, *(p.grad for p in layer.parameters())]

    for a, b in zip(*both(compute), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# torch's own: its tracer makes an instance of autograd.Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_layer_calls_the_same_operators(backend):
    layer = make_layer(aux_loss_coeff=0.1, backend="grouped_mm").bfloat16()
    x = torch.randn(33, D).bfloat16().requires_grad_()
    torch._dynamo.reset()

    with kernels.in_use() as calls:

        def compute(function):
            layer.zero_grad()
            calls.clear()
            out = function(x)
            (out.hidden.float().square().sum() + out.aux.aux_loss).backward()
            return dict(calls), [out.hidden, *(p.grad for p in layer.parameters())]

        counts, plain = compute(layer)
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        compute(compiled)
        again, numbers = compute(compiled)
    assert counts["sort_assignments"] == 1
    assert counts["take_rows"] == counts["sum_rows"] == 2
    assert counts["activate_backward"] == counts["select_experts_backward"] == 1
    assert again == counts
    assert all(torch.equal(a, b) for a, b in zip(numbers, plain, strict=True))


def without_lost_tiles(packed: torch.Tensor) -> torch.Tensor:
    """Packed rows, with zeros for the numbers of a tile that arrives as NaN, whatever they are."""
    pieces = -(-packed.shape[1] // 129)
    numbers, exponents = packed.split([packed.shape[1] - pieces, pieces], 1)
    lost = (exponents == 255).repeat_interleave(128, 1)[:, : numbers.shape[1]]
    return torch.cat([numbers.masked_fill(lost, 0), exponents], 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 127, 128, 200, 384, 1152])
def test_rows_are_packed_in_float8_bit_for_bit(dtype, width):
    x = torch.randn(40, width)
    x *= torch.pow(2.0, torch.randint(-120, 120, (40, 1)))
    x[0] = 0
    x[1, 0] = torch.nan
    x[2, 0], x[3, 0] = torch.inf, -torch.inf
    x[4] = 448
    x[5], x[5, 0] = 448 * 2.0**-9, 2.0**-140
    x[6] = 449
    x[7] = torch.linspace(-448, 448, width)
    x[8] = 2.0 ** -torch.arange(width).float().clamp(max=140)
    x[9] = torch.nextafter(torch.tensor(448.0), torch.tensor(1e9))
    x[10] = torch.nextafter(torch.tensor(448.0), torch.tensor(0.0))
    x[11] = 2.0**-149
    x[12] = torch.finfo(torch.float32).max
    x[13] = -x[7]
    x[14], x[15] = 224 * 2.0**-149, 225 * 2.0**-149
    x = x.to(dtype)
    if dtype == torch.bfloat16 and not kernels.ON_DEVICE:
        # The interpreter, which knows no bfloat16, loses its subnormal numbers.
        x = x.masked_fill(x.abs() < 2.0**-126, 0)
    plain, packed = both(lambda: Float8Rows().pack(x))
    assert torch.equal(*(without_lost_tiles(each) for each in (plain, packed)))
    plain, packed = both(lambda: Float8Rows().pack(x[:0]))
    assert torch.equal(plain, packed)


def test_every_number_of_float16_is_packed_bit_for_bit():
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).view(512, 128)
    plain, packed = both(lambda: Float8Rows().pack(x))
    assert torch.equal(*(without_lost_tiles(each) for each in (plain, packed)))


def test_columns_of_a_program_leave_threads_sixteen_bytes_of_bfloat16():
    assert [columns_of(w) for w in (1, 100, 256)] == [(1, 1), (128, 1), (256, 1)]
    assert columns_of(768) == (256, 1)
    assert columns_of(2048) == (1024, 4)
    assert columns_of(1536) == (512, 2)
