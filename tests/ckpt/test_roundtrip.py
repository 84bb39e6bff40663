"""Bits in are bits out, whatever the layouts; and other readers see the same numbers."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.format.chunk_grid import CHUNK_BYTES, SHARD_BYTES, storage_grid
from ckpt.format.dtypes import STORAGE_DTYPES
from ckpt.format.shard_layout import ObjectLayout
from ckpt.read import box
from ckpt.write.objects import write_objects
from parallel.layout import ShardLayout, Topology
from tests.support.checkpoints import (
    SPECS,
    bits,
    full_values,
    info,
    local_array,
    manifest_file,
    memory_folder,
    objects_folder,
    save_with_threads,
)

topologies = st.builds(
    lambda pp, dr, cp, tp, ep, more: Topology(
        pp=pp, dp_replicate=dr, dp_shard=ep * more, cp=cp, tp=tp, ep=ep
    ),
    *(st.integers(1, 2) for _ in range(6)),
).filter(lambda topology: topology.world <= 8)
small_topologies = topologies.filter(lambda topology: topology.pp * topology.cp * topology.tp == 1)
DTYPES = [getattr(torch, name) for name in STORAGE_DTYPES]


def assert_loads(root, manifest, topology, specs, seed=0, ranks=None, extra="refuse"):
    for rank in range(topology.world) if ranks is None else ranks:
        arrays = [local_array(spec, topology, rank) for spec in specs]
        ckpt.load(root, manifest, arrays, extra=extra)
        for array in arrays:
            expected = local_array(array.spec, topology, rank, full_values(array.spec, seed))
            for found, wanted in zip(array.pieces, expected.pieces, strict=True):
                assert torch.equal(bits(found), bits(wanted)), array.spec.name


def tree(topology, dtype, shape, interleaved):
    """Arrays of every kind of layout, as a run under ``topology`` has them."""
    pp, layers = topology.pp, 3
    places = [i % pp if interleaved else i * pp // layers for i in range(layers)]
    staged = () if pp == 1 else tuple(places)
    first, last = ((), ()) if pp == 1 else ((0,), (pp - 1,))
    return [
        ckpt.ArraySpec("a/plain", shape, dtype, (("fsdp",), (), ())),
        ckpt.ArraySpec("a/strided", shape, dtype, (("tp", "fsdp"), (), ()), stages=first),
        ckpt.ArraySpec("a/columns", shape, dtype, (("fsdp",), ("tp",), ()), stages=last),
        ckpt.ArraySpec("a/spread", shape, dtype, (("fsdp_tp",), (), ())),
        ckpt.ArraySpec("layers/stacked", (layers, *shape), dtype, ((), ("ep",), ("efsdp",), ())),
        ckpt.ArraySpec(
            "layers/staged", (layers, *shape), dtype, ((), ("ep",), ("efsdp",), ()), stages=staged
        ),
        ckpt.ArraySpec("rng", (topology.world, 5), torch.uint8, (("world",), ())),
        ckpt.ArraySpec("scalar", (), dtype, ()),
    ]


trees = st.tuples(
    st.sampled_from(DTYPES), st.tuples(*(st.integers(0, 7) for _ in range(3))), st.booleans()
)
compressions = st.sampled_from(["none", "zstd"])
PROPERTY = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@contextlib.contextmanager
def folder():
    with memory_folder() as room:
        root = Path(room) / "a folder with spaces, ünïcode"
        root.mkdir()
        yield root


@PROPERTY
@given(topologies, topologies, trees, compressions)
def test_any_layout_loads_under_any_other(before, after, shape, compression):
    with folder() as root:
        specs = tree(before, *shape)
        manifest = save_with_threads(root, 1, before, specs, compression=compression)
        there = [spec for spec in tree(after, *shape) if spec.name != "rng"]
        assert_loads(root, ckpt.read_manifest(root), after, there, extra="ignore")
        assert_loads(root, manifest, before, specs)
        assert ckpt.verify(root, manifest) == manifest.total_bytes

        # Cut in any other way: these are not the chunks that were written.
        for record in manifest.arrays:
            spec = next(spec for spec in specs if spec.name == record.name)
            box = tuple((n // 3, n - n // 4) for n in record.shape)
            part = full_values(spec)[tuple(slice(*extent) for extent in box)]
            found = ckpt.read.read_box(root, manifest, record, box)
            assert found.tobytes() == bits(part).numpy().tobytes(), record.name


@PROPERTY
@given(small_topologies, small_topologies, trees, compressions)
def test_a_reshard_writes_what_a_save_under_that_layout_writes(before, after, shape, compression):
    with folder() as root:
        more = {"compression": compression}
        specs = [spec for spec in tree(before, *shape) if spec.name != "rng"]
        manifest = save_with_threads(root, 1, before, specs, **more)
        resharded = ckpt.reshard(root, manifest, root / "other", after)
        assert_loads(root / "other", resharded, before, specs)
        ckpt.verify(root / "other", resharded)
        expected = save_with_threads(root / "direct", 1, after, specs, **more)
        assert {k: v.checksum for k, v in resharded.objects.items()} == {
            k: v.checksum for k, v in expected.objects.items()
        }


@PROPERTY
@given(topologies, trees, compressions, st.data())
def test_the_nodes_stores_hold_what_their_ranks_hold(topology, shape, compression, data):
    cut = data.draw(st.integers(0, topology.world - 1))
    specs = tree(topology, *shape)
    for ranks in (range(cut), range(cut, topology.world)):
        if not ranks:
            continue
        with folder() as root:
            more = {"ranks": tuple(ranks), "compression": compression}
            manifest = save_with_threads(root, 1, topology, specs, **more)
            assert ckpt.read_manifest(root) == manifest
            assert_loads(root, manifest, topology, specs, ranks=ranks)
            assert ckpt.verify(root, manifest) == manifest.total_bytes
            keys = [key for r in manifest.arrays for key in r.object_keys()]
            absent = set(keys) - manifest.objects.keys()
            if absent:
                with pytest.raises(ckpt.CheckpointError, match="is on another node"):
                    assert_loads(root, manifest, topology, specs)


@pytest.mark.parametrize("reader", ["zarr", "tensorstore"])
def test_other_readers_see_the_same_numbers(tmp_path, reader):
    specs = [
        *SPECS,
        ckpt.ArraySpec("scalar", (), torch.float64, ()),
        ckpt.ArraySpec("flags", (9,), torch.bool, (("fsdp",),)),
        ckpt.ArraySpec("counts", (5, 3), torch.int64, (("fsdp",), ())),
    ]
    manifest = save_with_threads(tmp_path, 7, Topology(dp_shard=4, ep=2), specs)
    folder = objects_folder(tmp_path, manifest.save_id)
    for spec in specs:
        if reader == "zarr":
            seen = zarr.open_group(folder, mode="r")[spec.name][...]
        else:
            store = {"driver": "file", "path": str(folder / spec.name)}
            seen = tensorstore.open({"driver": "zarr3", "kvstore": store}).result().read().result()
        expected = full_values(spec)
        if spec.dtype == torch.bfloat16:
            expected = expected.view(torch.uint16)
        assert np.asarray(seen).tobytes() == expected.numpy().tobytes(), spec.name
        assert np.asarray(seen).shape == spec.shape


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("width", [3, 1 << 18])
def test_an_object_is_the_same_in_whatever_memory_it_is_laid_out(width, compression):
    from ckpt.format.shard_writer import Encoder, aligned

    values = np.random.default_rng(0).random((13, width), np.float32)
    record = ckpt.format.ArrayRecord(
        name="w", shape=values.shape, logical_dtype="float32", splits=((), ()),
        shard_shape=(14, width), chunk_shape=(2, width), compression=compression,
    )  # fmt: skip
    layout = ObjectLayout(record, (0, 0))

    def read(box, out):
        out[...] = values[tuple(slice(*extent) for extent in box)]

    def encoded(rooms):
        encoder = Encoder(layout)
        return [bytes(part) for part in encoder.parts(rooms(encoder))], encoder.record

    parts, record = encoded(lambda e: e.fill(read))
    whole = b"".join(parts)
    assert record.bytes == len(whole)
    if compression == "none":
        assert len(whole) == layout.length
        assert len(whole) % 4096 == 0 or width == 3
    stride = layout.chunk_stride
    sizes = [0, stride, 2 * stride, 3 * stride + 1, layout.length - 1, layout.length,
             layout.buffer_bytes, layout.padded_bytes, 2 * layout.padded_bytes]  # fmt: skip
    for size in sizes:
        memory = aligned(size)
        memory[:] = 255  # what another object left
        parts, again = encoded(lambda e, memory=memory: e.fill(read, memory))
        assert (b"".join(parts), again) == (whole, record), size
        if compression == "none" and size >= layout.padded_bytes:
            assert len(parts) == 1, "all of it is one write"


def test_one_expert_is_one_index(tmp_path):
    save_with_threads(tmp_path, 7, Topology(dp_shard=2, ep=2))
    group = ckpt.read.open_group(tmp_path)
    array = group["model/layers/moe/experts/w_gate"]
    assert array.attrs["logical_dtype"] == "bfloat16"
    expected = full_values(SPECS[2])[1, 3].view(torch.uint16).numpy()
    assert np.array_equal(array[1, 3], expected)


def test_every_copy_has_some_objects_to_write(tmp_path):
    spec = ckpt.ArraySpec("w", (6, 4), torch.float32, ((), ()))
    topology = Topology(dp_replicate=3)
    record = spec.record(topology).model_copy(update={"shard_shape": (1, 4), "chunk_shape": (1, 4)})
    from ckpt.write.ownership import own_cells

    owned = [list(own_cells(record, record.layout(topology), rank)) for rank in range(3)]
    assert owned == [[(0, 0), (3, 0)], [(1, 0), (4, 0)], [(2, 0), (5, 0)]]


@settings(max_examples=300, deadline=None)
@given(
    st.tuples(*(st.integers(1, 60) for _ in range(4))), topologies, st.integers(16, 4000),
    st.integers(16, 500),
)  # fmt: skip
def test_chunks_divide_objects_and_no_object_crosses_a_boundary(
    shape, topology, shard_bytes, chunk_bytes
):
    layout = ShardLayout(shape, ((), ("ep",), ("efsdp",), ()), topology)
    shard, chunk = storage_grid(layout, 4, shard_bytes, chunk_bytes)
    assert all(s % c == 0 for s, c in zip(shard, chunk, strict=True))
    for grain, size, step in zip(layout.grain(), shape, shard, strict=True):
        assert grain % step == 0 or grain == size


@pytest.mark.parametrize(
    ("shape", "splits", "topology", "most_objects"),
    [
        ((151669, 2048), (("fsdp",), ()), Topology(dp_shard=8), 40),  # a prime number of rows each
        ((151936, 2048), (("fsdp",), ()), Topology(dp_shard=8), 40),
        ((50257, 768), (("fsdp",), ()), Topology(dp_shard=2), 8),
        ((50257, 768), (("fsdp",), ()), Topology(dp_shard=32), 32),
        ((50257, 768), ((), ()), Topology(), 8),
        ((48, 128, 2048, 768), ((), ("ep",), ("efsdp",), ()), Topology(dp_shard=64, ep=8), 1200),
        ((61, 7168), ((), ("fsdp",)), Topology(dp_shard=256), 256),
    ],
)
def test_objects_and_chunks_of_real_models_are_neither_tiny_nor_huge(
    shape, splits, topology, most_objects
):
    shard, chunk = storage_grid(ShardLayout(shape, splits, topology), 4)
    objects = np.prod([-(-n // s) for n, s in zip(shape, shard, strict=True)])
    assert objects <= most_objects
    assert np.prod(shard) * 4 <= 4 * SHARD_BYTES
    assert np.prod(chunk) * 4 <= 4 * CHUNK_BYTES
    chunks = np.prod([s // c for s, c in zip(shard, chunk, strict=True)])
    assert chunks == 1 or np.prod(chunk) * 4 >= CHUNK_BYTES / 4


def test_few_layers_are_not_padded():
    layout = ShardLayout((3, 8, 192, 256), ((), ("ep",), ("efsdp",), ()), Topology())
    shard, chunk = storage_grid(layout, 4)
    assert np.prod(shard) == np.prod(layout.shape)
    assert chunk[0] == 1


def test_a_reshard_reads_each_chunk_of_the_source_once_where_the_grids_agree(tmp_path, monkeypatch):
    spec = ckpt.ArraySpec("w", (4096, 1024), torch.float32, (("fsdp",), ()))  # 4 chunks
    manifest = save_with_threads(tmp_path / "a", 1, Topology(), [spec])
    boxes = []
    real = box.read_object
    monkeypatch.setattr(box, "read_object", lambda *a: (boxes.append(a[3]), real(*a))[1])
    ckpt.reshard(tmp_path / "a", manifest, tmp_path / "b", Topology(dp_shard=2))
    assert sorted(boxes) == [((i, i + 2048), (0, 1024)) for i in range(0, 4096, 2048)]


def test_a_model_of_another_shape_is_refused_before_anything_is_written(tmp_path):
    topology = Topology()
    manifest = save_with_threads(tmp_path, 1, topology)
    good = local_array(SPECS[0], topology, 0)
    for name, shape, dtype, message in [
        ("model/embed/weight", (14, 6), torch.float32, r"has shape \(13, 6\) but the model needs"),
        ("model/embed/weight", (13, 6), torch.float16, "has dtype float32 but the model needs"),
        ("model/nothing", (13, 6), torch.float32, "step 1 has no array model/nothing"),
    ]:
        wrong = local_array(ckpt.ArraySpec(name, shape, dtype, (("fsdp",), ())), topology, 0)
        with pytest.raises(ckpt.CheckpointError, match=message):
            ckpt.load(tmp_path, manifest, [good, wrong])
        assert bits(good.pieces[0]).sum() == 0
    with pytest.raises(ckpt.CheckpointError, match="dtype complex64; one of float64"):
        ckpt.ArraySpec("z", (1,), torch.complex64, ((),)).record(topology)


def test_a_step_is_never_saved_over(tmp_path):
    first = save_with_threads(tmp_path, 3, Topology(), seed=1)
    with pytest.raises(ckpt.CheckpointError, match="step 3 already has a checkpoint"):
        save_with_threads(tmp_path, 3, Topology(), seed=2, save_id="again")
    assert ckpt.read_manifest(tmp_path) == first
    assert_loads(tmp_path, first, Topology(), SPECS, seed=1)
    assert not objects_folder(tmp_path, "again").exists()


def test_retention_keeps_the_newest_and_leaves_others_whole(tmp_path):
    for step in (1, 2, 3, 4):
        save_with_threads(tmp_path, step, Topology(), seed=step)
    assert ckpt.retain(tmp_path, 2) == [1, 2]
    assert ckpt.committed_steps(tmp_path) == [3, 4]
    assert sorted(p.name for p in (tmp_path / "objects").iterdir()) == [
        "00000003-test",
        "00000004-test",
    ]
    for step in (3, 4):
        assert_loads(tmp_path, ckpt.read_manifest(tmp_path, step), Topology(), SPECS, seed=step)


def test_leftovers_of_an_interrupted_save_are_removed_and_nothing_else(tmp_path):
    save_with_threads(tmp_path, 1, Topology())
    objects = tmp_path / "objects"
    (objects / "00000002-dead" / "model").mkdir(parents=True)
    (objects / ".pending-00000002-dead").mkdir()
    (tmp_path / "manifests" / ".step-00000002.json.0123abcd").write_bytes(b"{")
    (tmp_path / "manifests" / ".snapshot").mkdir()  # a file system's own
    # Killed between the commit and the end of a save, or just before a removal.
    (objects / ".pending-00000001-test").mkdir()
    assert ckpt.committed_steps(tmp_path) == [1]
    assert ckpt.lifecycle.remove_uncommitted(tmp_path) == ["00000002-dead"]
    assert_loads(tmp_path, ckpt.read_manifest(tmp_path), Topology(), SPECS)
    names = sorted(p.name for p in (tmp_path / "manifests").iterdir())
    assert names == [".snapshot", "step-00000001.json"]
    assert [p.name for p in objects.iterdir()] == ["00000001-test"]


def test_the_objects_of_a_manifest_that_was_moved_away_stay(tmp_path):
    for step in (1, 2):
        save_with_threads(tmp_path, step, Topology(), seed=step)
    path = manifest_file(tmp_path, 2)
    path.rename(tmp_path / "aside.json")
    assert ckpt.lifecycle.remove_uncommitted(tmp_path) == []
    (tmp_path / "aside.json").rename(path)
    assert_loads(tmp_path, ckpt.read_manifest(tmp_path, 2), Topology(), SPECS, seed=2)


def test_a_removal_that_was_interrupted_is_ended_by_the_next_start(tmp_path, monkeypatch):
    for step in (1, 2):
        save_with_threads(tmp_path, step, Topology(), seed=step)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ckpt.LocalStore, "remove_all", killed)
        with pytest.raises(KeyboardInterrupt):
            ckpt.retain(tmp_path, 1)
    assert ckpt.committed_steps(tmp_path) == [2], "a manifest goes before its objects"
    assert ckpt.lifecycle.remove_uncommitted(tmp_path) == ["00000001-test"]
    assert [p.name for p in (tmp_path / "objects").iterdir()] == ["00000002-test"]
    assert_loads(tmp_path, ckpt.read_manifest(tmp_path), Topology(), SPECS, seed=2)


def test_an_object_that_two_would_write_cannot_exist_twice(tmp_path):
    layout = ObjectLayout(SPECS[0].record(Topology()), (0, 0))
    array = local_array(SPECS[0], Topology(), 0, full_values(SPECS[0]))
    store, about = ckpt.open_store(tmp_path), info(1, Topology())
    write_objects(store, about, [(layout, array.read_into)])
    with pytest.raises(FileExistsError):
        write_objects(store, about, [(layout, array.read_into)])
    assert (objects_folder(tmp_path, about.save_id) / layout.key).exists()
