"""Silent data corruption: a wrong bit in one rank is found, named, and left behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ckpt
from cluster.members import read_exclusions
from convoy.commands.pretrain import main
from parallel import Topology, digest, local_shard
from pretrain.checkpoint import Checkpointer, CheckpointProgress
from pretrain.errors import InputError
from pretrain.observe import Console, CorruptionFound, Events, History
from pretrain.parts.verify import (
    Finding,
    GradientPass,
    gradients_agree,
    judge_gradients,
    judge_states,
    machine_to_exclude,
    next_shifts,
)
from pretrain.spec import CheckpointConfig
from pretrain.train.trainer import Trainer
from tests.support.jobs import data_of, events, make_spec, prepare_job, write_spec
from tests.support.ranks import run_ranks

SLOW = pytest.mark.slow


def value(*tensors: torch.Tensor) -> int:
    return int(digest(tensors))


def test_a_digest_sees_every_flipped_bit():
    x = torch.randn(5, 7)
    known = {value(x)}
    bits = x.view(torch.int32)
    for place in range(0, 35, 3):
        for bit in range(32):
            mask = 1 << bit if bit < 31 else -(1 << 31)
            bits.view(-1)[place] ^= mask
            known.add(value(x))
            bits.view(-1)[place] ^= mask
    assert len(known) == 1 + 12 * 32
    assert value(x) in known


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_digest_is_of_all_values_in_their_order(dtype):
    x = torch.arange(70_001).remainder(2).to(dtype)  # more than a chunk, and an odd number of bytes
    last, swapped = x.clone(), x.clone()
    last[-1] = 1
    swapped[:2] = x[:2].flip(0)
    assert value(x) == value(x.clone()) == value(x.view(1, -1))
    assert len({value(x), value(last), value(swapped), value(x[1:]), value(x, x), value()}) == 6
    assert value(last, x) != value(x, last)
    assert value(x[1:]) == value(x[1:].clone())


def test_a_digest_is_the_same_number_for_ever():
    # All processes of a run must agree; a change here is a change of what they exchange.
    assert value(torch.tensor([1.0, -2.0, 3.5])) == value(torch.tensor([1.0, -2.0, 3.5]))
    assert value(torch.zeros(3)) == 3


THREE, TWO, ONE = (Topology(dp_replicate=r, dp_shard=2, pp=2) for r in (3, 2, 1))


def test_a_majority_names_the_replica_whose_state_differs():
    rows = [[rank // 6, rank % 2] for rank in range(12)]  # equal among replicas
    assert judge_states(rows, THREE) is None
    rows[8] = [5, 5]  # the second stage, the second replica, the first shard
    assert judge_states(rows, THREE) == Finding((8,), certain=True)
    rows[6] = [4, 4]
    assert judge_states(rows, THREE) == Finding((6, 8, 10), certain=False)
    pairs = [[rank // 4, rank % 2] for rank in range(8)]
    assert judge_states(pairs, TWO) is None
    pairs[7] = [5, 5]
    assert judge_states(pairs, TWO) == Finding((5, 7), certain=False)


def passes(replicas: int, shifts: list[int], wrong: set[tuple[int, int]]) -> list[GradientPass]:
    """Rows of one rank a replica; ``wrong`` has (pass, rank) whose digest is that of a fault."""

    def total(number: int, shift: int, rank: int) -> int:
        return 1000 + 10 * number + rank if (number, rank) in wrong else (rank + shift) % replicas

    return [
        GradientPass(shift, [(0, total(number, shift, rank)) for rank in range(replicas)])
        for number, shift in enumerate(shifts)
    ]


@pytest.mark.parametrize(
    ("replicas", "wrong", "finding"),
    [
        (3, {(0, 1)}, Finding((1,), True)),  # in the step itself
        (3, {(1, 1)}, Finding((1,), True)),  # in the check
        (3, {(0, 1), (1, 1), (2, 1)}, Finding((1,), True)),  # always
        (3, {(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)}, Finding((0, 1, 2), False)),
        (2, {(0, 1)}, Finding((1,), True)),
        (2, {(1, 0)}, Finding((0,), True)),
        (2, {(0, 0), (0, 1), (1, 0), (1, 1)}, Finding((0, 1), False)),
        (1, {(0, 0)}, Finding((0,), False)),
    ],
)
def test_a_further_opinion_names_the_replica_that_computes_wrongly(replicas, wrong, finding):
    topology = Topology(dp_replicate=replicas)
    shifts = [0, 1 if replicas > 1 else 0, *next_shifts(topology)]
    assert gradients_agree(passes(replicas, shifts, set()), topology)
    assert judge_gradients(passes(replicas, shifts, set()), topology) is None
    found = passes(replicas, shifts, wrong)
    assert not gradients_agree(found[:2], topology)
    assert judge_gradients(found, topology) == finding


def test_two_replicas_that_repeat_themselves_are_both_named():
    topology = Topology(dp_replicate=2)
    rows = {0: [(0, 7), (0, 91)], 1: [(0, 8), (0, 77)]}  # replica 1 always computes otherwise
    found = [GradientPass(shift, rows[shift]) for shift in (0, 1, 0, 1)]
    assert judge_gradients(found, topology) == Finding((0, 1), certain=False)


def test_what_a_rank_adds_to_a_sum_names_the_rank_within_its_replica():
    topology = Topology(dp_replicate=3, dp_shard=2)
    good = [[(10 + place, 20 + place) for place in (0, 1)] for _ in range(3)]
    rows = [row for replica in good for row in replica]
    # Rank 3 is wrong in the step itself: the sum over ranks 2 and 3 is wrong on both.
    own = [*rows[:2], (10, 99), (98, 99), *rows[4:]]
    found = [GradientPass(0, own), GradientPass(1, rows), GradientPass(2, rows)]
    assert judge_gradients(found, topology) == Finding((3,), certain=True)
    # Only the sum itself is wrong.
    own = [*rows[:3], (11, 99), *rows[4:]]
    found = [GradientPass(0, own), GradientPass(1, rows), GradientPass(2, rows)]
    assert judge_gradients(found, topology) == Finding((3,), certain=True)


def test_one_machine_is_excluded_and_never_the_last():
    assert machine_to_exclude(Finding((1,), True), ["a", "b"]) == "b"
    assert machine_to_exclude(Finding((1, 2), True), ["a", "b", "b"]) == "b"
    assert machine_to_exclude(Finding((1, 2), True), ["a", "b", "c"]) is None
    assert machine_to_exclude(Finding((1,), False), ["a", "b"]) is None
    assert machine_to_exclude(Finding((1,), True), ["a", "a"]) is None


def test_a_checkpoint_of_before_the_last_clean_check_must_be_left(tmp_path):
    with pytest.raises(InputError, match=r"gradients_interval_steps \(7\) must be at most"):
        make_spec(tmp_path, verify={"gradients_interval_steps": 7})
    make_spec(tmp_path, verify={"gradients_interval_steps": 6})
    with pytest.raises(InputError, match="must be at least 0, or save"):
        make_spec(tmp_path, verify={"parameters_interval_steps": -1})


@pytest.mark.parametrize(
    ("rank", "stops", "said"), [(0, False, True), (1, False, False), (0, True, False)]
)
def test_one_rank_tells_of_a_finding_that_does_not_end_the_run(rank, stops, said, capsys):
    found = CorruptionFound(
        step=4, kind="gradients", ranks=[1], machines=["b"], certain=True, stops=stops, text="wrong"
    )
    Console(6, rank)(found)
    assert capsys.readouterr().err == ("error: wrong; training goes on\n" if said else "")


@pytest.mark.parametrize(
    ("verified", "goes_on_after", "left"),
    [(None, 8, [3, 5, 8]), (9, 8, [3, 5, 8]), (5, 5, [3, 5]), (4, 3, [3]), (0, 0, []),
     (2, None, [3, 5, 8])],
)  # fmt: skip
def test_only_verified_checkpoints_are_left(tmp_path, verified, goes_on_after, left):
    (tmp_path / "manifests").mkdir()
    for step in (3, 5, 8):
        (tmp_path / ckpt.format.manifest_key(step)).write_text("{}")
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "0"}))
    job = SimpleNamespace(
        runtime=SimpleNamespace(from_first=lambda act: act(), agree=lambda ok: ok, world=1),
        spec=SimpleNamespace(checkpoint_path=tmp_path, checkpoint=CheckpointConfig()),
        events=Events(),
    )
    writer = SimpleNamespace(wait=list)
    checkpointer = Checkpointer(
        job, writer, stop=SimpleNamespace(), history=History(),
        progress=CheckpointProgress.after(8, 8),
    )  # fmt: skip
    assert checkpointer.leave_verified(verified) == goes_on_after
    assert ckpt.committed_steps(tmp_path) == left
    same_run = json.loads((tmp_path / "run.json").read_text())["run_id"] == "0"
    assert same_run == (verified is None or goes_on_after is None)


# Whole runs.


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("job"))


def flip(tensor: torch.Tensor, bit: int = 3) -> None:
    """Flip a low bit of the largest value: the loss hardly changes."""
    flat = tensor.view(-1).view(torch.int32)
    flat[int(tensor.abs().argmax())] ^= 1 << bit


def break_parameter(step: int) -> None:
    """One bit of one parameter of this rank, after ``step``."""
    commit = Trainer._commit

    def broken(self, *args):
        commit(self, *args)
        if self.progress.step == step:
            with torch.no_grad():
                flip(local_shard(next(self.job.model.parameters())))

    Trainer._commit = broken


def break_gradients(step: int, times: int) -> None:
    """One bit of a gradient in this rank's backwards from ``step`` on, ``times`` times."""
    module = sys.modules["pretrain.parallelize.micro_batches"]
    loss, left, here = module.next_token_loss, [times], [False]
    take = Trainer.step

    def step_with_fault(self, stop_requested):
        here[0] = self.progress.step + 1 >= step
        return take(self, stop_requested)

    def broken(gradient: torch.Tensor) -> torch.Tensor:
        wrong = gradient.clone()
        flip(wrong, 20)
        return wrong

    def loss_with_fault(logits, targets, sequence):
        if here[0] and left[0] and logits.numel():
            left[0] -= 1
            logits.register_hook(broken)
        return loss(logits, targets, sequence)

    Trainer.step, module.next_token_loss = step_with_fault, loss_with_fault


