"""What a device would do in a fake machine: its kernels, bytes, collectives and the host's waits.

Tensors have no numbers. Where the product reads a number of the device, the tally notes the wait
and answers by the name of the reading function, see :data:`NUMBERS`; another number is 0 or 1.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from router import kernels

ROOT = str(Path(__file__).parents[3])
BETWEEN = (str(Path(__file__).parent), str(Path(ROOT) / "router" / "host.py"))
"""Who calls for others."""
aten = torch.ops.aten

FREE = {
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "alias",
    "lift_fresh", "lift_fresh_copy", "_unsafe_view", "resize_", "set_", "view",
    "_reshape_alias", "is_pinned", "is_same_size", "result_type", "wait_tensor",
}  # fmt: skip
WAITING = {
    "masked_select", "unique_consecutive", "unique_dim", "_unique2", "equal", "is_nonzero",
    "repeat_interleave", "bincount", "nonzero",
}  # fmt: skip
COPIES = {"_to_copy", "copy_", "_copy_from"}
SEVERAL = {"_grouped_mm": 2}
"""Operators of several kernels. A grouped GEMM has one that finds its groups, as an H200 shows."""

NUMBERS: dict[str, Callable[[FrameType, Tensor], Any]] = {}
"""What the device's numbers would be, by the name of the function that reads: of the function's
frame and the tensor."""


def frames() -> Iterator[FrameType]:
    """The project's frames that called, the nearest first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and "/.venv/" not in file and not file.startswith(BETWEEN):
            yield frame
        frame = frame.f_back


def site() -> str:
    """The function of the project that called, as ``file function``."""
    for frame in frames():
        return f"{frame.f_code.co_filename[len(ROOT) + 1 :]} {frame.f_code.co_name}"
    return "torch"


