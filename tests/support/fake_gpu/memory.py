"""The bytes of a fake GPU's memory that tensors hold, at every moment."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.fake_gpu.tally import Tally, site


class Memory(TorchDispatchMode):
    """Counts every storage of the device from its first operator to its end.

    Use within :func:`tests.support.fake_gpu.shapes.machine`.
    """

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self.tally = tally
        self.live = self.peak = 0
        self.by_site, self.at_peak = Counter[str](), Counter[str]()
        self._held: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._plain_resize = torch.UntypedStorage.resize_

    def begin(self) -> None:
        """Forget the peak so far."""
        self.peak = 0

    def __enter__(self) -> Memory:
        def resize(storage: torch.UntypedStorage, size: int) -> None:
            self._plain_resize(storage, size)
            held = self._held.get(storage)
            if held is not None:
                self._change(held, storage.nbytes())

        torch.UntypedStorage.resize_ = resize
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._plain_resize
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if not self.tally.quiet:
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor) and tensor.device.type == "cuda":
                    self._hold(tensor.untyped_storage())
        return out

    def _hold(self, storage: Any) -> None:
        if storage in self._held:
            return
        held = self._held[storage] = [0, site()]
        self._change(held, storage.nbytes())
        weakref.finalize(storage, self._change, held, 0)

    def _change(self, held: list[Any], size: int) -> None:
        self.live += size - held[0]
        self.by_site[held[1]] += size - held[0]
        held[0] = size
        if self.live > self.peak:
            self.peak, self.at_peak = self.live, self.by_site.copy()
