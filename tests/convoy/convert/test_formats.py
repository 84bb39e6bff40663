"""Checkpoints of six formats: each array goes there and back, and nothing is lost in silence."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import CheckpointError
from ckpt.rewrite import SourceArray, rewrite
from convoy.commands.command_line import main
from convoy.convert.formats import (
    FORMATS,
    differences,
    hashes,
    lay_out,
    move,
    open_foreign,
    universal_files,
)
from convoy.convert.formats.links import Linked
from convoy.convert.formats.recognition import recognize
from convoy.doctor import open_patient
from pretrain.errors import InputError
from tests.support.peers import documented
from tests.support.sources import MemorySource, assert_same, random_box, whole
from tests.support.trained import LAYOUTS, checkpoint, cut_finely

KINDS = {
    f"{name}:{kind}": form.kinds[kind]
    for name, form in FORMATS.items()
    if name not in ("huggingface", "convoy")
    for kind in form.kinds
}
DECLARED = [name for name in KINDS if "latent" not in name]
NAMES = list(FORMATS)


def written(source, to: str, folder: Path) -> Path:
    """A checkpoint of a format, made of one in memory."""
    name, _, kind = to.partition(":")
    form = FORMATS[name]
    for made in [kind] if kind else form.kinds:
        try:
            if not form.without_place(source, made, 4):
                break
        except InputError:
            continue
    rewrite(form.target(source, made, folder, 4), 256 << 20)
    return folder


def assert_equal(found, expected) -> None:
    assert_same(found, expected, notes=False)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DECLARED), st.sampled_from(list(LAYOUTS)), st.integers(0, 1 << 30))
def test_a_declaration_read_backwards_is_its_own_inverse(tmp_path_factory, to, layout, seed):
    """Box by box: a box of ours is read through two links, and is what it was."""
    ours = checkpoint(tmp_path_factory.getbasetemp(), layout)
    made = lay_out(KINDS[to], ours.arrays, 4)
    if made.unnamed:
        assert "stacked" in to, made.unnamed
        assert "dense" in layout, made.unnamed
        return
    theirs = Linked(ours, made.links, made.arrays, "theirs", ours.info)
    read = recognize(KINDS[to], theirs.arrays, "test", 4)
    back = Linked(theirs, read.layout.links, read.ours, "ours", ours.info)
    assert {n: a.shape for n, a in back.arrays.items()} == {
        n: a.shape for n, a in ours.arrays.items()
    }
    for i, (name, array) in enumerate(ours.arrays.items()):
        box = random_box(array, seed + i)
        assert back.read_box(name, box).tobytes() == ours.read_box(name, box).tobytes(), name
        assert back.arrays[name].attributes == array.attributes
    # every number of theirs is one of ours
    numbers = sum(int(np.prod(array.shape)) for array in theirs.arrays.values())
    assert numbers == sum(int(np.prod(array.shape)) for array in ours.arrays.values())


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_with_moments_and_state(name, tmp_path, monkeypatch):
    """From each format to the next one and back: all bits, the counters and the settings."""
    cut_finely(monkeypatch)
    layout = list(LAYOUTS)[7 + NAMES.index(name) % 3]
    source = checkpoint(tmp_path, layout)
    first = written(source, name, tmp_path / "first")
    other = NAMES[(NAMES.index(name) + 1) % len(NAMES)]
    spec = tmp_path / "spec.toml"
    spec.write_text(toml_of(source.info.spec))
    there = move(first, tmp_path / "there", other, num_heads=4, samples=samples_of(first),
                 spec=spec)  # fmt: skip
    back = move(there.certificate.parent, tmp_path / "back", name, num_heads=4)
    assert_equal(open_foreign(first, num_heads=4), source)
    assert_equal(back.target, source)
    assert_equal(there.target, source)
    state = open_foreign(tmp_path / "back", num_heads=4).training
    assert state.updates == state.step == state.position == 40
    assert state.samples == 320
    assert state.optimizer["betas"] == source.training.optimizer["betas"]
    assert state.optimizer["lr"] == source.training.optimizer["lr"]
    for path in ("embed/weight", "layers/attention_norm/weight", "layers/moe/experts/w_up"):
        assert state.decay[path] == source.training.decay[path]


def toml_of(spec) -> str:
    import tomli_w

    def clean(node):
        if isinstance(node, dict):
            return {key: clean(value) for key, value in node.items() if value is not None}
        return node

    return tomli_w.dumps(clean(spec))


def samples_of(folder: Path) -> int | None:
    return 320 if open_foreign(folder, num_heads=4).training.samples is None else None


class TestCertificates:
    def test_experts_that_were_swapped_are_named(self, tmp_path):
        source = checkpoint(tmp_path, "plain")
        wrong = MemorySource(dict(source.arrays), source.info)
        name = "optimizer/exp_avg/layers/moe/experts/w_down"
        wrong.values[name][1, [0, 2]] = wrong.values[name][1, [2, 0]]
        found = differences(hashes(source), hashes(wrong))
        assert found == [f"{name} layer 1 expert {expert} differs" for expert in (0, 2)]

    def test_a_square_matrix_that_was_transposed_is_named(self, tmp_path):
        source = checkpoint(tmp_path, "square experts")
        wrong = MemorySource(dict(source.arrays), source.info)
        name = "model/layers/moe/experts/w_up"
        wrong.values[name][0, 1] = wrong.values[name][0, 1].T.copy()
        assert differences(hashes(source), hashes(wrong)) == [f"{name} layer 0 expert 1 differs"]

    def test_they_do_not_depend_on_the_dtype_or_the_format(self, tmp_path, capsys):
        source = checkpoint(tmp_path, "plain")
        halves = {
            name: replace(array, logical_dtype="bfloat16") for name, array in source.arrays.items()
        }
        narrow = MemorySource(halves, source.info)
        wide = MemorySource(dict(source.arrays), source.info)
        for name, values in narrow.values.items():
            wide.values[name] = (values.astype("u4") << 16).view("f4")
        assert hashes(narrow) == hashes(wide)
        small = written(source.changed(narrow), "megatron:singles", tmp_path / "a")
        large = written(source.changed(wide), "deepspeed", tmp_path / "b")
        assert main("convert", ["certificate", str(small), str(large)]) == 0
        assert "pieces are equal" in capsys.readouterr().out

    def test_the_command_says_what_differs(self, tmp_path, capsys):
        source = checkpoint(tmp_path, "plain")
        other = MemorySource(dict(source.arrays), source.info)
        other.values["model/norm/weight"].view("u4")[3] ^= 1
        folders = [
            str(written(source.changed(of), "automodel", tmp_path / name))
            for of, name in ((source.source, "a"), (other, "b"))
        ]
        assert main("convert", ["certificate", *folders]) == 1
        assert "model/norm/weight differs" in capsys.readouterr().out

    def test_a_target_that_is_not_what_was_read_is_refused(self, tmp_path, monkeypatch):
        """Where a layout would put an expert in the place of another."""
        first = written(checkpoint(tmp_path, "plain"), "torchtitan", tmp_path / "a")
        honest = Linked.read_box

        def careless(self, name, box):
            values = honest(self, name, box)
            return values[::-1].copy() if name.endswith("linear_fc2.weight") else values

        monkeypatch.setattr(Linked, "read_box", careless)
        with pytest.raises(CheckpointError, match=r"w_down layer 0 expert 0 differs.*do not use"):
            move(first, tmp_path / "b", "megatron", samples=1)
        assert not (tmp_path / "b/certificate.json").exists()


class TestRefusals:
    def test_what_a_target_has_no_place_for_is_named(self, tmp_path):
        source = checkpoint(tmp_path, "plain")
        arrays = {**source.arrays, "optimizer/momentum_buffer/embed/weight": SourceArray(
            (300, 12), "float32"
        )}  # fmt: skip
        muon = source.changed(MemorySource(arrays, source.info))
        first = written(muon, "torchtitan", tmp_path / "a")
        line = r"megatron:layers has no place for optimizer/momentum_buffer/embed/weight: .*--leave"
        with pytest.raises(InputError, match=line):
            move(first, tmp_path / "b", "megatron", samples=1)
        assert not (tmp_path / "b").exists()
        made = move(first, tmp_path / "b", "megatron", samples=1, leave=["moments"])
        assert "moments" in made.behind
        assert not [name for name in made.target.arrays if name.startswith("optimizer/")]

    @pytest.mark.parametrize("name", ["torchtitan:fused", "megatron", "deepspeed:list"])
    def test_an_expert_that_is_missing_is_named(self, name, tmp_path):
        """And an array of a model that is not known; in any format."""
        name = name if ":" in name else f"{name}:singles"
        ours = checkpoint(tmp_path, "plain")
        made = lay_out(KINDS[name], ours.arrays, 4)
        gone = next(n for n in sorted(made.arrays) if "experts.1" in n or "w2_EDF" in n)
        left = {n: a for n, a in made.arrays.items() if n != gone}
        with pytest.raises(InputError, match="missing"):
            recognize(KINDS[name], left, "here", 4)
        odd = {**made.arrays, "odd.weight": SourceArray((1,), "float32")}
        with pytest.raises(InputError, match=r"here: array odd\.weight is of no model"):
            recognize(KINDS[name], odd, "here", 4)

    def test_heads_that_cannot_be_told_must_be_named(self, tmp_path):
        ours = checkpoint(tmp_path, "plain")
        arrays = {n: a for n, a in ours.arrays.items() if "q_norm" not in n and "k_norm" not in n}
        source = ours.changed(MemorySource(arrays))
        for heads, line in (
            (None, "--num-heads must be given: 16 numbers of all query heads"),
            (5, r"--num-heads \(5\) must divide 16"),
            (16, r"--num-heads \(16\) must fit"),
        ):
            if heads == 16:
                arrays["model/layers/attention/wk/weight"] = SourceArray((2, 3, 12), "float32")
            with pytest.raises(InputError, match=line):
                lay_out(KINDS["megatron:layers"], source.arrays, heads)

    def test_the_optimizers_settings_must_be_known(self, tmp_path):
        source = checkpoint(tmp_path, "plain")
        bare = source.changed(training=replace(source.training, optimizer={}, decay={}))
        with pytest.raises(InputError, match=r"does not say lr, betas, eps, weight_decay.*--spec"):
            FORMATS["torchtitan"].target(bare, "fused", tmp_path / "x", 4)

    def test_moments_of_different_steps_are_refused(self, tmp_path):
        import torch

        folder = written(checkpoint(tmp_path, "plain"), "deepspeed", tmp_path / "a")
        torch.save(torch.tensor(7.0), folder / "zero/model.norm.weight/step.pt")
        with pytest.raises(
            InputError, match=r"model\.norm\.weight have seen 7 updates and those of"
        ):
            open_foreign(folder)

    def test_a_model_of_another_kind_is_refused(self, tmp_path):
        with pytest.raises(InputError, match="format that is known"):
            open_foreign(tmp_path)
        first = written(checkpoint(tmp_path, "plain"), "torchtitan", tmp_path / "a")
        with pytest.raises(InputError, match="does not say what its model is"):
            move(first, tmp_path / "b", "huggingface")
        with pytest.raises(InputError, match=r"--to \(pickle\) must be one of torchtitan, "):
            move(first, tmp_path / "b", "pickle")


def test_a_checkpoint_over_many_files_and_ranks_is_read(tmp_path):
    """Automodel's pieces of tensors, with their places in the header of each file."""
    source = checkpoint(tmp_path, "plain")
    folder = written(source, "automodel", tmp_path / "a")
    cut_into_pieces(folder / "model/model.safetensors")
    assert len(list((folder / "model").glob("shard-*.safetensors"))) == 2
    assert_equal(open_foreign(folder), source)


