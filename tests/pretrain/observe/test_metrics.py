"""What a fixed sequence of events makes of metrics, trackers and console is what it has been.

``METRICS_RECORDED`` has what Prometheus reads, families in the order of their names; then what a
tracker gets, the lines of the console, and the live view. ``python -m
tests.pretrain.observe.test_metrics``
writes the file anew.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console as Terminal

from docs.metrics_table import table
from parallel import Topology
from pretrain.observe import (
    CapacityPlanned,
    CheckpointCommitted,
    CheckpointFailed,
    Console,
    CorruptionFound,
    DataFetched,
    DeviceProblem,
    DevicesSampled,
    Evaluated,
    Event,
    FaultInjected,
    HealthAction,
    HealthSignal,
    IntervalEnded,
    Launched,
    LedgerSummed,
    LoggedEvent,
    Metrics,
    Notice,
    RankLossOdd,
    RankMetrics,
    RankMoves,
    RankStuck,
    Resized,
    Restored,
    RoutingReport,
    RunDone,
    RunFailed,
    RunStarted,
    RunStopped,
    SaveBegun,
    SpecChanged,
    StepCommitted,
    StepSkipped,
    StragglerEnded,
    StragglerFound,
    StragglerGain,
    Verified,
    ledger_of,
)
from pretrain.observe.console import progress_line
from pretrain.observe.events import EVENTS
from pretrain.observe.live import View
from pretrain.observe.metric import Metric, declared, metric
from pretrain.observe.prometheus import all_metrics
from pretrain.observe.tracking import values_of
from tests.support.jobs import make_spec

METRICS_RECORDED = Path(__file__).with_name("metrics_recorded.txt")
NOW = 1_700_000_000.25
COLLECTIVES = {("all_to_all", "ep"): 0.75, ("all_gather", "dp"): 0.5}
SIZES = {("all_to_all", "ep"): 4096, ("all_gather", "dp"): 512}
TOPOLOGY = {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "ep": 2}


def committed(step: int, **fields: object) -> StepCommitted:
    values: dict[str, object] = {
        "loss": 2.5 + 1 / step, "grad_norm": 0.7, "seconds": 0.5, "data_wait_seconds": 0.1,
        "rank_0_data_wait_seconds": 0.05, "lr": 0.01, "padding_tokens": 32, "target_tokens": 256,
        "tokens_seen": 256 * step, "consumed_samples": 9 * step, "slowest_rank_seconds": 0.4,
        "tokens_per_second": 512.0, "mfu": 0.5, "model_flops": 2e9,
        "communication_seconds": {"ep": 0.1, "world": 0.02},
        "exposed_seconds": {"ep": 0.05, "world": 0.01}, "collective_seconds": COLLECTIVES,
        "collective_bytes": SIZES,
    }  # fmt: skip
    return StepCommitted(step=step, **values | fields)


def interval(step: int, **fields: object) -> IntervalEnded:
    values: dict[str, object] = {
        "loss": 2.75, "lr": 0.01, "grad_norm": 0.7, "tokens_per_second": 512.0, "mfu": 0.5,
        "seconds": 8.0, "tokens_seen": 256 * step, "communication_seconds": {"ep": 2.0},
        "exposed_seconds": {},
    }  # fmt: skip
    return IntervalEnded(step=step, **values | fields)


ROUTING = RoutingReport(
    layers=[1, 2], tokens_per_expert=[[4, 0], [2, 2]], entropies=[0.5, 0.6], dropped=[3, 0],
    rerouted=[4, 0], copied=[5, 6], bias_abs_max=0.25, rank_imbalance=1.5, aux_loss=0.03125,
    aux_losses={"load_balance": [1.5, 1.0], "sequence_balance": [0.0, 0.25], "z": [2.0, 3.0]},
)  # fmt: skip
FULL = {
    "loss": 2.5, "exposed_seconds": {"dp": 0.5, "ep": 1.0, "world": 0.8}, "routing": ROUTING,
    "capacity_shares": [1.5, 0.5], "relative_speeds": [1.25, 0.75], "rank_seconds": [0.25, 0.5],
    "source_tokens": {"web": 96, "code": 32}, "peak_memory_bytes": 3 << 20, "aux_loss": 0.0123,
    "aux_losses": {"load_balance": 1.25, "z": 2.5}, "mtp_losses": [3.5, 4.5], "padding": 0.034,
    "bubble": 0.25, "bubble_formula": 0.2, "load_imbalance": 1.41, "router_entropy": 0.5,
    "dropped": 3, "rerouted": 4000, "layer_imbalances": [1.0, 2.5],
    "float8_underflow": {"experts.gradients": 0.125, "dense.inputs": 0.5},
    "float8_overflow": {"experts.gradients": 2}, "expert_loads": {"1": [200, 0]},
    "load_quantiles": {"p50": 1.0, "p90": 1.5, "p99": 1.75, "max": 2.0},
}  # fmt: skip


def sequence() -> Iterator[Event]:
    """A run of six steps in which nearly everything happens."""
    yield Launched(step=0, process_start=1234.5)
    yield Restored(step=1, tier="shared", seconds=3.0)
    yield Restored(step=1, tier="memory", seconds=1.5)
    yield Resized(step=1, epoch=3, before=TOPOLOGY, after=TOPOLOGY, save_id="a")
    yield SpecChanged(step=1, field="train.steps", before=4, now=6)
    yield RunStarted(
        step=1, job="tiny", world_size=2, topology=TOPOLOGY, parameters=1234, steps=6,
        step_tokens=256, launch_id="a", topology_epoch=3, layout="ep 2", device="cpu",
        metrics_url="http://127.0.0.1:1/metrics", spares=1, layout_reason="two ranks are left",
    )  # fmt: skip
    yield committed(2)
    yield committed(3, padding_tokens=None)
    for reason in ("not_finite", "overflow", "loss_spike"):
        yield StepSkipped(
            step=3, loss=float("nan"), grad_norm=0.7, seconds=0.25, reason=reason, why="of a test",
            overflow=reason == "overflow", collective_seconds=COLLECTIVES,
        )  # fmt: skip
    yield interval(3)
    yield interval(4, **FULL)
    yield interval(5, dropped=0, rerouted=0, source_tokens={"web": 4}, routing=ROUTING,
                   float8_overflow={"experts.gradients": 1}, aux_loss=0.5)  # fmt: skip
    yield interval(5, rank_seconds=[0.5, 0.75], mtp_losses=[], exposed_seconds={"pp": 2.0})
    yield Evaluated(step=5, loss=2.25, bits_per_byte=1.125, bits_per_byte_by_set={"web": 1.0})
    yield Evaluated(step=5, loss=2.125, bits_per_byte=1.0, whole=True)
    yield HealthSignal(
        step=5, rule="loss_spike", observed=9.0, usual=2.0, limit=4.0, text="a spike"
    )
    yield HealthAction(step=5, rule="loss_spike", action="go_back", occurrence=1, text="goes back")
    yield FaultInjected(step=5, kind="hang", rank=1, text="rank 1 hangs")
    yield DataFetched(step=5, cache_hits=3, cache_misses=1, fetched_bytes=4096, retries=2)
    yield DataFetched(step=5, cache_hits=8, cache_misses=0, fetched_bytes=0, retries=0)
    yield CapacityPlanned(step=5, plans=[[1536, 512]])
    yield StragglerFound(step=5, rank=1, speed=0.5, z=9.0, since_step=3, stage=1, action="less")
    yield StragglerFound(step=5, rank=0, speed=0.75, z=9.0, since_step=3, stage=1, action="less")
    yield StragglerEnded(step=5, rank=1, speed=0.5, since_step=3)
    yield StragglerEnded(step=5, rank=7, speed=0.5, since_step=3)
    yield StragglerGain(step=5, stage=1, seconds_before=2.0, seconds_after=1.5, kept=False)
    yield Verified(step=5, kind="parameters", seconds=0.5)
    yield Verified(step=5, kind="gradients", seconds=0.25)
    yield CorruptionFound(
        step=5, kind="gradients", ranks=[1], machines=["a"], certain=True, stops=False, text="bad"
    )
    for ranks in ([1, 2, 3], [5]):
        yield RankStuck(
            step=5, ranks=ranks, phase="data", seconds=40.0, limit_seconds=30.0,
            has_heartbeat=True, text="stuck in data",
        )  # fmt: skip
    yield RankMoves(step=5, ranks=[1, 2])
    yield RankLossOdd(step=5, rank=2, loss=4.0, usual_loss=3.0, z=9.0, steps=32)
    yield DeviceProblem(step=5, rank=2, device="GPU-1", text="Xid 79")
    used = {"utilization_of_rank": {0: 0.5, 3: 0.25}, "memory_bytes_of_rank": {3: 1024}}
    yield DevicesSampled(step=5, **used, energy_joules_of_rank={0: 1.0, 3: 10.0})
    yield DevicesSampled(step=5, energy_joules_of_rank={0: 0.5, 3: 12.5})
    yield SaveBegun(step=5, stall_seconds=0.1, tiers=["memory", "shared"])
    yield SaveBegun(step=5, stall_seconds=0.2, tiers=[])
    yield CheckpointCommitted(step=5, tier="shared", seconds=1.5, write_seconds=1.0)
    yield CheckpointFailed(step=5, tier="local", error="disk full", in_a_row=3)
    yield Notice(step=5, text="by the way")
    yield LedgerSummed(
        step=5, wall_seconds=10.0, goodput=0.5, step_share=0.75, seconds={"productive": 5.0},
        lost_seconds={}, restarts={},
    )  # fmt: skip
    yield committed(6)
    yield interval(6, exposed_seconds={"ep": 4.0}, layer_imbalances=[1.0, 1.5], tokens_seen=1536)
    yield RunStopped(step=6, cause="notice_file")
    yield RunFailed(step=6, state="crashed", reason="of a test")
    yield RunDone(step=6)


def former() -> list[LoggedEvent]:
    """The lines of a start before."""
    lines: list[Event] = [
        RunStarted(step=0, world_size=4, topology={}, parameters=1, launch_id="b"),
        committed(1),
        CheckpointCommitted(step=1, tier="local", seconds=1.5, write_seconds=1.0),
        StepSkipped(step=1, loss=1.0, grad_norm=0.7, seconds=0.25, reason="overflow"),
        Resized(step=1, epoch=2, before=TOPOLOGY, after=TOPOLOGY, save_id="a"),
    ]
    return [LoggedEvent(line, 1000.0 + number) for number, line in enumerate(lines)]


def scraped(registry: CollectorRegistry, before: str = "") -> str:
    """What Prometheus reads, families in the order of their names; those of ``before`` left out."""
    text = generate_latest(registry).decode()
    text = re.sub(r'(spec_hash|version|torch_version)="[^"]*"', r'\1="..."', text)
    text = re.sub(r"(?m)^(convoy_rank_memory_bytes) .*", r"\1 ...", text)
    families = re.split(r"(?m)^(?=# HELP )", text)
    fresh = [family for family in families if family not in before]
    return "".join(sorted(fresh, key=lambda family: family.split()[2:3]))


def recorded(folder: Path) -> str:
    """Everything that a sink makes of the sequence."""
    spec = make_spec(folder, metrics={"dollars_per_rank_hour": 2.0})
    registry, ranks = CollectorRegistry(), CollectorRegistry()
    ledger = ledger_of(former())
    with mock.patch.object(time, "time", return_value=NOW):
        metrics = Metrics(
            registry, spec, Topology(dp_shard=2, ep=2), "1.0", ledger=lambda: ledger,
            former=former(),
        )  # fmt: skip
        rank = RankMetrics(ranks, rank=1, host="here", device="cpu")
        before = scraped(registry) + scraped(ranks)
        parts = ["-- before the first event", before]
        for event in sequence():
            metrics(event)
            rank(event)
        parts += ["-- after the last event", scraped(registry, before)]
        parts += ["-- of a rank", scraped(ranks, before)]
        empty = CollectorRegistry()
        Metrics(empty, make_spec(folder), Topology(), "1.0")
        parts += ["-- of a run without a price and a past", scraped(empty, before)]
    parts.append("-- trackers")
    for event in sequence():
        if values := values_of(event):
            parts += [f"{event.name} {event.step} {sorted(values.items())}"]
    for number in (0, 1):
        parts.append(f"-- console of rank {number}")
        console, said = Console(6, number), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            for event in sequence():
                console(event)
        parts.append(re.sub(r"(?m)  \d\d:\d\d:\d\d$", "  HH:MM:SS", said.getvalue()))
    parts.append("-- live view")
    view, out = View(6, lambda: 100.0, wall=lambda: NOW), io.StringIO()
    terminal = Terminal(file=out, width=110, force_terminal=True, color_system=None)
    for event in sequence():
        view.take(event)
        if isinstance(event, IntervalEnded):
            terminal.print(view.drawing())
    parts.append(re.sub(r"\d\d:\d\d:\d\d", "HH:MM:SS", out.getvalue()))
    return "\n".join(parts)


def test_metrics_trackers_and_console_are_what_they_have_been(tmp_path):
    assert recorded(tmp_path) == METRICS_RECORDED.read_text()


def test_a_metric_of_an_interval_is_one_field(tmp_path, monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Warmer(IntervalEnded):
        temperatures: dict[int, float] = metric(
            "convoy_temperature_kelvin", "gauge", "kelvin", "Temperature of a rank.",
            labels=("rank",), tracker="machine/temperature_{}", short="rank {key} {:.1f} K",
            live=("heat", "{:.0f} K"), default_factory=dict,
        )  # fmt: skip

    monkeypatch.setitem(EVENTS, "interval", Warmer)
    registry = CollectorRegistry()
    metrics = Metrics(registry, make_spec(tmp_path), Topology(), "1.0")
    event = Warmer(**vars(interval(4)), temperatures={0: 300.0, 3: 301.5})
    metrics(event)
    assert registry.get_sample_value("convoy_temperature_kelvin", {"rank": "3"}) == 301.5
    assert values_of(event)["machine/temperature_0"] == 300.0
    assert progress_line(event, 6).endswith("  rank 0 300.0 K  rank 3 301.5 K")
    assert "| `convoy_temperature_kelvin{rank}` | gauge | kelvin |" in table(all_metrics())
    view, out = View(6, lambda: 100.0), io.StringIO()
    view.take(committed(4))
    view.take(event)
    Terminal(file=out, width=110).print(view.drawing())
    assert re.search(r"heat +300 K   302 K", out.getvalue())


def test_declarations_of_one_name_agree():
    seen: dict[str, Metric] = {}
    for kind in EVENTS.values():
        for _, declaration in declared(kind):
            shared = replace(declaration, value=None, former=False)
            assert not shared.name or seen.setdefault(shared.name, shared) == shared
    assert len(seen) > 60


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        METRICS_RECORDED.write_text(recorded(Path(folder)))
