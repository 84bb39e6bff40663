"""The commands as a person runs them, and what they say when it goes wrong."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckpt
from convoy.commands.inspect import main as inspect
from convoy.commands.pretrain import main as pretrain
from convoy.commands.reshard import main as reshard
from corpus.prepare.prepare import prepare_corpus
from parallel.layout import Topology
from tests.support import commands
from tests.support.checkpoints import objects_folder, save_with_threads
from tests.support.jobs import events, make_spec, write_corpus, write_spec
from tests.support.processes import children, is_running
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[3]
EXPERTS = [
    ckpt.ArraySpec("model/layers/moe/experts/w_gate", (3, 8, 12, 10), torch.float32,
                   ((), ("ep",), ("efsdp",), ())),
    ckpt.ArraySpec("model/embed/weight", (50, 12), torch.bfloat16, (("fsdp",), ())),
    ckpt.ArraySpec("optimizer/exp_avg/embed/weight", (50, 12), torch.float32, (("fsdp",), ())),
]  # fmt: skip


def command(*arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def one_error_line(text: str) -> str:
    assert text.startswith("error: "), text
    assert text.count("\n") == 1, text
    return text


def contents(root: Path) -> dict[str, tuple]:
    manifest = ckpt.read_manifest(root)
    ckpt.verify(root, manifest)
    return {key: (r.bytes, r.checksum) for key, r in manifest.objects.items()}


def test_reshard_to_one_to_four_and_back_is_bit_equal(tmp_path, capsys):
    start = tmp_path / "ep2"
    save_with_threads(start, 9, Topology(dp_shard=2, ep=2), EXPERTS)
    for source, target, layout in [
        ("ep2", "ep1", "ep=1"), ("ep1", "ep4", "ep=4"), ("ep4", "back", "ep=2"),
    ]:  # fmt: skip
        arguments = [str(tmp_path / source), str(tmp_path / target), "--layout", layout]
        assert reshard(arguments) == 0, capsys.readouterr().err
    assert contents(tmp_path / "back") == contents(start)
    assert contents(tmp_path / "ep4") != contents(start), "four ranks have other objects"
    assert "written and verified" in capsys.readouterr().out
    first, four = ckpt.read.open_group(start), ckpt.read.open_group(tmp_path / "ep4")
    for spec in EXPERTS:
        assert (first[spec.name][...].tobytes()) == four[spec.name][...].tobytes()
    assert ckpt.read_manifest(tmp_path / "ep4").topology["ep"] == 4


def test_reshard_refuses_what_it_cannot_do(tmp_path, capsys):
    source = tmp_path / "source"
    manifest = save_with_threads(source, 9, Topology(dp_shard=2, ep=2), EXPERTS)
    target = tmp_path / "target"

    def refused(*arguments: str) -> str:
        assert reshard([str(source), str(target), *arguments]) == 2
        return one_error_line(capsys.readouterr().err)

    assert "layout (eq=2) must be AXIS=DEGREE" in refused("--layout", "eq=2")
    assert "no checkpoint of step 8" in refused("--layout", "ep=1", "--step", "8")
    assert ckpt.committed_steps(target) == []
    victim = objects_folder(source, manifest.save_id) / "model/embed/weight/c.0.0"
    data = victim.read_bytes()
    victim.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
    assert "model/embed/weight/c.0.0 is damaged" in refused("--layout", "ep=1")
    assert ckpt.committed_steps(target) == []
    assert not list((target / "objects").iterdir()), "half a checkpoint was left"
    victim.write_bytes(data)
    assert reshard([str(source), str(target), "--layout", "ep=1"]) == 0
    capsys.readouterr()
    assert "already has another checkpoint of step 9" in refused("--layout", "ep=4")


def test_inspect_shows_and_verifies(tmp_path, capsys):
    manifest = save_with_threads(tmp_path, 9, Topology(dp_shard=2, ep=2), EXPERTS)
    assert inspect(["verify", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "step      9" in out
    assert "dp_shard=2 ep=2" in out
    assert "3 x 8 x 12 x 10" in out
    assert "bfloat16" in out
    assert f"verified: all {manifest.total_bytes:,} bytes" in out

    assert inspect([str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    arrays = {array["name"]: array for array in found["arrays"]}
    assert arrays["model/embed/weight"]["shape"] == [50, 12]
    assert arrays["model/embed/weight"]["objects"] == 2
    metadata = sum(r.bytes for k, r in manifest.objects.items() if k.endswith("zarr.json"))
    assert sum(a["bytes"] for a in found["arrays"]) + metadata == found["bytes"]

    (objects_folder(tmp_path, manifest.save_id) / "model/embed/weight/c.1.0").unlink()
    assert inspect(["verify", str(tmp_path)]) == 2
    assert "weight/c.1.0 is missing" in one_error_line(capsys.readouterr().err)
    assert inspect([str(tmp_path / "nowhere")]) == 2
    assert "no checkpoint in" in (line := one_error_line(capsys.readouterr().err))
    assert "there is no such folder" in line


def on_rank(rank: int, arguments: list[str]) -> tuple[int, str, str]:
    return commands.pretrain(arguments)


def refused(*arguments: str | Path) -> str:
    """What the command says, on a rank that has imported everything already."""
    ((code, _, err),) = run_ranks(on_rank, 1, list(map(str, arguments)), group=False)
    assert code == 2, err
    return one_error_line(err)


def test_bad_input_ends_with_2_and_one_line(tmp_path, capsys):
    write_corpus(tmp_path / "text", 12)
    spec = write_spec(tmp_path)
    for arguments, message in [
        ([spec, "--set", "train.stepz=3"], "did you mean train.steps?"),
        ([tmp_path / "none.toml"], "cannot be read"),
    ]:
        assert pretrain(list(map(str, arguments))) == 2
        assert message in one_error_line(capsys.readouterr().err)
    for change, message in [
        ("data.source=/no/where", "data.source (/no/where) must be"),
        ("run_dir=/proc/nowhere", "run_dir (/proc/nowhere) cannot be written"),
    ]:
        assert message in refused(spec, "--set", change)
    result = command("tools/pretrain.py", spec, "--set", "checkpoint.path=/proc/nowhere")
    assert result.returncode == 2, result
    assert "cannot be written" in one_error_line(result.stderr)


def test_the_resolved_spec_is_shown(tmp_path, capsys):
    spec = write_spec(tmp_path)
    assert pretrain([str(spec), "--print-spec", "--set", "train.steps=7"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["train"]["steps"] == 7
    assert shown["model"]["d_model"] == 32
    assert "d_model" not in shown["moe"]
    assert shown["checkpoint"]["retention"]["keep"] == 2


def test_a_disk_without_room_for_a_checkpoint_is_told_before_training(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        write_corpus(tmp_path / "text", 12)
        spec = write_spec(tmp_path)
        said = refused(spec, "--set", f"checkpoint.path={disk}/c")
        assert "must have room for one checkpoint" in said
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_too_deep_for_the_names_of_objects_is_refused_at_the_start(tmp_path):
    write_corpus(tmp_path / "text", 12)
    spec = write_spec(tmp_path)
    folders, rest = divmod(4050 - len(str(tmp_path)), 201)
    deep = tmp_path.joinpath(*["d" * 200] * folders, "d" * max(1, rest - 1))
    text = refused(spec, "--set", f"checkpoint.path={deep}")
    assert f"must be a shorter path: it has {len(str(deep))} bytes, and names of" in text
    assert not (tmp_path / "run/log.jsonl").exists() or not events(tmp_path / "run", "step")
    wide = tmp_path / ("w" * 256)
    assert "cannot be written: File name too long" in refused(spec, "--set", f"run_dir={wide}")


@contextlib.contextmanager
def torchrun(
    *arguments: str | Path, script: tuple[str, ...] = ("tools/pretrain.py",)
) -> Iterator[subprocess.Popen]:
    """On two ranks, which do not outlive the test, however that ends."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "--monitor-interval", "0.02", *script, *map(str, arguments)],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()  # it ends its ranks; they are in sessions of their own
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=60)
                process.kill()


