"""safetensors and torch.distributed.checkpoint: in, out, bit by bit, and nothing is executed."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from safetensors import safe_open
from safetensors.torch import save_file

from ckpt.errors import CheckpointError
from ckpt.format.dtypes import STORAGE_DTYPES
from ckpt.format.names import check_names, renamed
from ckpt.interop import dcp_writer as to_dcp
from ckpt.interop.dcp_reader import DcpSource
from ckpt.interop.dcp_writer import DcpTarget
from ckpt.interop.safetensors_reader import SafetensorsSource
from ckpt.interop.safetensors_writer import SafetensorsTarget
from ckpt.rewrite.engine import rewrite
from ckpt.rewrite.source import SourceArray
from parallel.layout import Topology
from tests.support.ranks import run_ranks
from tests.support.sources import MemorySource, assert_same, big, random_box, topologies, trees

MEMORY = 64 << 20


def to_torch(values: np.ndarray, logical_dtype: str) -> torch.Tensor:
    return torch.from_numpy(values.copy()).view(getattr(torch, logical_dtype))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    raw = [t.contiguous().reshape(-1).view(torch.uint8) if t.numel() else t for t in (a, b)]
    return torch.equal(*raw)


TARGETS = {
    "safetensors": (SafetensorsTarget, SafetensorsSource),
    "dcp": (DcpTarget, DcpSource),
}


@pytest.mark.parametrize("kind", TARGETS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(trees, topologies)
def test_what_is_written_is_read_bit_by_bit(tmp_path_factory, kind, arrays, topology):
    folder = tmp_path_factory.mktemp("interop") / "a folder with ünïcode"
    write, read = TARGETS[kind]
    source = MemorySource(arrays)
    rewrite(write(source, folder, topology), MEMORY)
    found = read(folder)
    assert_same(found, source)
    assert found.info.topology == topology
    assert (found.info.step, found.info.state, found.info.spec_hash) == (7, {"cursor": 3}, "f" * 64)
    for seed, (name, array) in enumerate(arrays.items()):
        box = random_box(array, seed)
        assert found.read_box(name, box).tobytes() == source.read_box(name, box).tobytes()
    assert [p.name for p in folder.parent.iterdir()] == [folder.name], "nothing stays beside it"


def small_tree() -> MemorySource:
    arrays = {
        f"model/{name}": SourceArray((3, 5), name, ((), ()), {"layers": [1]})
        for name in STORAGE_DTYPES
    }
    return MemorySource({**arrays, "model/scalar": SourceArray((), "float32"),
                         "model/none": SourceArray((0, 4), "bfloat16", ((), ()))})  # fmt: skip


def test_the_safetensors_package_reads_ours(tmp_path):
    source = small_tree()
    target = SafetensorsTarget(source, tmp_path / "out", Topology(), file_bytes=200)
    rewrite(target, MEMORY)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in source.arrays.values())
    assert len(set(index["weight_map"].values())) > 2
    for name, array in source.arrays.items():
        with safe_open(tmp_path / "out" / index["weight_map"][name], framework="pt") as file:
            expected = to_torch(source.values[name], array.logical_dtype)
            assert same_bits(file.get_tensor(name), expected), name


def test_we_read_what_the_safetensors_package_writes(tmp_path):
    source = small_tree()
    tensors = {n: to_torch(source.values[n], a.logical_dtype) for n, a in source.arrays.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert_same(SafetensorsSource(tmp_path), source, notes=False)
    assert_same(SafetensorsSource(tmp_path / "model.safetensors"), source, notes=False)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_distributed_checkpoint_loads_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(to_dcp, "CHUNK_BYTES", 64)
    monkeypatch.setattr(to_dcp, "FILE_BYTES", 150)
    source = small_tree()
    rewrite(DcpTarget(source, tmp_path / "out", Topology()), MEMORY)
    assert len(list((tmp_path / "out").glob("*.distcp"))) > 2
    into = {
        name: torch.zeros(array.shape, dtype=getattr(torch, array.logical_dtype))
        for name, array in source.arrays.items()
    }
    dcp.load(into, checkpoint_id=tmp_path / "out")
    for name, array in source.arrays.items():
        expected = to_torch(source.values[name], array.logical_dtype)
        assert same_bits(into[name], expected), name


def save_with_fsdp(rank: int, folder: str) -> dict[str, torch.Tensor]:
    """A model as torchtitan shards one: FSDP2 over what tensor parallelism has cut."""
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 7, bias=False), nn.LayerNorm(7))
    parallelize_module(model[0], mesh["tp"], ColwiseParallel())  # fsdp's slices are strided
    fully_shard(model, mesh=mesh["fsdp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    whole = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    parameters, moments = get_state_dict(model, optimizer)
    experts = torch.arange(4 * 5 * 6, dtype=torch.bfloat16).reshape(4, 5, 6)
    parameters["experts"] = distribute_tensor(experts, mesh, [Shard(1), Shard(0)])
    dcp.save({"model": parameters, "optimizer": moments, "step": 12}, checkpoint_id=folder)
    return {**whole, "experts": experts}


def test_a_checkpoint_of_torchs_own_from_four_ranks_is_read(tmp_path):
    whole = run_ranks(save_with_fsdp, 4, str(tmp_path / "dcp"))[0]
    source = DcpSource(tmp_path / "dcp")
    assert max(len(chunks) for chunks in source.chunks.values()) == 4
    for name, tensor in whole.items():
        array = source.arrays[f"model.{name}"]
        found = source.read_box(f"model.{name}", tuple((0, n) for n in array.shape))
        assert same_bits(to_torch(found, array.logical_dtype), tensor), name
    assert "step" in source.left_out
    moments = [name for name in source.arrays if name.endswith("exp_avg")]
    assert len(moments) == len(whole) - 1
    for name in moments:
        found = source.read_box(name, tuple((0, n) for n in source.arrays[name].shape))
        assert np.allclose(found, 0.1), "the mean of gradients that are all one"


class Malicious:
    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_malicious_metadata_executes_nothing(tmp_path):
    folder, trace = tmp_path / "dcp", tmp_path / "trace"
    evil = Malicious()
    evil.path = trace
    dcp.save({"w": torch.ones(3)}, checkpoint_id=folder)
    good = (folder / ".metadata").read_bytes()
    attacks = [
        pickle.dumps(evil),
        pickle.dumps({"state_dict_metadata": evil}, protocol=0),
        good[:-1] + pickle.dumps(evil)[2:],
        # names of what is admitted, put to use otherwise
        b"cos\nsystem\n(S'touch " + str(trace).encode() + b"'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch.serialization\nload\n(S'x'\ntR.",
        b"ctorch.distributed.checkpoint.metadata\npickle.loads\n(S'x'\ntR.",
        b"ctorch.distributed.checkpoint.metadata\nos\n.",
    ]
    for attack in attacks:
        (folder / ".metadata").write_bytes(attack)
        with pytest.raises(CheckpointError, match=r"\.metadata is (refused|no pickle|not of)"):
            DcpSource(folder)
    pickle.loads(attacks[0])
    assert trace.exists(), "the attack is a real one"
    trace.unlink()

    # The same in the archive of a tensor.
    (folder / ".metadata").write_bytes(good)
    data = next(folder.glob("*.distcp"))
    with zipfile.ZipFile(io.BytesIO(data.read_bytes())) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    members["archive/data.pkl"] = pickle.dumps(evil)
    with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    source = DcpSource(folder)
    source.chunks["w"][0] = source.chunks["w"][0]._replace(length=data.stat().st_size)
    with pytest.raises(CheckpointError, match=r"names posix\.system, which is never run"):
        source.read_box("w", ((0, 3),))
    assert not trace.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_metadata_with_any_byte_changed_never_does_more_than_raise(tmp_path):
    folder = tmp_path / "dcp"
    dcp.save({"w": torch.arange(24.0).reshape(4, 6), "step": 3}, checkpoint_id=folder)
    good = (folder / ".metadata").read_bytes()
    for at in range(0, len(good), 3):
        (folder / ".metadata").write_bytes(good[:at] + bytes([good[at] ^ 0x15]) + good[at + 1 :])
        try:
            source = DcpSource(folder)
            source.read_box("w", ((0, 4), (0, 6)))
        except (CheckpointError, KeyError):
            continue


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_chunks_that_are_not_the_whole_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(to_dcp, "CHUNK_BYTES", 40)
    source = MemorySource({"w": SourceArray((4, 10), "float32", ((), ()))})
    rewrite(DcpTarget(source, tmp_path / "out", Topology()), MEMORY)
    path = tmp_path / "out/.metadata"
    good = pickle.loads(path.read_bytes())

    def refused(match: str) -> None:
        path.write_bytes(pickle.dumps(good))
        with pytest.raises(CheckpointError, match=match):
            DcpSource(tmp_path / "out").read_box("w", ((0, 4), (0, 10)))

    last = good.state_dict_metadata["w"].chunks.pop()
    refused("chunks of w do not make up its shape")
    good.state_dict_metadata["w"].chunks.append(good.state_dict_metadata["w"].chunks[0])
    refused("chunks of w lie over each other")
    good.state_dict_metadata["w"].chunks[-1] = last
    file = next((tmp_path / "out").glob("*.distcp"))
    os.truncate(file, file.stat().st_size - 500)
    refused("chunk of w at byte")
    (tmp_path / "out/convoy.json").write_text("{}")
    refused("convoy.json is not of this format")
    file.unlink()
    refused(r"distcp cannot be read: No such file")


def header(entries: dict, data: bytes) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: list, begin: int, end: int, dtype: str = "F32") -> dict:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abc", "its header is too long"),
        (struct.pack("<Q", 1 << 60) + b"{}", "its header is too long"),
        (struct.pack("<Q", 2) + b"[]", "its header is no table"),
        (struct.pack("<Q", 2) + b"{x", "no whole safetensors file"),
        (struct.pack("<Q", 20) + b'{"a":{}, "a":{}}    ', "in its header twice"),
        (header(entry([2], 0, 8), b"1234567"), "says 8"),
        (header(entry([2], 4, 12), b"1" * 12), "holes"),
        (header(entry([3], 0, 8), b"1" * 8), "needs 12"),
        (header(entry([8], 0, 8, "F4"), b"1" * 8), "dtype F4"),
        (header(entry([-2], 0, 8), b"1" * 8), "no shape"),
        (header({"a": 3}, b""), "lacks offsets"),
    ],
)
def test_safetensors_files_that_are_not_right_are_refused(tmp_path, content, message):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsSource(tmp_path)


def test_a_folder_that_its_index_does_not_describe_is_refused(tmp_path):
    source = small_tree()
    rewrite(SafetensorsTarget(source, tmp_path / "out", Topology(), file_bytes=200), MEMORY)
    index = tmp_path / "out/model.safetensors.index.json"
    good = json.loads(index.read_text())
    name, file = next(iter(good["weight_map"].items()))

    def refused(weight_map: dict, match: str) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=match):
            SafetensorsSource(tmp_path / "out")

    refused({**good["weight_map"], "more": file}, "more is missing")
    refused({k: v for k, v in good["weight_map"].items() if k != name}, f"{name} is not in")
    refused({**good["weight_map"], name: "../x"}, "must be in the same folder")
    index.unlink()
    with pytest.raises(
        CheckpointError, match=r"safetensors files and no model\.safetensors\.index"
    ):
        SafetensorsSource(tmp_path / "out")
    shutil.copy(tmp_path / "out" / file, tmp_path / "out/twin.safetensors")
    twins = {**good["weight_map"], name: "twin.safetensors"}
    refused(twins, "must be in one file, and is in another")


def test_a_box_is_read_without_what_is_around_it(tmp_path):
    rewrite(SafetensorsTarget(big(8 << 20), tmp_path / "out", Topology()), MEMORY)
    source = SafetensorsSource(tmp_path / "out")
    total = []
    real = os.preadv

    def counting(handle, buffers, at):
        total.append(sum(b.nbytes for b in buffers))
        return real(handle, buffers, at)

    patch = pytest.MonkeyPatch()
    patch.setattr(os, "preadv", counting)
    try:
        source.read_box("model/w", ((100, 200), (0, 1024)))
        assert sum(total) == 100 * 4096
        assert len(total) == 1
        total.clear()
        source.read_box("model/w", ((100, 200), (0, 10)))
        assert sum(total) <= 100 * 4096
    finally:
        patch.undo()


@pytest.mark.parametrize(
    "names", [["../x"], ["a//b"], ["/a"], ["a", "a/b"], ["a/zarr.json"], ["__x"], ["a\\b"], [""]]
)
def test_names_that_are_no_places_in_a_checkpoint_are_refused(names):
    with pytest.raises(CheckpointError, match="array"):
        check_names(names)
    check_names(["a/b", "a/c", "ab", "model/layers/ü"])


def test_rules_of_renaming_leave_nothing_to_chance():
    names = ["a/x", "a/y", "a/deep/z", "b"]
    rules = {"a/": "c/", "a/deep/": "d/", "a/y": "why"}
    assert renamed(names, rules) == {"c/x": "a/x", "why": "a/y", "d/z": "a/deep/z", "b": "b"}
    for rename, match in [
        ({"q": "r"}, "rename q=r: there is no such array"),
        ({"b": "a/x"}, "rename gives a/x and b one name, a/x"),
        ({"a/": "c"}, "must be two names, or two prefixes"),
        ({"a/x": "", "b": "c"}, "must be two names"),
    ]:
        with pytest.raises(CheckpointError, match=match):
            renamed(names, rename)
