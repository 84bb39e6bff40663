"""A checkpoint from anyone: whatever is in it, a reader says what is wrong with it in one line, in
little memory, and runs nothing."""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.format import ObjectLayout
from ckpt.format.manifest import decode_manifest, encode_manifest
from parallel.layout import Topology
from tests.support.checkpoints import (
    SPECS,
    local_array,
    manifest_file,
    memory_folder,
    objects_folder,
    save_with_threads,
)

TOPOLOGY = Topology(dp_shard=2, ep=2)
LIMIT = 512 << 20  # of new memory; the checkpoint has some kilobytes


@pytest.fixture(scope="module")
def saved() -> Iterator[Path]:
    with memory_folder() as folder:
        root = Path(folder)
        save_with_threads(root, 5, TOPOLOGY)
        save_with_threads(root / "zstd", 5, TOPOLOGY, compression="zstd")
        yield root


@pytest.fixture(autouse=True)
def _little_memory():
    status = Path("/proc/self/status").read_text()
    now = int(status.split("VmSize:")[1].split()[0]) << 10
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + LIMIT, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def envelope(body: Any) -> bytes:
    """A manifest with a right checksum, whatever it says."""
    data = json.dumps(body).encode()
    return b'{"crc32c":%d,"manifest":%s}\n' % (crc32c(data), data)


def read_everything(root: Path) -> None:
    manifest = ckpt.read_manifest(root)
    ckpt.load(root, manifest, [local_array(s, Topology(), 0) for s in SPECS])
    ckpt.verify(root, manifest)


def only_checkpoint_errors(root: Path) -> None:
    message = ""
    try:
        read_everything(root)
    except ckpt.CheckpointError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 1000


def places(value: Any, path: tuple = ()) -> list[tuple]:
    found = [path] if path else []
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in list(inner):
            found += places(each, (*path, key))
    return found


WORDS = ["", ".", "..", "../..", "/etc/passwd", "a/../../b", "a\\b", "a//b", "c", "zarr.json", "\0",
         "x" * 300, "fsdp", "tp", "pp", "world", "ep", "bool", "float64", "zstd", "none", "NaN",
         "model", "model/embed", "model/embed/weight/c", ".pending-x", "é", "\ud800"]  # fmt: skip
NUMBERS = [0, 1, 2, 3, 5, 7, -1, 2**31, 2**62, 10**18, 10**30, 10**4000, 0.5, 1e400, float("nan")]
values = st.one_of(
    st.sampled_from(WORDS),
    st.sampled_from(NUMBERS),
    st.integers(0, 50),
    st.none(),
    st.booleans(),
    st.lists(st.sampled_from(NUMBERS), max_size=5),
    st.just({}),
    st.just([[[[]]]]),
)


def mutate(body: Any, data: st.DataObject) -> Any:
    body = copy.deepcopy(body)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(body)))
        holder = body
        for key in path[:-1]:
            holder = holder[key]
        what = data.draw(st.sampled_from(["set", "set", "set", "remove", "double", "rename"]))
        if what == "set":
            holder[path[-1]] = copy.deepcopy(data.draw(values))
        elif what == "remove":
            del holder[path[-1]]
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(holder[path[-1]]))
        elif what == "rename":
            holder[data.draw(st.sampled_from(WORDS))] = holder.pop(path[-1])
    return body


def fuzz_manifests(saved: Path, examples: int, enough: int) -> None:
    """At least so many examples, and until ``enough`` of them have got as far as the objects."""
    path = manifest_file(saved, 5)
    original = path.read_bytes()
    body = json.loads(original)["manifest"]
    body["ranks"] = None
    accepted = 0

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        nonlocal accepted
        changed = mutate(body, data)
        if data.draw(st.booleans()):
            # As a forger would: with the objects that the arrays ask for.
            changed = consistent(changed, body)
        path.write_bytes(envelope(changed))
        only_checkpoint_errors(saved)
        try:
            decode_manifest(path.read_bytes(), "it")
            accepted += 1
        except ckpt.CheckpointError:
            pass

    try:
        for _ in range(20):
            fuzz()
            if accepted > enough:
                break
        assert accepted > enough, "too few are such that only the objects show it"
    finally:
        path.write_bytes(original)
    read_everything(saved)


def consistent(body: Any, original: Any) -> Any:
    from ckpt.format.array import metadata_objects
    from ckpt.format.manifest import Manifest

    try:
        manifest = Manifest.model_validate({**body, "metadata": {}, "stored": []})
        keys = list(metadata_objects(manifest.arrays))
        counts = [manifest.count(record) for record in manifest.arrays]
    except (ValueError, TypeError):
        return body
    old = body["metadata"] if isinstance(body.get("metadata"), dict) else {}
    body["metadata"] = {key: old.get(key, [100, 1]) for key in keys}
    stored = {len(each["checksums"]): each for each in original["stored"]}
    body["stored"] = [stored.get(n, alike(n if n < 1000 else 1)) for n in counts]
    return body


