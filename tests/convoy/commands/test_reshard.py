"""convoy reshard between formats, of weights without moments, under other names and dtypes."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckpt
from ckpt.interop.safetensors_reader import SafetensorsSource
from convoy.commands import reshard
from parallel.layout import Topology
from pretrain.observe import progress_bar
from tests.convoy.commands.test_tools import EXPERTS, ROOT, contents, one_error_line
from tests.support.checkpoints import full_values, save_with_threads

BIAS = ckpt.ArraySpec("model/layers/moe/router/expert_bias", (3, 8), torch.float32, ((), ()))
NORM = ckpt.ArraySpec("model/norm/weight", (257,), torch.float32, (("fsdp",),))
COUNT = ckpt.ArraySpec("model/count", (4,), torch.int64, ((),))
RNG = ckpt.ArraySpec("rng/cpu", (4, 40), torch.uint8, (("world",), ()))
SPECS = [*EXPERTS, BIAS, NORM, COUNT, RNG]


@pytest.fixture
def start(tmp_path):
    save_with_threads(tmp_path / "start", 9, Topology(dp_shard=4, ep=2), SPECS)
    return tmp_path / "start"


def run(*arguments: object) -> int:
    return reshard.main([str(argument) for argument in arguments])


@pytest.mark.parametrize("form", ["dcp", "safetensors"])
def test_there_and_back_through_another_format_is_bit_equal(start, tmp_path, form, capsys):
    assert run(start, tmp_path / "files", "--format", form) == 0
    assert "dp_shard=4 ep=2 -> dp_shard=4 ep=2, 7 arrays" in capsys.readouterr().out
    assert run(tmp_path / "files", tmp_path / "back") == 0
    assert contents(tmp_path / "back") == contents(start)
    first, last = ckpt.read_manifest(start), ckpt.read_manifest(tmp_path / "back")
    assert (first.state, first.spec_hash, first.step) == (last.state, last.spec_hash, last.step)
    assert run(start, tmp_path / "files", "--format", form, "--layout", "ep=4") == 2
    assert "files must not exist" in one_error_line(capsys.readouterr().err)


KILLED = """
import os, signal, sys
from ckpt.rewrite import CheckpointTarget, FolderTarget
from convoy.commands.reshard import main
def killed(commit):
    def commit_and_die(self, receipts):
        commit(self, receipts)
        os.kill(os.getpid(), signal.SIGKILL)
    return commit_and_die
for target in (CheckpointTarget, FolderTarget):
    target.commit = killed(target.commit)
