"""Recording of routing in any training or inference loop.

Legend: L MoE layers, E experts, K top_k, T tokens of a call.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from torch import Tensor

from moe.traces.file import RoutingTrace, write_trace

_MOST_EXPERTS = int(np.iinfo(np.int16).max)


class Routed(Protocol):
    """What a layer says of its routing: :class:`moe.MoEAux` and ``router.RouterOutput`` do."""

    @property
    def tokens_per_expert_E(self) -> Tensor:
        """[E] integers: the assignments of each expert."""

    @property
    def topk_indices_TK(self) -> Tensor:
        """[T, K] integers: the experts of each token."""


class RoutingRecorder:
    """Records the routing of calls into a folder of files, which :func:`moe.read_trace` reads.

    On several ranks, each has a recorder on one folder, with its rank as ``sender``, and records
    the same calls. A file is written each ``calls_per_file`` calls, and at the end. A recording
    that is killed loses the calls after its last file.

    Example::

        with RoutingRecorder("trace", recipe="mine", sender=rank) as recorder:
            for step in range(1, steps + 1):
                hidden, aux = layer(x)
                recorder.add([aux], step=step)

    Args:
        folder: made where it is not there.
        recipe: the name of the model or of the run.
        seed: of the run.
        sender: the number of this process among those that record.
        layers: the number in the model of each MoE layer; None counts from 0.
        routes: whether the experts of each token are recorded too: 2·K bytes a token and layer,
            before compression.
        notes: what else a reader should know, as values of JSON.
        calls_per_file: calls that are kept in memory.

    Raises FileExistsError where the folder has files of this sender already, and OSError where it
    cannot be made.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        recipe: str = "",
        seed: int = 0,
        sender: int = 0,
        layers: Sequence[int] | None = None,
        routes: bool = False,
        notes: Mapping[str, Any] | None = None,
        calls_per_file: int = 256,
    ) -> None:
        if calls_per_file < 1:
            raise ValueError(f"calls_per_file ({calls_per_file}) must be at least 1")
        self.folder, self.sender = Path(folder), sender
        self._about: dict[str, Any] = {"recipe": recipe, "seed": seed, "notes": dict(notes or {})}
        self._layers = None if layers is None else tuple(layers)
        self._with_routes, self._calls_per_file = routes, calls_per_file
        self._sizes: tuple[int, int, int] | None = None
        self._calls = 0
        self._forget()
        self.folder.mkdir(parents=True, exist_ok=True)
        if next(self.folder.glob(f"{self._prefix}*.npz"), None) is not None:
            rule = f"must have no trace of sender {sender}: choose another folder, or remove it"
            raise FileExistsError(errno.EEXIST, rule, str(self.folder))

    @property
    def _prefix(self) -> str:
        return f"sender-{self.sender:05d}-"

    def _forget(self) -> None:
        self._steps: list[int] = []
        self._counts: list[Any] = []
        self._tokens: list[list[int]] = []
        self._routes: list[Any] = []

    def add(self, layers: Sequence[Routed], *, step: int) -> None:
        """Add one call, from what each MoE layer gave, in the model's order.

        The numbers are copied to the host, so the call waits for the device.

        Raises ValueError where the number of layers, of experts or of choices differs from that of
        the call before, and for routes with more than 32,767 experts.
        """
        sizes = {(len(r.tokens_per_expert_E), r.topk_indices_TK.shape[1]) for r in layers}
        if len(sizes) != 1:
            raise ValueError(f"layers (with experts and top_k {sorted(sizes)}) must be 1 or more, "
                             f"and have equal sizes")  # fmt: skip
        ((experts, top_k),) = sizes
        now, before = (len(layers), experts, top_k), self._sizes
        expected = len(layers) if self._layers is None else len(self._layers)
        if now != (before or now) or len(layers) != expected:
            raise ValueError(
                f"layers, experts and top_k of a call {list(now)} must be those of the calls "
                f"before {list(before or (expected, experts, top_k))}"
            )
        if self._with_routes and experts > _MOST_EXPERTS:
            raise ValueError(f"the experts ({experts}) of recorded routes must be at most "
                             f"{_MOST_EXPERTS}: record with routes=False")  # fmt: skip
        self._sizes = now
        self._steps.append(step)
        self._counts.append([r.tokens_per_expert_E.detach().cpu().numpy().copy() for r in layers])
        if self._with_routes:
            rows = [r.topk_indices_TK.detach().cpu().numpy().astype(np.int16) for r in layers]
            self._tokens.append([len(chosen) for chosen in rows])
            self._routes += rows
        if len(self._steps) == self._calls_per_file:
            self.flush()

    def flush(self) -> None:
        """Write the calls since the last file, where there are any."""
        if not self._steps or self._sizes is None:
            return
        num_layers, _, top_k = self._sizes
        trace = RoutingTrace(
            counts_CLSE=np.array(self._counts, np.int64)[:, :, None],
            step_C=np.array(self._steps, np.int64),
            top_k=top_k,
            layers=tuple(range(num_layers)) if self._layers is None else self._layers,
            senders=(self.sender,),
            tokens_CLS=np.array(self._tokens, np.int64)[..., None] if self._with_routes else None,
            routes_NK=np.concatenate(self._routes) if self._with_routes else None,
            **self._about,
        )
        path = self.folder / f"{self._prefix}{self._calls:09d}.npz"
        write_trace(path, trace, first_call=self._calls)
        self._calls += len(self._steps)
        self._forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Write what is left, also after an error: what was recorded is true."""
        self.flush()
