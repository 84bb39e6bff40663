"""Numbers on their way between a device and the host, without a wait of the device's queue.

A copy of a tensor to the host waits for all kernels that were launched before the copy, and nothing
is queued meanwhile. Here the copy runs on a stream of its own, and the host waits for the copy
later, after the host has queued more kernels. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_streams: dict[torch.device, torch.cuda.Stream] = {}


class HostRead:
    """The numbers of a tensor, which are copied to the host from now on."""

    def __init__(self, numbers: Tensor) -> None:
        self._host, self._event = numbers, None
        if numbers.device.type != "cuda":
            return
        stream = _copies(numbers.device)
        stream.wait_stream(torch.cuda.current_stream(numbers.device))
        with torch.cuda.stream(stream):
            self._host = torch.empty(
                numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True
            )
            self._host.copy_(numbers, non_blocking=True)
            numbers.record_stream(stream)
            self._event = stream.record_event()

    def wait(self) -> Tensor:
        """The numbers on the host, once the copy has ended."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.cpu()


def to_device(numbers: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """int64 numbers of the host on a device; the host does not wait."""
    host = torch.as_tensor(numbers, dtype=torch.int64, device="cpu")
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def _copies(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
