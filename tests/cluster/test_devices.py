"""What a GPU reports, with a stand-in for NVML whose names are those of nvidia-ml-py."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from cluster.detect import DeviceMonitor, DeviceReport, Heartbeat, HeartbeatPublisher, PhaseLimits
from cluster.detect.heartbeat import Pulse
from parallel import CommMonitor
from pretrain.observe import DeviceProblem, DevicesSampled
from pretrain.parts.rank_watch.watch import DeviceReports


class NVMLError(Exception):
    pass


class Nvml:
    """One healthy device; a test changes its values. None stands for 'not supported'."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU, NVML_VOLATILE_ECC, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 0, 1
    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        self.use, self.used, self.heat, self.ecc, self.reasons = 93, 7 << 30, 61, 5, 0x04
        self.millijoules = 9_000_000
        self.xids: list[int] = []

    def _value(self, value):
        if value is None:
            raise NVMLError("not supported")
        return value

    def nvmlInit(self):
        return None

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return self._value("device" if uuid == "GPU-1" else None)

    def nvmlEventSetCreate(self):
        return "set"

    def nvmlDeviceRegisterEvents(self, device, kinds, events):
        assert (device, kinds, events) == ("device", 8, "set")

    def nvmlEventSetWait_v2(self, events, milliseconds):
        return SimpleNamespace(eventData=self._value(self.xids.pop(0) if self.xids else None))

    def nvmlDeviceGetUtilizationRates(self, device):
        return SimpleNamespace(gpu=self._value(self.use))

    def nvmlDeviceGetMemoryInfo(self, device):
        return SimpleNamespace(used=self._value(self.used))

    def nvmlDeviceGetTemperature(self, device, sensor):
        return self._value(self.heat)

    def nvmlDeviceGetTotalEnergyConsumption(self, device):
        return self._value(self.millijoules)

    def nvmlDeviceGetTotalEccErrors(self, device, kind, counter):
        assert (kind, counter) == (1, 0)
        return self._value(self.ecc)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device):
        return self._value(self.reasons)


def test_a_healthy_device_has_its_use_and_no_problems():
    nvml = Nvml()
    monitor = DeviceMonitor.open("GPU-1", nvml)
    assert monitor is not None
    nvml.millijoules += 12_500
    # Five old ECC errors and a software power cap are no news; nor is energy of before.
    assert monitor.report() == DeviceReport("GPU-1", 0.93, 7 << 30, 61, 12.5)


def test_problems_are_noted_once_and_reads_are_far_apart():
    nvml, times = Nvml(), [0.0]
    monitor = DeviceMonitor(nvml, "GPU-1", now=lambda: times[0])
    nvml.xids, nvml.ecc, nvml.reasons = [79, 48], 7, 0x44
    found = ("Xid 79", "Xid 48", "2 new uncorrected ECC errors", "hardware thermal slowdown")
    assert monitor.report().problems == found
    nvml.ecc = 8
    times[0] = 9.0
    assert monitor.report().problems == found
    times[0] = 11.0
    assert monitor.report().problems == (*found, "1 new uncorrected ECC errors")


@pytest.mark.parametrize("field", ["use", "used", "heat", "millijoules", "ecc", "reasons"])
def test_what_a_device_does_not_know_is_none(field):
    nvml = Nvml()
    setattr(nvml, field, None)
    report = DeviceMonitor(nvml, "GPU-1").report()
    assert report.problems == ()
    named = {"use": report.utilization, "used": report.memory_bytes, "heat": report.temperature,
             "millijoules": report.energy_joules}  # fmt: skip
    assert [name for name, value in named.items() if value is None] == [field] * (field in named)


def test_nothing_is_watched_without_a_device_a_driver_or_the_package(monkeypatch):
    assert DeviceMonitor.open("GPU-2", Nvml()) is None
    nvml = Nvml()
    nvml.nvmlInit = lambda: nvml._value(None)
    assert DeviceMonitor.open("GPU-1", nvml) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert DeviceMonitor.open("GPU-1") is None


def test_heartbeats_bring_reports_to_rank_0():
    store, nvml = HashStore(), Nvml()
    nvml.xids = [79]
    HeartbeatPublisher(
        store, 3, heartbeat=Heartbeat(), monitor=CommMonitor(), limits=PhaseLimits(9.0, 9.0),
        seconds=0.01, device=DeviceMonitor(nvml, "GPU-1"),
    ).close()  # fmt: skip
    pulse = Pulse.decode(store.get("3"))
    assert pulse.device == DeviceReport("GPU-1", 0.93, 7 << 30, 61, 0.0, ("Xid 79",))


def test_each_problem_is_published_once_and_samples_a_minute_apart():
    published, times = [], [0.0]
    reports = DeviceReports(published.append, step=lambda: 7, now=lambda: times[0])
    hot = DeviceReport("GPU-9", 0.5, 100, 90.0, 2.0, ("Xid 79",))
    reports.take({0: DeviceReport("GPU-1", 1.0, 300, None, 1.5), 3: hot})
    reports.take({3: hot})
    times[0] = 61.0
    reports.take({3: DeviceReport("GPU-9", 0.5, 100, 90.0, None, ("Xid 79", "Xid 48"))})
    problems = [(e.rank, e.text) for e in published if isinstance(e, DeviceProblem)]
    assert problems == [(3, "Xid 79"), (3, "Xid 48")]
    first, second = (e for e in published if isinstance(e, DevicesSampled))
    assert first.utilization_of_rank == {0: 1.0, 3: 0.5}
    assert (first.utilization_min, first.utilization_mean) == (0.5, 0.75)
    assert (first.memory_bytes_max, first.temperature_max) == (300, 90.0)
    assert second.memory_bytes_of_rank == {3: 100}
    assert (first.energy_joules, first.energy_joules_of_rank) == (3.5, {0: 1.5, 3: 2.0})
    assert (second.energy_joules, second.energy_joules_of_rank) == (None, {})
