"""Whether the bits of a group of F.grouped_mm depend on the other groups of the call.

    python -m bench.grouped_mm [--quick] [--json FILE]

Exact runs (docs/exact.md) need a product for each expert and micro-batch whose bits are those of
that expert and micro-batch alone. One grouped product with a group for each would do, if a group
has the same bits whatever groups are beside it. For the forward, the rows' gradient and the
weights' gradient each group is computed among all others, alone, and among some others at other
places; a row of the table says which share of the groups has equal bits. Runs on CUDA in bfloat16,
and otherwise on the CPU in float32 and bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Row, arguments, finish

SIZES = {"small": (64, 96), "tiny recipe": (192, 256), "large": (1024, 512)}
"""d_model and d_ff; multiples of 16 bytes."""
COUNTS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 64, 100, 127, 128, 129, 257)
"""Rows of a group: around powers of two, where a kernel may take another tile."""

Groups = Sequence[tuple[Tensor, Tensor, Tensor]]
"""Of each group: rows [n, D], the gradient of their outputs [n, F], the weight [D, F]."""


def forward(groups: Groups) -> list[Tensor]:
    """x w of each group, in one call."""
    x, w = torch.cat([g[0] for g in groups]), torch.stack([g[2] for g in groups])
    return list(F.grouped_mm(x, w, offs=_ends(groups)).split([len(g[0]) for g in groups]))


def rows_gradient(groups: Groups) -> list[Tensor]:
    """dy w^T of each group."""
    dy, w = torch.cat([g[1] for g in groups]), torch.stack([g[2] for g in groups])
    dx = F.grouped_mm(dy, w.transpose(1, 2), offs=_ends(groups))
    return list(dx.split([len(g[0]) for g in groups]))


def weights_gradient(groups: Groups) -> list[Tensor]:
    """x^T dy of each group: the rows are the inner dim."""
    x, dy = torch.cat([g[0] for g in groups]), torch.cat([g[1] for g in groups])
    return list(F.grouped_mm(x.t(), dy, offs=_ends(groups)).unbind(0))


PRODUCTS: dict[str, Callable[[Groups], list[Tensor]]] = {
    "x w": forward, "dy w^T": rows_gradient, "x^T dy": weights_gradient,
}  # fmt: skip


def _ends(groups: Groups) -> Tensor:
    counts = torch.tensor([len(g[0]) for g in groups], device=groups[0][0].device)
    return counts.cumsum(0).to(torch.int32)


def equal_share(
    product: Callable[[Groups], list[Tensor]], groups: Groups, orders: int
) -> tuple[float, float]:
    """The share of groups with the bits of a call of their own, and of those with equal bits in
    ``orders`` calls of all groups in other orders and with other neighbours."""
    first = product(groups)
    alone = [torch.equal(product([group])[0], y) for group, y in zip(groups, first, strict=True)]
    among = [True] * len(groups)
    generator = torch.Generator().manual_seed(0)
    for _ in range(orders):
        order = torch.randperm(len(groups), generator=generator).tolist()
        order = order[: int(torch.randint(2, len(order) + 1, (), generator=generator))]
        for place, y in zip(order, product([groups[i] for i in order]), strict=True):
            among[place] &= torch.equal(y, first[place])
    return sum(alone) / len(alone), sum(among) / len(among)


def make_groups(
    d_model: int, d_ff: int, dtype: torch.dtype, device: torch.device, copies: int
) -> Groups:
    """``copies`` groups of each of COUNTS."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    counts = [count for count in COUNTS for _ in range(copies)]
    return [(draw(n, d_model), draw(n, d_ff), draw(d_model, d_ff)) for n in counts]


def rows(device: torch.device, quick: bool) -> list[Row]:
    """Every size, dtype and product."""
    dtypes = [torch.bfloat16] if device.type == "cuda" else [torch.float32, torch.bfloat16]
    found = []
    for size, (d_model, d_ff) in list(SIZES.items())[: 1 if quick else None]:
        for dtype in dtypes:
            groups = make_groups(d_model, d_ff, dtype, device, 1 if quick else 2)
            for name, product in PRODUCTS.items():
                alone, among = equal_share(product, groups, 2 if quick else 8)
                case = f"{size} {str(dtype).removeprefix('torch.')} {name}"
                print(f"{case:<36} alone {alone:.3f}, among others {among:.3f}", flush=True)
                found.append(Row(case, "alone", "equal_bits", alone, "share", alone, []))
                found.append(Row(case, "among others", "equal_bits", among, "share", among, []))
    return found


def main() -> None:
    args = arguments(__doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    finish("grouped_mm", rows(device, args.quick), ["torch"], args.json)


if __name__ == "__main__":
    main()