def on_rank(rank: int, arguments: list[str], fault: tuple | None) -> tuple[int, str]:
    os.environ["CONVOY_NODE_NAME"] = f"machine-{rank}"
    if fault is not None and rank == fault[0]:
        fault[1](*fault[2:])
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return code, err.getvalue()


def launch(spec: Path, world: int, fault: tuple | None = None, *overrides: str) -> tuple[int, str]:
    arguments = [str(spec), *(part for o in overrides for part in ("--set", o))]
    results = run_ranks(on_rank, world, arguments, fault, group=False)
    codes = {code for code, _ in results}
    assert len(codes) == 1, results
    assert not any(err for _, err in results[1:]), results
    return codes.pop(), results[0][1]


def spec_of(folder: Path, job: Path, replicas: int, **sections) -> Path:
    sections = {
        "parallel": {"dp_replicate": replicas},
        "moe": {"expert_bias": True, "input_jitter": 0.01},
        "checkpoint": {"interval_steps": 1},
        "eval": {"sequences": 2},
    } | sections
    return write_spec(folder, **{"data": data_of(job)} | sections)


def fingerprints(run: Path) -> dict[str, int]:
    manifest = ckpt.read_manifest(run / "checkpoints")
    return {key: record.checksum for key, record in manifest.objects.items()}