def alike(count: int) -> dict[str, Any]:
    return {"lengths": [[count, 100]], "checksums": [1] * count}


def test_a_forged_manifest_is_only_ever_refused(saved):
    fuzz_manifests(saved, 150, enough=5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_forged_manifests_are_only_ever_refused(saved):
    fuzz_manifests(saved, 6000, enough=300)


HUGE = 10**18
FORGED = [
    ({"arrays": {0: {"shape": [HUGE, 6]}}}, "lists 2 of"),
    ({"arrays": {0: {"shape": [HUGE, 6], "shard_shape": [1, 6], "chunk_shape": [1, 6]}}},
     "lists 2 of"),
    ({"arrays": {0: {"shape": [0, HUGE], "shard_shape": [1, 1], "chunk_shape": [1, 1]}}}, "stray"),
    ({"arrays": {0: {"shape": [HUGE, HUGE], "shard_shape": [HUGE, HUGE],
                     "chunk_shape": [HUGE, HUGE]}}}, "chunk of more than"),
    ({"arrays": {0: {"shape": [HUGE, 6], "shard_shape": [HUGE, 6],
                     "chunk_shape": [1, 6]}}}, "lacks object|stray object"),
    ({"arrays": {0: {"shard_shape": [0, 6]}}}, "equal to 1"),
    ({"arrays": {0: {"chunk_shape": [5, 6]}}}, "in objects of"),
    ({"arrays": {0: {"shape": [13]}}}, "of differing length"),
    ({"arrays": {0: {"shape": [-1, 6]}}}, "greater than or equal to 0"),
    ({"arrays": {0: {"splits": [["elsewhere"], []]}}}, "axes that go together"),
    ({"arrays": {0: {"splits": [["fsdp", "fsdp"], []]}}}, "each axis once"),
    ({"arrays": {0: {"stages": [0, 1, 2]}}}, "stages"),
    ({"arrays": {0: {"logical_dtype": "object"}}}, "has dtype 'object'"),
    ({"arrays": {0: {"name": "../../outside"}}}, "none of them '.' or '..'"),
    ({"arrays": {0: {"name": "/outside"}}}, "must be parts"),
    ({"arrays": {0: {"name": "a//b"}}}, "must be parts"),
    ({"arrays": {0: {"name": "a\\b"}}}, "must be parts"),
    ({"arrays": {0: {"name": "a\0b"}}}, "must be parts"),
    ({"arrays": {0: {"name": ""}}}, "must be parts"),
    ({"arrays": {0: {"name": "model/layers/norm/weight"}}}, "two arrays have one name"),
    ({"arrays": {0: {"name": "model/layers"}}}, "inside another array"),
    ({"save_id": "../objects/x"}, "must be"),
    ({"save_id": ".."}, "must be"),
    ({"save_id": "/tmp"}, "must be"),
    ({"save_id": ".pending-x"}, "does not begin with"),
    ({"topology": {"dp_shard": 2**40}}, "at most"),
    ({"topology": {"sideways": 2}}, "is no axis"),
    ({"topology": {"dp_shard": 0}}, "at least 1"),
    ({"ranks": [7]}, "ranks must be below 2"),
    ({"ranks": []}, "ranks must not be empty"),
    ({"ranks": [0, 0]}, "must not repeat"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), FORGED)
def test_what_makes_no_sense_is_refused_by_name(saved, change, message):
    original = manifest_file(saved, 5).read_bytes()
    body = json.loads(original)["manifest"]
    for field, value in change.items():
        if field == "arrays":
            body["arrays"][0].update(value[0])
        else:
            body[field] = value
    with pytest.raises(ckpt.CheckpointError, match=message) as error:
        decode_manifest(envelope(body), "it")
    assert "\n" not in str(error.value)


def test_a_forged_manifest_of_some_ranks_asks_for_little(saved):
    body = json.loads(manifest_file(saved, 5).read_bytes())["manifest"]
    body["topology"] = {"dp_shard": 1 << 20}
    body["ranks"] = [5, 9]
    body["arrays"] = [{**body["arrays"][0], "shape": [1 << 50, 6], "shard_shape": [1 << 30, 6],
                       "chunk_shape": [1, 6]}]  # fmt: skip
    body = json.loads(json.dumps(body))
    keys = ["zarr.json", "model/zarr.json", "model/embed/zarr.json", "model/embed/weight/zarr.json"]
    body["metadata"] = {key: [100, 1] for key in keys}
    body["stored"] = [alike(2)]
    manifest = decode_manifest(envelope(body), "it")
    with pytest.raises(ckpt.CheckpointError):
        ckpt.verify(saved, manifest)


def object_of(root: Path) -> tuple[Path, ckpt.Manifest, str]:
    manifest = ckpt.read_manifest(root)
    key = next(k for k in manifest.objects if "w_gate/c." in k)
    return objects_folder(root, manifest.save_id) / key, manifest, key


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_forged_object_is_only_ever_refused(saved, compression):
    # Index and manifest have right checksums: what the index says must still make sense.
    root = saved / "zstd" if compression == "zstd" else saved
    path, manifest, key = object_of(root)
    original, where = path.read_bytes(), manifest_file(root, 5)
    before = where.read_bytes()
    record = manifest.array(key.partition("/c.")[0])
    count = ObjectLayout(record, (0, 0, 0, 0)).index_bytes

    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        changed = bytearray(original)
        index = memoryview(changed)[-count:-4].cast("Q")
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(index) - 1))
            index[at] = data.draw(
                st.one_of(st.integers(0, 2**64 - 1), st.integers(0, len(original) + 9))
            )
        del index
        if data.draw(st.booleans()):
            at = data.draw(st.integers(0, len(changed) - count - 1))
            changed[at] ^= data.draw(st.integers(1, 255))
        changed[-4:] = crc32c(changed[-count:-4]).to_bytes(4, "little")
        path.write_bytes(changed)
        only_checkpoint_errors(root)

    try:
        fuzz()
    finally:
        path.write_bytes(original)
        where.write_bytes(before)
    read_everything(root)


