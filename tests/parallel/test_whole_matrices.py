"""Whole matrices of sliced parameters: who computes with which, and the exchange on real ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel import ShardLayout, Topology, parse_topology
from parallel.comm.whole_matrices import WholeMatrices, share_out
from parallel.layout import dense_splits, expert_splits, spread_splits
from tests.support.ranks import run_ranks

E = 8
SAME = [f"layers.{i}.wide" for i in range(8)]
SHAPES = {
    "wide": (6, 20), "tall": (20, 6), "rows": (6, 20), "router": (E, 6), "experts": (E, 8, 5),
    **dict.fromkeys(SAME, (6, 20)),
}  # fmt: skip
TOPOLOGIES = [
    "dp_shard=1", "dp_shard=4", "dp_replicate=2,dp_shard=2,ep=2", "dp_shard=2,tp=2,ep=2",
    "dp_shard=4,ep=2", "dp_replicate=2,dp_shard=4,tp=2,ep=4", "dp_shard=16,ep=2",
]  # fmt: skip


def layouts_of(topology: Topology) -> dict[str, ShardLayout]:
    """A matrix without and two with tensor parallelism, one beside it, and a stack of experts."""
    splits = {
        "wide": dense_splits(2), "tall": dense_splits(2, 0), "rows": dense_splits(2, 1),
        "router": spread_splits(2), "experts": expert_splits(3),
        **dict.fromkeys(SAME, dense_splits(2)),
    }  # fmt: skip
    return {name: ShardLayout(SHAPES[name], splits[name], topology) for name in SHAPES}


def cost(rows: int, columns: int) -> float:
    return rows * columns


@pytest.mark.parametrize("most", [1 << 20, 100])
@pytest.mark.parametrize("layout", TOPOLOGIES)
def test_each_matrix_has_one_owner_and_comes_whole(layout: str, most: int):
    topology = parse_topology(layout)
    layouts = layouts_of(topology)
    rounds = share_out(layouts, range(topology.world), cost, most)
    owned: Counter[tuple[str, int]] = Counter()
    for shares in rounds:
        for share in shares:
            m = share.matrices
            owned.update((m.name, m.first + i) for i in range(m.number))
            sent = Counter(
                (row, column)
                for rank in share.senders
                for row in range(*share.slices[rank].box[0])
                for column in range(*share.slices[rank].box[1])
            )
            assert len(sent) == m.rows * m.columns
            assert set(sent.values()) == {1}, "a number is sent twice"
            assert share.owner in share.senders
            # Within a replica, where the replica has it all.
            assert {r // share.replica for r in share.senders} == {share.owner // share.replica}
        held = Counter[int]()
        for share in shares:
            m = share.matrices
            held[share.owner] += m.number * m.rows * m.columns
        largest = max(s.matrices.rows * s.matrices.columns for s in shares)
        assert max(held.values()) <= max(most, largest)
    assert owned == Counter(
        (name, i) for name in SHAPES for i in range(E if name == "experts" else 1)
    )


@pytest.mark.parametrize("ranks", [2, 8])
def test_replicas_and_ranks_share_the_work_evenly(ranks: int):
    for topology in (Topology(dp_replicate=ranks), Topology(dp_shard=ranks, ep=2)):
        same = {f"layers.{i}.w": ShardLayout((32, 8), dense_splits(2), topology) for i in range(16)}
        experts = {"experts": ShardLayout((16, 32, 8), expert_splits(3), topology)}
        for layouts in (same, experts):
            busy = Counter[int]()
            for shares in share_out(layouts, range(ranks), cost):
                for share in shares:
                    busy[share.owner] += share.matrices.number
            assert set(busy.values()) == {16 // ranks}, (topology, busy)


def function(x_BMN: Tensor) -> Tensor:
    """Of each matrix by itself, and of all of its numbers."""
    return x_BMN @ x_BMN.mT @ x_BMN


def values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def sliced(layouts: Mapping[str, ShardLayout], rank: int) -> dict[str, Tensor]:
    """Local shards, as [E, M, N]."""
    found = {}
    for name, whole in values().items():
        local = whole[tuple(slice(*extent) for extent in layouts[name].box(rank))].clone()
        found[name] = local if local.ndim == 3 else local.unsqueeze(0)
    return found


def exchanged(rank: int, layout: str, most: int) -> dict[str, float]:
    """By parameter: the largest difference of this rank's slices from those of whole matrices."""
    layouts = layouts_of(parse_topology(layout))
    here = sliced(layouts, rank)
    found = {name: torch.full_like(x, torch.nan) for name, x in here.items()}
    group = dist.group.WORLD if dist.is_initialized() else None
    whole = WholeMatrices(layouts, cost, group, torch.device("cpu"), torch.float32, most)

    def write(name: str, experts: slice, result: Tensor) -> None:
        found[name][experts] = result

    whole.apply(function, lambda name, experts: here[name][experts], write)
    errors = {}
    for name, x in values().items():
        expected = function(x if x.ndim == 3 else x.unsqueeze(0))
        box = layouts[name].box(rank)
        box = box if len(box) == 3 else ((0, 1), *box)
        at = tuple(slice(*extent) for extent in box)
        errors[name] = (
            float((found[name] - expected[at]).abs().amax()) if found[name].numel() else 0
        )
    return errors


@pytest.mark.parametrize("most", [1 << 20, 100])
def test_one_process_needs_no_group(most: int):
    assert max(exchanged(0, "dp_shard=1", most).values()) < 1e-5


@pytest.mark.parametrize(
    ("layout", "most"),
    [
        ("dp_shard=2,tp=2,ep=2", 100),
        pytest.param("dp_shard=4,ep=2", 1 << 20, marks=pytest.mark.slow),
        pytest.param("dp_replicate=2,dp_shard=2,ep=2", 100, marks=pytest.mark.slow),
        pytest.param("dp_replicate=2,dp_shard=2,tp=2,ep=2", 1 << 20, marks=pytest.mark.slow),
        pytest.param("dp_shard=8,ep=8", 100, marks=pytest.mark.slow),
    ],
)
def test_every_rank_gets_its_slice_of_the_result(layout: str, most: int):
    for errors in run_ranks(exchanged, parse_topology(layout).world, layout, most):
        for name, error in errors.items():
            assert error < 1e-5, (name, error)
