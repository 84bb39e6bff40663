"""convoy's commands take a checkpoint of a state dict; other libraries read what it becomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from pretrain.commands import main
from tests.support.ranks import run_ranks


@pytest.fixture(autouse=True)
def pack_little(monkeypatch):
    """Tensors of a mebibyte have arrays of their own, so that small states have both kinds."""
    monkeypatch.setattr("ckpt.state_dict.packing.PACK_BYTES", 1 << 20)


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
    path = next((saved / "objects" / save_id / "packed").rglob("c/0/0"))
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
    load(found, storage_reader=FileSystemReader(tmp_path / "dcp"), no_dist=True)
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


def sharded(rank: int, root: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    cut = {
        key: distribute_tensor(one, mesh, [Shard(0)], src_data_rank=None)
        for key, one in state(1.0)["model"].items()
    }
    ckpt.save_state_dict(root, {"model": cut}, step=1)


def test_what_two_ranks_saved_becomes_whole_files(root, tmp_path):
    run_ranks(sharded, 2, root)
    assert run("reshard", root, tmp_path / "st", "--format", "safetensors") == 0
    flat = load_file(tmp_path / "st" / "model.safetensors")
    for key, one in state(1.0)["model"].items():
        assert torch.equal(flat[f"model.{key}"], one), key
