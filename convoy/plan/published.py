"""Failures of published training runs."""

from __future__ import annotations

from typing import NamedTuple

from convoy.plan.causes import Cause, Detection, Nature

LLAMA3_GPUS = 16_384
LLAMA3_DAYS = 54.0
LLAMA3_PLANNED = 47
"""Planned interruptions of the same days, for maintenance. ``LLAMA3`` leaves them out."""


class _Observed(NamedTuple):
    times: int
    nature: Nature
    detection: Detection


LLAMA3 = {
    "faulty GPU": _Observed(148, "replace", "crash"),
    "GPU HBM3 memory": _Observed(72, "replace", "crash"),
    "software bug": _Observed(54, "restart", "crash"),
    "network switch or cable": _Observed(35, "replace", "hang"),
    "host maintenance": _Observed(32, "replace", "crash"),
    "GPU SRAM memory": _Observed(19, "reboot", "crash"),
    "GPU system processor": _Observed(17, "reboot", "hang"),
    "NIC": _Observed(7, "replace", "hang"),
    "NCCL watchdog timeout": _Observed(7, "restart", "hang"),
    "silent data corruption": _Observed(6, "replace", "silent"),
    "GPU thermal interface": _Observed(6, "replace", "crash"),
    "SSD": _Observed(3, "replace", "crash"),
    "power supply": _Observed(3, "replace", "crash"),
    "server chassis": _Observed(2, "replace", "crash"),
    "IO expansion board": _Observed(2, "replace", "crash"),
    "dependency": _Observed(2, "restart", "crash"),
    "CPU": _Observed(2, "replace", "crash"),
    "system memory": _Observed(2, "replace", "crash"),
}
"""The 419 unexpected interruptions of Llama 3 405B in 54 days on 16,384 GPUs (arXiv 2407.21783,
table 5). The paper has the counts. What each cause needs, and how the cause shows, is Convoy's
reading: a network fault and a lost system processor show as a collective that hangs, and what the
driver reports as an error ends a process."""


def llama3_causes() -> dict[str, Cause]:
    """The causes of :data:`LLAMA3` as rates: count / (16,384 GPUs * 54 days * 24 h)."""
    gpu_hours = LLAMA3_GPUS * LLAMA3_DAYS * 24
    return {
        name: Cause(
            per_gpu_hour=seen.times / gpu_hours, nature=seen.nature, detection=seen.detection
        )
        for name, seen in LLAMA3.items()
    }
