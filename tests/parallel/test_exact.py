"""Sums that have equal bits in any order: of gradients, of squares, of losses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel.exact.arithmetic import (
    FRACTION_BITS,
    UnitLimit,
    add_unit,
    from_fixed,
    from_parts,
    on_loss_grid,
    row_square_sums,
    square_parts,
    to_fixed_,
)
from parallel.exact.tensor_digest import placed_digest

QUANTUM = 2.0**-FRACTION_BITS


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int64 if x.dtype == torch.float64 else torch.int32)


def summed(units: list[Tensor], limit: UnitLimit | None = None) -> Tensor:
    """float32: one rank's sum."""
    total, out = torch.zeros(units[0].shape, dtype=torch.int64), torch.empty(units[0].shape)
    for unit in units:
        add_unit(total, unit, limit or UnitLimit(len(units)))
    from_fixed(total, out)
    return out


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.integers(0, 2**32 - 1), st.integers(-40, 2), st.data())
def test_any_order_and_nesting_gives_the_same_bits(
    units: int, seed: int, exponent: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-20, 1, (33,), generator=generator)
    grads = [torch.randn(33, generator=generator) * sizes * 2.0**exponent for _ in range(units)]
    expected = summed(grads)
    order = data.draw(st.permutations(range(units)))
    cuts = sorted(data.draw(st.lists(st.integers(0, units), max_size=5)))
    total = torch.zeros(33, dtype=torch.int64)
    # Each rank sums some of the units; what a rank holds may come through a float64 buffer.
    for start, stop in zip([0, *cuts], [*cuts, units], strict=True):
        part = torch.zeros(33, dtype=torch.int64)
        for i in order[start:stop]:
            if i % 2:
                add_unit(part, grads[i], UnitLimit(units))
            else:
                part += to_fixed_(grads[i].double(), UnitLimit(units))
        total += part
    out = torch.empty(33)
    from_fixed(total, out)
    assert torch.equal(bits(out), bits(expected))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 1024), st.integers(0, 2**32 - 1))
def test_a_sum_is_as_near_as_the_rounding_of_its_units(units: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scale = 2.0 ** torch.randint(-30, -1, (8,), generator=generator)
    grads = [torch.randn(8, generator=generator) * scale for _ in range(units)]
    exact = [math.fsum(float(grad[i]) for grad in grads) for i in range(8)]
    for value, true in zip(summed(grads).tolist(), exact, strict=True):
        assert abs(value - true) <= units * QUANTUM / 2 + abs(true) * 2**-24


def test_more_than_one_chunk() -> None:
    grads = [torch.randn(100_003) for _ in range(3)]
    assert torch.equal(summed(grads), torch.stack(grads).double().sum(0).float())


def test_a_sum_of_64_bits_is_rounded_once() -> None:
    total = torch.tensor([(1 << 62) + 1, -(1 << 62) - 1, (1 << 53) + 1, -3, 0])
    out = torch.empty(5, dtype=torch.float64)
    from_fixed(total, out)
    assert out.tolist() == [float(x) * QUANTUM for x in total.tolist()]
    same = total.clone()
    from_fixed(same, same.view(torch.float64))
    assert torch.equal(bits(same.view(torch.float64)), bits(out))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 64.5, -200.0])
def test_numbers_over_the_limit_are_found(bad: float) -> None:
    for convert in (lambda x, limit: add_unit(torch.zeros(3, dtype=torch.int64), x, limit),
                    lambda x, limit: to_fixed_(x.double(), limit)):  # fmt: skip
        limit = UnitLimit(4)
        assert limit.take()
        convert(torch.tensor([1.0, 64.0, -64.0]), limit)
        assert limit.take()
        convert(torch.tensor([1.0, bad, 2.0]), limit)
        convert(torch.tensor([1.0, 1.0, 2.0]), limit)
        assert not limit.take()
        assert limit.take(), "the next step begins anew"


