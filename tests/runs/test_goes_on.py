"""A run goes on with the training of another run, also by way of other trainers' formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.rewrite import CheckpointSource
from convoy.commands.audit_data import main as audit_data
from convoy.commands.command_line import main
from tests.runs.test_runs import launch, losses
from tests.support.jobs import data_of, events, prepare_job, write_spec

MODEL: dict[str, Any] = {"first_k_dense": 0, "d_ff": 0, "qk_norm": "head", "head_dim": 8}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    return data_of(prepare_job(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    """The folder of a run of 6 steps with checkpoints of steps 3 and 6."""
    folder = tmp_path_factory.mktemp("first")
    assert launch(write_spec(folder, data=data, model=MODEL), 1)[0] == 0
    return folder / "run"


def arrays_of(root: Path) -> dict[str, np.ndarray[Any, Any]]:
    source = CheckpointSource(root, ckpt.read_manifest(root))
    return {
        name: source.read_box(name, tuple((0, size) for size in array.shape))
        for name, array in source.arrays.items()
        if not name.startswith("rng/")
    }


def go_on(folder: Path, data: dict[str, str], checkpoint: Path, world: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    init = {"checkpoint": str(checkpoint), "state": "training"}
    spec = write_spec(folder, data=data, model=MODEL, init=init)
    code, out, err = launch(spec, world)
    assert code == 0, err
    assert "the training goes on from step 3 in" in out
    return folder / "run"


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "way",
    ["", "deepspeed", pytest.param("torchtitan", marks=SLOW), pytest.param("megatron", marks=SLOW)],
)
def test_the_other_steps_have_the_bits_that_they_would_have_had(way, run, data, tmp_path, capsys):
    checkpoint = run / "checkpoints" / "manifests" / "step-00000003.json"
    if way:
        for source, to in ((checkpoint, way), (tmp_path / way, "convoy")):
            words = ["convert", "move", str(source), str(tmp_path / to), "--to", to]
            heads = ["--num-heads", "4"] if way == "megatron" else []
            assert main(arguments=[*words, *heads]) == 0, capsys.readouterr().err
        checkpoint = tmp_path / "convoy"
    second = go_on(tmp_path / "second", data, checkpoint)
    there = [event["loss"] for event in events(second, "step")]
    assert there == losses(run)[3:]
    assert [event["step"] for event in events(second, "step")] == [4, 5, 6]
    first, again = arrays_of(run / "checkpoints"), arrays_of(second / "checkpoints")
    assert first.keys() == again.keys()
    assert [name for name, values in first.items() if not np.array_equal(values, again[name])] == []
    # Samples are counted from where the run began.
    assert audit_data([str(second)]) == 0
    assert "each sample exactly once and in order" in capsys.readouterr().out


def test_the_loads_of_experts_go_on(data, tmp_path):
    """The loss over the loads of the step before is that of the run that did not stop."""
    moe = {"aux_loss_scope": "previous_step", "aux_loss_coeff": 0.5}
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    assert launch(write_spec(first, data=data, model=MODEL, moe=moe), 1)[0] == 0
    init = {"checkpoint": str(first / "run/checkpoints/manifests/step-00000003.json")}
    spec = write_spec(second, data=data, model=MODEL, moe=moe, init=init | {"state": "training"})
    assert launch(spec, 1)[0] == 0
    assert [event["loss"] for event in events(second / "run", "step")] == losses(first / "run")[3:]


def test_a_blend_goes_on_with_the_weights_that_it_had(data, tmp_path):
    text = Path(data["source"])
    names = sorted(path.name for path in text.iterdir())
    for number, half in enumerate((names[::2], names[1::2])):
        (tmp_path / f"text{number}").mkdir()
        for name in half:
            (tmp_path / f"text{number}" / name).write_bytes((text / name).read_bytes())

    def sections(weight: float) -> dict[str, Any]:
        sources = {
            f"s{n}": {"source": str(tmp_path / f"text{n}"), "path": str(tmp_path / f"corpus{n}"),
                      "weight": weight if n else 1.0} for n in range(2)
        }  # fmt: skip
        return {"data": {"sources": sources, "source": "", "path": ""}, "model": MODEL}

    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    assert main(arguments=["prepare", str(write_spec(first, **sections(1.0)))]) == 0
    short = write_spec(first, **sections(1.0))
    assert launch(short, 1, "train.steps=3", "schedule.kind=constant")[0] == 0
    again = write_spec(first, **sections(3.0))
    assert launch(again, 1, "schedule.kind=constant")[0] == 0
    # From step 6 on: the blend had other weights before step 3.
    init = {"checkpoint": str(first / "run" / "checkpoints"), "state": "training"}
    spec = write_spec(second, **sections(3.0), init=init)
    assert launch(spec, 1, "train.steps=9", "schedule.kind=constant")[0] == 0
    assert launch(again, 1, "train.steps=9", "schedule.kind=constant")[0] == 0
    there = {event["step"]: event["loss"] for event in events(first / "run", "step")}
    here = {event["step"]: event["loss"] for event in events(second / "run", "step")}
    assert here == {step: there[step] for step in (7, 8, 9)}
    code, _, err = launch(spec, 1, "train.steps=6", f"run_dir={tmp_path / 'third'}")
    assert code == 2
    assert "train.steps (6) must be above the step of init.checkpoint (9)" in err


def test_what_has_no_training_is_refused(run, data, tmp_path):
    hf, weights = str(tmp_path / "hf"), str(tmp_path / "weights")
    assert main(arguments=["convert", "export", str(run / "checkpoints"), hf]) == 0
    assert main(arguments=["convert", "import", hf, weights]) == 0
    tokenizer = {"tokenizer": f"{data['path']}/tokenizer.json", "path": str(tmp_path / "corpus")}
    assert main(arguments=["prepare", str(write_spec(tmp_path, data=data | tokenizer))]) == 0
    for init, message in (
        ({"checkpoint": f"{weights}/checkpoints"}, "has weights alone at step 0"),
        ({}, "init.state (training) needs init.checkpoint"),
    ):
        spec = write_spec(
            tmp_path, data=data | tokenizer, model=MODEL, init={**init, "state": "training"}
        )
        code, _, err = launch(spec, 1)
        assert code == 2
        assert message in err
