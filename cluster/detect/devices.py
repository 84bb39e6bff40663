"""The health of a rank's NVIDIA GPU, by NVML: Xid errors, ECC errors, throttling, and use.

NVML is asked through the package nvidia-ml-py, where that and a driver are there. Tests hand in an
object with NVML's functions: no GPU has failed in a run of this file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_READ_SECONDS = 10.0
_MOST_PROBLEMS = 20
_SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""Bits of NVML's clocks event reasons that are no ordinary work: a software power cap (0x04) is."""


@dataclass(frozen=True)
class DeviceReport:
    """What NVML says of one device; a value that the device does not know is None."""

    uuid: str
    utilization: float | None = None
    """Share of the last sample period in which a kernel ran, 0 to 1."""
    memory_bytes: int | None = None
    """Used, by all processes."""
    temperature: float | None = None
    """In degrees Celsius."""
    energy_joules: float | None = None
    """That the device has used since the start of this process."""
    problems: tuple[str, ...] = ()
    """All since the start of this process, oldest first; the first 20."""


class DeviceMonitor:
    """Watches one GPU.

    Args:
        nvml: the module pynvml of nvidia-ml-py, after ``nvmlInit``.
        uuid: of the device, as ``GPU-...``.
        now: the time in seconds.

    Raises the NVMLError of ``nvml`` where there is no such device.
    """

    def __init__(self, nvml: Any, uuid: str, now: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self.uuid, self._now = nvml, uuid, now
        self._device = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._problems: list[str] = []
        self._ecc_before = self._uncorrected()
        self._energy_before = self._energy()
        self._slowdowns: set[int] = set()
        self._xids: Any = None
        with suppress(nvml.NVMLError):  # some devices report no events
            xids = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._device, nvml.nvmlEventTypeXidCriticalError, xids)
            self._xids = xids
        self._read_at = float("-inf")
        self._report = DeviceReport(uuid)

    @staticmethod
    def open(uuid: str, nvml: Any = None) -> DeviceMonitor | None:
        """Watch a device; None without nvidia-ml-py, without a driver or without the device.

        Args:
            uuid: of the device.
            nvml: stands for the module pynvml.
        """
        if nvml is None:
            try:
                import pynvml
            except ImportError:
                return None
            nvml = pynvml
        try:
            nvml.nvmlInit()
            return DeviceMonitor(nvml, uuid)
        except nvml.NVMLError:
            return None

    def report(self) -> DeviceReport:
        """The device's state, at most 10 seconds old."""
        now = self._now()
        if now - self._read_at < _READ_SECONDS:
            return self._report
        self._read_at = now
        nvml, device = self._nvml, self._device
        self._look_for_xids()
        self._look_for_ecc()
        self._look_for_slowdowns()
        use = self._asked(nvml.nvmlDeviceGetUtilizationRates, device)
        memory = self._asked(nvml.nvmlDeviceGetMemoryInfo, device)
        energy, before = self._energy(), self._energy_before
        self._report = DeviceReport(
            self.uuid,
            utilization=None if use is None else use.gpu / 100,
            memory_bytes=None if memory is None else int(memory.used),
            temperature=self._asked(
                nvml.nvmlDeviceGetTemperature, device, nvml.NVML_TEMPERATURE_GPU
            ),
            energy_joules=None if energy is None or before is None else (energy - before) / 1000,
            problems=tuple(self._problems),
        )
        return self._report

    def _asked(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """NVML's answer; None where the device does not know, or is lost."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None

    def _note(self, problem: str) -> None:
        if len(self._problems) < _MOST_PROBLEMS:
            self._problems.append(problem)

    def _look_for_xids(self) -> None:
        for _ in range(_MOST_PROBLEMS):
            # Without an event within 0 ms NVML raises NVML_ERROR_TIMEOUT.
            event = None if self._xids is None else self._asked(
                self._nvml.nvmlEventSetWait_v2, self._xids, 0
            )  # fmt: skip
            if event is None:
                return
            self._note(f"Xid {int(event.eventData)}")

    def _energy(self) -> int | None:
        """Millijoules since the driver was loaded; devices before Volta do not count them."""
        count = self._asked(self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._device)
        return None if count is None else int(count)

    def _uncorrected(self) -> int | None:
        nvml = self._nvml
        count = self._asked(
            nvml.nvmlDeviceGetTotalEccErrors,
            self._device,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        )
        return None if count is None else int(count)

    def _look_for_ecc(self) -> None:
        count, before = self._uncorrected(), self._ecc_before
        if count is not None and count > (before or 0):
            self._note(f"{count - (before or 0)} new uncorrected ECC errors")
            self._ecc_before = count

    def _look_for_slowdowns(self) -> None:
        reasons = self._asked(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons, self._device)
        if reasons is None:
            return
        active = {bit for bit in _SLOWDOWNS if int(reasons) & bit}
        for bit in sorted(active - self._slowdowns):
            self._note(_SLOWDOWNS[bit])
        self._slowdowns |= active  # told once: a hot machine goes in and out of it
