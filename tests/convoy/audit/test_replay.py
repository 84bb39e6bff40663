"""``convoy replay``: steps of a recorded run once more, and the first tensor in which runs part."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from convoy.audit.replayed import Comparison, RecordedStep
from convoy.commands.command_line import main
from pretrain.observe import Digested
from tests.support.exact import exact_spec
from tests.support.jobs import data_of, prepare_job
from tests.support.ranks import run_ranks

LAYERS, TENSORS = ["embed.weight", "0", "1"], ["embed.weight", "attention.wq.weight", "norm.weight"]


def digest(**changed: dict[str, str]) -> Digested:
    layers, tensors = dict.fromkeys(LAYERS, "0" * 16), dict.fromkeys(TENSORS, "0" * 16)
    fields = {"gradient_layers": layers, "gradient_tensors": tensors,
              "parameter_layers": layers, "parameter_tensors": tensors}  # fmt: skip
    return Digested(step=3, **{name: of | changed.get(name, {}) for name, of in fields.items()})


STEP = RecordedStep(3, 2.5, 1.25, 12, 77, digest())
OTHER = "f" * 16


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (STEP, ""),
        (replace(STEP, data_checksum=78), "the samples differ"),
        (replace(STEP, next_sample=13), "the samples differ"),
        (replace(STEP, data_checksum=None, digest=None), ""),
        (replace(STEP, loss=2.5 * (1 + 1e-15)), "the loss differs: the forward has computed"),
        (replace(STEP, grad_norm=1.26), "the gradient norm differs"),
        (replace(STEP, grad_norm=1.26, digest=digest(
            gradient_layers={"1": OTHER}, gradient_tensors={"norm.weight": OTHER})),
         "the gradient of layer 1 (norm.weight) differs"),
        (replace(STEP, digest=digest(
            gradient_layers={"embed.weight": OTHER, "0": OTHER},
            gradient_tensors={"embed.weight": OTHER, "attention.wq.weight": OTHER})),
         "the gradient of layer 0 (attention.wq.weight), and of 1 other layers, differs"),
        (replace(STEP, digest=digest(
            parameter_layers={"embed.weight": OTHER}, parameter_tensors={"embed.weight": OTHER})),
         "the updated parameter embed.weight differs"),
    ],
)  # fmt: skip
def test_the_first_tensor_that_differs_is_named(other: RecordedStep, difference: str) -> None:
    found = STEP.difference(other)
    assert found.startswith(difference)
    assert bool(found) == bool(difference)


def test_what_was_compared_is_said() -> None:
    equal = Comparison((1, 9), None, 6, [])
    assert equal.is_equal
    assert equal.lines() == ["steps 1 to 9: equal, bit for bit",
                             "checkpoints of step 6: equal, bit for bit"]  # fmt: skip
    stale = Comparison((1, 9), None, 6, ["a", "b", "c", "d"])
    assert not stale.is_equal
    assert stale.lines()[1] == "checkpoints of step 6: a, b, c and 1 more differ"
    parted = Comparison((1, 9), (STEP, replace(STEP, loss=2.0)), None, [])
    assert parted.lines()[0].startswith("step 3 is the first that differs: the loss differs")
    assert "none of an equal step" in parted.lines()[-1]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (None, "cannot be read"),
        ([], "must be true to compare runs"),
        ([{"event": "start", "spec": {"train": {"exact": False}}}], "must be true to compare runs"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused_in_one_line(
    lines: list[dict[str, object]] | None,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    start = {"step": 0, "job": "a", "spec_hash": "", "world_size": 1, "topology": {}, "layout": "",
             "parameters": 1, "steps": 1, "launch_id": "0", "time": 0.0}  # fmt: skip
    if lines is not None:
        text = "".join(json.dumps(start | line) + "\n" for line in lines)
        (tmp_path / "log.jsonl").write_text(text)
    assert main("replay", [str(tmp_path), "--against", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["--step", "1", "--against", "x"],
                                       ["--step", "1", "--ranks", "0"]])  # fmt: skip
def test_arguments_that_ask_for_nothing_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main("replay", ["run", *arguments])
    assert ended.value.code == 2


def pretrain_on_rank(spec: str, rank: int) -> int:
    return main("pretrain", [spec])


@pytest.mark.slow
def test_the_step_and_the_tensor_of_a_flipped_bit_are_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Runs on one rank and on two are equal; a flipped bit of one gradient is named."""
    data = data_of(prepare_job(tmp_path / "job"))
    flip = {"kind": "flip_gradient_bit", "step": 5, "rank": 0, "bit": 3}
    runs = {}
    for name, layout, inject in (("alone", "", []), ("wide", "dp_shard=2,ep=2", []),
                                 ("broken", "dp_shard=2,ep=2", [flip])):  # fmt: skip
        spec = exact_spec(tmp_path / name, data, layout, train={"steps": 6},
                          checkpoint={"interval_steps": 3, "retention": {"keep": 5}},
                          model={"num_layers": 2}, metrics={"port": -1})  # fmt: skip
        path = tmp_path / name / "spec.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"inject": inject}))
        ranks = 2 if layout else 1
        assert run_ranks(partial(pretrain_on_rank, str(path)), ranks, group=False) == [0] * ranks
        runs[name] = spec.run_path
    before = sorted(p.name for p in tmp_path.rglob("*"))

    def against(one: str, other: str, *more: str) -> tuple[int, str]:
        capfd.readouterr()
        code = main("replay", [str(runs[one]), "--against", str(runs[other]), *more])
        found = capfd.readouterr()
        return code, found.out + found.err

    code, said = against("alone", "wide")
    assert code == 0, said
    assert "steps 1 to 6: equal" in said
    assert "checkpoints of step 6: equal" in said
    code, said = against("wide", "broken", "--ranks", "2", "--set", "parallel.ep=2")
    assert code == 1, said
    assert "step 5 is the first that differs: the gradient of embed.weight differs" in said
    assert "checkpoints of step 3: equal" in said
    assert said.count("  as in the log") == 2, "the steps 4 and 5, on two ranks"
    assert "computes its log again" in said
    code, said = against("broken", "alone")
    assert code == 1, said
    assert "does not compute its log again" in said
    assert sorted(p.name for p in tmp_path.rglob("*")) == before, "a run is changed"
    shutil.rmtree(runs["wide"] / "checkpoints" / "manifests")
    (runs["wide"] / "checkpoints" / "manifests").mkdir()
    code, said = against("wide", "broken")
    assert code == 2, said
    assert "must have a checkpoint of before step 5 to begin from" in said.splitlines()[-1]
