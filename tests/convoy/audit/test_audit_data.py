"""The audit of what a run has consumed: kills, resizes, changed blends, and logs that lie."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from convoy.audit.data import audit_data
from convoy.commands import main
from convoy.preparation import prepare_corpora
from pretrain.data.corpora import open_corpora
from pretrain.spec.read import load_spec
from pretrain.train.trainer import Trainer
from tests.support.jobs import events, tiny, write_corpus
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow  # three starts of a run; docs/data.md's test audits one
VOCAB = 320


def train_on_rank(rank: int, arguments: list[str], killed_in: int | None) -> int:
    if killed_in is not None:
        step = Trainer.step

        def step_or_die(self, stop_requested):
            if self.progress.step == killed_in:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(self, stop_requested)

        Trainer.step = step_or_die
    from convoy.commands.pretrain import main as pretrain

    return pretrain(arguments)


def launch(spec: Path, ranks: int, *overrides: str, killed_in: int | None = None) -> None:
    arguments = [str(spec), *(part for o in overrides for part in ("--set", o))]
    if killed_in is None:
        codes = run_ranks(train_on_rank, ranks, arguments, None, group=False)
        assert codes == [0] * ranks
        return
    with pytest.raises(BaseException, match=r"."):
        run_ranks(train_on_rank, ranks, arguments, killed_in, group=False)


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    """A run of two sources: killed after step 4, resumed on two ranks with another blend."""
    folder = tmp_path_factory.mktemp("audit")
    whole = write_corpus(folder / "all", 40)
    for number, path in enumerate(sorted(whole.iterdir())):
        part = folder / "text" / "abv"[number % 3]
        part.mkdir(parents=True, exist_ok=True)
        path.rename(part / path.name)
    values = tiny(folder, train={"steps": 10, "log_interval_steps": 5}, checkpoint={
        "interval_steps": 3, "reshard_on_load": True,
    }, eval={"sequences": 4, "interval_steps": 5})  # fmt: skip
    values["data"] = {
        "sources": {
            name: {"source": str(folder / "text" / name), "path": str(folder / name)}
            for name in "ab"
        },
        "validation": {"v": {"source": str(folder / "text" / "v"), "path": str(folder / "v")}},
        "seq_len": 32,
        "shard_tokens": 20_000,
    }
    (folder / "spec.json").write_text(json.dumps(values))
    spec = load_spec(folder / "spec.json")
    prepare_corpora(spec.data, VOCAB, lambda _: None)
    launch(folder / "spec.json", 1, killed_in=4)
    launch(folder / "spec.json", 2, "data.sources.a.weight=3.0", "parallel.ep=2", "train.steps=8")
    launch(folder / "spec.json", 1, "data.sources.a.weight=3.0")
    return folder


def test_a_run_over_a_kill_a_resize_and_another_blend_is_proved(ran):
    spec = load_spec(ran / "spec.json")
    found = audit_data(ran / "run", open_corpora(spec.data, VOCAB))
    assert found.problem == ""
    assert [list(s.samples) for s in found.steps] == [
        list(range(8 * i, 8 * i + 8)) for i in range(10)
    ]
    assert (found.taken, found.starts, found.resizes) == (11, 3, 2)
    assert found.checked_steps == 10
    # 24 samples half and half, then 56 as 3 to 1.
    assert {one.name: one.samples for one in found.shares} == {"a": 12 + 42, "b": 12 + 14}


def test_the_blend_of_a_resume_is_in_the_log_and_each_set_is_scored(ran):
    opened = events(ran / "run", "data")
    assert [[p["from_sample"] for p in one["blend"]] for one in opened] == [[0], [0, 24], [0, 24]]
    assert {source["name"] for source in opened[0]["sources"].values()} == {"a", "b"}
    changed = events(ran / "run", "spec_changed")
    assert {"data.sources.a.weight"} <= {event["field"] for event in changed}
    for scored in events(ran / "run", "eval"):
        assert set(scored["bits_per_byte_by_set"]) == {"a", "b", "v"}
        sets = scored["bits_per_byte_by_set"]
        assert min(sets["a"], sets["b"]) <= scored["bits_per_byte"] <= max(sets["a"], sets["b"])
    summary = json.loads((ran / "run" / "summary.json").read_text())
    assert set(summary["val_bits_per_byte_by_set"]) == {"a", "b", "v"}


def test_intervals_count_the_tokens_of_each_source(ran):
    counted = [each["source_tokens"] for each in events(ran / "run", "interval")]
    # Steps 4-5, 6-8 and 9-10 of 8 sequences, 3 to 1; the start that was killed ended no interval.
    assert counted == [{"a": 32 * n, "b": 32 * n // 3} for n in (12, 18, 12)]


def test_the_command_says_what_it_proves(ran, tmp_path, capsys):
    steps = tmp_path / "steps.json"
    arguments = [str(ran / "run"), "--tokens", str(ran / "spec.json"), "--json", str(steps)]
    assert main("audit-data", arguments) == 0
    out = capsys.readouterr().out
    assert "10 steps consumed 80 samples, from 0 to 79, over 3 starts and 2 resizes" in out
    assert "1 steps were taken again" in out
    assert "each sample exactly once and in order" in out
    assert "  a: 54 samples (67.50%), " in out
    assert json.loads(steps.read_text())[3] == {"step": 4, "first": 24, "last": 31, "count": 8}


def lie(ran: Path, folder: Path, change) -> Path:
    """A copy of the run with another log: ``change`` is given each line's values, and may return
    how many times the line stands there."""
    run = folder / "run"
    (run / "data").mkdir(parents=True)
    for path in (ran / "run" / "data").iterdir():
        (run / "data" / path.name).write_bytes(path.read_bytes())
    lines = [json.loads(x) for x in (ran / "run" / "log.jsonl").read_text().splitlines()]
    kept = []
    for line in lines:
        times = change(line)
        kept += [line] * (1 if times is None else int(times))
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    return run


def drop_step(line):
    return not (line["event"] == "step" and line["step"] == 6)


def step_twice(line):
    return 2 if line["event"] == "step" and line["step"] == 6 else 1


def eat_more(line):
    if line["event"] == "step" and line["step"] >= 6:
        line["consumed_samples"] += 1


def other_seed(line):
    if line["event"] == "data" and line["sample"]:
        line["seed"] += 1


def other_past(line):
    if line["event"] == "data" and line["sample"]:
        line["blend"][0]["weights"] = line["blend"][1]["weights"]


def start_late(line):
    if line["event"] == "data" and line["sample"]:
        line["sample"] -= 8


def other_tokens(line):
    if line["event"] == "step" and line["step"] == 7:
        line["data_checksum"] += 1


def other_size(line):
    for source in line.get("sources", {}).values():
        source["tokens"] += 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop_step, "step 7 comes after step 5: a step is missing"),
        (step_twice, "step 6 comes again after step 6, without a start or a rollback between"),
        (
            eat_more,
            "step 6 took 8 samples and ended at sample 49; from sample 40 it must ",
        ),
        (other_seed, "the start after step 3 has seed 1, and 0 before"),
        (other_past, "the start after step 3 has another blend for samples before 24"),
        (start_late, "the start after step 3 goes on with sample 16; the log has 3 steps before"),
        (other_tokens, "step 7 had tokens with the checksum "),
        (other_size, " tokens in "),
    ],
)
def test_a_log_that_says_something_else_is_not_proof(ran, tmp_path, change, said):
    spec = load_spec(ran / "spec.json")
    found = audit_data(lie(ran, tmp_path, change), open_corpora(spec.data, VOCAB))
    assert said in found.problem


def test_without_manifest_or_data_there_is_no_proof(ran, tmp_path, capsys):
    run = lie(ran, tmp_path, lambda line: True)
    next((run / "data").iterdir()).unlink()
    assert main("audit-data", [str(run)]) == 1
    assert "NOT PROVED: " in capsys.readouterr().out
    (run / "log.jsonl").write_text(
        "".join(json.dumps(e) + "\n" for e in events(ran / "run", "step"))
    )
    assert main("audit-data", [str(run)]) == 2
    assert "must have an event data before step 1" in capsys.readouterr().err
    assert main("audit-data", [str(tmp_path)]) == 2


def test_a_source_that_changed_is_refused_and_the_shard_is_named(ran, tmp_path):
    import shutil

    from tests.support.ranks import run_ranks as ranks

    data = json.loads((ran / "spec.json").read_text())["data"]
    folder = tmp_path / "job"
    shutil.copytree(ran / "run", folder / "run")
    first = sorted((ran / "text" / "b").iterdir())[0]
    other = tmp_path / "b-text"
    shutil.copytree(ran / "text" / "b", other)
    (other / first.name).write_text("other text " * 300)
    data["sources"]["b"] = {"source": str(other), "path": str(tmp_path / "b")}
    values = {**json.loads((ran / "spec.json").read_text()), "run_dir": str(folder / "run")}
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({**values, "data": data}))
    prepare_corpora(load_spec(spec).data, VOCAB, lambda _: None)
    ((code, err),) = ranks(refusal_on_rank, 1, [str(spec), "--set", "train.steps=12"], group=False)
    assert code == 2
    assert "must hold the corpus of the checkpoint of step 10 in " in err
    assert "train-00000.bin differs" in err


def refusal_on_rank(rank: int, arguments: list[str]) -> tuple[int, str]:
    import contextlib
    import io

    from convoy.commands.pretrain import main as pretrain

    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        code = pretrain(arguments)
    return code, err.getvalue()
