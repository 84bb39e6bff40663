"""``torch.cuda`` without a GPU: devices, streams and events that are there and do nothing."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch

# An H100's, as NVIDIA has published them.
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 << 30, uuid=None,
    multi_processor_count=132, warp_size=32, max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=233472, L2_cache_size=50 << 20,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, gcnArchName="",
)  # fmt: skip


ON_WAIT: list[Callable[[str], None]] = []
"""Called with the name of what the host waits for."""


def _wait(what: str) -> None:
    for note in ON_WAIT:
        note(what)


class Stream(torch.Stream):
    """The only stream."""

    cuda_stream = 0

    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Stream:
        return super().__new__(cls, stream_id=0, device_index=0, device_type=1)

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def synchronize(self) -> None:
        _wait("stream")

    def query(self) -> bool:
        return True


class Event:
    """An event that is over."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _wait("event")

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class _Device(contextlib.nullcontext):
    def __init__(self, device: Any = None) -> None:
        super().__init__()


def install(devices: int) -> None:
    """Have ``torch.cuda`` say that there are so many devices, all of which are the first."""
    stream = Stream()
    said: dict[str, Any] = {
        "is_available": True, "device_count": devices, "current_device": 0, "init": None,
        "set_device": None, "is_initialized": True, "_lazy_init": None, "current_stream": stream,
        "default_stream": stream, "stream": contextlib.nullcontext(), "set_stream": None,
        "get_device_name": PROPERTIES.name, "get_device_properties": PROPERTIES,
        "get_device_capability": (PROPERTIES.major, PROPERTIES.minor),
        "mem_get_info": (PROPERTIES.total_memory,) * 2, "max_memory_allocated": 0,
        "memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0,
        "reset_peak_memory_stats": None, "empty_cache": None, "is_bf16_supported": True,
        "manual_seed": None, "manual_seed_all": None, "is_current_stream_capturing": False,
        "check_error": None, "_is_in_bad_fork": False,
    }  # fmt: skip
    for name, value in said.items():
        setattr(torch.cuda, name, lambda *_, _value=value, **__: _value)
    torch.cuda.synchronize = lambda device=None: _wait("device")
    torch.cuda.memory_stats = lambda device=None: {}
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    for name, kind in {"Stream": Stream, "Event": Event, "ExternalStream": Stream}.items():
        setattr(torch.cuda, name, kind)
    torch.cuda.device = _Device
    torch.accelerator.current_stream = lambda device=None: stream
