"""What can fail, how often, and what a failure takes away; the failures of a published run."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field

from corpus.config import Section

Nature = Literal["restart", "reboot", "replace"]
"""What a failure needs: the processes start again, the node boots again, or another node takes the
failed node's place."""
Detection = Literal["crash", "hang", "silent"]
"""How a failure shows: a process ends, a collective does not end, or numbers are wrong."""


class Cause(Section):
    """One cause of failures, ``[failures.causes.NAME]``: a Poisson process."""

    per_gpu_hour: float | None = Field(default=None, ge=0, le=1)
    """Failures of one GPU in an hour."""
    per_node_hour: float | None = Field(default=None, ge=0, le=10)
    """Failures of one node in an hour; in place of ``per_gpu_hour``."""
    nature: Nature
    """What the failure needs: ``restart`` of the processes, ``reboot`` of the node, or ``replace``:
    another node."""
    detection: Detection
    """How the failure shows: ``crash`` (a process ends), ``hang`` (a collective does not end), or
    ``silent`` (numbers are wrong, and a check finds out later)."""

    def per_hour(self, gpus: int, nodes: int) -> float:
        """Failures in an hour of ``gpus`` GPUs in ``nodes`` nodes."""
        return (self.per_gpu_hour or 0.0) * gpus + (self.per_node_hour or 0.0) * nodes


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