def cut_into_pieces(path: Path) -> None:
    """What two ranks would have written, each half of the rows of every tensor."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path)
    for rank in range(2):
        mine, notes = {}, {}
        for name, values in tensors.items():
            half = -(-len(values) // 2)
            piece = values[rank * half : (rank + 1) * half]
            if len(piece):
                mine[name] = np.ascontiguousarray(piece)
                start = [rank * half] + [0] * (values.ndim - 1)
                notes[name] = {"saved_offsets": start}
        save_file(
            mine,
            path.with_name(f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"),
            {"DCP_SHARDING_INFO": json.dumps(notes)},
        )
    path.unlink()


def test_megatrons_copies_in_full_precision_count_more(tmp_path):
    """Weights in 16 bits have a master copy beside the moments."""
    source = checkpoint(tmp_path, "plain")
    made = lay_out(KINDS["megatron:layers"], source.arrays, 4)
    theirs = Linked(source, made.links, made.arrays, "theirs", source.info)
    masters = {f"optimizer.state.fp32_param.{n}": n for n in theirs.arrays if "optimizer" not in n}
    from ckpt.interop import DcpTarget
    from ckpt.rewrite import Converted, Selected
    from convoy.convert.formats.opened import Together
    from parallel import Topology

    halves = Converted(theirs, list(masters.values()), "bfloat16")
    both = Together([("", halves), ("", Selected(theirs, masters))], source.info)
    rewrite(DcpTarget(both, tmp_path / "m", Topology(), beside={}), 256 << 20)
    assert_equal(open_foreign(tmp_path / "m", num_heads=4), source)


def test_what_convoy_writes_begins_a_run_and_has_its_moments(tmp_path):
    """The arrays are those of the model of the spec, each with its layout over ranks."""
    source = checkpoint(tmp_path, "a dense layer first")
    first = written(source, "megatron", tmp_path / "a")
    spec = tmp_path / "spec.toml"
    spec.write_text(toml_of(source.info.spec))
    made = move(first, tmp_path / "b", "convoy", spec=spec, num_heads=4)
    for name, array in made.target.arrays.items():
        expected = source.arrays[name.replace("optimizer/exp_avg_sq/", "model/")
                                 .replace("optimizer/exp_avg/", "model/")]  # fmt: skip
        assert array.splits == expected.splits
        assert array.attributes == expected.attributes
    assert made.target.training.schedule["style"] == source.training.schedule["style"]
    shutil.rmtree(tmp_path / "a")
    assert (tmp_path / "b/certificate.json").is_file()
    assert whole(array)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_three_hundred_conversions(name, tmp_path, monkeypatch):
    """From each format to each other one, in ten layouts of model and files, and back."""
    count = 0
    for number, layout in enumerate(LAYOUTS):
        with monkeypatch.context() as patch:
            if number % 2:
                cut_finely(patch)
            source = checkpoint(tmp_path, layout)
            spec = tmp_path / "spec.toml"
            spec.write_text(toml_of(source.info.spec))
            first = written(source, name, tmp_path / "first")
            for to in NAMES:
                if to == name:
                    continue
                there = move(first, tmp_path / "there", to, num_heads=4, spec=spec,
                             samples=samples_of(first))  # fmt: skip
                assert_equal(there.target, source)
                back = move(tmp_path / "there", tmp_path / "back", name, num_heads=4)
                assert_equal(back.target, source)
                count += 1
                for folder in ("there", "back"):
                    shutil.rmtree(tmp_path / folder)
            shutil.rmtree(first)
    assert count == 50


KILLED = """
import os, signal, sys
from pathlib import Path
from ckpt.rewrite import FolderTarget
from tests.convoy.convert.test_formats import small_files
from convoy.convert.formats import move
import ckpt.rewrite.engine as engine
engine._JOURNAL_SECONDS = 0.0
written, honest = 0, FolderTarget.journal
def journal(self, receipts):
    global written
    honest(self, receipts)
    written += len(receipts)
    if written >= int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