def losses(run: Path) -> dict[int, float]:
    """Of each step as it was taken last."""
    return {event["step"]: event["loss"] for event in events(run, "step")}


CHECKS = {"gradients_interval_steps": 2, "parameters_interval_steps": 2}


@pytest.mark.parametrize(
    ("world", "parallel", "moe"),
    [
        (2, {"dp_replicate": 2}, {}),
        pytest.param(1, {}, {}, marks=SLOW),
        pytest.param(3, {"dp_replicate": 3}, {}, marks=SLOW),
        pytest.param(4, {"dp_replicate": 2, "ep": 2}, {
            "capacity": {"policy": "straggler_aware"}, "expert_bias": True,
        }, marks=SLOW),
        pytest.param(4, {"dp_replicate": 2, "pp": 2}, {}, marks=SLOW),
        pytest.param(2, {"dp_replicate": 2, "gradient_compression": "one_bit"}, {}, marks=SLOW),
        pytest.param(2, {"dp_shard": 2, "memory": {"zero_stage": 1}}, {}, marks=SLOW),
    ],
)  # fmt: skip
def test_checks_of_a_healthy_run_accuse_nobody_and_change_no_bit(
    text, tmp_path, world, parallel, moe
):
    if "capacity" in moe:
        # Plans follow measured times: one run is enough to see that nobody is accused.
        spec = spec_of(tmp_path, text, 2, parallel=parallel, moe=moe, verify=CHECKS)
        assert launch(spec, world) == (0, "")
        assert not events(tmp_path / "run", "corruption")
        assert len(events(tmp_path / "run", "verified")) == 3 + 6
        return
    moe = {"expert_bias": True, "input_jitter": 0.01} | moe
    off, few = {"parameters_interval_steps": 0}, {"checkpoint": {"interval_steps": 3}}
    few |= {"train": {"steps": 4, "timeout_seconds": 60.0}}
    spec = spec_of(tmp_path, text, 2, parallel=parallel, moe=moe, verify=off, **few)
    without, checked = tmp_path / "without", tmp_path / "checked"
    assert launch(spec, world, None, f"run_dir={without}")[0] == 0
    spec = spec_of(tmp_path, text, 2, parallel=parallel, moe=moe, verify=CHECKS, **few)
    assert launch(spec, world, None, f"run_dir={checked}") == (0, "")
    assert losses(without) == losses(checked)
    assert fingerprints(without) == fingerprints(checked)
    assert not events(checked, "corruption")
    assert not events(without, "verified")
    found = events(checked, "verified")
    assert [e["step"] for e in found if e["kind"] == "gradients"] == [1, 3]
    compared = [e["step"] for e in found if e["kind"] == "parameters"]
    assert compared == ([] if world == 1 or "dp_shard" in parallel else [2, 3, 4])
    assert ckpt.read_manifest(checked / "checkpoints").state["verified_step"] == 4


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=SLOW)])
def test_a_flipped_bit_of_a_parameter_is_not_saved(text, tmp_path, world):
    spec, run = spec_of(tmp_path, text, world), tmp_path / "run"
    code, said = launch(spec, world, (1, break_parameter, 4))
    assert code == 1
    assert said.startswith("error: after step 4, ")
    assert "goes on after step 3" in said
    (found,) = events(run, "corruption")
    assert (found["kind"], found["to_step"]) == ("parameters", 3)
    assert ckpt.committed_steps(run / "checkpoints")[-1] == 3
    if world == 3:
        assert (found["ranks"], found["certain"]) == ([1], True)
        assert [one.node for one in read_exclusions(run / "exclude.json")] == ["machine-1"]
    else:
        assert (found["ranks"], found["certain"]) == ([0, 1], False)
        assert read_exclusions(run / "exclude.json") == []
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("lost_rank", 1)


