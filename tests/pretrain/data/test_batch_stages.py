"""Global batches that change in the middle of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pretrain.data.batch import BatchConfig
from tests.runs.test_runs import launch, losses
from tests.support.jobs import data_of, events, prepare_job, tiny, write_spec

S = 32


def batch_of(*stages: tuple[int, int], **fields) -> BatchConfig:
    tables = [{"from_tokens": tokens, "global_batch_size": size} for tokens, size in stages]
    values = {"global_batch_size": 8, "micro_batch_size": 2, "stages": tables, **fields}
    return BatchConfig.model_validate(values)


STAGES = st.lists(st.tuples(st.integers(1, 9), st.integers(2, 30)), max_size=4)
RAMP = st.none() | st.builds(lambda tokens: {"start": 1, "tokens": tokens}, st.integers(1, 900))


@settings(max_examples=150, deadline=None)
@given(STAGES, RAMP, st.integers(0, 120))
def test_each_step_has_the_batch_of_the_last_stage_that_has_begun(gaps, ramp, steps):
    at = 0 if ramp is None else ramp["tokens"]
    stages = []
    for gap, size in gaps:
        at += 40 * gap
        stages.append((at, size))
    batch = batch_of(*stages, batch_size_rampup=ramp)
    samples = 0
    for step in range(steps):
        assert batch.samples_of(step, S) == samples
        size, tokens = batch.size_at(samples, S), samples * S
        if ramp is None or tokens >= ramp["tokens"]:
            begun = [size for start, size in stages if start <= tokens]
            assert size == (begun[-1] if begun else 8)
        samples += size
    assert batch.samples_of(steps, S) == samples
    assert batch.largest == max([8, *(size for _, size in stages)])


@pytest.mark.parametrize(
    ("stages", "fields", "said"),
    [
        ([(64, 4), (64, 8)], {}, "(64) must be above that of the stage before (64)"),
        ([(64, 4)], {"batch_size_rampup": {"start": 2, "tokens": 64}},
         "(64) must be above batch.batch_size_rampup.tokens (64)"),
        ([(64, 1)], {}, "batch.micro_batch_size (2) must be at most batch.stages.global_batch"),
        ([(0, 4)], {}, "greater than or equal to 1"),
    ],
)  # fmt: skip
def test_stages_that_make_no_sense_are_refused(stages, fields, said):
    with pytest.raises(ValidationError, match=re.escape(said)):
        batch_of(*stages, **fields)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("text"))


def written(folder: Path, text: Path, *stages: tuple[int, int]) -> Path:
    return write_spec(
        folder, data=data_of(text), train={"steps": 7},
        batch=json.loads(batch_of(*stages).model_dump_json()),
    )  # fmt: skip


@pytest.mark.slow
def test_a_resume_may_change_the_batch_of_later_steps_and_keeps_moments(text, tmp_path):
    # 3 steps of 8 sequences are 768 tokens; then 2 steps of 12, and 4 from there on.
    stages = [(3 * 8 * S, 12), (48 * S, 4)]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    code, _, err = launch(written(tmp_path, text, *stages), 1, f"run_dir={straight}")
    assert code == 0, err
    where = f"run_dir={resumed}"
    assert launch(written(tmp_path, text), 2, where, stop_after=3)[0] == 75
    code, out, err = launch(written(tmp_path, text, *stages), 2, where)
    assert code == 0, err
    assert "spec changed since step 3: batch.stages was [], is [" in out
    for run in (straight, resumed):
        steps = events(run, "step")
        assert [step["samples"] for step in steps] == [8, 8, 8, 12, 12, 4, 4]
        assert [step["consumed_samples"] for step in steps] == [8, 16, 24, 36, 48, 52, 56]
    assert losses(resumed) == pytest.approx(losses(straight), rel=1e-5)
    assert [e["data_checksum"] for e in events(resumed, "step")] == [
        e["data_checksum"] for e in events(straight, "step")
    ]
    # What steps have had already stays: the run has 56 samples, 1,792 tokens.
    for change in ([], [stages[0]], [(700, 12), stages[1]]):
        code, _, err = launch(written(tmp_path, text, *change), 1, where, "train.steps=8")
        assert code == 2
        assert "batch.stages must be as in the checkpoint of step 7 in" in err
        assert "up to its 1792 tokens; add stages from there on" in err
        assert err.count("\n") == 1
    from convoy.commands.command_line import main

    assert main("audit-data", [str(resumed)]) == 0


def test_a_length_of_sequences_in_a_stage_is_refused(tmp_path):
    from pretrain.errors import InputError
    from pretrain.spec.read import load_spec

    values = tiny(tmp_path, batch=json.loads(batch_of((64, 4)).model_dump_json()))
    values["batch"]["stages"][0]["seq_len"] = 64
    (tmp_path / "spec.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"seq_len"):
        load_spec(tmp_path / "spec.json")
