"""Events, and what the log, the metrics and the console make of them."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from convoy.commands.pretrain import main
from parallel import Topology
from pretrain.errors import InputError
from pretrain.observe import Console, Endpoint, Events, JsonlLog, Metrics, read_log
from pretrain.observe.checkpoint_events import (
    CheckpointCommitted,
    CheckpointFailed,
    Restored,
    SaveBegun,
)
from pretrain.observe.event import (
    Event,
)
from pretrain.observe.events import (
    EVENTS,
    LOG_VERSION,
    Launched,
    Notice,
    RunDone,
    RunStarted,
    RunStopped,
    SpecChanged,
)
from pretrain.observe.rank_events import (
    DeviceProblem,
    DevicesSampled,
    RankLossOdd,
    RankMoves,
    RankStuck,
)
from pretrain.observe.step_events import (
    Evaluated,
    IntervalEnded,
    RoutingReport,
    StepCommitted,
    StepSkipped,
)
from pretrain.train.interval_stats import is_communication_timed
from pretrain.train.trainer import Trainer
from tests.support.checkpoints import eventually
from tests.support.jobs import data_of, events, make_spec, prepare_job, write_spec
from tests.support.ranks import run_ranks

EXAMPLES = {
    "int": 7,
    "float": 0.5,
    "str": "text",
    "bool": True,
    "Any": [1, None],
    "float | None": 0.25,
    "int | None": 3,
    "str | None": "there",
    "dict[str, int]": {"ep": 2},
    "dict[str, float]": {"ep": 0.5},
    "dict[str, list[int]]": {"3": [120, 80]},
    "list[str]": ["memory"],
    "list[float]": [0.5, 1.5],
    "list[int]": [5, 3],
    "list[list[int]]": [[1536, 512]],
    "tuple[int, int] | None": [3, 1],
    "dict[str, str]": {"code": "c0ffee"},
    "dict[str, Any]": {"train": {"steps": 6}},
    "list[float] | None": [1.5, 2.5],
    "dict[str, dict[str, Any]]": {"abc": {"name": "web", "sequences": 5}},
    "list[dict[str, Any]]": [{"from_sample": 0, "weights": {"abc": 1}}],
}


def example(kind: type[Event]) -> Event:
    """An event with a value of its own in every field that the log has."""
    return kind(**{f.name: EXAMPLES[f.type] for f in fields(kind) if f.metadata.get("log", True)})


def test_every_event_comes_back_from_the_log_as_it_was_published(tmp_path):
    log = JsonlLog(tmp_path / "log.jsonl", now=lambda: 1234.5678)
    events = Events(log)
    published = [example(kind) for kind in EVENTS.values()]
    for event in published:
        events.publish(event)
    log.close()
    found = read_log(tmp_path / "log.jsonl")
    assert found.problems == []
    assert found.events == published
    assert {line.time for line in found.lines} == {1234.568}
    lines = [json.loads(text) for text in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == list(EVENTS)
    assert all(list(line)[:2] == ["event", "time"] for line in lines)


def test_numbers_that_are_not_finite_are_null_in_the_log(tmp_path):
    log = JsonlLog(tmp_path / "log.jsonl")
    log(StepSkipped(step=3, loss=math.nan, grad_norm=math.inf, seconds=1.0, reason="not_finite"))
    log.close()
    line = json.loads((tmp_path / "log.jsonl").read_text())
    assert line["loss"] is None
    assert line["grad_norm"] is None
    (event,) = read_log(tmp_path / "log.jsonl").events
    assert math.isnan(event.loss)


def test_lines_that_are_no_events_are_problems_and_a_cut_last_line_is_none(tmp_path):
    path = tmp_path / "log.jsonl"
    good = '{"event": "done", "time": 1.0, "step": 6}'
    path.write_text(f'[1]\n{good}\n{{"event": "done"}}\nnoise\n{{"event": "do')
    log = read_log(path)
    assert [event.step for event in log.events] == [6]
    assert [problem.partition(": line ")[2][0] for problem in log.problems] == ["1", "3", "4"]
    with pytest.raises(FileNotFoundError):
        read_log(tmp_path / "none")


def test_lines_wait_for_room_on_a_full_disk(tmp_path, monkeypatch, capsys):
    write, room = os.write, [10_000]

    def full(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = write(file, bytes(data[: room[0]]))
        room[0] -= count
        return count

    path = tmp_path / "log.jsonl"
    log = JsonlLog(path)
    monkeypatch.setattr("pretrain.observe.jsonl.os.write", full)
    for step in range(1, 31):
        if step == 11:
            room[0] = 20  # a line is cut off
        elif step == 21:
            assert read_log(path).problems == []
            assert [event.step for event in read_log(path).events] == list(range(1, 11))
            room[0] = 10_000
        log(RunDone(step=step))
    log.close()
    found = read_log(path)
    assert found.problems == []
    assert [event.step for event in found.events] == list(range(1, 31))
    said = capsys.readouterr().out
    assert said.count("its lines wait for room") == 1


def test_a_log_without_room_for_ever_ends_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = JsonlLog(tmp_path / "log.jsonl")
    monkeypatch.setattr("pretrain.observe.jsonl._MOST_WAITING_BYTES", 500)
    monkeypatch.setattr("pretrain.observe.jsonl.os.write", full)
    for step in range(100):
        log(RunDone(step=step))
    log.close()
    assert (tmp_path / "log.jsonl").read_bytes() == b""
    said = capsys.readouterr().out.splitlines()
    assert [line.rpartition("; ")[2] for line in said] == [
        "its lines wait for room", "logging ends here",
    ]  # fmt: skip


def test_a_log_that_cannot_be_opened_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match=r"run_dir: .*log.jsonl cannot be written"):
        JsonlLog(tmp_path / "nowhere" / "log.jsonl")


def test_sinks_get_every_event_in_the_order_of_their_subscription():
    seen = []
    events = Events(lambda event: seen.append(("first", event.step)))
    events.publish(RunStopped(step=1))
    events.subscribe(lambda event: seen.append(("second", event.step)))
    events.publish(RunStopped(step=2))
    assert seen == [("first", 1), ("first", 2), ("second", 2)]


STARTED = {
    "job": "tiny", "parameters": 1234, "world_size": 1, "layout": "1 rank", "device": "cpu",
    "steps": 6, "step_tokens": 256, "spec_hash": "0123456789abcdef", "topology": {},
    "launch_id": "a",
}  # fmt: skip
STUCK = {
    "step": 4, "ranks": [1], "phase": "data", "seconds": 40.0, "limit_seconds": 30.0,
    "has_heartbeat": True, "text": "rank 1 stuck in data",
}  # fmt: skip
SHARED = {"tier": "shared", "seconds": 1.5, "write_seconds": 1.0}


@pytest.mark.parametrize(
    ("event", "out", "err"),
    [
        (RunStarted(step=0, **STARTED), "tiny: 1,234 parameters on 1 rank, cpu", ""),
        (RunStarted(step=6, **STARTED), "done already: step 6 of 6", ""),
        (RunStarted(step=2, **STARTED), "resuming after step 2", ""),
        (Restored(step=2, tier="memory", seconds=1.0), "restored step 2 from tier memory", ""),
        (Restored(step=2, tier="shared", seconds=1.0), "", ""),
        (SpecChanged(step=2, field="a.b", before=1, now=2), "a.b was 1, is 2", ""),
        (Notice(step=0, text="by the way"), "by the way", ""),
        (Notice(step=0, text="look here", problem=True), "", "error: rank {}: look here"),
        (Evaluated(step=4, loss=1.0, bits_per_byte=2.0), "step 4: 2.0000 bits per byte", ""),
        (Evaluated(step=4, loss=1.0, bits_per_byte=2.0, whole=True), "", ""),
        (CheckpointCommitted(step=4, **SHARED), "checkpoint of step 4 committed in 1.50 s", ""),
        (
            CheckpointFailed(step=4, tier="local", error="disk full"), "",
            "error: rank {}: checkpoint of step 4 is not in tier local: disk full",
        ),
        (
            CheckpointFailed(step=-1, tier="local", error="disk full", in_a_row=3), "",
            "a checkpoint is not in tier local: disk full; tier local has failed 3 times in a row",
        ),
        (RankStuck(**STUCK), "", "error: rank 1 stuck in data"),
        (RankStuck(**STUCK | {"ends_run": True}), "", "rank 1 stuck in data; the run ends"),
        (
            RankLossOdd(step=4, rank=2, loss=4.0, usual_loss=3.0, z=9.0, steps=32), "",
            "error: rank 2 has loss 4.0000, other ranks 3.0000 (over 32 steps)",
        ),
        (
            DeviceProblem(step=4, rank=2, device="GPU-1", text="Xid 79"), "",
            "error: rank 2: Xid 79 on GPU-1",
        ),
        (RankMoves(step=4, ranks=[1, 2, 5]), "ranks 1-2, 5 move again", ""),
        (RunStopped(step=4), "stopped after step 4; the same command resumes", ""),
    ],
)  # fmt: skip
def test_the_console_says_what_happens_on_rank_0_and_problems_everywhere(event, out, err, capsys):
    Console(6, 0)(event)
    shown = capsys.readouterr()
    assert out in shown.out
    assert bool(out) == bool(shown.out)
    assert err.format(0) in shown.err
    assert bool(err) == bool(shown.err)
    Console(6, 3)(event)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert err.format(3) in shown.err


STEPPED = {
    "grad_norm": 0.7, "lr": 0.01, "seconds": 2.0, "target_tokens": 256, "tokens_seen": 256,
    "consumed_samples": 8, "slowest_rank_seconds": 2.0, "tokens_per_second": 128.0, "mfu": 0.5,
}  # fmt: skip
REPORTED = {
    "lr": 0.01, "grad_norm": 0.7, "tokens_per_second": 512.0, "mfu": 0.5,
    "communication_seconds": {}, "exposed_seconds": {},
}  # fmt: skip


def test_the_first_step_of_a_start_has_a_line_and_intervals_say_what_is_left(capsys):
    console = Console(60, 0)
    console(RunStarted(step=10, **STARTED))
    capsys.readouterr()
    console(StepCommitted(step=11, loss=2.5, **STEPPED))
    assert capsys.readouterr().out.startswith("step 11/60  loss 2.5000")
    console(StepCommitted(step=12, loss=2.5, **STEPPED))
    assert capsys.readouterr().out == "", "other steps wait for the interval"
    console(IntervalEnded(step=20, loss=2.5, seconds=30.0, **REPORTED))
    assert re.search(r"  2 m 00 s left  \d\d:\d\d:\d\d\n$", capsys.readouterr().out)
    console(IntervalEnded(step=60, loss=2.5, seconds=30.0, **REPORTED))
    assert "left" not in capsys.readouterr().out
    Console(60, 3)(StepCommitted(step=11, loss=2.5, **STEPPED))
    assert capsys.readouterr().out == ""


def test_a_line_of_an_interval_names_exposed_communication_and_expert_imbalance(capsys):
    report = IntervalEnded(
        step=2, loss=2.5, lr=0.01, grad_norm=0.7, tokens_per_second=512.0, mfu=0.5, seconds=8.0,
        communication_seconds={"ep": 2.0, "world": 1.0},
        exposed_seconds={"ep": 1.0, "world": 0.8},
        load_imbalance=1.41, dropped=3, bubble=0.25, bubble_formula=0.2,
        tokens_seen=12345, aux_loss=0.0123, padding=0.034, peak_memory_bytes=3 << 20,
    )  # fmt: skip
    Console(60, 0)(report)
    line = capsys.readouterr().out
    assert line.startswith("step  2/60  loss 2.5000  aux 0.0123  lr 1.00e-02")
    assert "12,345 tokens  512 tokens/s" in line
    assert "padding 3.4%  memory 3.0 MiB" in line
    assert "exposed comm 22% (ep 12%, sync 10%)" in line
    assert "bubble 25% (formula 20%)" in line
    assert "expert imbalance 1.41" in line
    assert "dropped 3" in line
    assert "rerouted" not in line


@pytest.mark.parametrize(
    ("device", "time_cuda", "timed"),
    [("cpu", False, True), ("cuda", True, True), ("cuda", False, False)],
)
def test_communication_that_nobody_times_is_not_reported_as_hidden(device, time_cuda, timed):
    monitor = SimpleNamespace(time_cuda=time_cuda)
    runtime = SimpleNamespace(device=torch.device(device), comm_monitor=monitor)
    assert is_communication_timed(runtime) is timed


def test_every_field_of_an_event_has_an_example_here():
    for kind in EVENTS.values():
        for each in fields(kind):
            if each.metadata.get("log", True):
                assert each.type in EXAMPLES, (kind, each.name, each.type)
    assert next(f for f in fields(RunStarted) if f.name == "log_version").default == LOG_VERSION
    assert all(
        f.default is not MISSING or f.default_factory is not MISSING or f.metadata.get("log", True)
        for kind in EVENTS.values()
        for f in fields(kind)
    ), "what the log leaves out has a default"


def test_what_is_not_known_yet_is_no_zero(tmp_path):
    registry = CollectorRegistry()
    metrics = Metrics(registry, make_spec(tmp_path), Topology(), "1.0")
    names = ("convoy_loss", "convoy_validation_loss", "convoy_communication_time_ratio")
    assert all(math.isnan(registry.get_sample_value(name)) for name in names)
    metrics(Evaluated(step=0, loss=2.5, bits_per_byte=1.0))
    assert registry.get_sample_value("convoy_validation_loss") == 2.5
    assert math.isnan(registry.get_sample_value("convoy_loss"))
    assert registry.get_sample_value("convoy_steps_total") == 0


def test_metrics_have_the_agreed_names_and_are_served(tmp_path):
    registry = CollectorRegistry()
    spec = make_spec(tmp_path)
    metrics = Metrics(registry, spec, Topology(dp_shard=2, ep=2), "1.0")
    taken = {"loss": 2.5, "grad_norm": 0.7, "seconds": 0.5, "data_wait_seconds": 0.1}
    metrics(
        StepCommitted(
            **taken, step=1, lr=0.01, padding_tokens=32, target_tokens=256, tokens_seen=256,
            consumed_samples=9, slowest_rank_seconds=0.4, tokens_per_second=512.0, mfu=0.5,
            model_flops=2e9,
            collective_seconds={("all_to_all", "ep"): 0.75},
            collective_bytes={("all_to_all", "ep"): 4096},
        )
    )  # fmt: skip
    for reason in ("not_finite", "overflow", "overflow", "not_finite"):
        metrics(StepSkipped(**taken, step=2, reason=reason, overflow=reason == "overflow"))
    routing = RoutingReport(
        layers=[1, 2], tokens_per_expert=[[4, 0], [2, 2]], entropies=[0.5, 0.6], dropped=[3, 0],
        rerouted=[4, 0], copied=[5, 6], bias_abs_max=0.25, rank_imbalance=1.5, aux_loss=0.03125,
        aux_losses={"load_balance": [1.5, 1.0], "sequence_balance": [0.0, 0.0], "z": [2.0, 3.0]},
    )  # fmt: skip
    metrics(
        IntervalEnded(
            step=2, loss=2.5, lr=0.01, grad_norm=0.7, tokens_per_second=512.0, mfu=0.5,
            seconds=8.0, communication_seconds={"ep": 2.0}, exposed_seconds={"ep": 1.0},
            routing=routing, capacity_shares=[1.5, 0.5], relative_speeds=[1.25, 0.75],
            rank_seconds=[0.25, 0.5], source_tokens={"web": 96, "code": 32},
            peak_memory_bytes=4096,
        )
    )  # fmt: skip
    metrics(RankStuck(**STUCK | {"ranks": [1, 2]}))
    metrics(RankMoves(step=4, ranks=[1]))
    used = {"utilization_of_rank": {3: 0.5}, "memory_bytes_of_rank": {3: 1024}}
    metrics(DevicesSampled(step=4, **used, energy_joules_of_rank={3: 10.0}))
    metrics(DevicesSampled(step=4, energy_joules_of_rank={3: 12.5}))
    metrics(Restored(step=1, tier="shared", seconds=3.0))
    metrics(Launched(step=0, process_start=1234.5))
    metrics(RunStarted(step=4, **STARTED | {"world_size": 2}, topology_epoch=3))
    metrics(Evaluated(step=4, loss=2.25, bits_per_byte=1.0))
    metrics(CheckpointFailed(step=4, tier="local", error="disk full"))
    metrics(SaveBegun(step=2, stall_seconds=0.1, tiers=["memory", "shared"]))
    metrics(CheckpointCommitted(step=2, tier="shared", seconds=1.5, write_seconds=1.0))
    endpoint = Endpoint(registry, "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(endpoint.url) as response:
            text = response.read().decode()
        with pytest.raises(InputError, match=r"metrics.port .* cannot be listened on"):
            Endpoint(registry, "127.0.0.1", int(endpoint.url.split(":")[2].split("/")[0]))
    finally:
        endpoint.close()
    for line in [
        "convoy_steps_total 1.0",
        "convoy_tokens_total 256.0",
        "convoy_loss 2.5",
        "convoy_grad_norm 0.7",
        "convoy_learning_rate 0.01",
        "convoy_tokens_per_second 512.0",
        "convoy_model_flops_total 2e+09",
        "convoy_mfu_ratio 0.5",
        "convoy_consumed_samples 9.0",
        'convoy_collective_seconds_total{group="ep",op="all_to_all"} 0.75',
        'convoy_collective_bytes_total{group="ep",op="all_to_all"} 4096.0',
        "convoy_communication_time_ratio 0.125",
        "convoy_data_wait_seconds_total 0.5",
        'convoy_skipped_steps_total{reason="not_finite"} 2.0',
        'convoy_skipped_steps_total{reason="overflow"} 2.0',
        "convoy_overflows_total 2.0",
        'convoy_moe_expert_load_imbalance_ratio{layer="1"} 2.0',
        'convoy_moe_expert_load_imbalance_ratio{layer="2"} 1.0',
        'convoy_moe_dead_experts{layer="1"} 1.0',
        'convoy_moe_router_entropy_nats{layer="2"} 0.6',
        "convoy_moe_router_bias_abs_max 0.25",
        "convoy_moe_rank_load_imbalance_ratio 1.5",
        'convoy_moe_capacity_share{rank="1"} 0.5',
        'convoy_rank_relative_speed_ratio{rank="0"} 1.25',
        'convoy_restore_duration_seconds{tier="shared"} 3.0',
        'convoy_rank_compute_seconds{rank="1"} 0.5',
        'convoy_checkpoint_failures_total{tier="local"} 1.0',
        "convoy_validation_loss 2.25",
        "convoy_ranks 2.0",
        "convoy_topology_epoch 3.0",
        "convoy_step 4.0",
        "convoy_target_steps 6.0",
        "convoy_start_timestamp_seconds 1234.5",
        "convoy_stuck_ranks 1.0",
        'convoy_gpu_utilization_ratio{rank="3"} 0.5',
        'convoy_gpu_memory_bytes{rank="3"} 1024.0',
        'convoy_gpu_energy_joules_total{rank="3"} 12.5',
        "convoy_data_padding_tokens_total 32.0",
        'convoy_data_source_tokens_total{source="web"} 96.0',
        "convoy_peak_memory_bytes 4096.0",
        "convoy_moe_aux_loss 0.03125",
        'convoy_moe_load_balance_loss{layer="1"} 1.5',
        'convoy_moe_sequence_balance_loss{layer="1"} 0.0',
        'convoy_moe_z_loss{layer="2"} 3.0',
        'convoy_moe_dropped_tokens_total{layer="1"} 3.0',
        'convoy_moe_rerouted_tokens_total{layer="1"} 4.0',
        'convoy_parallelism_info{cp="1",dp_replicate="1",dp_shard="2",ep="2",pp="1",tp="1"} 1.0',
        f'convoy_job_info{{name="tiny",spec_hash="{spec.hash}"}} 1.0',
        'convoy_checkpoint_duration_seconds_count{stage="stall",tier="memory"} 1.0',
        'convoy_checkpoint_duration_seconds_sum{stage="write",tier="shared"} 1.0',
        'convoy_checkpoint_duration_seconds_sum{stage="commit",tier="shared"} 1.5',
    ]:
        assert line in text.splitlines(), line
    assert generate_latest(registry).decode().count("convoy_build_info{") == 1


# ------------------------------------------------------------------------------------------------
# Two real ranks, each with metrics of its own.


HOST = socket.gethostname()
ROOT = Path(__file__).parents[3]


def pretrain_on_rank(rank: int, spec: str) -> tuple[int, str, dict[str, list[str]]]:
    """The exit code, what was printed, and what every rank served just before the last step."""
    found: dict[str, list[str]] = {}
    step = Trainer.step

    def scrape_then_step(self, stop_requested):
        if rank == 0 and self.progress.step == 5:
            for target in sorted(self.job.spec.run_path.glob("metrics/*.json")):
                ((one,), labels) = json.loads(target.read_text())[0].values()
                assert f"tiny-rank-{labels['process_rank']}.json" == target.name
                assert labels["run"] == "tiny"
                assert labels["instance"] == f"{HOST}:{self.job.spec.run_path.resolve()}"
                with urllib.request.urlopen(f"http://{one}/metrics") as response:
                    found[labels["process_rank"]] = response.read().decode().splitlines()
        return step(self, stop_requested)

    Trainer.step = scrape_then_step
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main([spec])
        except SystemExit as end:
            code = end.code
    return code, said.getvalue(), found


def value(lines: list[str], name: str) -> float:
    (line,) = (each for each in lines if each.partition(" ")[0] == name)
    return float(line.split()[1])


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("job"))


@pytest.mark.slow
def test_every_rank_serves_its_own_metrics_and_rank_0_the_runs(tmp_path, text):
    sections = {"data": data_of(text), "eval": {"sequences": 2}}
    metrics = {"port": 0, "all_ranks": True, "dollars_per_rank_hour": 2.0}
    spec = write_spec(tmp_path, metrics=metrics, **sections)
    (first, second) = run_ranks(pretrain_on_rank, 2, str(spec), group=False)
    assert (first[0], second[0]) == (0, 0), first[1] + second[1]
    assert "metrics at http://127.0.0.1:" in first[1]
    assert set(first[2]) == {"0", "1"}
    for rank, lines in first[2].items():
        assert value(lines, "convoy_rank_steps_total") == 5
        assert value(lines, "convoy_rank_step_seconds_total") > 0
        assert value(lines, "convoy_rank_memory_bytes") > 2**20
        assert any(
            f'convoy_rank_info{{device="cpu",host="{HOST}",rank="{rank}"}}' in line
            for line in lines
        )
    run, other = first[2]["0"], first[2]["1"]
    assert value(run, "convoy_step") == 5
    assert value(run, "convoy_ranks") == 2
    taken = events(tmp_path / "run", "step")[:5]
    targets = sum(step["target_tokens"] for step in taken)
    padding = 32 * sum(step["samples"] for step in taken) - targets
    assert value(run, "convoy_tokens_total") == targets > 0
    assert value(run, "convoy_data_padding_tokens_total") == padding
    assert value(run, 'convoy_rank_compute_seconds{rank="1"}') > 0
    assert value(run, "convoy_cost_dollars_total") > 0
    assert not any(line.startswith("convoy_step ") for line in other)
    assert list((tmp_path / "run" / "metrics").iterdir()) == [], "the servers are gone"
    intervals = events(tmp_path / "run", "interval")
    assert [len(each["rank_seconds"]) for each in intervals] == [2, 2, 2]
    assert all(len(each["layer_imbalances"]) == 2 for each in intervals)
    assert all(each["peak_memory_bytes"] > 2**20 for each in intervals)
    # Without z-loss and sequence loss; 1 is an even load, and 2 of 4 experts the worst.
    assert all(list(each["aux_losses"]) == ["load_balance"] for each in intervals)
    assert all(1 <= each["aux_losses"]["load_balance"] < 2 for each in intervals)
    assert all(
        each["aux_loss"] == pytest.approx(2 * 0.01 * each["aux_losses"]["load_balance"], rel=1e-4)
        for each in intervals
    )
    assert value(run, "convoy_moe_aux_loss") > 0


def test_a_port_that_is_taken_is_one_line(tmp_path, text):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        spec = write_spec(tmp_path, data=data_of(text), metrics={"port": port})
        ((code, said, _),) = run_ranks(pretrain_on_rank, 1, str(spec), group=False)
    assert code == 2
    wanted = f"error: metrics.host and metrics.port (127.0.0.1:{port}) cannot be listened on: "
    assert [line for line in said.splitlines() if "error" in line] == [
        wanted + "Address already in use; 0 takes a free port, -1 none"
    ]


def test_the_endpoint_serves_metrics_only_and_new_ones():
    registry = CollectorRegistry()
    gauge = Gauge("convoy_step", "A step.", registry=registry)
    endpoint = Endpoint(registry, "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(endpoint.url) as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert value(response.read().decode().splitlines(), "convoy_step") == 0
        gauge.set(7)

        def scrape() -> float:
            with urllib.request.urlopen(endpoint.url) as response:
                return value(response.read().decode().splitlines(), "convoy_step")

        eventually(lambda: scrape() == 7, "the new value is served")
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            urllib.request.urlopen(endpoint.url.replace("/metrics", "/etc/passwd"))
        refused.value.close()
        with pytest.raises(urllib.error.HTTPError, match="501") as refused:
            urllib.request.urlopen(endpoint.url, data=b"x")
        refused.value.close()
    finally:
        endpoint.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(endpoint.url)


@pytest.mark.parametrize(
    ("host", "port", "why"),
    [
        ("no.such.host.invalid", 0, "the host has no address"),
        ("127.0.0.1", 70_000, "there is no such port"),
    ],
)
def test_an_address_that_cannot_be_is_told(host, port, why):
    with pytest.raises(InputError, match=why):
        Endpoint(CollectorRegistry(), host, port)


def serve_and_wait(told: str) -> None:
    endpoint = Endpoint(CollectorRegistry(), "127.0.0.1", 0)
    Path(told).write_text(endpoint.url)
    time.sleep(600)


@pytest.mark.slow
def test_the_endpoint_of_a_killed_rank_is_gone(tmp_path):
    told = tmp_path / "url"
    code = f"import sys; from {__name__} import serve_and_wait; serve_and_wait(sys.argv[1])"
    rank = subprocess.Popen([sys.executable, "-c", code, str(told)], cwd=ROOT)
    try:
        eventually(lambda: told.exists() and told.read_text(), "the rank serves")
        url = told.read_text()
        with urllib.request.urlopen(url) as response:
            assert response.status == 200
        rank.send_signal(signal.SIGSTOP)  # a rank that hangs is still seen, with what it said last
        with urllib.request.urlopen(url, timeout=30) as response:
            assert response.status == 200
    finally:
        rank.kill()
        rank.wait()

    def gone() -> bool:
        try:
            urllib.request.urlopen(url, timeout=30).close()
        except urllib.error.URLError as error:
            return isinstance(error.reason, ConnectionRefusedError)
        except OSError:
            pass  # the server has lost the rank, and has not ended yet
        return False

    eventually(gone, "nobody serves for the rank that was killed")