def test_ranks_end_with_a_checkpoint_when_torchrun_is_killed(tmp_path):
    write_corpus(tmp_path / "text", 20)
    made = make_spec(tmp_path)
    prepare_corpus(made.data, made.model.vocab_size, lambda _: None)
    spec = write_spec(
        tmp_path, train={"steps": 100_000}, checkpoint={"interval_steps": 100_000}
    )  # fmt: skip
    run, ranks = tmp_path / "run", []
    with torchrun(spec, script=("-m", "tools.pretrain")) as launched:
        try:
            while not (run / "log.jsonl").exists() or len(events(run, "step")) < 3:
                assert launched.poll() is None, launched.communicate()[0]
                time.sleep(0.02)
            ranks = children(launched.pid)
            assert len(ranks) == 2
            launched.kill()
            deadline = time.monotonic() + 100
            while any(map(is_running, ranks)):
                assert time.monotonic() < deadline, "ranks outlive the torchrun of theirs"
                time.sleep(0.05)
        finally:
            for rank in filter(is_running, ranks):
                os.kill(rank, signal.SIGKILL)
    assert json.loads((run / "status.json").read_text())["state"] == "try_again"
    assert ckpt.committed_steps(run / "checkpoints") == [len(events(run, "step"))]


def run_by_torchrun(arguments: list[str]) -> tuple[int, str]:
    with torchrun(*arguments) as process:
        out = process.communicate()[0]
    return process.returncode, out