@pytest.mark.parametrize("units", [1, 2, 3, 64, 1000])
def test_no_sum_within_the_limit_overflows(units: int) -> None:
    limit = UnitLimit(units)
    largest = torch.tensor([limit.largest, -limit.largest])
    assert summed([largest] * units, limit).tolist() == [limit.largest * units,
                                                         -limit.largest * units]  # fmt: skip
    assert limit.take()
    assert limit.largest * units <= 2**8


def test_bfloat16_gradients_are_taken_as_they_are() -> None:
    grads = [torch.randn(50).bfloat16() for _ in range(8)]
    assert torch.equal(summed(grads), torch.stack(grads).double().sum(0).float())


@pytest.mark.parametrize("shape", [(7, 33), (5, 3, 16), (1, 1), (3, 1000), (40_000,), (0, 4)])
def test_rows_have_the_same_square_sums_whoever_has_them(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    squares = row_square_sums(x)
    rows = x.reshape(-1, shape[-1] if len(shape) > 1 else 1)
    torch.testing.assert_close(squares, rows.double().square().sum(1), rtol=1e-14, atol=0)
    for start, stop in ((0, 1), (1, 3), (2, len(rows))):
        part = rows[start:stop] if len(shape) > 1 else x[start:stop]
        assert torch.equal(bits(row_square_sums(part)), bits(squares[start:stop]))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.integers(0, 2**32 - 1), st.data())
def test_squares_sum_to_the_same_bits(rows: int, seed: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-60, 20, (rows,), generator=generator).double()
    squares = torch.rand(rows, generator=generator).double() * 2.0**exponents
    expected = from_parts(square_parts(squares))
    order = data.draw(st.permutations(range(rows)))
    cut = data.draw(st.integers(0, rows))
    parts = [square_parts(squares[order[:cut]]), square_parts(squares[order[cut:]])]
    assert torch.equal(bits(from_parts(parts[0] + parts[1])), bits(expected))
    true = math.fsum(squares.tolist())
    assert abs(float(expected) - true) <= 2**-51 * true + rows * 2**-91


@pytest.mark.parametrize("bad", [math.nan, math.inf, 2.0**41])
def test_squares_that_are_too_large_have_no_norm(bad: float) -> None:
    assert torch.isnan(from_parts(square_parts(torch.tensor([1.0, bad]))))
    half = square_parts(torch.tensor([2.0**39 + 1]))
    assert torch.isfinite(from_parts(half))
    assert torch.isnan(from_parts(half + half + half)), "the sum over ranks is too large"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 2.0**20, width=32), min_size=1, max_size=100), st.randoms())
def test_losses_sum_to_the_same_bits(losses: list[float], random: object) -> None:
    on_grid = [on_loss_grid(torch.tensor(loss)) for loss in losses]
    total = sum(on_grid)
    random.shuffle(on_grid)  # type: ignore[attr-defined]
    assert sum(on_grid) == total
    assert abs(float(total) - math.fsum(losses)) <= len(losses) * 2**-21


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 9), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    st.data(),
)
def test_digests_of_slices_sum_to_that_of_the_array(
    shape: list[int], dtype: torch.dtype, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randint(-1000, 1000, shape, generator=generator).to(dtype)
    whole = tuple((0, size) for size in shape)
    boxes = [whole]
    for dim in range(len(shape)):
        cut = data.draw(st.integers(0, shape[dim]))
        ends = ((0, cut), (cut, shape[dim]))
        boxes = [(*box[:dim], end, *box[dim + 1 :]) for box in boxes for end in ends]
    parts = [placed_digest(x[tuple(slice(*end) for end in box)], box) for box in boxes]
    assert sum(parts, torch.tensor(0)) == placed_digest(x, whole)


def test_a_placed_digest_sees_values_and_places() -> None:
    x = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(2))
    box = ((0, 5), (0, 4), (0, 3))
    known = {int(placed_digest(x, box)), int(placed_digest(x, ((1, 6), *box[1:])))}
    for dim in range(3):
        known.add(int(placed_digest(x.flip(dim), box)))
    for bit in range(32):
        other = x.clone()
        other.view(torch.int32)[4, 2, 1] ^= 1 << bit if bit < 31 else -(1 << 31)
        known.add(int(placed_digest(other, box)))
    assert len(known) == 2 + 3 + 32
