"""convoy inspect doctor: its lines, its exit codes, what it refuses, and what it leaves alone."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ckpt
from ckpt.format import STORAGE_DTYPES
from ckpt.rewrite import SourceArray
from convoy.commands.command_line import main
from convoy.doctor import CHECKS, Declared, Patient, examine, open_patient
from convoy.doctor.order import best_assignment
from convoy.doctor.vitals import examine as vitals_of
from convoy.doctor.vitals import kinship, spread
from tests.support.patients.planted import KINDS, SQUARE
from tests.support.patients.trained import Trained, train
from tests.support.patients.written import titan_state, write

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def small() -> Trained:
    return train(replace(SQUARE, model={"num_layers": 3}, moe={**SQUARE.moe, "d_ff": 32}, steps=8))[
        8
    ]


def doctor(*words: object) -> int:
    return main("inspect", ["doctor", *map(str, words)])


def test_a_healthy_checkpoint_ends_with_0_and_one_line(small, tmp_path, capsys):
    path = write("convoy", small, tmp_path / "checkpoints")
    assert doctor(path) == 0
    out, err = capsys.readouterr()
    assert out == (
        f"none of {len(CHECKS)} known corruptions: Convoy, 3 layers of 8 experts, with moments\n"
    )
    assert err == ""


def test_findings_end_with_1_and_say_what_where_and_what_to_do(small, tmp_path, capsys):
    path = write("titan", KINDS["half of the experts"].plant(small), tmp_path / "step-8")
    assert doctor(path) == 1
    line, last = capsys.readouterr().out.splitlines()
    assert line.startswith("partial-experts: layers 0-2, layers.0.moe.experts.w1")
    assert "KempnerForge#202" in line
    assert "save again with all expert-parallel ranks" in line
    assert last == "1 known corruption: torchtitan, 3 layers of 4 experts, with moments"


def test_json_has_the_numbers(small, tmp_path, capsys):
    path = write("hf", KINDS["half of the experts"].plant(small), tmp_path / "hf")
    assert doctor(path, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["format"], told["healthy"], told["experts"]) == ("Hugging Face", False, 4)
    (finding,) = told["findings"]
    assert (finding["check"], finding["layers"]) == ("partial-experts", [0, 1, 2])
    assert finding["numbers"] == {
        "experts": 4, "router rows": 8, "biases": 8, "experts in the config": 8
    }  # fmt: skip


def test_a_reference_of_another_format_decides_more(small, tmp_path, capsys):
    before = write("megatron", small, tmp_path / "iter_0000008")
    after = write("hf", KINDS["gate and up swapped"].plant(small), tmp_path / "hf")
    assert doctor(after) == 0
    capsys.readouterr()
    assert doctor(after, "--against", before) == 1
    assert capsys.readouterr().out.startswith("gate-up-swapped: layers 0-2")


@pytest.mark.parametrize("what", ["nothing", "half", "dense", "pickle", "config"])
def test_what_cannot_be_read_is_one_line_and_ends_with_2(small, tmp_path, capsys, what):
    path = tmp_path / what
    if what == "dense":
        dense = {n: v for n, v in small.arrays.items() if "/moe/" not in n}
        write("hf", replace(small, arrays=dense), path)
    elif what == "pickle":
        path.mkdir()
        (path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    elif what != "nothing":
        write("hf", small, path)
        damaged = path / ("model.safetensors" if what == "half" else "config.json")
        damaged.write_bytes(damaged.read_bytes()[: 1000 if what == "half" else 5])
    assert doctor(path) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert str(path) in line


def test_nothing_is_written_and_nothing_is_touched(small, tmp_path):
    for form in ("convoy", "hf", "titan", "deepspeed", "automodel"):
        write(form, small, tmp_path / form)
    before = seal(tmp_path)
    for form in ("convoy", "hf", "titan", "deepspeed", "automodel"):
        assert doctor(tmp_path / form) == 0
    assert seal(tmp_path) == before


def seal(folder: Path) -> dict[str, tuple[int, str]]:
    return {
        str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_state_dict_with_packed_tensors_is_read(small, tmp_path):
    """Arrays under a trainer's own names in a Convoy checkpoint, small ones in packs."""
    state = titan_state(KINDS["a NaN"].plant(small))
    ckpt.save_state_dict(tmp_path / "packed", {"model": state}, step=8)
    assert open_patient(str(tmp_path / "packed")).moe_layers() == (0, 1, 2)
    (finding,) = examine(open_patient(str(tmp_path / "packed")))
    assert (finding.check.name, finding.layers, finding.experts) == ("not-finite", (1,), (6,))


class Generated:
    """Arrays that exist only while they are read."""

    def __init__(self, arrays: dict[str, SourceArray]) -> None:
        self.arrays = arrays
        self.info = None
        self.largest = 0
        self.some = np.random.default_rng(1).standard_normal(99_991, dtype=np.float32)

    def read_box(self, name, box):
        shape = tuple(stop - start for start, stop in box)
        values = np.resize(self.some, shape)
        self.largest = max(self.largest, values.nbytes)
        return values.view(STORAGE_DTYPES["float32"])


def test_memory_holds_an_expert_and_not_a_layer():
    """A layer of 192 MiB in the experts' matrices, and an embedding of 256 MiB."""
    arrays = {
        "model.layers.0.mlp.experts.gate_up_proj": SourceArray((16, 2048, 1024), "float32"),
        "model.layers.0.mlp.experts.down_proj": SourceArray((16, 1024, 1024), "float32"),
        "model.layers.0.mlp.gate.weight": SourceArray((16, 1024), "float32"),
        "model.embed_tokens.weight": SourceArray((65536, 1024), "float32"),
    }
    assert sum(array.nbytes for array in arrays.values()) > 400 << 20
    source = Generated(arrays)
    tracemalloc.start()
    examine(Patient(source, Declared()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert source.largest <= 64 << 20
    assert peak < 320 << 20


@pytest.mark.parametrize("draw", ["normal", "uniform", "truncated"])
def test_random_values_are_not_far_from_random_values(draw):
    generator = np.random.default_rng(1)
    for shape in ((64, 64), (32, 200), (300, 24)):
        values = generator.standard_normal(shape)
        if draw == "uniform":
            values = generator.uniform(-1, 1, shape)
        if draw == "truncated":
            values = np.clip(values, -2, 2)
        vitals = vitals_of(values.astype(np.float32), "float32")
        assert abs(spread(vitals)) < 4
        assert abs(kinship(values)) < 4
        grown = values * np.linspace(0.7, 1.4, shape[1])
        assert spread(vitals_of(grown.astype(np.float32), "float32")) > 8


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_the_best_assignment_is_the_best_of_all(count):
    from itertools import permutations

    for seed in range(20):
        scores = np.random.default_rng(seed).standard_normal((count, count))
        best = max(permutations(range(count)), key=lambda p: sum(scores[range(count), p]))
        assert best_assignment(scores) == list(best)


def test_the_page_has_every_check_and_what_it_needs():
    page = (ROOT / "docs" / "doctor.md").read_text()
    for check in CHECKS:
        rows = [line for line in page.splitlines() if line.startswith(f"| `{check.name}` |")]
        row, measured = rows
        assert check.needs in row, check.name
        assert "/" in measured, check.name
        for thread in check.threads:
            assert thread in row, (check.name, thread)