FolderTarget.journal = journal
small_files()
move(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], num_heads=4)
"""


def small_files() -> None:
    from ckpt.interop import dcp_writer, safetensors_writer

    dcp_writer.CHUNK_BYTES, dcp_writer.FILE_BYTES, safetensors_writer.FILE_BYTES = 400, 3000, 3000


@pytest.mark.parametrize("to", ["megatron", "automodel"])
def test_after_a_kill_the_same_call_makes_the_same_bytes(to, tmp_path, monkeypatch):
    first = written(checkpoint(tmp_path, "plain"), "deepspeed", tmp_path / "a")
    words = [str(first), str(tmp_path / "b"), to, "5"]
    root = Path(__file__).parents[3]
    died = subprocess.run(
        [sys.executable, "-c", KILLED, *words], cwd=root, env={**os.environ, "PYTHONPATH": "."},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not (tmp_path / "b").exists()
    (work,) = tmp_path.glob(".b.*")
    done = {path: path.stat().st_mtime_ns for path in work.rglob("*.distcp")}
    done |= {path: path.stat().st_mtime_ns for path in work.rglob("*.safetensors")}
    assert done
    cut_finely(monkeypatch)
    move(first, tmp_path / "b", to, num_heads=4)
    assert not work.exists()
    for path, when in list(done.items())[:4]:
        assert (tmp_path / "b" / path.relative_to(work)).stat().st_mtime_ns == when
    move(first, tmp_path / "c", to, num_heads=4)
    names = {path.relative_to(tmp_path / "c") for path in (tmp_path / "c").rglob("*.*")}
    for name in names - {Path(".rewrite.json")}:
        if (tmp_path / "c" / name).is_file():
            assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()


def test_the_commands_of_the_page(tmp_path, capsys):
    """Those of docs/moving-over.md, word by word."""
    source = checkpoint(tmp_path, "plain")
    written(source, "torchtitan", tmp_path / "a")
    places = {"SRC": tmp_path / "a", "DST": tmp_path / "b"}
    words = documented("SRC DST --to megatron", places)
    assert words[-1] == "32"
    assert main(arguments=[*words[:-1], "4", "--samples", "320"]) == 0
    said = capsys.readouterr().out
    assert "step 40: torchtitan:fused -> megatron:layers" in said
    assert main(arguments=documented("certificate SRC DST", places)) == 0


def test_a_file_of_deepspeed_without_a_tensor_is_named(tmp_path):
    zero = tmp_path / "zero" / "model.norm.weight"
    zero.mkdir(parents=True)
    torch.save({"param": torch.ones(3), "cat_dim": 0}, zero / "fp32.pt")
    torch.save(torch.tensor(2.0), zero / "step.pt")
    torch.save({"global_steps": 2}, tmp_path / "mp_rank_00_model_states.pt")
    assert [(file.key, file.parameter) for file in universal_files(tmp_path)] == [
        ("fp32", zero.name), ("step", zero.name),
    ]  # fmt: skip
    torch.save({"cat_dim": 0}, zero / "exp_avg.pt")
    message = "exp_avg.pt has no tensor under the key param"
    for read in (open_foreign, lambda folder: open_patient(str(folder))):
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path)
