"""Campaigns of faults: what is drawn, what an audit sees, and a campaign on real processes."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace

import pytest

from convoy.audit import audit
from convoy.chaos import DrawnFault, draw_faults
from convoy.chaos.campaign import sections_of_run
from convoy.commands.chaos import chaos_table
from convoy.commands.command_line import main
from convoy.commands.pretrain import main as pretrain
from pretrain.errors import InputError
from pretrain.observe import FaultInjected, LoggedEvent, StepCommitted, read_log
from pretrain.spec import load_spec
from tests.support.agents import agents
from tests.support.jobs import data_of, prepare_job, write_spec
from tests.support.ranks import run_ranks

BATCH = 4


def step(number: int, time: float, *, loss: float = 2.0, samples: int | None = None) -> LoggedEvent:
    event = StepCommitted(
        step=number, loss=loss, grad_norm=1.0, seconds=1.0, lr=0.1, tokens_seen=1, mfu=0.1,
        consumed_samples=BATCH * number if samples is None else samples,
        slowest_rank_seconds=1.0, tokens_per_second=1.0,
    )  # fmt: skip
    return LoggedEvent(event, time)


def fault(number: int, time: float, kind: str = "kill") -> LoggedEvent:
    return LoggedEvent(FaultInjected(step=number - 1, kind=kind, rank=1, text=kind), time)


CALM = [step(n, float(n)) for n in range(1, 6)]


def test_steps_that_are_taken_again_with_their_samples_are_exact():
    lines = [step(1, 1.0), step(2, 2.0), fault(3, 2.5), step(2, 12.0), step(3, 13.0),
             step(4, 14.0), step(5, 15.0)]  # fmt: skip
    found = audit(lines, CALM)
    assert (found.samples_problem, found.losses, found.recovered) == ("", [], 1)
    assert [(one.kind, one.step, one.seconds) for one in found.faults] == [("kill", 3, 10.5)]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([step(1, 1.0), step(3, 2.0)], "step 3 comes after step 1: a step is missing"),
        ([step(1, 1.0), step(2, 2.0, samples=9)], "step 2 ends at sample 9, and at 8 in"),
        (CALM[:4], "the last step is 4, and 5 in the undisturbed run"),
        ([*CALM[:3], step(5, 4.0)], "step 5 comes after step 3"),
    ],
)
def test_samples_that_are_not_those_of_the_undisturbed_run_are_named(lines, problem):
    found = audit(lines, CALM)
    assert not found.samples_exact
    assert found.samples_problem.startswith(problem)


def test_a_loss_that_differs_is_named():
    found = audit([*CALM[:4], step(5, 5.0, loss=2.001)], CALM)
    assert found.samples_exact
    assert [number for number, _ in found.losses] == [5]
    assert found.losses[0][1] == pytest.approx(5e-4)
    assert found.is_one_run
    assert not audit([*CALM[:4], step(5, 5.0, loss=2.1)], CALM).is_one_run


def test_losses_that_differ_for_long_are_of_another_state():
    """As after a restore that has lost a moment: every later loss is half a percent off."""
    calm = [step(number, float(number)) for number in range(1, 41)]
    for far, is_one in ((4, True), (5, False)):
        other = [
            step(number, float(number), loss=2.01) if number > 40 - far else calm[number - 1]
            for number in range(1, 41)
        ]
        assert audit(other, calm).is_one_run == is_one


def test_an_exact_run_must_have_equal_bits():
    assert audit(CALM, CALM, is_exact=True).is_one_run
    for other in (replace(CALM[-1].event, loss=CALM[-1].event.loss * (1 + 1e-15)),
                  replace(CALM[-1].event, grad_norm=0.25)):  # fmt: skip
        lines = [*CALM[:-1], replace(CALM[-1], event=other)]
        assert audit(lines, CALM).is_one_run
        found = audit(lines, CALM, is_exact=True)
        assert len(found.losses) == 1
        assert not found.is_one_run


def test_a_fault_without_a_later_step_is_not_recovered():
    found = audit([*CALM, fault(6, 5.5)], CALM, [(2, 0, 1.5)])
    assert [(one.kind, one.seconds) for one in found.faults] == [
        ("machine_lost", 0.5),
        ("kill", None),
    ]
    assert found.recovered == 1


def test_the_ledger_is_compared_with_the_clock():
    assert audit(CALM, CALM, ended=5.0).ledger_error == pytest.approx(0.0, abs=0.01)
    assert audit(CALM, CALM, ended=9.0).ledger_error > 0.4


def test_faults_are_drawn_by_the_seed():
    drawn = draw_faults(3, 10, 60, 4)
    assert drawn == draw_faults(3, 10, 60, 4) != draw_faults(4, 10, 60, 4)
    steps = [one.step for one in drawn]
    assert steps == sorted(set(steps))
    assert max(steps) <= 54
    assert {one.rank for one in drawn} <= set(range(4))


def test_too_few_steps_for_the_faults_are_refused():
    with pytest.raises(InputError, match=r"train\.steps \(20\) must be at least 35 for 10 faults"):
        draw_faults(0, 10, 20, 2)
    assert len(draw_faults(0, 10, 35, 2)) == 10


def test_a_folder_with_files_is_refused(tmp_path, capsys):
    spec = write_spec(tmp_path, train={"steps": 40})
    assert main("chaos", [str(spec), str(tmp_path), "--quick"]) == 2
    assert f"OUT ({tmp_path}) must be empty or missing" in capsys.readouterr().err


def test_a_campaign_runs_what_the_spec_says(tmp_path, capsys):
    """Each run has every table of the spec, but for its folders, its machines and its faults."""
    own = {"kind": "slow", "step": 3, "rank": 0}
    path = write_spec(
        tmp_path,
        data=data_of(prepare_job(tmp_path / "job")),
        train={"steps": 40},
        checkpoint={"interval_steps": 7, "path": str(tmp_path / "elsewhere")},
        elastic={"recovery": "warm"},
        inject=[own],
    )
    out = tmp_path / "out"
    arguments = [str(path), str(out), "--quick", "--limit", "0"]  # ended when it has begun
    assert main("chaos", arguments) == 2, capsys.readouterr()
    expected = load_spec(path).as_dict()
    expected["elastic"]["enabled"] = True
    expected["checkpoint"]["path"] = None
    calm = {"run_dir": str(out / "undisturbed/run"), "inject": []}
    assert json.loads((out / "undisturbed/spec.json").read_text()) == expected | calm
    drawn = [DrawnFault("kill", 5, 1), DrawnFault("machine_lost", 8, 0)]
    sections = sections_of_run(load_spec(path), drawn, out)
    assert sections["inject"] == [*expected["inject"], drawn[0].table()]
    assert sections["elastic"] == {"enabled": True, "recovery": "warm"}


@pytest.mark.parametrize("flag", ["--faults", "--machines"])
def test_numbers_that_make_no_campaign_are_refused(tmp_path, capsys, flag):
    with pytest.raises(SystemExit) as ended:
        main("chaos", ["spec.toml", str(tmp_path / "out"), flag, "0"])
    assert ended.value.code == 2
    assert f"{flag} (0) must be at least" in capsys.readouterr().err


def on_rank(rank: int, spec: str) -> int:
    with contextlib.redirect_stdout(io.StringIO()):
        return pretrain([spec])


@pytest.mark.slow  # CI runs it by `make test-faults`
@pytest.mark.timeout(600)  # on a machine with ten times its work
def test_a_short_campaign_on_two_machines_is_exact(tmp_path):
    """By this seed a rank is slow, is killed, and has a gradient that is not finite."""
    faults = draw_faults(252, 3, 14, 2)
    assert [one.kind for one in faults] == ["slow", "kill", "nan_gradient"]
    job, logs = prepare_job(tmp_path / "job"), []
    for name, inject in (("calm", []), ("faults", [one.table() for one in faults])):
        folder = tmp_path / name
        folder.mkdir()
        spec = write_spec(
            folder, data=data_of(job), parallel={"ep": 2}, inject=inject, train={"steps": 14},
            batch={"global_batch_size": BATCH}, checkpoint={"interval_steps": 2},
        )  # fmt: skip
        logs.append(folder / "run/log.jsonl")
        if not inject:
            assert run_ranks(on_rank, 2, str(spec), group=False) == [0, 0]
            continue
        with agents(spec, folder / "run", least=2, most=2) as launch:
            launch.start()
            launch.start()
            assert launch.wait_for_end(500) == [0, 0], launch.output()
    calm, disturbed = (read_log(log).lines for log in logs)
    found = audit(disturbed, calm, ended=logs[1].stat().st_mtime)
    assert [one.kind for one in found.faults] == ["slow", "kill", "nan_gradient"]
    assert found.recovered == 3
    assert found.starts == 2
    assert found.samples_exact, found.samples_problem
    assert found.losses_exact, found.losses
    assert found.ledger_error < 0.01


def test_a_last_state_that_differs_is_no_exact_run():
    found = audit(CALM, CALM, is_exact=True)
    assert found.is_one_run
    stale = replace(found, arrays=("optimizer/exp_avg/head/weight",))
    assert not stale.is_one_run
    assert "differs in optimizer/exp_avg/head/weight" in chaos_table(stale)
    assert "parameters and moments of the undisturbed run, bit for bit" in chaos_table(found)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_campaign_of_an_exact_run_has_equal_bits(tmp_path, capsys):
    """Machines are lost, and the run goes on with one rank or two: samples, losses, norms,
    parameters and moments are those of the undisturbed run. Killed ranks are forked again."""
    job = prepare_job(tmp_path / "job")
    spec = write_spec(
        tmp_path,
        data=data_of(job),
        moe={"top_k": 3, "num_experts": 8},
        parallel={"ep": 2},
        batch={"global_batch_size": BATCH, "micro_batch_size": 1},
        train={"steps": 20, "timeout_seconds": 10.0},
        checkpoint={"interval_steps": 2},
        elastic={"recovery": "warm"},
    )
    arguments = [str(spec), str(tmp_path / "out"), "--faults", "3", "--machines", "2",
                 "--seed", "7", "--set", "train.exact=true"]  # fmt: skip
    code = main("chaos", [*arguments, "--json", str(tmp_path / "chaos.json")])
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "chaos.json").read_text())
    assert (found["faults"], found["recovered"]) == (3, 3), said
    assert {"machine_lost", "kill"} <= {one["kind"] for one in found["recoveries"]}, said
    assert found["exact"], said
    assert (found["losses_exact"], found["samples_exact"]) == (True, True), said
    assert found["losses"] == found["arrays_that_differ"] == []
    assert code == 0
    printed = [log.read_text() for log in (tmp_path / "out/faults/machines").glob("*.txt")]
    assert any("all ranks start again" in text for text in printed), printed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_convoy_chaos_ends_with_an_exact_run(tmp_path, capsys):
    job = prepare_job(tmp_path / "job")
    spec = write_spec(
        tmp_path,
        data=data_of(job),
        model={"d_model": 48, "first_k_dense": 2},
        moe={"num_experts": 12, "d_ff": 48},
        parallel={"ep": 2},
        batch={"global_batch_size": BATCH, "micro_batch_size": 1},
        train={"steps": 30, "timeout_seconds": 10.0},
        checkpoint={"interval_steps": 2},
        optimizer={"lr": 0.001},
    )
    out = tmp_path / "out"
    arguments = [str(spec), str(out), "--faults", "5", "--machines", "2", "--seed", "3"]
    code = main("chaos", [*arguments, "--json", str(tmp_path / "chaos.json")])
    print(capsys.readouterr())
    found = json.loads((tmp_path / "chaos.json").read_text())
    assert (found["faults"], found["recovered"], found["samples_exact"]) == (5, 5, True), found
    assert {"kill", "machine_lost"} <= {one["kind"] for one in found["recoveries"]}
    assert found["ledger_error"] < 0.01
    assert code == 0
    assert len(found["losses"]) <= 1, found["losses"]
