"""The watch over the ranks of a run by their heartbeats, and what is done about a stuck rank."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import fmean

import torch

from cluster.detect import (
    DeviceMonitor,
    DeviceReport,
    HeartbeatPublisher,
    PhaseLimits,
    StuckRanks,
    StuckWatch,
    dump_collectives,
    publish_seconds,
)
from pretrain.errors import EXIT_LOST
from pretrain.observe import DeviceProblem, DevicesSampled, Event, RankMoves, RankStuck
from pretrain.parts.rank_watch.config import DetectionConfig
from pretrain.runtime import Runtime

_SILENT_PUBLICATIONS = 5
_SAMPLE_SECONDS = 60.0
_KEPT_LAUNCHES = 8
"""Launches whose dumps of collectives are kept, the present one not counted."""


@contextmanager
def watch_ranks(
    runtime: Runtime,
    config: DetectionConfig,
    *,
    timeout_seconds: float,
    run_path: Path,
    publish: Callable[[Event], None],
) -> Iterator[None]:
    """Publish this rank's heartbeat, and on rank 0 watch all heartbeats.

    Where a collective fails on any rank, this rank's last collectives are written to
    ``RUN_DIR/flight/LAUNCH/rank-N.json``.

    Args:
        runtime: this rank.
        config: when a rank is stuck.
        timeout_seconds: of a step's collectives.
        run_path: the run's folder.
        publish: takes the events.
    """
    folder = flight_folder(run_path, runtime.launch_id)
    if runtime.is_first:
        _remove_old(folder.parent)
    if runtime.hang_report is not None:
        runtime.hang_report.before_answer = lambda: _dump(folder, runtime)
    limits = PhaseLimits.of_run(config.stuck_seconds, timeout_seconds)
    seconds = publish_seconds(runtime.world, timeout_seconds)
    # Where replicas heal, the processes of a stuck replica are ended from outside.
    end = _end_process if config.end_stuck_run and runtime.lose is None else None

    def tell(stuck: StuckRanks) -> None:
        publish(_stuck(stuck, config))
        if runtime.lose is not None:
            runtime.lose(stuck.ranks, stuck.describe())

    with ExitStack() as held:
        publisher = HeartbeatPublisher(
            runtime.store("heartbeat"),
            runtime.rank,
            heartbeat=runtime.heartbeat,
            monitor=runtime.comm_monitor,
            limits=limits,
            seconds=seconds,
            end=end,
            device=_open_device(runtime.device),
        )
        held.callback(publisher.close)
        if runtime.is_first:
            watch = StuckWatch(
                runtime.store("heartbeat"),
                runtime.world,
                seconds=seconds,
                silence_limit=max(limits.least_seconds, _SILENT_PUBLICATIONS * seconds),
                tell=tell,
                tell_moving=lambda ranks: publish(
                    RankMoves(step=runtime.heartbeat.place.step, ranks=ranks)
                ),
                end=end,
                take_devices=DeviceReports(publish, step=lambda: runtime.heartbeat.place.step).take,
            )
            held.callback(watch.close)
        yield


class DeviceReports:
    """Publishes what GPUs report: each problem once, and all values once in a minute.

    Args:
        publish: takes the events.
        step: the committed steps now.
        now: the time in seconds.
    """

    def __init__(
        self,
        publish: Callable[[DeviceProblem | DevicesSampled], None],
        *,
        step: Callable[[], int],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._publish, self._step, self._now = publish, step, now
        self._published: dict[int, int] = {}
        """The number of published problems, by rank."""
        self._sample_at = now()

    def take(self, reports: Mapping[int, DeviceReport]) -> None:
        """Take in the newest reports, by rank."""
        for rank, report in reports.items():
            for text in report.problems[self._published.get(rank, 0) :]:
                self._publish(
                    DeviceProblem(step=self._step(), rank=rank, device=report.uuid, text=text)
                )
            self._published[rank] = len(report.problems)
        if reports and self._now() >= self._sample_at:
            self._sample_at = self._now() + _SAMPLE_SECONDS
            self._sample(reports)

    def _sample(self, reports: Mapping[int, DeviceReport]) -> None:
        used = {r: d.utilization for r, d in reports.items() if d.utilization is not None}
        memory = {r: d.memory_bytes for r, d in reports.items() if d.memory_bytes is not None}
        energy = {r: d.energy_joules for r, d in reports.items() if d.energy_joules is not None}
        heat = [d.temperature for d in reports.values() if d.temperature is not None]
        self._publish(
            DevicesSampled(
                step=self._step(),
                utilization_min=min(used.values(), default=None),
                utilization_mean=fmean(used.values()) if used else None,
                memory_bytes_max=max(memory.values(), default=None),
                temperature_max=max(heat, default=None),
                energy_joules=sum(energy.values()) if energy else None,
                utilization_of_rank=used,
                energy_joules_of_rank=energy,
                memory_bytes_of_rank=memory,
            )
        )


def _open_device(device: torch.device) -> DeviceMonitor | None:
    if device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    # Not by its number: CUDA_VISIBLE_DEVICES renumbers the devices of PyTorch, not those of NVML.
    return None if uuid is None else DeviceMonitor.open(f"GPU-{uuid}")


def flight_folder(run_path: Path, launch_id: str) -> Path:
    """Where the ranks of a launch write their last collectives."""
    return run_path / "flight" / launch_id


def _dump(folder: Path, runtime: Runtime) -> None:
    with suppress(Exception):  # the report of the lost rank is worth more
        dump_collectives(folder, runtime.rank, runtime.comm_monitor.waits_in_group)


def _remove_old(parent: Path) -> None:
    with suppress(OSError):
        launches = sorted(parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for old in launches[:-_KEPT_LAUNCHES]:
            shutil.rmtree(old, ignore_errors=True)


def _stuck(stuck: StuckRanks, config: DetectionConfig) -> RankStuck:
    return RankStuck(
        step=stuck.step,
        ranks=list(stuck.ranks),
        phase=stuck.phase,
        seconds=stuck.seconds,
        limit_seconds=stuck.limit_seconds,
        has_heartbeat=stuck.has_heartbeat,
        place=stuck.place,
        ends_run=config.end_stuck_run,
        text=stuck.describe(),
    )


def _end_process() -> None:
    """End this process at once, from any thread: the training thread may never come back."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_LOST)
