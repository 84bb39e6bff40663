"""A dispatcher from outside the package: its contract, and training on two ranks.

Legend: T tokens, S rows on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe import (
    DispatchedRows,
    Dispatcher,
    DispatcherTraits,
    DispatchSetup,
    MoEConfig,
    MoELayer,
)
from moe.config import DISPATCHERS
from moe.rows import rows_of
from moe.testing import DispatcherContract
from parallel import ParallelDims, Topology, apply_expert_parallel
from tests.moe import test_dispatch
from tests.support.ranks import run_ranks

HERE = f"{__name__}:Everything"


class _Gather(torch.autograd.Function):
    """All ranks' rows, padded to equal numbers; the gradient is the sum of all ranks'."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.rows = group, len(rows)
        gathered = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(gathered, rows.contiguous(), group=group)
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        start = ctx.group.rank() * ctx.rows
        return grad[start : start + ctx.rows], None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = rows.clone()
        dist.all_reduce(total, group=group)
        count = len(rows) // group.size()
        return total[group.rank() * count : (group.rank() + 1) * count]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        gathered = [torch.empty_like(grads[0]) for _ in range(ctx.group.size())]
        dist.all_gather(gathered, grads[0].contiguous(), group=ctx.group)
        return torch.cat(gathered), None


class Everything(Dispatcher):
    """Every rank gets all rows, and outputs are summed over all ranks: the plainest dispatcher."""

    traits = DispatcherTraits()
    GROUPS = ("group",)

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @classmethod
    def of(cls, setup: DispatchSetup) -> Everything:
        return cls(setup.group)

    def dispatch(self, x_TD: Tensor, routed: Any) -> Iterator[DispatchedRows]:
        E, T = len(routed.rows_per_expert_E), len(x_TD)
        most = torch.tensor([T])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)

        def gathered(rows: Tensor, fill: int = 0) -> Tensor:
            padding = rows.new_full((int(most) - T, rows.shape[1]), fill)
            return _Gather.apply(torch.cat([rows, padding]), self.group)

        size = E // self.group.size()
        experts = range(E)[self.group.rank() * size :][:size]
        indices_SK = gathered(routed.expert_indices_TK, E)
        weights_SK = gathered(routed.expert_weights_TK)
        yield DispatchedRows(rows_of(gathered(x_TD), indices_SK, weights_SK, experts), T)

    def combine(self, y_SD: Tensor, dispatched: DispatchedRows) -> Callable[[], Tensor]:
        y_TD = _Sum.apply(y_SD, self.group)
        return lambda: y_TD[: dispatched.handle]


class TestFromOutside(DispatcherContract):
    """With the shipped way to start ranks."""

    fields = {"dispatcher": HERE}


def test_every_dispatcher_has_a_contract_class():
    contract = test_dispatch.DispatcherContract
    tested = {kind.fields.get("dispatcher", "all_to_all") for kind in contract.__subclasses__()}
    assert tested == set(DISPATCHERS)


def trained(rank: int) -> list[float]:
    """The losses of a few steps, of all ranks' tokens."""
    dims = ParallelDims.build(Topology(dp_shard=2, ep=2), "cpu")
    torch.manual_seed(0)
    layer = MoELayer(
        MoEConfig(d_model=16, d_ff=24, num_experts=4, top_k=2, dispatcher=HERE, aux_loss_coeff=0.0)
    )
    apply_expert_parallel(layer, dims.ep_mesh)
    assert type(layer.dispatcher).__name__ == "Everything"
    optimizer = torch.optim.SGD(layer.experts.parameters(), lr=0.5)
    x, y = torch.randn(2, 2, 12, 16, generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(5):
        loss = (layer(x).hidden - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(float(total))
    return losses


def test_a_layer_trains_with_a_dispatcher_from_outside_on_two_ranks():
    first, second = run_ranks(trained, 2)
    assert first == second
    assert first[-1] < first[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dispatcher": "alltoall"}, r"\(alltoall\) must be all_to_all, padded_all_to_all, "
         r"all_gather, hierarchical, deep_ep or package.module:Class"),
        ({"dispatcher": f"{__name__}:Nobody"}, r"must be importable as package.module:Class"),
        ({"dispatcher": "router:TopK"}, r"with traits, .* Dispatcher of package moe"),
        ({"dispatcher": HERE, "overlap_chunks": 2}, r"overlap_chunks \(2\) must be 1"),
        ({"dispatcher": HERE, "max_tokens_per_call": 5}, r"and 0 without"),
        ({"dispatcher": HERE, "dispatch_dtype": "float8"}, "which does not pack rows"),
    ],
)  # fmt: skip
def test_a_dispatcher_that_does_not_fit_is_refused_in_one_line(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        MoEConfig(d_model=8, d_ff=8, num_experts=4, top_k=2, **fields)
    assert "\n" not in str(error.value)
