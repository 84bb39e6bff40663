"""Layouts as arithmetic: slices, copies, grids and folding."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel import ParallelConfig, ShardLayout, Topology, parse_topology
from parallel.layout import box_shape, cell_box, cells, intersect, name_ranks, nodes_per_token

topologies = st.builds(
    lambda pp, dr, ep, more, cp, tp: Topology(
        pp=pp, dp_replicate=dr, dp_shard=ep * more, cp=cp, tp=tp, ep=ep
    ),
    *(st.integers(1, 3) for _ in range(6)),
)
SPLITS = [
    ((), ("fsdp",)),
    (("pp",), ("fsdp",)),
    (("tp", "fsdp"), ()),
    (("fsdp",), ("tp",)),
    (("ep",), ("efsdp",)),
    (("pp", "ep"), ("efsdp",)),
    (("world",), ()),
]


@settings(max_examples=150, deadline=None)
@given(topologies, st.tuples(st.integers(0, 13), st.integers(0, 13)), st.sampled_from(SPLITS))
def test_slices_cover_an_array_and_copies_are_counted(topology, shape, splits):
    layout = ShardLayout(shape, splits, topology)
    holders: dict[tuple[int, int], list[int]] = {}
    for rank in range(topology.world):
        (a, b), (c, d) = layout.box(rank)
        for i in range(a, b):
            for j in range(c, d):
                holders.setdefault((i, j), []).append(rank)
    assert set(holders) == {(i, j) for i in range(shape[0]) for j in range(shape[1])}
    for ranks in holders.values():
        assert len(ranks) == layout.num_replicas
        assert sorted(layout.replica_index(r) for r in ranks) == list(range(layout.num_replicas))


@settings(max_examples=150, deadline=None)
@given(topologies, st.tuples(st.integers(0, 30), st.integers(0, 30)), st.sampled_from(SPLITS))
def test_no_cell_of_the_grain_crosses_a_boundary(topology, shape, splits):
    layout = ShardLayout(shape, splits, topology)
    grain = layout.grain()
    covered = 0
    for rank in range(topology.world):
        box = layout.box(rank)
        for coordinates in cells(box, grain):
            cell = cell_box(coordinates, grain, shape)
            assert intersect(cell, box) == cell
            covered += math.prod(box_shape(cell))
    assert covered == math.prod(shape) * layout.num_replicas


def test_one_even_split_keeps_one_cell_per_rank():
    layout = ShardLayout((10, 6), (("fsdp",), ()), Topology(dp_shard=4))
    assert [layout.box(r)[0] for r in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert layout.grain() == (3, 6)


def test_folding_keeps_exchanging_ranks_together():
    topology = Topology(dp_shard=2, cp=2, tp=2, ep=4)
    experts = ShardLayout((8, 4), (("ep",), ("efsdp",)), topology)
    assert [experts.box(r) for r in (0, 1, 3, 4)] == [
        ((0, 2), (0, 2)),
        ((2, 4), (0, 2)),
        ((6, 8), (0, 2)),
        ((0, 2), (2, 4)),
    ]


@pytest.mark.parametrize(
    "topology",
    [Topology(), Topology(2, 2, 3, 2, 2, ep=4), Topology(dp_shard=4, cp=2, tp=2, ep=16),
     Topology(pp=3, dp_replicate=2, dp_shard=2, ep=2)],
)  # fmt: skip
def test_the_place_of_a_rank_is_its_cell_in_the_grid_of_ranks(topology):
    t = topology
    dense = np.arange(t.world).reshape(t.pp, t.dp_replicate, t.dp_shard, t.cp, t.tp)
    experts = dense.reshape(t.pp, t.dp_replicate, t.efsdp, t.ep)
    for rank in range(t.world):
        p = t.place(rank)
        assert dense[p.pp, p.dp_replicate, p.dp_shard, p.cp, p.tp] == rank
        assert experts[p.pp, p.dp_replicate, p.efsdp, p.ep] == rank
        alike = dense.reshape(t.pp, -1, t.cp * t.tp)[p.pp, t.dp_rank(rank)]
        assert rank in alike, "ranks that read the same sequences"


def test_dp_shard_takes_the_ranks_left_over():
    assert ParallelConfig(ep=2).topology(4) == Topology(dp_shard=4, ep=2)
    assert ParallelConfig(dp_replicate=2).topology(6) == Topology(dp_replicate=2, dp_shard=3)


@pytest.mark.parametrize(
    ("fields", "world", "message"),
    [
        ({"dp_shard": 3}, 4, r"= 3\) must multiply to the world size \(4\)"),
        ({"dp_replicate": 3}, 4, r"world size \(4\) must be a multiple of .* = 3\)"),
        ({"ep": 3}, 4, r"parallel.ep \(3\) must divide dp_shard x cp x tp \(4 x 1 x 1 = 4\)"),
        ({"dp_shard": 0}, 4, r"parallel.dp_shard \(0\) must be -1"),
        ({"tp": 0}, 4, "tp"),
    ],
)
def test_degrees_that_cannot_work_are_refused(fields, world, message):
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**fields).topology(world)


def test_a_layout_is_read_from_text():
    assert parse_topology("ep=4") == Topology(dp_shard=4, ep=4)
    assert parse_topology("dp_shard=4, ep=2,dp_replicate=2") == Topology(
        dp_shard=4, ep=2, dp_replicate=2
    )
    for text, message in [
        ("", r"layout \(\) must be AXIS=DEGREE"),
        ("ep=2,ep=4", r"layout \(ep=4\) must be AXIS=DEGREE, each AXIS once"),
        ("dp_shard=99999999999999999999", "ranks must have at most 1048576"),
        ("zz=2", r"layout \(zz=2\) must be AXIS=DEGREE"),
        ("ep", r"layout \(ep\) must be"),
        ("ep=two", r"layout ep \(two\) must be a whole number"),
        ("ep=0", r"^ep \(0\) must be a whole number of at least 1"),
        ("ep=3,dp_shard=2", r"^ep \(3\) must divide"),
    ]:
        with pytest.raises(ValueError, match=message):
            parse_topology(text)


@pytest.mark.parametrize(
    ("n_groups", "topk_groups", "top_k", "ep", "per_node", "nodes"),
    [
        (8, 4, 8, 64, 8, 4),  # DeepSeek-V3's: a group is a node
        (8, 4, 8, 32, 8, 4),  # two groups on a node, but the four may be on four nodes
        (8, 2, 8, 16, 8, 2),
        (4, 2, 8, 64, 8, 4),  # a group is on two nodes
        (1, 1, 8, 64, 8, 8),
        (1, 1, 2, 64, 8, 2),
        (8, 4, 8, 8, 8, 1),
        (8, 4, 8, 4, 8, 1),
    ],
)
def test_how_many_nodes_a_token_is_sent_to(n_groups, topk_groups, top_k, ep, per_node, nodes):
    found = nodes_per_token(256, n_groups, topk_groups, top_k, ep, per_node)
    assert found == nodes
    # By trying: the worst choice of groups, and of experts within them.
    size, per_rank = 256 // n_groups, 256 // ep
    worst = 0
    for groups in itertools.combinations(range(n_groups), topk_groups):
        experts = [e for g in groups for e in range(g * size, (g + 1) * size)]
        worst = max(worst, min(len({e // per_rank // per_node for e in experts}), top_k))
    assert worst == nodes


def test_ranks_are_named_by_ranges_and_shortened_in_the_middle():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 1, 2, 3, 7]) == "ranks 0-3, 7"
    assert name_ranks(range(0, 16, 2), most=4) == "ranks 0, 2, 4, ..., 14"
    assert name_ranks(range(0, 8, 2), most=4) == "ranks 0, 2, 4, 6"
