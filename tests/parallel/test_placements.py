"""Slices of DTensors by plain arithmetic, against what torch itself holds on each rank."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel.layout import box_shape, intersect, within
from parallel.placements import MeshLayout, Placement, RankMesh


def cases(count: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]]:
    """Random shapes, meshes and placements: uneven, nested, strided and empty ones among them."""
    draw = random.Random(20261122)
    for _ in range(count):
        shape = tuple(draw.randint(1, 13) for _ in range(draw.randint(1, 3)))
        mesh = tuple(draw.choice([1, 2, 3]) for _ in range(draw.randint(1, 3)))
        placements: list[Placement] = []
        for _ in mesh:
            dim = draw.randrange(len(shape))
            placements.append(draw.choice([None, dim, (dim, draw.choice([2, 3]))]))
        yield shape, mesh, tuple(placements)


def torch_placement(placement: Placement) -> Replicate | Shard | _StridedShard:
    if isinstance(placement, tuple):
        return _StridedShard(placement[0], split_factor=placement[1])
    return Replicate() if placement is None else Shard(placement)


def held_by_torch(
    rank: int, whole: torch.Tensor, mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> torch.Tensor:
    world = RankMesh(mesh, tuple(range(torch.Size(mesh).numel()))).ranks
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(world))
    try:
        device_mesh = DeviceMesh("cpu", torch.tensor(world).view(mesh))
        spec = [torch_placement(placement) for placement in placements]
        return distribute_tensor(whole, device_mesh, spec, src_data_rank=None).to_local()
    finally:
        dist.destroy_process_group()


def test_each_rank_holds_what_torch_says() -> None:
    for shape, mesh, placements in cases(80):
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        ranks = tuple(range(torch.Size(mesh).numel()))
        layout = MeshLayout(shape, RankMesh(mesh, ranks), placements)
        for rank in {0, ranks[-1], ranks[len(ranks) // 2]}:
            expected = held_by_torch(rank, whole, mesh, placements)
            boxes = layout.boxes(rank)
            found = [whole[within(box, tuple((0, n) for n in shape))] for box in boxes]
            # A local shard has its boxes end to end along each dim.
            numbers = sorted(n for piece in found for n in piece.reshape(-1).tolist())
            assert numbers == sorted(expected.reshape(-1).tolist()), (shape, mesh, placements, rank)
            assert sum(torch.Size(box_shape(box)).numel() for box in boxes) == expected.numel()


def test_slices_cover_a_tensor_once_and_cells_cross_no_slice() -> None:
    for shape, mesh, placements in cases(300):
        ranks = tuple(range(10, 10 + torch.Size(mesh).numel()))
        layout = MeshLayout(shape, RankMesh(mesh, ranks), placements)
        held = torch.zeros(shape, dtype=torch.int64)
        grain = layout.grain()
        for slot in range(layout.num_slots):
            for box in layout.slot_boxes(slot):
                held[within(box, tuple((0, n) for n in shape))] += 1
                for (start, stop), step, size in zip(box, grain, shape, strict=True):
                    assert start % step == 0
                    assert stop % step == 0 or stop == size
        assert held.min() == held.max() == 1
        for rank in ranks:
            slot = layout.slot(rank)
            assert slot is not None
            assert layout.boxes(rank) == layout.slot_boxes(slot)
        replicas = itertools.groupby(sorted(ranks, key=layout.slot), key=layout.slot)  # type: ignore[arg-type]
        for _, group in replicas:
            indexes = sorted(layout.replica_index(rank) for rank in group)
            assert indexes == list(range(layout.num_replicas))


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    layout = MeshLayout((4, 2), RankMesh((2,), (1, 3)), (0,))
    assert layout.slot(0) is None
    assert layout.boxes(0) == []
    assert layout.boxes(3) == [((2, 4), (0, 2))]
    assert MeshLayout((), RankMesh((2,), (1, 3)), (None,)).boxes(1) == [()]
    assert intersect((), ()) == ()


@pytest.mark.parametrize(
    ("placements", "says"),
    [
        ((0, 0), "one for each dim"),
        ((1,), "cuts no dim"),
        (((0, 0),), "cuts no dim"),
    ],
)
def test_a_layout_of_no_tensor_is_refused(placements: tuple[Placement, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MeshLayout((4,), RankMesh((2,), (0, 1)), placements)


def test_a_mesh_has_each_rank_once() -> None:
    with pytest.raises(ValueError, match="one rank for each place"):
        RankMesh((2,), (0, 0))
