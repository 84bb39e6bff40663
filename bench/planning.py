"""What it costs to know who writes what, as layers, experts and ranks grow: bench/checkpoint.py
--planning.

The tensors are a large MoE model's and AdamW's two moments (at the largest Qwen3-235B's: 94 layers
of 128 experts), up to 108,288 expert matrices; the ranks are simulated, up to 4,096. No number is
written or held.

- ``convoy``: what each rank does, all by itself, to know its objects: the records and its own cells
  of some tens of stacked arrays; the slowest of seven ranks. ``convoy, an array each`` stacks
  nothing: as many arrays as there are tensors.
- ``convoy commit``, ``convoy read_manifest``: what only rank 0 does, and what every reader does,
  once a save: reading all receipts, writing the manifest; reading it back. Files are on tmpfs.
- ``dcp, rank 0``: torch.distributed.checkpoint's planner: one rank's local plan, then on rank 0 the
  unpickling of all ranks' plans, the global plan and its pickling; what is sent to rank 0 is
  ``plan_bytes``. Its tensors are stacked by layer, and with ``a tensor each`` not at all. Left out
  where there are more than 300,000 items: each takes some 20 microseconds and a kilobyte.

There is no physical limit: shares are of the one second that planning may take, 1 below it.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import pickle
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckpt
from bench.harness import Row, finish
from bench.state import KINDS, Sizes
from ckpt.format import ObjectLayout, ObjectRecord
from ckpt.local_array import ArraySpec
from ckpt.store import LocalStore
from ckpt.write import begin, commit, own_cells, read_receipts, write_metadata, write_receipt
from parallel.layout import Topology, cells, dense_splits, expert_splits, whole_box

MODELS = [
    Sizes(layers=layers, d_model=4096, d_ff=1536, experts=experts, vocab=152064)
    for layers, experts in ((14, 8), (36, 32), (94, 128))
]
RANKS = (8, 64, 512, 4096)
MOST_ITEMS = 300_000
Series = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Case:
    """A model over so many ranks: pipeline stages where there are more than 512."""

    sizes: Sizes
    ranks: int

    @property
    def tensors(self) -> int:
        """Expert matrices, moments included."""
        return self.sizes.layers * self.sizes.experts * 3 * len(KINDS)

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.tensors:,} tensors, {self.ranks:,} ranks"

    @property
    def topology(self) -> Topology:
        """Experts over as many ranks as there are, up to 64."""
        pp = max(1, self.ranks // 512)
        shard = self.ranks // pp
        return Topology(pp=pp, dp_shard=shard, ep=min(shard, self.sizes.experts, 64))

    def stacked(self) -> list[ArraySpec]:
        """As Convoy stores it."""
        layers, pp = self.sizes.layers, self.topology.pp
        stages = tuple(i * pp // layers for i in range(layers)) if pp > 1 else ()
        specs = []
        for kind in KINDS:
            for name, shape in self.sizes.layer().items():
                splits = expert_splits(3) if len(shape) == 3 else dense_splits(len(shape))
                specs.append(ArraySpec(f"{kind}/layers/{name}", (layers, *shape), torch.float32,
                                       ((), *splits), stages=stages))  # fmt: skip
            for name, shape in self.sizes.rest().items():
                at = (0 if name == "embed" else pp - 1,) if pp > 1 else ()
                specs.append(ArraySpec(f"{kind}/{name}", shape, torch.float32,
                                       dense_splits(len(shape)), stages=at))  # fmt: skip
        return specs

    def separate(self) -> list[ArraySpec]:
        """Every expert's matrix an array of its own, cut along its rows."""
        shapes = {n: s[1:] for n, s in self.sizes.layer().items() if len(s) == 3}
        return [
            ArraySpec(f"{kind}/layers/{i}/{name}/{e}", shape, torch.float32, dense_splits(2))
            for kind in KINDS
            for i in range(self.sizes.layers)
            for e in range(self.sizes.experts)
            for name, shape in shapes.items()
        ]


