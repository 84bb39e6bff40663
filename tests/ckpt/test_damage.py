"""A missing object, a truncated one and a flipped bit are refused, naming the object."""

from __future__ import annotations

import resource
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import ckpt
from parallel.layout import Topology
from tests.support import damage
from tests.support.checkpoints import (
    SPECS,
    full_values,
    info,
    local_array,
    manifest_file,
    objects_folder,
    save_with_threads,
)
from tests.support.ranks import run_ranks


@pytest.fixture
def saved(tmp_path) -> tuple[Path, ckpt.Manifest]:
    return tmp_path, save_with_threads(tmp_path, 5, Topology(dp_shard=2, ep=2))


def object_files(root: Path, manifest: ckpt.Manifest) -> list[Path]:
    keys = [key for key in manifest.objects if not key.endswith("zarr.json")]
    assert len(keys) >= 7
    return [objects_folder(root, manifest.save_id) / key for key in keys]


def load_everything(root: Path) -> None:
    """As a run with two ranks would, and as one with one would."""
    manifest = ckpt.read_manifest(root)
    for topology in (Topology(dp_shard=2, ep=2), Topology()):
        for rank in range(topology.world):
            ckpt.load(root, manifest, [local_array(s, topology, rank) for s in SPECS])


def refused(root: Path, path: Path, damage: str, reader) -> None:
    original = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(original[:-1])
    elif damage == "longer":
        path.write_bytes(original + b"\0")
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        position = int(len(original) * float(damage))
        changed = bytearray(original)
        changed[position] ^= 1
        path.write_bytes(bytes(changed))
    with pytest.raises(ckpt.CheckpointError) as error:
        reader()
    if damage in ("truncated", "longer") and path.suffix != ".json":
        assert "bytes, the manifest says" in str(error.value)
    assert str(path) in str(error.value), "the object must be named"
    assert "\n" not in str(error.value)
    path.write_bytes(original)