class Tally(TorchDispatchMode):
    """Counts of what runs inside; :meth:`take` returns them and begins anew."""

    def __init__(self) -> None:
        super().__init__()
        self.quiet = 0
        """Above 0, DTensor learns shapes from operators on global shapes: no kernel runs."""
        self.take()

    def take(self) -> dict[str, Any]:
        """The counts since the last call: kernels, collectives and gigabytes moved, and the waits
        by the function that waited."""
        counts = {}
        if hasattr(self, "kernels"):
            counts = {
                "kernels": self.kernels.total(),
                "collectives": self.collectives.total(),
                "gigabytes": round(self.moved.total() / 1e9, 3),
                "waits": dict(sorted(self.waits.items())),
            }
        self.kernels, self.by_site = Counter[str](), Counter[str]()
        self.moved, self.waits = Counter[str](), Counter[str]()
        self.collectives = Counter[str]()
        return counts

    def wait(self, what: str) -> None:
        """The host waits for the device."""
        if not self.quiet:
            self.waits[f"{what}: {site()}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its local operations come here then
        if func is aten.record_stream.default:
            return None
        answer = self._answer(func, args, kwargs)
        if answer is not None:
            return answer
        out = func(*args, **kwargs)
        if not self.quiet:
            self._count(func, args, kwargs, out)
        return out

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator that depends on numbers, or None."""
        if func is aten._pin_memory.default:
            return args[0]
        if func is aten.is_pinned.default:
            return True
        if func is aten._local_scalar_dense.default:
            if args[0].device.type == "cuda":
                self.wait("item")
            return number(args[0])
        on_device = any(isinstance(a, Tensor) and a.device.type == "cuda" for a in args)
        if func is aten.nonzero.default:
            if on_device:
                self.wait("nonzero")
                self._kernel("nonzero", func, 0)
            return args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            if on_device:
                self.wait("repeat_interleave")
            length = known(args[0], ".repeat")
            length = args[0].numel() if length is None else length
            return args[0].new_empty(length, dtype=torch.int64)
        return None

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        outs = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        on_device = [each for each in tensors + outs if each.device.type == "cuda"]
        name = func._schema.name.split("::")[1]
        if func.namespace == "c10d":
            self.collectives[name] += 1
            self._kernel(name, func, 0)
            return
        if not on_device or name in FREE or func.is_view or func.namespace == "prim":
            return
        if name in COPIES and self._copied(name, func, args, kwargs, out):
            return
        if name in WAITING and kwargs.get("output_size") is None:
            self.wait(name)
        indexed = name == "index"
        if name in ("index_put_", "_index_put_impl_"):
            indexed = args[2].numel() != 1  # with one value it is masked_fill_, which does not wait
        if indexed and any(mask is not None and mask.dtype == torch.bool for mask in args[1]):
            self.wait(f"{name} with a mask")
        self._kernel(name, func, sum(each.nbytes for each in on_device))

    def _copied(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        source, target = (args[1], args[0]) if name == "copy_" else (args[0], out)
        if source.device.type == target.device.type:
            return False
        if not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
            self.wait("copy to the host" if source.device.type == "cuda" else "copy to the device")
        self._kernel("memcpy", func, 0)
        return True

    def _kernel(self, name: str, func: Any, moved: int) -> None:
        launches = kernels.LAUNCHES.get(f"{func.namespace}::{name}", SEVERAL.get(name, 1))
        self.kernels[name] += launches
        self.by_site[site()] += launches
        self.moved[name] += moved


def known(tensor: Tensor, suffix: str) -> Any:
    """What :data:`NUMBERS` says for the nearest function that it names, or None."""
    for frame in frames():
        names = (frame.f_code.co_name, frame.f_code.co_qualname)
        numbers = next((NUMBERS[n + suffix] for n in names if n + suffix in NUMBERS), None)
        if numbers is not None:
            return numbers(frame, tensor)
    return None


def number(tensor: Tensor) -> bool | int | float:
    """What ``.item()`` is."""
    found = known(tensor, "")
    if found is not None:
        return found
    return False if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 0


def to_list(tally: Tally | None) -> Callable[[FakeTensor], Any]:
    """``FakeTensor.tolist`` that the tally counts."""

    def tolist(tensor: FakeTensor) -> Any:
        if tally is not None and tensor.device.type == "cuda":
            tally.wait("tolist")
        found = known(tensor, ".list")
        if found is not None:
            return found

        def nested(shape: tuple[int, ...]) -> Any:
            return [nested(shape[1:]) for _ in range(shape[0])] if shape else number(tensor)

        return nested(tuple(tensor.shape))

    return tolist


def numbers(name: str) -> Callable[[Callable[[FrameType, Tensor], Any]], Any]:
    """Say what a function of the product reads: ``name.list`` of lists, ``name.repeat`` of the
    length of a repeat_interleave, ``name`` of a number."""

    def add(answer: Callable[[FrameType, Tensor], Any]) -> Any:
        NUMBERS[name] = answer
        return answer

    return add


def _hits(rows: int, choices: int, blocks: int) -> int:
    """Of so many rows with so many choices each: those with a choice in one of equal blocks."""
    return min(rows, max(1, round(rows * (1 - (1 - 1 / blocks) ** choices)))) if rows else 0


@numbers("plan_transfers.list")
def _rows_to_ranks(frame: FrameType, counts_G: Tensor) -> list[int]:
    """Routing is balanced: every rank gets of each chunk what a rank would on average."""
    chunk, ranks = frame.f_locals["chunks"][frame.f_locals["i"]], len(counts_G)
    T, K = chunk.expert_indices_TK.shape
    return [_hits(T, K, ranks)] * ranks


@numbers("plan_transfers")
def _assignments(frame: FrameType, _: Tensor) -> int:
    T, K = frame.f_locals["chunks"][frame.f_locals["i"]].expert_indices_TK.shape
    caller = frame.f_back
    if caller is None or caller.f_code.co_name != "_dispatched":
        return T * K
    # Rows that came to this node: each has a choice there, and on average some more.
    nodes = len(caller.f_locals["experts"]) // len(caller.f_locals["mine"])
    return round(T * K / nodes / (1 - (1 - 1 / nodes) ** K))


def _rows_of_experts(frame: FrameType, counts_E: Tensor) -> list[int]:
    E, R = len(counts_E), len(frame.f_locals["rows"].source_R)
    return [R // E + (e < R % E) for e in range(E)]


numbers("experts_loop.list")(_rows_of_experts)
numbers("loop_backward.list")(_rows_of_experts)


@numbers("_ByUnit.forward.list")
def _rows_of_units(frame: FrameType, counts_EU: Tensor) -> list[list[int]]:
    E, U = counts_EU.shape
    each = len(frame.f_locals["rows"].source_R) // (E * U)
    return [[each] * U for _ in range(E)]


@numbers("rows_of.repeat")
def _units(frame: FrameType, _: Tensor) -> int:
    return len(frame.f_locals["x_SD"])


@numbers("dispatch")
def _most_tokens(frame: FrameType, _: Tensor) -> int:
    """Of all_gather: every rank has as many tokens."""
    return frame.f_locals["T"]
