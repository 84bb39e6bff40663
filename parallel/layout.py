"""Which rank holds which slice of an array, as plain arithmetic.

This module uses neither torch nor process groups: the layout of any rank of any topology can be
computed on a laptop. Checkpoints are written and resharded by this arithmetic.

The product of the dense axes is the world size, outermost axis first: ``pp x dp_replicate x
dp_shard x cp x tp``. Experts are sharded over the same ranks: ``efsdp x ep = dp_shard x cp x tp``,
with ``ep`` innermost, so that the ranks of one ep group are neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import product
from typing import NamedTuple

Box = tuple[tuple[int, int], ...]
"""A half-open range for each dim: ``((start, stop), ...)`` in coordinates of the global array."""

MOST_RANKS = 1 << 20

# The axes that an array may be split over. The axes of each group together decompose a rank number.
# "fsdp" is dp_shard and cp as one axis, as in fully_shard; "fsdp_tp" is dp_shard, cp and tp.
_BASES: tuple[tuple[str, ...], ...] = (
    ("pp", "dp_replicate", "fsdp", "tp"),
    ("pp", "dp_replicate", "efsdp", "ep"),
    ("pp", "dp_replicate", "fsdp_tp"),
    ("world",),
)


class Place(NamedTuple):
    """Where a rank stands: its index along each axis, from 0.

    ``pp`` to ``tp`` are the dense axes from the outermost to the innermost. ``efsdp`` and ``ep``
    are the same ranks as experts are laid out over them.
    """

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    efsdp: int


@dataclass(frozen=True)
class Topology:
    """The degree of every parallel axis; needs no process group."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            degree = getattr(self, field.name)
            if not isinstance(degree, int) or degree < 1:
                raise ValueError(f"{field.name} ({degree}) must be a whole number of at least 1")
        inner = self.dp_shard * self.cp * self.tp
        if self.world > MOST_RANKS:
            raise ValueError(f"a topology of {self.world} ranks must have at most {MOST_RANKS}")
        if inner % self.ep:
            raise ValueError(
                f"ep ({self.ep}) must divide dp_shard x cp x tp "
                f"({self.dp_shard} x {self.cp} x {self.tp} = {inner})"
            )

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.pp * self.dp_replicate * self.fsdp * self.tp

    @property
    def fsdp(self) -> int:
        """The number of shards of a dense parameter: dp_shard x cp."""
        return self.dp_shard * self.cp

    @property
    def fsdp_tp(self) -> int:
        """The number of shards of a parameter outside tensor parallelism: dp_shard x cp x tp."""
        return self.fsdp * self.tp

    @property
    def efsdp(self) -> int:
        """The number of shards of an expert: dp_shard x cp x tp / ep."""
        return self.fsdp * self.tp // self.ep

    def place(self, rank: int) -> Place:
        """Where a rank stands along every axis; the inverse of how ranks are numbered."""
        outer, inner = divmod(rank, self.fsdp_tp)
        pp, dp_replicate = divmod(outer, self.dp_replicate)
        shards, tp = divmod(inner, self.tp)
        dp_shard, cp = divmod(shards, self.cp)
        efsdp, ep = divmod(inner, self.ep)
        return Place(pp, dp_replicate, dp_shard, cp, tp, ep, efsdp)

    def dp_rank(self, rank: int) -> int:
        """The index of a rank among the ranks that get different sequences."""
        place = self.place(rank)
        return place.dp_replicate * self.dp_shard + place.dp_shard

    def size(self, axis: str) -> int:
        """The degree of ``axis``: a field, or fsdp, fsdp_tp, efsdp or world."""
        return int(getattr(self, axis))

    def as_dict(self) -> dict[str, int]:
        """The six degrees by name, as a manifest records them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def describe(self) -> str:
        """The degrees above one, for people: ``dp_shard=2 ep=2``, or ``1 rank``."""
        parts = [f"{name}={degree}" for name, degree in self.as_dict().items() if degree > 1]
        return " ".join(parts) or count_ranks(1)


def name_ranks(ranks: Sequence[int], most: int | None = None) -> str:
    """``rank 3``, or ``ranks 0-3, 7``; with more than ``most`` parts ``ranks 0, 2, 4, ..., 14``."""
    parts: list[str] = []
    start = previous = ranks[0]
    for rank in [*ranks[1:], -1]:
        if rank != previous + 1:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = rank
        previous = rank
    if most is not None and len(parts) > most:
        parts[most - 1 : -1] = ["..."]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"


def count_ranks(count: int) -> str:
    """``1 rank`` or ``2 ranks``, for people."""
    return f"{count} rank" + ("" if count == 1 else "s")


def divisors(n: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def parse_topology(text: str) -> Topology:
    """Read ``"dp_shard=4,ep=2"``. Without dp_shard, the smallest that ``ep`` needs is taken.

    Raises ValueError for an unknown axis, a degree that is not a whole number, or an ep that does
    not divide dp_shard x cp x tp.
    """
    names = [field.name for field in fields(Topology)]
    degrees: dict[str, int] = {}
    for part in (piece.strip() for piece in text.split(",")):
        name, equals, value = part.partition("=")
        if name not in names or not equals or name in degrees:
            raise ValueError(
                f"layout ({part}) must be AXIS=DEGREE, each AXIS once, of {', '.join(names)}"
            )
        if not value.isdecimal():
            raise ValueError(f"layout {name} ({value}) must be a whole number of at least 1")
        degrees[name] = int(value)
    if "dp_shard" not in degrees:
        shared = degrees.get("cp", 1) * degrees.get("tp", 1)
        degrees["dp_shard"] = max(1, degrees.get("ep", 1) // max(1, shared))
    return Topology(**degrees)


def _piece(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """Part ``index`` of a range split as by torch.chunk: ceil(n / parts) each, the last short."""
    step = -(-(stop - start) // parts)
    return min(start + index * step, stop), min(start + (index + 1) * step, stop)


@dataclass(frozen=True)
class ShardLayout:
    """The slices of one array over the ranks of a topology.

    ``splits`` has, for each dim, the axes that split the dim, outermost first. Ranks along an axis
    that splits no dim hold replicas. ``shape`` is the shape of the global array.
    """

    shape: tuple[int, ...]
    splits: tuple[tuple[str, ...], ...]
    topology: Topology
    stages: tuple[int, ...] = ()
    """Places along pp: one for the array, or one for each index of the first dim; empty where every
    place holds the array."""

    def __post_init__(self) -> None:
        # ValueError and not assert: a checkpoint's layouts are read from a file.
        used = [axis for axes in self.splits for axis in axes]
        if len(self.splits) != len(self.shape):
            raise ValueError(f"splits {self.splits} must be one for each dim of {self.shape}")
        if len(set(used)) != len(used):
            raise ValueError(f"splits {self.splits} must have each axis once")
        if not any(set(used) | ({"pp"} if self.stages else set()) <= set(b) for b in _BASES):
            together = "; ".join(", ".join(axes) for axes in _BASES)
            raise ValueError(f"splits {self.splits} must name axes that go together: {together}")
        if len(self.stages) > 1 and (self.shape[:1] != (len(self.stages),) or self.splits[0]):
            raise ValueError(f"stages ({len(self.stages)}) must be one for each index of dim 0")

    @cached_property
    def _used(self) -> set[str]:
        return {axis for axes in self.splits for axis in axes} | ({"pp"} if self.stages else set())

    @cached_property
    def _basis(self) -> tuple[str, ...]:
        return next(basis for basis in _BASES if self._used <= set(basis))

    def _coordinates(self, rank: int) -> dict[str, int]:
        """The index of a rank along each axis of the basis, also those that join several."""
        topology, place = self.topology, self.topology.place(rank)
        fsdp = place.dp_shard * topology.cp + place.cp
        joined = {"fsdp": fsdp, "fsdp_tp": fsdp * topology.tp + place.tp, "world": rank}
        return {a: joined[a] if a in joined else getattr(place, a) for a in self._basis}

    def boxes(self, rank: int) -> list[Box]:
        """The slices that ``rank`` holds: one, or with ``stages`` any number."""
        box = self.box(rank)
        if not self.stages:
            return [box]
        here = self._coordinates(rank)["pp"]
        if len(self.stages) == 1:
            return [box] if self.stages[0] == here else []
        runs: list[Box] = []
        for index, stage in enumerate(self.stages):
            if stage != here:
                continue
            start = index
            if runs and runs[-1][0][1] == index:
                start = runs.pop()[0][0]
            runs.append(((start, index + 1), *box[1:]))
        return runs

    def box(self, rank: int) -> Box:
        """The slice of ``rank`` with ``stages`` ignored. A range is empty where the dim has fewer
        parts than ranks."""
        coordinates = self._coordinates(rank)
        box = []
        for size, axes in zip(self.shape, self.splits, strict=True):
            extent = (0, size)
            for axis in axes:
                extent = _piece(*extent, self.topology.size(axis), coordinates[axis])
            box.append(extent)
        return tuple(box)

    @cached_property
    def num_replicas(self) -> int:
        """The number of ranks that hold each slice."""
        return math.prod(self.topology.size(a) for a in self._basis if a not in self._used)

    def replica_index(self, rank: int) -> int:
        """The index of ``rank`` among the ranks that hold the same slice, from 0."""
        coordinates = self._coordinates(rank)
        index = 0
        for axis in self._basis:
            if axis not in self._used:
                index = index * self.topology.size(axis) + coordinates[axis]
        return index

    def grain(self) -> tuple[int, ...]:
        """The largest cell of a regular grid in which each cell belongs to one rank's slice.

        A zarr grid is regular, and nested uneven splits are not; cells as long as the greatest
        common divisor of all boundaries always fit. Only the last cell of a dim may be shorter.
        """
        grain = [self._grain_of(n, axes) for n, axes in zip(self.shape, self.splits, strict=True)]
        changes = [i for i in range(1, len(self.stages)) if self.stages[i] != self.stages[i - 1]]
        if changes:
            grain[0] = math.gcd(*changes)
        return tuple(grain)

    def _grain_of(self, size: int, axes: tuple[str, ...]) -> int:
        extents = [(0, size)]
        for axis in axes:
            parts = self.topology.size(axis)
            extents = [
                (at, min(at + step, stop))
                for start, stop in extents
                for step in [max(-(-(stop - start) // parts), 1)]
                for at in range(start, stop, step)
            ]
        inner = {start for start, _ in extents if 0 < start < size}
        return math.gcd(*inner) if inner else max(size, 1)


def intersect(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes, or None where it is empty; of two scalars ``()``."""
    common = tuple((max(s, t), min(e, f)) for (s, e), (t, f) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def cells(box: Box, cell: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The grid coordinates of every cell that intersects ``box``, in row-major order."""
    ranges = [
        range(start // step, -(-stop // step)) if start < stop else range(0)
        for (start, stop), step in zip(box, cell, strict=True)
    ]
    # With an empty range the other ranges may have any length, and product() would list them all.
    return product(*ranges) if all(ranges) else iter(())


def count_cells(box: Box, cell: tuple[int, ...]) -> int:
    """The number of :func:`cells`, without listing the cells."""
    sizes = (
        -(-stop // step) - start // step if start < stop else 0
        for (start, stop), step in zip(box, cell, strict=True)
    )
    return math.prod(sizes)


def cell_box(coordinates: tuple[int, ...], cell: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    """The box of a grid cell, clipped to the array's ``shape``."""
    return tuple(
        (i * step, min((i + 1) * step, size))
        for i, step, size in zip(coordinates, cell, shape, strict=True)
    )


# The dim that fully_shard splits, and so the dim that a checkpoint's grid splits: the first of a
# dense parameter; the second of an expert's, because ep splits the first, which is the expert.
FSDP_DENSE_DIM = 0
FSDP_EXPERT_DIM = 1


def dense_splits(ndim: int, tp_dim: int | None = None) -> tuple[tuple[str, ...], ...]:
    """Splits of a dense parameter of ``ndim`` dims; tp may split one dim, before fsdp does."""
    return tuple(
        (("tp",) if dim == tp_dim else ()) + (("fsdp",) if dim == FSDP_DENSE_DIM else ())
        for dim in range(ndim)
    )


def spread_splits(ndim: int) -> tuple[tuple[str, ...], ...]:
    """Splits of a parameter that tp replicates, and whose gradients are summed over tp."""
    return tuple(("fsdp_tp",) if dim == FSDP_DENSE_DIM else () for dim in range(ndim))


def expert_splits(ndim: int) -> tuple[tuple[str, ...], ...]:
    """Splits of an expert parameter [E, ...] of ``ndim`` dims, at least 2."""
    assert ndim >= 2, "an expert parameter needs a dim besides the expert's"
    return tuple(
        ("ep",) if dim == 0 else ("efsdp",) if dim == FSDP_EXPERT_DIM else () for dim in range(ndim)
    )


def nodes_per_token(
    num_experts: int, n_groups: int, topk_groups: int, top_k: int, ep: int, ranks_per_node: int
) -> int:
    """The most nodes that a token is sent to, with experts in equal blocks over ``ep`` ranks.

    Node-limited routing (DeepSeek-V3, arXiv 2412.19437, section 2.1.2) is group-limited routing
    where each group of experts is on one node. Groups are the model's and nodes the cluster's;
    this function relates the two.

    Args:
        num_experts: number of experts.
        n_groups: number of equal groups of consecutive experts.
        topk_groups: number of groups that a token's experts come from.
        top_k: number of experts of a token.
        ep: number of ranks that share the experts; a multiple or a divisor of ``ranks_per_node``.
        ranks_per_node: number of consecutive ranks on one machine.
    """
    size, per_rank = num_experts // n_groups, num_experts // ep
    nodes = [
        {expert // per_rank // ranks_per_node for expert in range(g * size, (g + 1) * size)}
        for g in range(n_groups)
    ]
    everywhere = len(set().union(*nodes))
    widest = sorted((len(group) for group in nodes), reverse=True)[:topk_groups]
    return min(sum(widest), everywhere, top_k)


def box_shape(box: Box) -> tuple[int, ...]:
    """The sizes of a box."""
    return tuple(stop - start for start, stop in box)


def whole_box(shape: Sequence[int]) -> Box:
    """The box of a whole array."""
    return tuple((0, size) for size in shape)


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """The slices that pick ``box`` out of an array that holds ``outer``."""
    return tuple(
        slice(start - base, stop - base)
        for (start, stop), (base, _) in zip(box, outer, strict=True)
    )
