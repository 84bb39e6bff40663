"""Faults on purpose: each does what its name says, once in a run."""

from __future__ import annotations

import os
import pickle
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import ckpt
from convoy.preparation import prepare
from pretrain.errors import InputError
from pretrain.parts.faults import process as faults_of_process
from pretrain.parts.faults import tensors
from pretrain.spec.read import load_spec
from tests.runs.test_runs import launch, on_rank
from tests.support.checkpoints import eventually
from tests.support.jobs import data_of, events, prepare_job, write_spec
from tests.support.ranks import run_ranks, start_ranks


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("job"))


def model_with_gradients() -> torch.nn.Module:
    model = torch.nn.Linear(4, 3)
    model.weight.grad = torch.linspace(-1.0, 0.5, 12).view(4, 3).t()  # not contiguous
    model.bias.grad = torch.ones(3)
    return model


@pytest.mark.parametrize("bit", [0, 22, 30, 31])
def test_one_bit_of_one_value_is_flipped(bit):
    model, untouched = model_with_gradients(), model_with_gradients()
    tensors.flip_bit(model, bit)
    now, before = (m.weight.grad.contiguous().view(torch.int32) for m in (model, untouched))
    differences = [int(x) & 0xFFFFFFFF for x in (now ^ before).flatten() if x]
    assert differences == [1 << bit]
    assert torch.equal(model.bias.grad, untouched.bias.grad)


def test_a_gradient_gets_a_nan_or_is_multiplied():
    model, untouched = model_with_gradients(), model_with_gradients()
    tensors.scale(model, 8.0)
    assert torch.equal(model.weight.grad, 8 * untouched.weight.grad)
    assert torch.equal(model.bias.grad, 8 * untouched.bias.grad)
    tensors.set_nan(model)
    assert int(model.weight.grad.isnan().sum() + model.bias.grad.isnan().sum()) == 1


def test_garbage_has_the_shapes_and_the_vocabulary():
    batches = [torch.zeros(2, 9, dtype=torch.int64), torch.zeros(0, 9, dtype=torch.int64)]
    found = tensors.garbage(batches, 50, seed=3)
    assert [b.shape for b in found] == [b.shape for b in batches]
    assert [b.dtype for b in found] == [b.dtype for b in batches]
    assert 0 <= int(found[0].min()) < int(found[0].max()) < 50
    assert torch.equal(found[0], tensors.garbage(batches, 50, seed=3)[0])


def wait_for(rank: int, path: str) -> int:
    """Stand still half of the time until there is a file; then say so."""
    pacer = faults_of_process.Pacer(2.0)
    while not Path(path).exists():
        pass
    pacer.end()
    return os.getpid()


def test_a_slow_process_stands_still_now_and_then_and_goes_on(tmp_path):
    flag = tmp_path / "enough"
    (rank,), results = start_ranks(wait_for, 1, str(flag), group=False)

    def state() -> str:
        return Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()[0]

    eventually(lambda: state() == "T", "the process is stopped")
    eventually(lambda: state() == "R", "the process goes on")
    flag.touch()
    assert results.get(timeout=60)[:2] == (0, True)


def exchange(rank: int) -> list[str]:
    """Two sums over both ranks, with the network of rank 1 dropped in between."""
    import torch.distributed as dist

    # Now and then gloo does not notice, and waits for the group's time-out.
    found, group = [], dist.new_group(timeout=timedelta(seconds=30))
    for turn in range(2):
        if turn and rank == 1:
            found.append(f"{faults_of_process.shut_down_connections() > 0}")
        try:
            dist.all_reduce(torch.ones(1), group=group)
            found.append("done")
        except RuntimeError:
            found.append("failed")
    return found


def test_without_a_network_no_collective_works_on_either_side():
    first, second = run_ranks(exchange, 2)
    assert first == ["done", "failed"]
    assert second == ["done", "True", "failed"]


def test_a_full_disk_costs_checkpoints_and_not_the_run(text, tmp_path):
    spec = write_spec(
        tmp_path, data=data_of(text), checkpoint={"interval_steps": 1},
        train={"steps": 5}, inject=[{"kind": "disk_full", "step": 2, "duration_steps": 2}],
    )  # fmt: skip
    code, out, err = launch(spec, 1)
    assert code == 0, err
    run = tmp_path / "run"
    assert "step 2: injected fault: disk_full on rank 0" in out
    failed = events(run, "checkpoint_failed")
    assert failed
    assert {event["step"] for event in failed} <= {1, 2, 3}
    assert all("File too large" in event["error"] for event in failed)
    assert ckpt.committed_steps(run / "checkpoints")[-1] == 5
    assert [event["kind"] for event in events(run, "fault")] == ["disk_full"]
    assert [path.name for path in (run / "injected").iterdir()] == ["disk_full-step2-rank0-2"]
    prepare(load_spec(spec), reset=True)
    assert not (run / "injected").exists(), "a new run meets the fault again"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hang", "drop_network"])
def test_a_rank_that_is_lost_on_purpose_is_lost_once(text, tmp_path, kind):
    spec = write_spec(
        tmp_path, data=data_of(text), train={"steps": 4, "timeout_seconds": 5.0},
        checkpoint={"interval_steps": 1}, inject=[{"kind": kind, "step": 3, "rank": 1}],
    )  # fmt: skip
    processes, results = start_ranks(on_rank, 2, [str(spec)], None, group=False)
    ended = {}
    for _ in range(1 if kind == "hang" else 2):
        rank, ok, value = results.get(timeout=120)
        assert ok, value
        ended[rank] = pickle.loads(value)
    if kind == "hang":
        assert "inject.py" in ended[0][2], "the line at which rank 1 sleeps"
        assert processes[1].is_alive()
        processes[1].kill()
    for process in processes:
        process.join(60)
    assert {code for code, _, _ in ended.values()} == {1}
    code, out, err = launch(spec, 2)
    assert code == 0, err
    assert "injected fault" not in out
    steps = [event["step"] for event in events(tmp_path / "run", "step")]
    assert steps[-1] == 4
    assert [event["kind"] for event in events(tmp_path / "run", "fault")] == [kind]


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ("[{kind='kil',step=1}]", "inject.0.kind ('kil')"),
        ("[{kind='kill'}]", "inject.0.step: required"),
        ("[{kind='kill',step=7}]", "inject.step (7) of kill must be at most train.steps (6)"),
        ("[{kind='kill',step=1,factor=2.0}]",
         "inject.factor (2.0) must be left out with inject.kind (kill)"),
        ("[{kind='slow',step=1,bit=3}]", "only flip_gradient_bit has it"),
        ("[{kind='slow',step=1,factor=1.0}]", "inject.0.factor (1.0)"),
        ("[{kind='kill',step=1},{kind='kill',step=1}]",
         "inject must have each fault once: there are two of kill-step1-rank0"),
        ("[{kind='kill',stp=1}]", "inject.0.stp: no such field; did you mean inject.0.step"),
    ],
)  # fmt: skip
def test_a_bad_fault_is_refused_in_one_line(faults, message, tmp_path):
    with pytest.raises(InputError) as error:
        load_spec(write_spec(tmp_path), [f"inject={faults}"])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
