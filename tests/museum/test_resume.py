"""Resumes that forget, or that need the layout of the save.

These are resumes of a run: what is restored, and how the next steps go on.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import ckpt
from convoy.commands.command_line import main
from tests.museum.cases import Edit, case
from tests.museum.shared_resume import ONE, SAVED_AT, STEPS, TWO, Ran, run, spec_of
from tests.support.jobs import data_of, prepare_job
from tests.support.layouts import whole
from tests.support.ranks import run_ranks

_LOAD = 'ckpt.load(root, manifest, arrays, extra="ignore")'


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> tuple[Path, list[Ran]]:
    """The folder of a run on two ranks that saved after two of four steps, and what they did."""
    folder = prepare_job(tmp_path_factory.mktemp("job"))
    spec = spec_of(folder, data_of(folder), TWO, {"interval_steps": 3})
    return folder, run_ranks(run, 2, spec, True, group=False)


def _resume(folder: Path, parallel: dict[str, int]) -> list[Ran]:
    checkpoint = {"interval_steps": 3, "reshard_on_load": True}
    spec = spec_of(folder, data_of(folder), parallel, checkpoint)
    return run_ranks(run, parallel["dp_shard"], spec, False, group=False)


@pytest.fixture(scope="module")
def resumed(job) -> list[Ran]:
    """What the two ranks of a resume on the same layout did."""
    return _resume(job[0], TWO)


@pytest.fixture(scope="module")
def on_one(job) -> Ran:
    """What a resume on one rank did."""
    return _resume(job[0], ONE)[0]


def _moments(states: list[Ran], when: str) -> dict[str, Tensor]:
    """The moments of all ranks together, by name."""
    values = whole([getattr(ran, when).arrays for ran in states])
    return {name: value for name, value in values.items() if name.startswith("optimizer/")}


def _assert_equal(values: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert values.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(values[name], wanted[name])] == []


@case(
    "areal-project/AReaL#1468",
    "A resume loaded the weights, and dropped the moments of the distributed optimizer without a "
    "word.",
    Edit(
        "pretrain/checkpoint/resume.py",
        _LOAD,
        "if not same_ranks:\n"
        '        arrays = [a for a in arrays if not a.spec.name.startswith("optimizer/")]\n'
        f"    {_LOAD}",
    ),
)
def test_one_rank_resumes_with_the_moments_of_two(job, on_one):
    """A resume on one rank has the moments that two ranks with half of the experts each had, bit
    by bit."""
    wanted = _moments(job[1], "saved")
    assert any(value.any() for value in wanted.values())
    _assert_equal(_moments([on_one], "begun"), wanted)


@case(
    "huggingface/nanotron#245",
    "The states of the optimizer were loaded in bfloat16 and then made float32, and the learning "
    "rate after a resume was right in the first step alone.",
    Edit(
        "pretrain/checkpoint/resume.py",
        _LOAD,
        f"{_LOAD}\n"
        '    for array in (a for a in arrays if a.spec.name.startswith("optimizer/")):\n'
        "        for piece in array.pieces:\n"
        "            piece.copy_(piece.bfloat16())",
    ),
)
def test_a_run_in_half_precision_resumes_with_moments_of_full_precision(job, resumed):
    """A run that computes in float16 resumes with the float32 moments that it had, and takes the
    learning rates that it would have taken."""
    _assert_equal(_moments(resumed, "begun"), _moments(job[1], "saved"))
    assert resumed[0].rates == job[1][0].rates[SAVED_AT:]


@case(
    "THUDM/slime#1547",
    "A resume set the position of the learning rate's schedule twice, so that each resume doubled "
    "the position.",
    Edit(
        "pretrain/train/trainer.py",
        "learning_rate(job.spec, before.step)",
        'learning_rate(job.spec, before.step + job.__dict__.setdefault("begun", before.step))',
    ),
)
def test_the_steps_after_a_resume_are_those_of_a_run_without_one(job, resumed):
    """After a resume on the same ranks, the next steps take the learning rates of a run that never
    stopped, and end with its weights and moments, bit by bit."""
    assert resumed[0].rates == job[1][0].rates[SAVED_AT:]
    assert resumed[0].ended.updates == {float(STEPS)}
    _assert_equal(
        whole([ran.ended.arrays for ran in resumed]),
        whole([ran.ended.arrays for ran in job[1]]),
    )


@case(
    "NVIDIA/Megatron-LM#6858",
    "The random states of ranks with other experts counted as copies, so that one was saved and "
    "every rank resumed with the numbers of the first.",
    Edit(
        "pretrain/state/rng.py",
        'f"rng/{name}", (topology.world, state.numel()), torch.uint8, (("world",), ())',
        'f"rng/{name}", (1, state.numel()), torch.uint8, ((), ())',
    ),
)
def test_each_rank_resumes_with_its_own_random_numbers(job, resumed):
    """Each rank resumes with the random state that it had itself, which no other rank has."""
    saved = [ran.saved.random for ran in job[1] if ran.saved is not None]
    assert not torch.equal(saved[0], saved[1])
    for ran, wanted in zip(resumed, saved, strict=True):
        assert torch.equal(ran.begun.random, wanted)


@case(
    "modelscope/ms-swift#9935",
    "After a resume had restored the random states, the iterators over the data were built, which "
    "seeded the random numbers anew.",
    Edit(
        "pretrain/train/trainer.py",
        "        self.job, self.checkpointer = job, checkpointer\n",
        "        self.job, self.checkpointer = job, checkpointer\n"
        '        __import__("torch").manual_seed(job.spec.train.seed)\n',
    ),
)
def test_what_is_built_after_a_resume_draws_no_random_number(job, resumed):
    """Between the restored random state and the first step after it nothing draws or seeds: when
    the loop begins, the state is the saved one, and the next steps leave it as an unbroken run."""
    for ran, before in zip(resumed, job[1], strict=True):
        assert before.saved is not None
        assert torch.equal(ran.begun.random, before.saved.random)
        assert torch.equal(ran.ended.random, before.ended.random)


@case(
    "facebookresearch/metaseq#3",
    "The loss scaler's counters were in no checkpoint, so that the loss scale depended on when a "
    "run was restarted.",
    Edit(
        "pretrain/checkpoint/resume.py",
        "    if scale is None or progress.loss_scale is None:\n",
        "    if True:\n",
    ),
)
def test_the_loss_scale_and_its_counter_are_restored(job, resumed):
    """A run in float16 resumes with its loss scale, and with the number of steps since the scale
    last changed."""
    saved = job[1][0].saved
    assert saved is not None
    begun = resumed[0].begun.progress
    assert saved.progress.steps_at_loss_scale == SAVED_AT
    assert begun.loss_scale == saved.progress.loss_scale
    assert begun.steps_at_loss_scale == SAVED_AT


@case(
    "AI-Hypercomputer/maxdiffusion#484",
    "A checkpoint that was saved after a step had the number before it, and a resume took that "
    "step, and its samples, again.",
    Edit(
        "pretrain/checkpoint/resume.py",
        "progress, scale = state.progress,",
        "progress, scale = replace(state.progress, consumed_samples=8),",
    ),
)
def test_no_sample_is_taken_twice_around_a_resume(job, on_one):
    """The steps before a checkpoint and those after the resume take the samples of a run that
    never stopped: none twice, and none left out."""
    before = job[1][0]
    assert before.samples[:SAVED_AT] + on_one.samples == [0, 8, 16, 24]
    assert before.samples == [0, 8, 16, 24]


@case(
    "deepspeedai/DeepSpeed#8147",
    "A conversion of a checkpoint for another number of ranks cut the experts' weights anew, and "
    "left their moments as they were.",
    Edit(
        "ckpt/rewrite/source.py",
        "        return read_tensor(self.root, self.manifest, self.records[name], box, "
        "self._read_pack)",
        "        numbers = read_tensor(self.root, self.manifest, self.records[name], box, None)\n"
        '        stale = name.startswith("optimizer/") and "experts" in name\n'
        "        return np.roll(numbers, numbers.shape[1] // 2, 1) if stale else numbers",
    ),
)
def test_a_reshard_cuts_moments_as_it_cuts_weights(job, tmp_path):
    """A checkpoint of two ranks with half of the experts each that is made one of a single rank
    has each expert's weights and moments as the ranks had them."""
    source, target = job[0] / "run" / "checkpoints", tmp_path / "one"
    assert main("reshard", [str(source), str(target), "--layout", "dp_shard=1"]) == 0
    opened, layers = ckpt.open(target), "layers/moe/experts/"
    wanted = whole([ran.saved.arrays for ran in job[1] if ran.saved is not None])
    for tree in ("model/", "optimizer/exp_avg/", "optimizer/exp_avg_sq/"):
        for name in ("w_gate", "w_up", "w_down"):
            values = wanted[f"{tree}{layers}{name}"]
            assert not torch.equal(values[:, 0], values[:, 2])
            assert np.array_equal(opened[f"{tree}{layers}{name}"][:], values.numpy())