@pytest.mark.parametrize(
    ("world", "times", "ranks", "certain"),
    [
        (2, 1, [1], True),
        pytest.param(2, 1000, [0, 1], False, marks=SLOW),
        pytest.param(3, 1, [1], True, marks=SLOW),
        pytest.param(3, 1000, [1], True, marks=SLOW),
    ],
)
def test_a_flipped_bit_of_a_gradient_takes_the_run_back(
    text, tmp_path, world, times, ranks, certain
):
    spec, run = (
        spec_of(tmp_path, text, world, verify={"gradients_interval_steps": 2}),
        tmp_path / "run",
    )
    # A fault that lasts begins in a step without a check; one that does not, within a check.
    step = 5 if times > 1 else 6
    code, said = launch(spec, world, (1, break_gradients, step, times))
    assert code == 1
    assert said.startswith("error: in step 6, ")
    assert "goes on after step 4" in said
    (found,) = events(run, "corruption")
    assert (found["kind"], found["ranks"], found["certain"]) == ("gradients", ranks, certain)
    assert (found["step"], found["to_step"]) == (5, 4)
    assert ckpt.committed_steps(run / "checkpoints")[-1] == 4
    named = [one.node for one in read_exclusions(run / "exclude.json")]
    assert named == (["machine-1"] if certain else [])
    if (world, times) == (2, 1):
        return  # the default suite has no time for more
    # The run goes on as a run that nothing happened to.
    assert launch(spec, world) == (0, "")
    healthy = tmp_path / "healthy"
    assert launch(spec, world, None, f"run_dir={healthy}") == (0, "")
    assert losses(run) == losses(healthy)
    assert fingerprints(run) == fingerprints(healthy)


@SLOW
def test_a_rank_without_replicas_finds_its_own_passing_fault(text, tmp_path):
    spec, run = spec_of(tmp_path, text, 1, verify={"gradients_interval_steps": 2}), tmp_path / "run"
    assert launch(spec, 1, (0, break_gradients, 2, 1))[0] == 1
    (found,) = events(run, "corruption")
    assert (found["ranks"], found["certain"], found["to_step"]) == ([0], False, 0)
    assert ckpt.committed_steps(run / "checkpoints") == []
    assert launch(spec, 1) == (0, "")


@SLOW
def test_a_rank_is_named_within_its_replica(text, tmp_path):
    parallel = {"dp_replicate": 2, "dp_shard": 2}
    verify = {"gradients_interval_steps": 2}
    spec = spec_of(tmp_path, text, 2, parallel=parallel, verify=verify)
    code, said = launch(spec, 4, (3, break_gradients, 4, 1))
    assert code == 1
    assert "rank 3 on machine-3 computed wrong gradients" in said
    assert [one.node for one in read_exclusions(tmp_path / "run" / "exclude.json")] == ["machine-3"]


@SLOW
def test_a_report_leaves_the_run_alone(text, tmp_path):
    verify = {"gradients_interval_steps": 2, "on_mismatch": "report"}
    spec = spec_of(tmp_path, text, 2, verify=verify)
    code, said = launch(spec, 2, (1, break_gradients, 4, 1))
    assert code == 0
    assert "training goes on" in said
    (found,) = events(tmp_path / "run", "corruption")
    assert (found["ranks"], found["stops"]) == ([1], False)
    assert "to_step" not in found
    healthy = tmp_path / "healthy"
    assert launch(spec, 2, None, f"run_dir={healthy}") == (0, "")
    # The fault was in the repetition, whose gradients nobody keeps.
    assert fingerprints(tmp_path / "run") == fingerprints(healthy)