DAMAGE = ["missing", "truncated", "longer", "empty", "0.0", "0.3", "0.6", "0.99"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_objects_are_refused_at_load(saved, damage):
    root, manifest = saved
    load_everything(root)
    for path in object_files(root, manifest):
        refused(root, path, damage, lambda: load_everything(root))
    load_everything(root)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_of_any_kind_are_found_by_verify(saved, damage):
    root, manifest = saved
    folder = objects_folder(root, manifest.save_id)
    for key in manifest.objects:
        refused(root, folder / key, damage, lambda: ckpt.verify(root, manifest))
    ckpt.verify(root, manifest)


@pytest.mark.parametrize("damage", DAMAGE[1:])
def test_a_damaged_manifest_is_refused_and_never_passed_over(saved, damage):
    root, _ = saved
    save_with_threads(root, 6, Topology(dp_shard=2, ep=2), seed=1)
    path = manifest_file(root, 6)
    refused(root, path, damage, lambda: ckpt.read_manifest(root))
    assert ckpt.read_manifest(root, 5).step == 5


@pytest.mark.parametrize("part", [False, True])
def test_objects_that_changed_places_are_refused(tmp_path, part):
    # Each is whole and fits the other's place; only the manifest knows which is which.
    spec = ckpt.ArraySpec("w", (8, 6), torch.float32, (("fsdp",), ()))
    manifest = save_with_threads(tmp_path, 5, Topology(dp_shard=2), [spec])
    a, b = (objects_folder(tmp_path, manifest.save_id) / f"w/c.{i}.0" for i in (0, 1))
    first, second = a.read_bytes(), b.read_bytes()
    assert len(first) == len(second)
    a.write_bytes(second)
    b.write_bytes(first)
    box = ((0, 4), (0, 6)) if not part else ((1, 2), (0, 6))
    with pytest.raises(ckpt.CheckpointError, match=r"w/c\.0\.0 is damaged: it is not the one that"):
        ckpt.read.read_box(tmp_path, manifest, manifest.array("w"), box)


def test_checksums_tell_contents_apart(tmp_path):
    # The CRC of a file that ends with its own CRC is a constant; a manifest of those says nothing.
    checksums = []
    for seed in (1, 2):
        manifest = save_with_threads(tmp_path / str(seed), 5, Topology(), SPECS, seed)
        keys = [k for k in manifest.objects if "/c." in k]
        checksums.append([manifest.objects[key].checksum for key in keys])
    assert all(a != b for a, b in zip(*checksums, strict=True))


def test_one_flipped_bit_in_a_part_that_is_read_alone(saved):
    # A reader of a part does not sum the whole object: the chunk's own checksum must speak.
    root, _ = saved
    spec = ckpt.ArraySpec("w", (64, 1024), torch.float32, ((), ()))
    manifest = save_with_threads(root, 9, Topology(), [spec])
    record = manifest.array("w")
    cut = record.model_copy(update={"chunk_shape": (1, 1024)})
    from ckpt.format.shard_layout import ObjectLayout
    from ckpt.write.commit import commit
    from ckpt.write.objects import write_metadata, write_objects

    store, about = ckpt.open_store(root), info(10, Topology(), "fine-chunks")
    array = local_array(spec, Topology(), 0, full_values(spec))
    objects = write_metadata(store, about, [cut])
    objects |= write_objects(store, about, [(ObjectLayout(cut, (0, 0)), array.read_into)])
    manifest = commit(root, about, [cut], objects)
    path = objects_folder(root, "fine-chunks") / "w/c.0.0"
    box = ((7, 9), (0, 1024))
    expected = full_values(spec)[7:9].numpy().tobytes()
    assert ckpt.read.read_box(root, manifest, cut, box).tobytes() == expected

    data = bytearray(path.read_bytes())
    data[8 * 4104 + 77] ^= 4
    path.write_bytes(bytes(data))
    with pytest.raises(ckpt.CheckpointError, match=r"w/c\.0\.0 is damaged: the CRC32C of chunk 8"):
        ckpt.read.read_box(root, manifest, cut, box)


def test_a_manifest_that_forgets_an_object_is_refused(saved):
    root, manifest = saved
    from ckpt.format.manifest import encode_manifest

    path = manifest_file(root, 5)
    for at, (record, stored) in enumerate(zip(manifest.arrays, manifest.stored, strict=True)):
        one_less = stored.model_copy(update={"checksums": stored.checksums[:-1]})
        others = [*manifest.stored[:at], one_less, *manifest.stored[at + 1 :]]
        path.write_bytes(encode_manifest(manifest.model_copy(update={"stored": others})))
        with pytest.raises(ckpt.CheckpointError, match=f"lacks objects of {record.name}"):
            ckpt.read_manifest(root)
    for key in manifest.metadata:
        rest = {k: v for k, v in manifest.metadata.items() if k != key}
        path.write_bytes(encode_manifest(manifest.model_copy(update={"metadata": rest})))
        with pytest.raises(ckpt.CheckpointError, match=f"lacks object {key} "):
            ckpt.read_manifest(root)


def test_only_the_whole_is_committed(saved):
    from dataclasses import replace

    from ckpt.write.commit import commit

    root, manifest = saved
    about, objects = (
        replace(info(6, Topology(**manifest.topology)), save_id=manifest.save_id),
        dict(manifest.objects),
    )
    for key in objects:
        rest = {k: v for k, v in objects.items() if k != key}
        with pytest.raises(ckpt.CheckpointError, match=f"lacks object {key} .1 in all"):
            commit(root, about, manifest.arrays, rest)
    stray = "model/embed/weight/c.9.9"
    with pytest.raises(ckpt.CheckpointError, match=f"has a stray object {stray}"):
        commit(root, about, manifest.arrays, objects | {stray: objects["zarr.json"]})
    assert ckpt.committed_steps(root) == [5]
    assert commit(root, about, manifest.arrays, objects).objects == objects


def test_objects_of_a_manifest_are_found_by_their_keys_alone(saved):
    _, manifest = saved
    assert set(manifest.objects) == {*manifest.metadata} | {
        key for record in manifest.arrays for key in record.object_keys()
    }
    assert len(manifest.objects) == len(list(manifest.objects))
    assert [(key, manifest.objects[key]) for key in manifest.objects] == [*manifest.objects.items()]
    for other in ("model/embed/weight/c.0", "model/embed/weight/c.0.9", "model/embed/weight/c.00.0",
                  "model/embed/weight/c.-1.0", "model/embed/weight", "c", "/c.", "", "x/c.0.0",
                  "model/embed/weight/c", "model/embed/weight/c.0.0/",
                  "model/embed/weight/c/0/0", "model/embed/weight/c.0/0"):  # fmt: skip
        assert other not in manifest.objects, other


def test_the_plain_zarr_view_checks_that_objects_are_there(saved):
    # zarr-python itself returns zeros for a missing object.
    root, manifest = saved
    path = object_files(root, manifest)[0]
    path.unlink()
    with pytest.raises(ckpt.CheckpointError, match="is missing"):
        ckpt.read.open_group(root)


def test_a_renamed_manifest_is_refused(saved):
    root, _ = saved
    manifest_file(root, 5).rename(manifest_file(root, 99))
    with pytest.raises(ckpt.CheckpointError, match=r"00000099.json is of step 5; it was renamed"):
        ckpt.read_manifest(root)


def test_no_checkpoint_is_one_line(tmp_path):
    save_with_threads(tmp_path / "run" / "checkpoints", 5, Topology())
    with pytest.raises(ckpt.CheckpointError, match=r"did you mean .*run/checkpoints\?"):
        ckpt.read_manifest(tmp_path / "run")
    with pytest.raises(ckpt.CheckpointError, match="no checkpoint in"):
        ckpt.read_manifest(tmp_path)
    save_with_threads(tmp_path, 5, Topology())
    with pytest.raises(ckpt.CheckpointError, match=r"no checkpoint of step 4 .* there are \[5\]"):
        ckpt.read_manifest(tmp_path, 4)


def test_a_folder_that_ranks_do_not_share_is_told(tmp_path):
    topology = Topology(dp_shard=2)
    arrays = [local_array(s, topology, 0, full_values(s)) for s in SPECS]
    with pytest.raises(ckpt.CheckpointError, match=r"rank 1 left no receipt .* every rank shares"):
        ckpt.save(tmp_path, info(1, topology), arrays, 0, lambda ok: ok)
    assert ckpt.committed_steps(tmp_path) == []


def fails_without_trace(root: Path) -> str:
    array = [local_array(s, Topology(), 0, full_values(s)) for s in SPECS]
    with pytest.raises(ckpt.CheckpointError) as error:
        ckpt.save(root, info(6, Topology()), array, 0, lambda ok: ok)
    assert ckpt.committed_steps(root) == [5]
    ckpt.verify(root, ckpt.read_manifest(root))
    assert [p.name for p in (root / "objects").iterdir()] == ["00000005-test"]
    return str(error.value)


def test_a_write_that_fails_part_way_leaves_nothing(tmp_path):
    save_with_threads(tmp_path, 5, Topology())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        message = fails_without_trace(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "checkpoint of step 6 in" in message
    assert "File too large" in message


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path):
    if shutil.which("mount") is None:
        pytest.skip("no mount command")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        save_with_threads(disk, 5, Topology())
        free = shutil.disk_usage(disk).free
        (disk / "filler").write_bytes(b"x" * (free - 9000))
        assert "No space left on device" in fails_without_trace(disk)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def one_rank_is_out_of_room(rank: int, root: Path) -> tuple[str, str]:
    import torch.distributed as dist

    def agree(ok: bool) -> bool:
        word = torch.tensor(int(ok))
        dist.all_reduce(word, dist.ReduceOp.MIN)
        return bool(word)

    topology = Topology(dp_shard=2, ep=2)
    arrays = [local_array(s, topology, rank, full_values(s, 5)) for s in SPECS]
    ckpt.save(root, info(5, topology), arrays, rank, agree)
    if rank == 1:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        ckpt.save(root, info(6, topology), arrays, rank, agree)
    except ckpt.CheckpointError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_all_ranks_learn_that_one_could_not_write(tmp_path):
    results = run_ranks(one_rank_is_out_of_room, 2, tmp_path)
    assert results[0][0] == "OtherRankError"
    assert results[1][0] == "CheckpointError"
    assert "File too large" in results[1][1]
    assert ckpt.committed_steps(tmp_path) == [5]
    assert [p.name for p in (tmp_path / "objects").iterdir()] == ["00000005-test"]
    ckpt.verify(tmp_path, ckpt.read_manifest(tmp_path))


def assert_all_is_noticed(outcomes: damage.Outcomes) -> None:
    for (kind, what), by in outcomes.items():
        tried = by["verify"].tried
        harmless = "padding" in what
        assert tried or harmless, what
        assert by["verify"].caught == (0 if harmless else tried), (kind, what)
        for reader in ("load", "read_box"):
            # A zarr.json is for others: the manifest says how an array is stored.
            seen = 0 if harmless or kind == "zarr.json" else tried
            assert (by[reader].caught, by[reader].wrong) == (seen, 0), (reader, kind, what)


@pytest.mark.slow
def test_the_published_table_of_damage_is_what_happens():
    text, outcomes = damage.section(most=6)
    for each in outcomes:
        assert_all_is_noticed(each)
    assert outcomes[0]["object", "one bit of the padding between chunks flipped"]["load"].tried
    page = damage.DOC.read_text()
    published = page.partition(damage.BEGIN)[2].partition(damage.END)[0]
    assert published.strip().startswith(text), "python -m tests.support.damage --write"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_every_bit_and_every_file_matters(compression):
    assert_all_is_noticed(damage.table(compression, 1 << 30)[1])