main(sys.argv[1:])
"""


def stats(folder):
    found = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in found.items()}


@pytest.mark.parametrize("form", ["convoy", "dcp", "safetensors"])
def test_after_a_kill_that_came_after_the_commit_the_command_says_that_it_is_done(
    start, tmp_path, form, capsys
):
    command = [start, tmp_path / "out", "--format", form, "--layout", "dp_shard=2"]
    died = subprocess.run([sys.executable, "-c", KILLED, *map(str, command)], cwd=ROOT)
    assert died.returncode == -signal.SIGKILL
    before = stats(tmp_path / "out")
    for _ in range(2):
        assert run(*command) == 0
        assert "were written before and verified" in capsys.readouterr().out
    left = {path for path in stats(tmp_path / "out") if ".pending" not in str(path)}
    assert stats(tmp_path / "out") == {path: before[path] for path in left}
    for other in (["--layout", "ep=4"], ["--rename", "model/norm/=model/last/"]):
        assert run(*command[:-2], *other) == 2
        assert "out" in one_error_line(capsys.readouterr().err)
    assert run("weights", *command) == 2
    capsys.readouterr()
    victim = max(left, key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[-9] ^= 1
    victim.write_bytes(data)
    assert run(*command) == 2, "damage is never called done"
    assert victim.name in one_error_line(capsys.readouterr().err)


def test_weights_alone_in_bfloat16(start, tmp_path):
    assert run("weights", start, tmp_path / "out", "--dtype", "bf16") == 0
    found = ckpt.open(tmp_path / "out")
    assert set(found) == {spec.name for spec in SPECS if spec.name.startswith("model/")}
    for spec in SPECS:
        if spec.name not in found:
            continue
        array, values = found[spec.name], full_values(spec)
        if spec in (BIAS, COUNT):
            assert array.logical_dtype == str(spec.dtype).removeprefix("torch.")
            assert array[...].tobytes() == values.numpy().tobytes()
            continue
        assert array.logical_dtype == "bfloat16"
        made = torch.from_numpy(array[...]).view(torch.bfloat16)
        expected = values.bfloat16()
        nan = expected.isnan()
        assert torch.equal(made.isnan(), nan)
        assert torch.equal(made[~nan], expected[~nan])
    assert list(found.manifest.state) == ["weights_of"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", ["dcp", "safetensors"])
def test_a_checkpoint_of_others_is_stacked_and_renamed(tmp_path, form):
    generator = torch.Generator().manual_seed(0)
    tensors = {"tok_embeddings.weight": torch.randn(9, 4, generator=generator)}
    for layer in range(3):
        tensors[f"layers.{layer}.attention.wq.weight"] = torch.randn(4, 4, generator=generator)
    tensors["layers.0.feed_forward.w1.weight"] = torch.randn(6, 4, generator=generator)
    tensors["layers.1.odd"], tensors["layers.2.odd"] = torch.ones(2), torch.ones(3)
    if form == "dcp":
        moments = {f"optimizer.{n}.exp_avg": torch.ones_like(t) for n, t in tensors.items()}
        dcp.save({**tensors, **moments, "step": 7}, checkpoint_id=tmp_path / "theirs")
    else:
        (tmp_path / "theirs").mkdir()
        save_file(tensors, tmp_path / "theirs/model.safetensors")
    rules = ["tok_embeddings/=model/embed/", "layers/=model/layers/"]
    flags = [flag for rule in rules for flag in ("--rename", rule)]
    assert run("weights", tmp_path / "theirs", tmp_path / "out", *flags) == 0
    found = ckpt.open(tmp_path / "out")
    assert set(found) == {
        "model/embed/weight", "model/layers/attention/wq/weight",
        "model/layers/feed_forward/w1/weight", "model/layers/1/odd", "model/layers/2/odd",
    }  # fmt: skip
    wq = found["model/layers/attention/wq/weight"]
    assert wq.attributes == {"layers": [0, 1, 2]}
    for layer in range(3):
        expected = tensors[f"layers.{layer}.attention.wq.weight"].numpy()
        assert np.array_equal(wq[layer], expected)
    assert found["model/layers/feed_forward/w1/weight"].attributes == {"layers": [0]}
    assert np.array_equal(
        found["model/embed/weight"][...], tensors["tok_embeddings.weight"].numpy()
    )


def test_names_change_on_the_way_out_too(start, tmp_path):
    flags = ["--dtype", "bf16", "--rename", "model/norm/=model/last/"]
    assert run("weights", start, tmp_path / "out", "--format", "safetensors", *flags) == 0
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert tensors["model/last/weight"].dtype == torch.bfloat16
    source = SafetensorsSource(tmp_path / "out")
    assert source.arrays["model/last/weight"].splits == (("fsdp",),)


def test_bad_input_is_refused_in_one_line_and_leaves_nothing(start, tmp_path, capsys):
    def refused(*flags: str, source=start) -> str:
        capsys.readouterr()
        assert run(source, tmp_path / "out", *flags) == 2
        assert not (tmp_path / "out").exists()
        return one_error_line(capsys.readouterr().err)

    assert "--memory (lots) must be a size such as 512MiB" in refused("--memory", "lots")
    assert "memory (16 MiB) must be at least 32 MiB" in refused("--memory", "16MiB")
    text = refused("--memory", "64MB", "--workers", "3")
    assert "memory (64 MiB) must be at least 96 MiB, 32 MiB for each of 3 workers" in text
    assert "--rename (a) must be OLD=NEW" in refused("--rename", "a")
    assert "rename a=b: there is no such array" in refused("--rename", "a=b")
    text = refused("--rename", "model/norm/weight=model/embed/weight")
    assert "one name, model/embed/weight" in text
    text = refused("--rename", "model/norm/weight=../../x")
    assert "array name '../../x' must be parts" in text
    assert run("surgery", start, tmp_path / "out", "drop=1") == 2
    assert "the checkpoint's spec: name: required" in one_error_line(capsys.readouterr().err)
    assert "no checkpoint in" in refused(source=tmp_path / "nowhere")
    with pytest.raises(SystemExit, match="2"):
        run("surgry", start, tmp_path / "out", "drop=1")
    assert "did you mean surgery?" in one_error_line(capsys.readouterr().err)
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\0" * 20)
    assert "is no whole safetensors file" in refused(source=path)
    save_file({"w": torch.ones(2)}, path)
    assert "--step (3) is for checkpoint folders" in refused("--step", "3", source=path)
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").write_bytes(b"cos\nsystem\n.")
    assert "names os.system, which is never run" in refused(source=tmp_path / "dcp")
    (tmp_path / "file").write_text("")
    capsys.readouterr()
    assert run(start, tmp_path / "file/out") == 2
    assert ": Not a directory" in one_error_line(capsys.readouterr().err)


def test_the_bar_counts_every_byte(start, tmp_path, monkeypatch):
    bars = []

    @contextmanager
    def spy(total):
        bars.append([total, 0])

        def advance(count):
            bars[-1][1] += count

        yield advance

    monkeypatch.setattr(reshard, "progress_bar", spy)
    for form in ("convoy", "dcp", "safetensors"):
        bars.clear()
        assert run(start, tmp_path / form, "--format", form) == 0
        assert len(bars) == (2 if form == "convoy" else 1), "a checkpoint is verified too"
        for total, done in bars:
            assert done >= total > 0
            assert form == "dcp" or done == total
    assert json.loads((tmp_path / "dcp/convoy.json").read_text())["step"] == 9


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_is_shown_on_a_terminal_and_nowhere_else(monkeypatch):
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        with progress_bar(1 << 20) as advance:
            advance(1 << 19)
            advance(1 << 19)
        assert ("1.0/1.0 MiB" in stream.getvalue()) == stream.isatty()
        assert ("100%" in stream.getvalue()) == stream.isatty()
        assert bool(stream.getvalue()) == stream.isatty()
