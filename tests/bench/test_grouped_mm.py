"""The bench that asks whether groups of a grouped product depend on each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bench.grouped_mm import PRODUCTS, Groups, equal_share, make_groups


def of_each(groups: Groups) -> list[Tensor]:
    return [x @ w for x, _, w in groups]


def of_all_before(groups: Groups) -> list[Tensor]:
    """A product whose groups depend on how many rows are before them."""
    rows, found = 0, []
    for x, _, w in groups:
        found.append(x @ w + rows)
        rows += len(x)
    return found


def test_a_dependence_among_groups_is_seen() -> None:
    groups = make_groups(16, 32, torch.float32, torch.device("cpu"), 1)
    assert equal_share(of_each, groups, 3) == (1.0, 1.0)
    alone, among = equal_share(of_all_before, groups, 3)
    assert alone == 1 / len(groups)
    assert among < 0.5


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_products_are_those_of_each_group(name: str) -> None:
    groups = make_groups(16, 32, torch.float32, torch.device("cpu"), 1)
    expected = {"x w": lambda x, dy, w: x @ w, "dy w^T": lambda x, dy, w: dy @ w.t(),
                "x^T dy": lambda x, dy, w: x.t() @ dy}[name]  # fmt: skip
    for found, group in zip(PRODUCTS[name](groups), groups, strict=True):
        torch.testing.assert_close(found, expected(*group), rtol=1e-4, atol=1e-4)
