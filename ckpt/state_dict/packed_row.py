"""A row of a pack whose numbers lie in the tensors themselves: no row is built in memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from ckpt.format import Array
from ckpt.local_array import ArraySpec, LocalArray, storage_view
from ckpt.store import Bytes
from parallel.layout import Box


class PackedRow(LocalArray):
    """One row of a pack as pieces of tensors in host memory.

    Args:
        spec: the pack.
        slot: the row.
        pieces: contiguous pieces of tensors, each with the place of its first element in the row,
            ascending. Elements between pieces are saved as zeros, and are read to nowhere.
    """

    def __init__(self, spec: ArraySpec, slot: int, pieces: Iterable[tuple[int, Tensor]]) -> None:
        super().__init__(spec, [], [])
        self.boxes = [((slot, slot + 1), (0, spec.shape[1]))]
        self._runs: list[tuple[int, Array]] = [
            (at, storage_view(piece.detach()).reshape(-1).numpy()) for at, piece in pieces
        ]
        self._starts = [at for at, _ in self._runs]

    def read_into(self, box: Box, out: Array) -> None:
        """See :class:`ckpt.LocalArray`."""
        row, (start, _) = out[0], box[1]
        for low, high, part in self._parts_of(box):
            row[low - start : high - start] = 0 if part is None else part

    def write(self, box: Box, values: Array) -> None:
        """See :class:`ckpt.LocalArray`."""
        start = box[1][0]
        for low, high, part in self._parts_of(box):
            if part is not None:
                part[...] = values[0, low - start : high - start]

    def memory(self, box: Box) -> list[Bytes]:
        """See :class:`ckpt.LocalArray`."""
        size = self._runs[0][1].itemsize if self._runs else 1
        return [
            np.empty((high - low) * size, np.uint8) if part is None else part.view(np.uint8)
            for low, high, part in self._parts_of(box)
        ]

    def _parts_of(self, box: Box) -> Iterator[tuple[int, int, Array | None]]:
        """The parts of a box in order: first and last element, and the numbers; None for a gap."""
        at, stop = box[1]
        for i in range(max(0, bisect_right(self._starts, at) - 1), len(self._runs)):
            start, numbers = self._runs[i]
            if start >= stop:
                break
            if at < start:
                yield at, start, None
                at = start
            end = min(stop, start + numbers.size)
            if at < end:
                yield at, end, numbers[at - start : end - start]
                at = end
        if at < stop:
            yield at, stop, None


class GatheredRow(LocalArray):
    """One row of a pack, to be saved from tensors on a device or from tensors with gaps.

    The part that is asked for, a chunk, is gathered on the device: one copy to the host, and not
    one for each tensor. The device never holds the whole row.

    Args:
        spec: the pack.
        slot: the row.
        pieces: pieces of tensors, each with the place of its first element in the row, ascending.
            Elements between pieces are saved as zeros.
    """

    def __init__(self, spec: ArraySpec, slot: int, pieces: Iterable[tuple[int, Tensor]]) -> None:
        super().__init__(spec, [], [])
        self.boxes = [((slot, slot + 1), (0, spec.shape[1]))]
        self._runs = [(at, piece.detach()) for at, piece in pieces]
        on_device = (piece.device for _, piece in self._runs if not piece.is_cpu)
        self._device = next(on_device, torch.device("cpu"))

    def read_into(self, box: Box, out: Array) -> None:
        """See :class:`ckpt.LocalArray`."""
        start, stop = box[1]
        part = torch.zeros(stop - start, dtype=self.spec.dtype, device=self._device)
        for at, piece in self._runs:
            low, high = max(at, start), min(at + piece.numel(), stop)
            if low < high:
                part[low - start : high - start] = piece.reshape(-1)[low - at : high - at]
        torch.from_numpy(out)[0].copy_(storage_view(part), non_blocking=True)

    def memory(self, box: Box) -> list[Bytes] | None:
        """See :class:`ckpt.LocalArray`; None: such a row is saved, and never loaded into."""
        return None
