"""What sees the events of a run on this rank: console, log, metrics, ledger, trackers."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from prometheus_client import CollectorRegistry

from parallel import Topology
from parallel.version import VERSION
from pretrain.observe import (
    Console,
    Endpoint,
    Events,
    JsonlLog,
    LiveConsole,
    LiveLedger,
    LoggedEvent,
    Metrics,
    RankMetrics,
    local_port,
    on_terminal,
    open_trackers,
)
from pretrain.runtime import Runtime
from pretrain.spec import JobSpec


def log_path(spec: JobSpec) -> Path:
    """The log of a run's events."""
    return spec.run_path / "log.jsonl"


def open_console(steps: int, runtime: Runtime, *, plain: bool) -> Console:
    """Lines, or on rank 0's terminal a view, unless ``plain``."""
    drawn = runtime.is_first and on_terminal(plain=plain)
    return LiveConsole(steps) if drawn else Console(steps, runtime.rank)


def open_sinks(
    spec: JobSpec,
    topology: Topology,
    events: Events,
    *,
    former: Sequence[LoggedEvent],
    sinks: ExitStack,
) -> tuple[CollectorRegistry, LiveLedger]:
    """Let the log, the metrics and the ledger have the run's events.

    Returns the registry of the metrics, and the ledger.
    """
    log = JsonlLog(log_path(spec))
    sinks.callback(log.close)
    events.subscribe(log)
    ledger = LiveLedger(former, log, events)
    registry = CollectorRegistry()
    events.subscribe(
        Metrics(registry, spec, topology, VERSION, ledger=ledger.ledger, former=former)
    )
    events.subscribe(ledger)
    for tracking in open_trackers(spec.tracking, spec.run_path):
        sinks.callback(tracking.close)
        events.subscribe(tracking)
    return registry, ledger


def serve_metrics(
    spec: JobSpec,
    runtime: Runtime,
    events: Events,
    *,
    registry: CollectorRegistry,
    sinks: ExitStack,
) -> str | None:
    """Serve the registry of rank 0, and of every rank where the spec says so; returns where."""
    config = spec.metrics
    if config.port < 0 or not (runtime.is_first or config.all_ranks):
        return None
    rank, host = runtime.rank, socket.gethostname()
    if config.all_ranks:
        device = str(runtime.device)
        events.subscribe(RankMetrics(registry, rank=rank, host=host, device=device))
    port = local_port(config.port) if config.all_ranks else config.port
    endpoint = Endpoint(registry, config.host, port)
    sinks.callback(endpoint.close)
    targets = Path(config.targets_dir or spec.run_path / "metrics")
    endpoint.announce(targets, spec.name, rank=rank, run_dir=spec.run_path)
    return endpoint.url
