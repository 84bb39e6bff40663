"""convoy's commands take a checkpoint of a state dict; other libraries read what it becomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckpt
from ckpt.read import read_box
from ckpt.rewrite import CheckpointSource, CheckpointTarget, Selected
from convoy.commands.command_line import main
from parallel import Topology
from tests.ckpt.test_state_dict import same
from tests.support.ranks import run_ranks


@pytest.fixture(autouse=True)
def pack_little(monkeypatch):
    """Tensors of a mebibyte have arrays of their own, so that small states have both kinds."""
    monkeypatch.setattr("ckpt.format.pack_plan.PACK_BYTES", 1 << 20)


def state(step: float) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": {"layers.0.w": torch.randn(512, 600) + step, "layers.0.norm": torch.ones(7)},
        "optim": {"state": {0: {"exp_avg": torch.full((3, 2), step)}}, "lr": 0.1},
    }


@pytest.fixture
def saved(root: Path) -> Path:
    for step in (1, 2):
        ckpt.save_state_dict(root, state(float(step)), step=step)
    return root


def run(*words: object) -> int:
    command, *rest = map(str, words)
    try:
        return main(command, rest)
    except SystemExit as end:
        return int(end.code or 0)


def test_inspect_shows_tensors_and_fits_a_screen(saved, capsys):
    assert run("inspect", saved) == 0
    out = capsys.readouterr().out
    assert "1 rank\n" in out
    assert "saved by save_state_dict, 3 tensors" in out
    assert "optim/state/0/exp_avg" in out
    assert max(map(len, out.splitlines())) < 120
    assert run("inspect", saved, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["name"] for one in found["packed"]} == {
        "model/layers.0.norm",
        "optim/state/0/exp_avg",
    }


def test_verify_finds_damage_and_diff_finds_differences(saved, capsys):
    first, second = (saved / "manifests" / f"step-0000000{n}.json" for n in (1, 2))
    assert run("inspect", "diff", first, first) == 0
    capsys.readouterr()
    assert run("inspect", "diff", first, second) == 1
    out = capsys.readouterr().out
    assert "model/layers.0.w" in out
    assert "optim/state/0/exp_avg" in out
    assert "norm" not in out
    assert run("inspect", "verify", saved) == 0
    save_id = ckpt.read_manifest(saved).save_id
    path = next((saved / "objects" / save_id / "packed").rglob("c.0.0"))
    good = path.read_bytes()
    path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    assert run("inspect", "verify", saved) == 2
    assert f"{path} is damaged" in capsys.readouterr().err


def test_gc_keeps_what_is_committed(saved, capsys):
    assert run("inspect", "gc", saved, "--grace-seconds", 0) == 0
    for step in (1, 2):
        ckpt.verify(saved, ckpt.read_manifest(saved, step))
    assert ckpt.retain(saved, 1) == [1]
    ckpt.verify(saved, ckpt.read_manifest(saved))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_and_safetensors_read_what_a_reshard_writes(saved, tmp_path):
    expected = state(2.0)
    assert run("reshard", saved, tmp_path / "dcp", "--format", "dcp") == 0
    found = {
        "model": {key: torch.zeros_like(one) for key, one in expected["model"].items()},
        "optim": {"state": {"0": {"exp_avg": torch.zeros(3, 2)}}},
    }
    load_dcp(found, storage_reader=FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert torch.equal(found["model"]["layers.0.w"], expected["model"]["layers.0.w"])
    assert torch.equal(found["optim"]["state"]["0"]["exp_avg"], torch.full((3, 2), 2.0))

    assert run("reshard", saved, tmp_path / "st", "--format", "safetensors") == 0
    flat = load_file(tmp_path / "st" / "model.safetensors")
    assert set(flat) == {"model.layers.0.w", "model.layers.0.norm", "optim.state.0.exp_avg"}
    assert torch.equal(flat["model.layers.0.w"], expected["model"]["layers.0.w"])


def test_a_reshard_of_a_state_dict_loads_as_before(saved, tmp_path):
    assert run("reshard", saved, tmp_path / "copy") == 0
    found: dict[str, Any] = {}
    assert ckpt.load_state_dict(tmp_path / "copy", found) == 2
    assert torch.equal(found["model"]["layers.0.w"], state(2.0)["model"]["layers.0.w"])
    assert found["optim"]["lr"] == 0.1


def tree_state() -> dict[str, Any]:
    """Keys of every kind: with dots, whole numbers, lists, none, and what names encode."""
    torch.manual_seed(0)
    return {
        "net": {"layers.0.w": torch.randn(512, 600), "layers.0.norm": torch.ones(7), "note": "x"},
        "opt": {"state": {0: {"m": torch.randn(3, 2).bfloat16(), "step": 5}}, "groups": []},
        "a/b": [torch.tensor(True), (torch.empty(0, 3), 2.5, b"yes"), None],
        "packed": {"": torch.arange(4)},
    }


def load(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    ckpt.load_state_dict(root, found)
    return found


def test_renamed_arrays_are_renamed_in_the_state_too(root, tmp_path, capsys):
    ckpt.save_state_dict(root, tree_state(), step=1)
    rules = ["net/=model/", "opt/state/0/m=opt/state/0/exp_avg", "a%2Fb/=lists/inner/",
             "opt/state/0/step=opt/count"]  # fmt: skip
    words = [word for rule in rules for word in ("--rename", rule)]
    assert run("reshard", root, tmp_path / "new", *words) == 0
    was, found = tree_state(), load(tmp_path / "new")
    assert same(found["model"], was["net"])
    assert same(found["opt"]["state"], {0: {"exp_avg": was["opt"]["state"][0]["m"]}})
    assert found["opt"]["count"] == 5
    assert same(found["lists"], {"inner": was["a/b"]})
    assert same(found["packed"], was["packed"])
    assert list(found) == ["model", "opt", "lists", "packed"]
    weight = ckpt.open(tmp_path / "new")["model/layers.0.w"]
    assert weight.shape == (512, 600)
    for rule, says in (
        ("a%2Fb/0=x", "must be renamed as a whole"),
        ("net/note=net/layers.0.w", "one name"),
        ("net/note=packed", "no keys of a state have this name"),
        ("net/note=opt/state/0/m/x", "the keys of"),
        ("nothing=x", "no such array"),
    ):
        capsys.readouterr()
        assert run("reshard", root, tmp_path / "no", "--rename", rule) == 2
        assert says in capsys.readouterr().err, rule
        assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
def test_the_way_through_another_format_and_back_keeps_every_bit(kind, root, tmp_path):
    ckpt.save_state_dict(root, tree_state(), step=7)
    assert run("reshard", root, tmp_path / "there", "--format", kind) == 0
    assert run("reshard", tmp_path / "there", tmp_path / "back") == 0
    assert same(load(tmp_path / "back"), tree_state())
    assert run("inspect", "diff", root, tmp_path / "back") == 0
    assert run("reshard", tmp_path / "there", tmp_path / "again", "--format", "safetensors") == 0
    names = set(load_file(tmp_path / "again" / "model.safetensors"))
    assert {"net.layers.0.w", "a/b.1.0", "packed."} <= names


def test_names_that_differ_in_dots_alone_are_refused_by_other_formats(root, tmp_path, capsys):
    ckpt.save_state_dict(root, {"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.zeros(1)}}, step=1)
    assert run("reshard", root, tmp_path / "there", "--format", "safetensors") == 2
    assert "a/b.c and a.b/c have one name with dots, a.b.c" in capsys.readouterr().err


def test_weights_of_a_state_dict_are_what_the_key_model_has(root, tmp_path, capsys):
    ckpt.save_state_dict(root, tree_state(), step=1)
    assert run("reshard", "weights", root, tmp_path / "no") == 2
    assert "its keys are net, opt, a/b, packed" in capsys.readouterr().err
    words = ["weights", root, tmp_path / "weights", "--rename", "net/=model/"]
    assert run("reshard", *words) == 0
    assert same(load(tmp_path / "weights"), {"model": tree_state()["net"]})
    words = ["weights", tmp_path / "weights", tmp_path / "half", "--dtype", "bf16"]
    assert run("reshard", *words) == 0
    assert load(tmp_path / "half")["model"]["layers.0.w"].dtype is torch.bfloat16
    words = ["weights", tmp_path / "weights", tmp_path / "files", "--format", "safetensors"]
    assert run("reshard", *words) == 0
    names = set(load_file(tmp_path / "files" / "model.safetensors"))
    assert names == {"model.layers.0.w", "model.layers.0.norm"}


def test_arrays_that_are_not_those_of_the_state_are_refused(root, tmp_path):
    ckpt.save_state_dict(root, tree_state(), step=1)
    source = CheckpointSource(root, ckpt.read_manifest(root))
    some = Selected(source, {name: name for name in source.arrays if "norm" not in name})
    with pytest.raises(ckpt.CheckpointError, match=r"layers\.0\.norm is no array"):
        CheckpointTarget(some, tmp_path, Topology())
    more = Selected(source, {name: name for name in source.arrays} | {"x": "net/layers.0.w"})
    with pytest.raises(ckpt.CheckpointError, match="x is not in its tree"):
        CheckpointTarget(more, tmp_path, Topology())


def test_a_reshard_reads_a_pack_once_and_not_once_for_each_tensor(root, tmp_path, monkeypatch):
    state = {f"w{i}": torch.full((3,), float(i)) for i in range(200)}
    ckpt.save_state_dict(root, state, step=1)
    reads = []

    def counted(*args: Any) -> Any:
        reads.append(args)
        return read_box(*args)

    monkeypatch.setattr("ckpt.read.box.read_box", counted)
    assert run("reshard", root, tmp_path / "copy", "--workers", "1") == 0
    assert 0 < len(reads) < 5
    assert same(load(tmp_path / "copy"), state)


def sharded(rank: int, root: Path) -> None:
    mesh = init_device_mesh("cpu", (1, 2))
    cut = {
        key: distribute_tensor(one, mesh, [Replicate(), Shard(0)], src_data_rank=None)
        for key, one in state(1.0)["model"].items()
    }
    small = [
        distribute_tensor(torch.arange(i + 5.0), mesh, [Shard(0), Replicate()], src_data_rank=None)
        for i in range(20)
    ]
    ckpt.save_state_dict(root, {"model": cut, "small": small}, step=1)


def test_what_two_ranks_saved_becomes_whole_files(root, tmp_path, capsys):
    run_ranks(sharded, 2, root)
    assert run("reshard", root, tmp_path / "st", "--format", "safetensors") == 0
    flat = load_file(tmp_path / "st" / "model.safetensors")
    for key, one in state(1.0)["model"].items():
        assert torch.equal(flat[f"model.{key}"], one), key
    capsys.readouterr()
    assert run("reshard", root, tmp_path / "copy", "--layout", "ep=2") == 2
    assert "--layout (ep=2) is for checkpoints of a run" in capsys.readouterr().err
    assert run("reshard", root, tmp_path / "copy") == 0
    old, new = ckpt.read_manifest(root), ckpt.read_manifest(tmp_path / "copy")
    assert new.packed == old.packed
    assert new.arrays == old.arrays, "packs, meshes and placements stay"
    assert new.objects.keys() == old.objects.keys()
    assert same(load(tmp_path / "copy"), load(root))
