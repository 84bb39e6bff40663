"""The end of a run: what its last checkpoint says, and what a person is told who trains on."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import ckpt
from convoy.commands.prepare import main as prepare
from pretrain.observe.summary import how_to_train_on
from tests.runs.test_runs import launch
from tests.support.jobs import data_of, events, make_spec, prepare_job, write_spec


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize(
    ("schedule", "resumes"),
    [
        ({"kind": "constant"}, True),
        ({"kind": "cosine", "min_lr_ratio": 1.0}, True),
        ({"kind": "linear", "min_lr_ratio": 0.95}, True),
        ({"kind": "cosine"}, False),
        ({"kind": "linear", "min_lr_ratio": 0.0}, False),
        ({"kind": "wsd", "decay_steps": 2}, False),
        ({"kind": "wsd", "decay_steps": 2, "min_lr_ratio": 0.9}, True),
    ],
)
def test_more_steps_are_proposed_where_the_learning_rate_does_not_jump(tmp_path, schedule, resumes):
    spec = make_spec(tmp_path, schedule=schedule)
    told = how_to_train_on(spec, 6, spec.checkpoint_path)
    assert ("--set train.steps=12" in told) == resumes
    assert ("--set init.checkpoint=" in told) == (not resumes)


def parts_of(out: str) -> str:
    (line,) = (line for line in out.splitlines() if line.startswith("  train on  "))
    return line.removeprefix("  train on  ")


def settings_in(line: str) -> list[str]:
    """The overrides of a command that was printed."""
    return [shlex.split(word)[0] for word in re.findall(r"--set (\S+)", line)]


def test_a_decayed_run_is_trained_on_as_it_says(text, tmp_path):
    evaluation, checkpoint = {"interval_steps": 4, "sequences": 4}, {"path": str(tmp_path / "c")}
    spec = write_spec(tmp_path, data=data_of(text), eval=evaluation, checkpoint=checkpoint)
    code, out, _ = launch(spec, 1)
    assert code == 0

    scores = {e["step"]: e["loss"] for e in events(tmp_path / "run", "eval") if not e["whole"]}
    assert sorted(scores) == [4, 6]
    assert ckpt.read_manifest(tmp_path / "c", 6).state["validation"] == scores[6]

    # Peak 0.003, from step 2 on along half a cosine to a tenth; of 12 steps 6 are 4 of 10.
    overrides = settings_in(parts_of(out))
    assert "from 3.0e-04 to 2.1e-03" in parts_of(out)
    code, out, _ = launch(spec, 1, *overrides)
    assert code == 0
    assert f"initial weights are those of step 6 in {tmp_path / 'c'}" in out
    assert "learning rate jumps" not in out
    assert ckpt.committed_steps(tmp_path / "c-2") == [3, 6]

    code, out, _ = launch(spec, 1, "train.steps=12")
    assert code == 0
    jump = "step 7 has 2.07e-03, and would have 3.00e-04 with the spec of the checkpoint"
    assert f"learning rate jumps: {jump}" in out
    told = [e["text"] for e in events(tmp_path / "run", "notice")]
    assert [text for text in told if not text.startswith("scoring")] == [
        f"learning rate jumps: {jump}"
    ]


def test_a_run_before_its_decay_is_trained_on_as_it_says(text, tmp_path):
    schedule = {"kind": "wsd", "decay_steps": 2, "warmup_steps": 1}
    spec = write_spec(tmp_path, data=data_of(text), schedule=schedule)
    code, out, _ = launch(spec, 1)
    assert code == 0
    line = parts_of(out)
    assert line.startswith("convoy prepare SPEC --load-step 3 ")
    assert prepare([str(spec), "--load-step", "3"]) == 0
    code, out, _ = launch(spec, 1, *settings_in(line))
    assert code == 0
    assert "resuming after step 3" in out
    assert "learning rate jumps" not in out