def run_by_ranks(arguments: list[str]) -> tuple[int, str]:
    """The same, by processes that have imported everything already."""
    results = run_ranks(on_rank, 2, arguments, group=False)
    return max(code for code, _, _ in results), "".join(out + err for _, out, err in results)


@pytest.mark.parametrize(
    "run_again", [run_by_ranks, pytest.param(run_by_torchrun, marks=pytest.mark.slow)]
)
def test_sigterm_to_torchrun_commits_and_the_next_start_resumes(tmp_path, run_again):
    write_corpus(tmp_path / "text", 20)
    made = make_spec(tmp_path)
    prepare_corpus(made.data, made.model.vocab_size, lambda _: None)
    spec = write_spec(
        tmp_path, parallel={"ep": 2}, train={"steps": 100_000},
        checkpoint={"interval_steps": 100_000},
    )  # fmt: skip
    run = tmp_path / "run"
    with torchrun(spec) as first:
        while not (run / "log.jsonl").exists() or len(events(run, "step")) < 5:
            assert first.poll() is None, first.communicate()[0]
            time.sleep(0.02)
        first.send_signal(signal.SIGTERM)
        out = first.communicate()[0]
    assert "the same command resumes" in out
    assert first.returncode == 1, "torchrun hides the exit code of its ranks"
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["world_size"]) == ("try_again", 75, 2)
    (step,) = ckpt.committed_steps(run / "checkpoints")
    assert step == len(events(run, "step"))
    ckpt.verify(run / "checkpoints", ckpt.read_manifest(run / "checkpoints"))

    more = ["--set", f"train.steps={step + 2}", "--set", "schedule.warmup_steps=0"]
    code, out = run_again([str(spec), *more])
    assert code == 0, out
    assert f"resuming after step {step}" in out
    assert "spec changed since step" in out
    assert json.loads((run / "status.json").read_text())["state"] == "done"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == step + 2
    assert summary["world_size"] == 2
    assert summary["layout"] == "dp_shard=2 ep=2"
    for key in (
        "val_bits_per_byte", "train_loss_first", "train_loss_last", "tokens_per_second",
        "peak_memory_bytes", "tokens", "checkpoint",
    ):  # fmt: skip
        assert summary[key], key
