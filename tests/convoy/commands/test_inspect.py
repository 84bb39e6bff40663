"""convoy inspect: damage, differences, history and garbage, as lines and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.format.keys import locate, objects_key, pending_key
from convoy.commands.inspect import main
from convoy.commands.reshard import main as reshard
from parallel.layout import Topology
from tests.support.checkpoints import (
    SPECS,
    full_values,
    info,
    local_array,
    manifest_file,
    objects_folder,
    save_with_threads,
)
from tests.support.s3 import BUCKET, Server, use

TOPOLOGY = Topology(dp_shard=2, ep=2)


def run(capsys, *arguments: object, code: int = 0) -> tuple[str, list[str]]:
    assert main([str(each) for each in arguments]) == code
    out, err = capsys.readouterr()
    return out, err.splitlines()


def as_json(capsys, *arguments: object, code: int = 0):
    return json.loads(run(capsys, *arguments, "--json", code=code)[0])


def save(root, step: int, arrays: dict[str, torch.Tensor], **changed):
    specs = [
        ckpt.ArraySpec(name, tuple(x.shape), x.dtype, tuple(() for _ in x.shape))
        for name, x in arrays.items()
    ]
    local = [local_array(spec, Topology(), 0, arrays[spec.name]) for spec in specs]
    about = replace(info(step, Topology()), **changed)
    return ckpt.save(root, about, local, 0, lambda ok: ok)


def test_what_is_shown_fits_a_screen(tmp_path, capsys):
    arrays = {f"model/w{i:03d}": torch.ones(2) for i in range(60)}
    state = {"weights_of": "x" * 5000, "text": "one\ntwo"}
    save(tmp_path, 3, arrays, state=state)
    lines = run(capsys, tmp_path)[0].splitlines()
    assert max(map(len, lines)) <= 110
    assert lines[-2].startswith("model/w039 ")
    assert lines[-1] == "... and 20 more; --all shows them"
    assert "  text      one two" in lines
    out = run(capsys, "show", tmp_path, "--all")[0]
    assert "x" * 5000 in out
    assert out.splitlines()[-1].startswith("model/w059 ")
    assert len(as_json(capsys, tmp_path)["arrays"]) == 60
    save(tmp_path / "other", 3, {name: 2 * x for name, x in arrays.items()})
    out = run(capsys, "diff", tmp_path, tmp_path / "other", code=1)[0].splitlines()
    assert out[-2:] == ["... and 20 more; --all shows them",
                        "0 of 60 arrays are identical, bit by bit"]  # fmt: skip


def test_verify_names_all_that_is_damaged(tmp_path, capsys):
    manifest = save_with_threads(tmp_path, 9, TOPOLOGY)
    folder = objects_folder(tmp_path, manifest.save_id)
    (folder / "model/embed/weight/c.1.0").unlink()
    (folder / "rng/torch/zarr.json").write_bytes(b"{}")
    path = folder / "model/layers/moe/experts/w_gate/c.0.1.0.0"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    out, lines = run(capsys, "verify", tmp_path, code=2)
    assert "step      9" in out
    assert "verified" not in out
    assert len(lines) == 3
    for what in ("embed/weight/c.1.0 is missing", "rng/torch/zarr.json is damaged",
                 "w_gate/c.0.1.0.0 is damaged: the CRC32C of chunk"):  # fmt: skip
        assert sum(what in line for line in lines) == 1, what
    found = as_json(capsys, "verify", tmp_path, code=2)
    assert len(found["damage"]) == 3
    assert found["verified_bytes"] is None
    with pytest.raises(ckpt.CheckpointError, match=r"rng/torch/zarr.json is damaged"):
        ckpt.verify(tmp_path, manifest)


def test_verify_tells_how_far_it_is(tmp_path):
    manifest = save_with_threads(tmp_path, 9, TOPOLOGY)
    done = []
    assert ckpt.verify(tmp_path, manifest, done.append) == manifest.total_bytes
    assert sorted(done) == sorted(record.bytes for record in manifest.objects.values())


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
          torch.float8_e5m2, torch.int64, torch.int8, torch.uint8]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_differences_are_those_that_torch_finds(tmp_path, dtype):
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(40, 50, generator=generator) * 9).abs().to(dtype)
    y = x.clone()
    rows = torch.randperm(40, generator=generator)[:7]
    y[rows] = (y[rows].double() * 1.5 + 1).to(dtype)
    first = save(tmp_path / "a", 1, {"w": x})
    second = save(tmp_path / "b", 2, {"w": y})
    (found,) = ckpt.compare(tmp_path / "a", first, tmp_path / "b", second)
    a, b = x.double(), y.double()
    assert found.what == "numbers"
    assert found.elements == 2000
    assert found.differing == int((a != b).sum())
    assert found.max_abs == float((a - b).abs().max())
    assert found.relative_l2 == pytest.approx(float((b - a).norm() / a.norm()), rel=1e-12)
    assert found.not_finite == 0
    (same,) = ckpt.compare(tmp_path / "a", first, tmp_path / "a", first)
    assert same.what == "alike"


def test_bits_tell_where_numbers_do_not(tmp_path):
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([0.0, nan, 1.0, inf, 2.0])
    y = torch.tensor([-0.0, nan, nan, inf, 2.5])
    flags = torch.tensor([True, False]), torch.tensor([True, True])
    first = save(tmp_path / "a", 1, {"w": x, "flags": flags[0], "zero": torch.zeros(0, 3)})
    second = save(tmp_path / "b", 1, {"w": y, "flags": flags[1], "zero": torch.zeros(0, 3)})
    found = {d.name: d for d in ckpt.compare(tmp_path / "a", first, tmp_path / "b", second)}
    assert (found["w"].differing, found["w"].not_finite, found["w"].max_abs) == (3, 1, 0.5)
    assert found["w"].relative_l2 == pytest.approx(0.5 / 2)  # NaN and what is beside it left out
    assert (found["flags"].differing, found["flags"].max_abs) == (1, None)
    assert found["zero"].what == "alike"


def test_layouts_are_no_difference(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(import_module("ckpt.read.compare"), "BLOCK_BYTES", 64)
    save_with_threads(tmp_path / "a", 5, TOPOLOGY)
    save_with_threads(tmp_path / "b", 7, Topology(dp_shard=4, ep=4))
    out, _ = run(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert out == "4 of 4 arrays are identical, bit by bit\n"
    save_with_threads(tmp_path / "b", 8, Topology(dp_replicate=2), seed=1)
    found = as_json(capsys, "diff", tmp_path / "a", tmp_path / "b", code=1)
    for spec in SPECS:
        (one,) = (array for array in found["arrays"] if array["name"] == spec.name)
        a, b = full_values(spec), full_values(spec, 1)
        size = spec.dtype.itemsize
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
        assert one["differing"] == int((a.view(bits) != b.view(bits)).sum())
    assert not found["alike"]
    found = as_json(capsys, "diff", tmp_path / "a", tmp_path / "b", "--other-step", "7")
    assert found["alike"]


def test_diff_tells_of_arrays_and_of_the_spec(tmp_path, capsys):
    both = {"same": torch.ones(3), "numbers": torch.ones(4)}
    save(tmp_path / "a", 1, {**both, "here": torch.ones(1), "shape": torch.ones(2, 3)},
         spec={"train": {"lr": 1, "seed": 0}})  # fmt: skip
    changed = {"same": torch.ones(3), "numbers": torch.tensor([1.0, 1, 1, 3])}
    save(tmp_path / "b", 1, {**changed, "there": torch.ones(1), "shape": torch.ones(3, 2)},
         spec={"train": {"lr": 2, "seed": 0}, "moe": None})  # fmt: skip
    lines = run(capsys, "diff", tmp_path / "a", tmp_path / "b", code=1)[0].splitlines()
    assert "spec: train.lr is 1 in CKPT, 2 in OTHER" in lines
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    assert rows["here"] == "only here"
    assert rows["there"] == "only there"
    assert rows["shape"] == "shape: (2, 3) and (3, 2)"
    assert rows["numbers"] == "numbers 1 of 4 2 1"  # sqrt(4) / sqrt(4)
    assert "same" not in rows
    assert lines[-1] == "1 of 5 arrays are identical, bit by bit"


def test_diff_refuses_what_is_damaged(tmp_path, capsys):
    manifest = save_with_threads(tmp_path / "a", 5, TOPOLOGY)
    save_with_threads(tmp_path / "b", 5, TOPOLOGY)
    path = objects_folder(tmp_path / "b", manifest.save_id) / "model/embed/weight/c.1.0"
    path.write_bytes(path.read_bytes()[:-1])
    _, lines = run(capsys, "diff", tmp_path / "a", tmp_path / "b", code=2)
    assert len(lines) == 1
    assert str(path) in lines[0]


def test_history_tells_of_runs_resizes_specs_and_reshards(tmp_path, capsys):
    w = {"w": torch.ones(2)}
    spec = {"train": {"lr": 1.0}, "moe": {"top_k": 2}}
    save(tmp_path, 10, w, save_id="00000010-first", spec=spec, spec_hash="a" * 64)
    save(tmp_path, 20, w, save_id="00000020-first", spec=spec, spec_hash="a" * 64)
    later = spec | {"train": {"lr": 0.5}}
    save_with_threads(tmp_path, 30, Topology(dp_shard=2), [], save_id="00000030-second", spec=later)
    found = as_json(capsys, "history", tmp_path)
    assert [link["launch"] for link in found] == ["first", "first", "second"]
    assert [link["new_launch"] for link in found] == [False, False, True]
    assert [link["resized"] for link in found] == [False, False, True]
    assert found[2]["spec_changes"] == [{"field": "train.lr", "before": 1.0, "now": 0.5}]
    assert found[1]["seconds"] >= 0
    assert found[0]["bytes"] == ckpt.read_manifest(tmp_path, 10).total_bytes
    out, _ = run(capsys, "history", tmp_path)
    assert out.splitlines()[0] == "launch first"
    assert "launch second" in out
    assert "resized to dp_shard=2" in out
    assert "spec: train.lr was 1.0, is 0.5" in out

    source = ckpt.read_manifest(tmp_path, 20)
    made = ckpt.reshard(tmp_path, source, tmp_path / "other", Topology(dp_shard=2))
    assert made.parent == "00000020-first"
    assert ckpt.read_manifest(tmp_path / "other").parent == "00000020-first"
    out, _ = run(capsys, "history", tmp_path / "other")
    assert out.splitlines()[0].endswith(", of 00000020-first")
    out, _ = run(capsys, tmp_path / "other")
    assert "made of   00000020-first" in out


def test_history_goes_past_a_damaged_manifest_and_says_so(tmp_path, capsys):
    for step in (1, 2, 3):
        save(tmp_path, step, {"w": torch.ones(2)})
    manifest_file(tmp_path, 2).write_bytes(b"{}")
    out, lines = run(capsys, "history", tmp_path, code=2)
    assert "step        1" in out
    assert "step        3" in out
    assert len(lines) == 1
    assert "step-00000002.json is damaged" in lines[0]
    assert lines[0].endswith("; the checkpoint before is of step 1")
    _, lines = run(capsys, "history", tmp_path / "nowhere", code=2)
    assert "no checkpoint in" in lines[0]


def test_garbage_is_listed_and_removed(tmp_path, capsys):
    save(tmp_path, 1, {"w": torch.ones(2)})
    store = ckpt.LocalStore(tmp_path)
    store.write(f"{pending_key('00000002-dead')}/rank-0.begun", [b""])
    store.write(f"{objects_key('00000002-dead')}/w/c.0", [bytes(2048)])
    store.write(f"{objects_key('00000003-away')}/w/c.0", [bytes(1024)])
    _, lines = run(capsys, "gc", tmp_path, "--grace-seconds", "-1", code=2)
    assert lines == ["error: --grace-seconds (-1) must be 0 or more"]
    out, _ = run(capsys, "gc", tmp_path, "--dry-run")
    assert out.count("stays: it is younger than 86400 s") == 2
    out, _ = run(capsys, "gc", tmp_path, "--dry-run", "--grace-seconds", "0")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "uncommitted 00000002-dead 2 2.0 KiB would go" in lines
    assert "unlisted 00000003-away 1 1.0 KiB stays: its manifest may have been moved away" in lines
    assert lines[-1] == "2.0 KiB in 1 entry would be removed"
    assert (tmp_path / "objects/00000002-dead").exists()
    out, _ = run(capsys, "gc", tmp_path, "--grace-seconds", "0")
    assert out.splitlines()[-1] == "2.0 KiB in 1 entry were removed"
    assert not (tmp_path / "objects/00000002-dead").exists()
    found = as_json(capsys, "gc", tmp_path, "--grace-seconds", "0", "--unlisted")
    assert [(each["name"], each["removed"]) for each in found["garbage"]] == [
        ("00000003-away", True)
    ]
    assert found["bytes"] == 1024
    out, _ = run(capsys, "gc", tmp_path, "--grace-seconds", "0")
    assert out == "0 B in 0 entries were removed\n"
    ckpt.verify(tmp_path, ckpt.read_manifest(tmp_path))


def test_an_s3_location_is_as_good_as_a_folder(tmp_path, capsys):
    server = Server()
    try:
        with use(server.port):
            root = f"s3://{BUCKET}/run/checkpoints"
            manifest = save_with_threads(root, 5, TOPOLOGY)
            save_with_threads(tmp_path, 5, Topology())
            out, _ = run(capsys, "verify", root)
            assert f"verified: all {manifest.total_bytes:,} bytes" in out
            assert f"{root}/manifests/step-00000005.json" in out
            assert "4 of 4 arrays are identical" in run(capsys, "diff", root, tmp_path)[0]
            assert "launch test" in run(capsys, "history", root)[0]
            assert run(capsys, "gc", root)[0] == "0 B in 0 entries were removed\n"
            _, lines = run(capsys, "s3://no-bucket/run", code=2)
            assert lines[0].startswith("error: s3://no-bucket/run")
            assert lines[0].endswith(" cannot be read: there is no such bucket")
    finally:
        server.kill()
    for wrong in ("ftp://host/run", "s3://"):
        _, lines = run(capsys, wrong, code=2)
        assert len(lines) == 1
        assert "must be a folder, or one of s3://BUCKET/PREFIX" in lines[0]


def test_the_path_of_a_manifest_names_its_checkpoint(tmp_path, capsys, monkeypatch):
    root = tmp_path / "a"
    for step in (3, 5):
        save(root, step, {"w": torch.full((2,), float(step))})
    path = manifest_file(root, 3)
    assert as_json(capsys, path)["step"] == 3
    assert as_json(capsys, "verify", path, "--step", "3")["step"] == 3
    assert as_json(capsys, "diff", path, root, code=1)["arrays"][0]["max_abs"] == 2
    assert "step        3" in run(capsys, "history", path)[0]
    _, lines = run(capsys, path, "--step", "5", code=2)
    assert "step (5) must be left out, or be that of the manifest" in lines[0]
    assert ckpt.open(str(path))["w"][0] == ckpt.open(path)["w"][0] == 3
    monkeypatch.chdir(root)
    assert as_json(capsys, "manifests/step-00000003.json")["step"] == 3
    out = tmp_path / "out"
    assert reshard([str(path), str(out), "--layout", "dp_shard=2"]) == 0
    assert ckpt.committed_steps(out) == [3]
    assert locate("s3://bucket/run/manifests/step-00000003.json") == ("s3://bucket/run", 3)
    assert locate("/manifests/step-00000003.json")[0] == Path("/")
    assert locate(root, 4) == (root, 4)