def test_a_chunk_that_claims_to_unpack_to_anything_is_refused(saved):
    root = saved / "zstd"
    _, manifest, key = object_of(root)
    name = key.partition("/c.")[0]
    shape = (1 << 11, 1 << 10, 6, 5)
    wide = {"shape": shape, "shard_shape": shape, "chunk_shape": shape, "splits": ((),) * 4}
    record = manifest.array(name).model_copy(update=wide)
    body = json.loads(encode_manifest(manifest))["manifest"]
    body["arrays"] = [
        r if r["name"] != name else record.model_dump(mode="json") for r in body["arrays"]
    ]
    first = manifest.objects[f"{name}/c.0.0.0.0"]
    body["stored"] = [
        s if r["name"] != name else {"lengths": [[1, first.bytes]], "checksums": [first.checksum]}
        for r, s in zip(body["arrays"], body["stored"], strict=True)
    ]
    forged = decode_manifest(envelope(body), "it")
    with pytest.raises(ckpt.CheckpointError, match="is damaged"):
        ckpt.read.read_box(root, forged, forged.array(name), ((0, 1), (0, 1), (0, 1), (0, 1)))


@pytest.mark.parametrize("what", ["folder", "pipe", "endless", "text", "nesting"])
def test_what_stands_in_a_files_place_is_refused(saved, tmp_path, what):
    manifest = ckpt.read_manifest(saved)
    shutil.copytree(saved / "objects", tmp_path / "objects")
    (tmp_path / "manifests").mkdir()
    for path, back in [
        (tmp_path / "manifests" / "step-00000005.json", manifest_file(saved, 5).read_bytes()),
        (objects_folder(tmp_path, manifest.save_id) / "model/embed/weight/c.0.0", None),
    ]:
        path.unlink(missing_ok=True)
        if what == "folder":
            path.mkdir()
        elif what == "pipe":
            os.mkfifo(path)
        elif what == "endless":
            path.symlink_to("/dev/zero")
        elif what == "text":
            path.write_text("hello")
        else:
            nested = b"[" * 100_000
            path.write_bytes(b'{"crc32c":%d,"manifest":%s}\n' % (crc32c(nested), nested))
        with pytest.raises(ckpt.CheckpointError) as error:
            read_everything(tmp_path)
        assert str(path) in str(error.value)
        if back is not None:
            path.rmdir() if what == "folder" else path.unlink()
            path.write_bytes(back)


def test_names_that_only_look_like_manifests_are_none(tmp_path):
    save_with_threads(tmp_path, 5, Topology())
    for name in ["step-٠٠٠٠٠٠٠٩.json", "step-000000009.json", "step-9.json", "step-00000009.json~",
                 "step-" + "9" * 60 + ".json"]:  # fmt: skip
        (tmp_path / "manifests" / name).write_bytes(b"")
    assert ckpt.committed_steps(tmp_path) == [5]
