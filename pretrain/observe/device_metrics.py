"""Prometheus metrics of GPUs, by NVML."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from pretrain.observe.rank_events import DevicesSampled


class DeviceMetrics:
    """Keeps what NVML says of the GPU of each rank in an injected registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.utilization = Gauge(
            "convoy_gpu_utilization_ratio",
            "Share of time in which the GPU of a rank ran kernels.",
            ["rank"],
            registry=registry,
        )
        self.memory = Gauge(
            "convoy_gpu_memory_bytes", "Used memory of the GPU of a rank.", ["rank"],
            registry=registry,
        )  # fmt: skip
        self.energy = Counter(
            "convoy_gpu_energy_joules_total",
            "Energy that the GPU of a rank used in this start.",
            ["rank"],
            registry=registry,
        )
        self._joules: dict[int, float] = {}

    def __call__(self, event: DevicesSampled) -> None:
        """Publish one sample of all GPUs."""
        for rank, share in event.utilization_of_rank.items():
            self.utilization.labels(str(rank)).set(share)
        for rank, count in event.memory_bytes_of_rank.items():
            self.memory.labels(str(rank)).set(count)
        for rank, joules in event.energy_joules_of_rank.items():
            used = joules - self._joules.get(rank, 0.0)
            self.energy.labels(str(rank)).inc(max(0.0, used))
            self._joules[rank] = joules