def _seconds(act: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    began = time.perf_counter()
    result = act()
    return time.perf_counter() - began, result


def objects_of(specs: list[ArraySpec], topology: Topology, rank: int) -> list[ObjectLayout]:
    """All that a rank of a save works out before it writes."""
    return [
        ObjectLayout(record, coordinates)
        for spec in specs
        for record in [spec.record(topology)]
        for coordinates in own_cells(record, spec.layout(topology), rank)
    ]


def convoy(case: Case, separate: bool) -> tuple[list[float], int]:
    """Seconds of some ranks, and the most objects that one of them has."""
    specs, world = case.separate() if separate else case.stacked(), case.ranks
    chosen = sorted({0, 1, world // 3, world // 2, 2 * world // 3, world - 2, world - 1})
    chosen = [0, world - 1] if separate else chosen  # alike, and slow
    timed = [_seconds(partial(objects_of, specs, case.topology, rank)) for rank in chosen]
    return [seconds for seconds, _ in timed], max(len(objects) for _, objects in timed)


def committed(case: Case, folder: Path) -> tuple[float, float, int]:
    """Seconds of rank 0's commit and of reading the manifest back, and the count of objects."""
    store, specs = LocalStore(folder), case.stacked()
    info = ckpt.SaveInfo("planned", 1, case.topology, {}, {}, "0" * 8)
    records = [spec.record(case.topology) for spec in specs]
    begin(store, info, 0)
    objects = {
        layout.key: ObjectRecord(bytes=layout.buffer_bytes + layout.index_bytes, checksum=2**32 - 1)
        for record in records
        for cell in cells(whole_box(record.shape), record.shard_shape)
        for layout in [ObjectLayout(record, cell)]
    }
    keys = list(objects)
    metadata = write_metadata(store, info, records)
    for rank in range(case.ranks):  # as many receipts, with as many objects in all
        receipt = {key: objects[key] for key in keys[rank :: case.ranks]}
        write_receipt(store, info, rank, receipt | (metadata if rank == 0 else {}))
    seconds, manifest = _seconds(lambda: commit(store, info, records, read_receipts(store, info)))
    read, _ = _seconds(lambda: ckpt.read_manifest(store, 1))
    return seconds, read, len(manifest.objects)


def dcp(case: Case, separate: bool) -> tuple[float, float, int] | None:
    """Seconds of a local plan and of rank 0's share, and the bytes sent to it."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    shapes = {
        f"{kind}.layers.{i}.{name}": shape
        for kind in KINDS
        for i in range(case.sizes.layers)
        for name, shape in case.sizes.layer().items()
    }
    if separate:
        shapes = {spec.name: spec.shape for spec in case.separate()}
    if len(shapes) * case.ranks > MOST_ITEMS or case.topology.pp > 1:
        return None
    ep, world = case.topology.ep, case.ranks
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        flat = init_device_mesh("cpu", (world,))
        folded = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("efsdp", "ep"))
        cuts = {name: _cuts(shape, world, ep) for name, shape in shapes.items()}
        tensors = {}
        for name, shape in shapes.items():
            local = torch.empty(cuts[name](0)[1], device="meta")
            mesh, placements = (
                (folded, [Shard(1), Shard(0)]) if len(shape) == 3 else (flat, [Shard(0)])
            )
            size, stride = torch.Size(shape), _strides(shape)
            tensors[name] = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=size, stride=stride
            )
        planner = DefaultSavePlanner()
        planner.set_up_planner(tensors, None, True)
        local_seconds, first = _seconds(planner.create_local_plan)
        sent = [pickle.dumps(plan) for plan in _plans(first, cuts, world)]

        def on_rank_0() -> None:
            plans, _ = planner.create_global_plan([pickle.loads(plan) for plan in sent])
            for plan in plans:
                pickle.dumps(plan)

        seconds, _ = _seconds(on_rank_0)
        return local_seconds, seconds, sum(map(len, sent))
    finally:
        dist.destroy_process_group()


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _cuts(
    shape: tuple[int, ...], world: int, ep: int
) -> Callable[[int], tuple[list[int], list[int]]]:
    """Where each rank's part of a tensor begins, and its shape, as torch.chunk cuts."""

    def cut(rank: int) -> tuple[list[int], list[int]]:
        by_dim = {0: (world, rank)}
        if len(shape) == 3:
            by_dim = {0: (ep, rank % ep), 1: (world // ep, rank // ep)}
        offsets, sizes = [0] * len(shape), list(shape)
        for dim, (parts, index) in by_dim.items():
            step = -(-shape[dim] // parts)
            offsets[dim] = min(index * step, shape[dim])
            sizes[dim] = min(step, shape[dim] - offsets[dim])
        return offsets, sizes

    return cut


def _plans(first: Any, cuts: dict[str, Any], world: int) -> Iterator[Any]:
    """The local plans of all ranks, from that of rank 0."""
    for rank in range(world):
        items = []
        for item in first.items:
            offsets, sizes = cuts[item.index.fqn](rank)
            if 0 in sizes:
                continue
            place = torch.Size(offsets)
            chunk = dataclasses.replace(item.tensor_data.chunk, offsets=place,
                                        sizes=torch.Size(sizes))  # fmt: skip
            index = dataclasses.replace(item.index, offset=place)
            data = dataclasses.replace(item.tensor_data, chunk=chunk)
            items.append(dataclasses.replace(item, index=index, tensor_data=data))
        yield dataclasses.replace(first, items=items)


def run(args: Namespace) -> None:
    """Measure, print a table, and where asked write the rows and, beside them, a plot."""
    rows: list[Row] = []
    lines: Series = {}

    def note(case: Case, subject: str, samples: list[float], what: str = "plan_seconds") -> None:
        value = max(samples)
        rows.append(Row(case.name, subject, what, value, "s", min(1.0, 1 / value), samples))

    def point(line: str, case: Case) -> None:
        lines.setdefault(line, []).append((case.tensors, rows[-1].value))

    every = [Case(sizes, ranks) for sizes in MODELS for ranks in RANKS]
    if args.quick:
        every = [Case(sizes, ranks) for sizes in MODELS[:2] for ranks in RANKS[:2]]
    for case in (case for case in every if args.only in case.name):
        seconds, most = convoy(case, separate=False)
        note(case, "convoy", seconds)
        point(f"convoy, each of {case.ranks:,} ranks", case)
        rows.append(Row(case.name, "convoy", "objects_per_rank", most, "objects", 1.0, []))
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            took, read, _ = committed(case, Path(folder))
        note(case, "convoy commit", [took], "commit_seconds")
        if case.ranks == RANKS[-1]:
            point(f"convoy, rank 0's commit, {case.ranks:,} ranks", case)
        note(case, "convoy read_manifest", [read], "read_seconds")
        if case.ranks in (RANKS[0], RANKS[-1]):
            seconds, _ = convoy(case, separate=True)
            note(case, "convoy, an array each", seconds)
        for separate, how in ((False, ""), (True, ", a tensor each")):
            found = dcp(case, separate)
            if found is None:
                continue
            local, at_rank_0, sent = found
            note(case, f"dcp, each rank{how}", [local])
            note(case, f"dcp, rank 0{how}", [at_rank_0])
            point(f"dcp, rank 0 of {case.ranks:,}{how}", case)
            rows.append(Row(case.name, f"dcp, rank 0{how}", "plan_bytes", sent, "bytes", 1.0, []))
    finish("planning", rows, ["torch", "numpy"], args.json)
    if args.json is not None:
        args.json.with_suffix(".svg").write_text(plot(lines))


def plot(lines: Series) -> str:
    """Seconds over tensors, both logarithmic, as SVG."""
    import matplotlib as mpl  # here: only --json draws
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "convoy", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9, 4.4), layout="constrained")
        axes = figure.subplots()
        for name, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=name)
        axes.axhline(1, color="#cc0000", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="logical tensors",
                 ylabel="seconds to plan one save")  # fmt: skip
        axes.grid(color="#e8e8e8")
        figure.legend(loc="outside right upper", frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
