"""The file of a routing trace, written and read. It is an npz, which numpy alone can read.

A trace has what the routers of a model chose in some calls: how many tokens took each expert, and,
where it was asked for, which experts each token took. The arrays of a file:

    meta     text, one JSON object: format, version, num_experts, top_k, layers, senders,
             first_call, recipe, seed, notes
    step     [C] int64, the training step of each call
    counts   [C, L, S, E] unsigned, the assignments of each expert
    tokens   [C, L, S] int64, the rows of each block of ``routes``; only with routes
    routes   [N, K] int16, the experts of each token, num_experts for none, -1 - e for a dropped
             expert e; blocks in the order of calls, layers and senders; only with routes

A trace is one file, or a folder of files: every sender writes files of its own, with successive
calls. A file takes its name when all of its bytes are durable, so a file under its name is whole.

Legend: C calls, L MoE layers, S senders (the ranks whose tokens are routed), E experts, K top_k,
T tokens of a call, N tokens of all calls, layers and senders.
"""

from __future__ import annotations

import errno
import io
import json
import os
import secrets
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT, VERSION = "convoy-routing-trace", 1
Counts = NDArray[np.int64]
Routes = NDArray[np.int16]


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingTrace:
    """What the routers of a model chose in some calls.

    A call is one forward of the model, as of a micro-batch, on every sender. Counts of a sender
    are those of its own tokens, whatever rank computes them.

    Raises ValueError where shapes do not fit.
    """

    counts_CLSE: Counts
    """[C, L, S, E] int64: the assignments of each expert, before capacity."""
    step_C: Counts
    """[C] int64: the training step of each call; calls of one step follow each other."""
    top_k: int
    """The most experts that a token takes."""
    layers: tuple[int, ...]
    """[L] the number in the model of each MoE layer."""
    senders: tuple[int, ...]
    """[S] the number of each sender: its rank, or its place among batches."""
    recipe: str = ""
    """The name of the model or of the run."""
    seed: int = 0
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What else a reader should know, as values of JSON."""
    tokens_CLS: Counts | None = None
    """[C, L, S] int64: how many rows of ``routes_NK`` are of this call, layer and sender."""
    routes_NK: Routes | None = None
    """[N, K] int16: the experts that each token took, the ``topk_indices_TK`` of a layer:
    ``num_experts`` for no expert, as of padding, and -1 - e where expert e was chosen and had no
    room."""

    def __post_init__(self) -> None:
        C, L, S = len(self.step_C), len(self.layers), len(self.senders)
        if self.counts_CLSE.ndim != 4 or self.counts_CLSE.shape[:3] != (C, L, S):
            raise ValueError(
                f"counts_CLSE ({list(self.counts_CLSE.shape)}) must have the lengths of step_C, "
                f"layers and senders {[C, L, S]}, and then the experts"
            )
        if (self.tokens_CLS is None) != (self.routes_NK is None):
            raise ValueError("tokens_CLS and routes_NK must both be there, or neither")
        if self.tokens_CLS is not None and self.routes_NK is not None:
            rows = int(self.tokens_CLS.sum())
            if self.tokens_CLS.shape != (C, L, S) or self.routes_NK.shape != (rows, self.top_k):
                raise ValueError(
                    f"routes_NK ({list(self.routes_NK.shape)}) must have the sum of tokens_CLS "
                    f"({rows}) rows and top_k ({self.top_k}) columns, and tokens_CLS "
                    f"({list(self.tokens_CLS.shape)}) the shape {[C, L, S]}"
                )

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return int(self.counts_CLSE.shape[-1])

    def routes_of(self, call: int, layer: int, sender: int) -> Routes:
        """[T, K] int16: the experts of each token, by indices into the axes of ``counts_CLSE``.

        Raises ValueError for a trace without routes.
        """
        if self.tokens_CLS is None or self.routes_NK is None:
            raise ValueError("the trace must have routes: record it with routes=True")
        block = np.ravel_multi_index((call, layer, sender), self.tokens_CLS.shape)
        ends = self.tokens_CLS.cumsum()
        rows = self.tokens_CLS.flat[block]
        return self.routes_NK[ends[block] - rows : ends[block]]


def write_trace(path: str | Path, trace: RoutingTrace, *, first_call: int = 0) -> None:
    """Write a trace as one file, compressed, whose name should end with ``.npz``.

    ``first_call`` is how many calls the files before this one have, in a recording of several.

    Raises FileExistsError where the file is there already, and OSError where it cannot be written.
    """
    path = Path(path)
    if path.exists():
        rule = "must not exist: choose another name, or remove the file"
        raise FileExistsError(errno.EEXIST, rule, str(path))
    counts = trace.counts_CLSE
    meta = {
        "format": FORMAT, "version": VERSION, "num_experts": trace.num_experts,
        "top_k": trace.top_k, "layers": trace.layers, "senders": trace.senders,
        "first_call": first_call, "recipe": trace.recipe, "seed": trace.seed,
        "notes": dict(trace.notes),
    }  # fmt: skip
    arrays: dict[str, Any] = {
        "meta": np.array(json.dumps(meta)),
        "step": trace.step_C.astype(np.int64),
        "counts": counts.astype(np.min_scalar_type(int(counts.max(initial=0)))),
    }
    if trace.routes_NK is not None and trace.tokens_CLS is not None:
        arrays |= {"tokens": trace.tokens_CLS.astype(np.int64), "routes": trace.routes_NK}
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    _publish(path, content.getbuffer())


def read_trace(path: str | Path) -> RoutingTrace:
    """Read a trace: a file, or a folder of the files of one recording.

    Of a folder, calls that some sender has not written are left out, as at the end of a recording
    that was killed.

    Raises FileNotFoundError where nothing is there, and ValueError where a file is no whole trace,
    has a version that is not known, or does not go with the others.
    """
    path = Path(path)
    if not path.is_dir():
        return _read_file(path)[1]
    by_sender: dict[tuple[int, ...], list[tuple[int, RoutingTrace]]] = {}
    for name in sorted(path.glob("*.npz")):
        first_call, trace = _read_file(name)
        by_sender.setdefault(trace.senders, []).append((first_call, trace))
    if not by_sender:
        rule = "must have a file of a routing trace (*.npz)"
        raise FileNotFoundError(errno.ENOENT, rule, str(path))
    recordings = [_joined(files, path) for _, files in sorted(by_sender.items())]
    calls = min(len(recording.step_C) for recording in recordings)
    return _beside([_first_calls(recording, calls) for recording in recordings], path)


def _read_file(path: Path) -> tuple[int, RoutingTrace]:
    """How many calls are before the file's first one, and the file's trace."""
    try:
        # An open file and not its path: of a broken file, numpy leaves the path's file open.
        with path.open("rb") as content, np.load(content, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        meta = json.loads(str(arrays["meta"]))
        if meta["format"] != FORMAT:
            raise ValueError(f"format ({meta['format']}) must be {FORMAT}")
        missing = sorted({"counts", "step"} - arrays.keys())
        if missing:
            raise ValueError(f"{missing[0]} is missing")
        if arrays["counts"].size and arrays["counts"].min() < 0:
            raise ValueError(f"counts ({arrays['counts'].min()}) must be at least 0")
    except FileNotFoundError:
        raise
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        text = " ".join(str(error).split())
        raise ValueError(f"{path} must be a whole routing trace: {text}") from None
    if meta["version"] > VERSION:
        raise ValueError(f"{path}: version ({meta['version']}) must be at most {VERSION}: a newer "
                         f"Convoy wrote the trace")  # fmt: skip
    trace = RoutingTrace(
        counts_CLSE=arrays["counts"].astype(np.int64),
        step_C=arrays["step"],
        top_k=meta["top_k"],
        layers=tuple(meta["layers"]),
        senders=tuple(meta["senders"]),
        recipe=meta["recipe"],
        seed=meta["seed"],
        notes=meta["notes"],
        tokens_CLS=arrays.get("tokens"),
        routes_NK=arrays.get("routes"),
    )
    _check_routes(trace, path)
    return meta["first_call"], trace


def _check_routes(trace: RoutingTrace, path: Path) -> None:
    """Raise ValueError where the routes are not those that were counted."""
    if trace.tokens_CLS is None or trace.routes_NK is None:
        return
    E, blocks = trace.num_experts, trace.tokens_CLS.size
    chosen_NK = np.where(trace.routes_NK < 0, -1 - trace.routes_NK, trace.routes_NK)
    if chosen_NK.max(initial=0) > E:
        raise ValueError(f"{path}: an expert in routes ({chosen_NK.max()}) must be at most {E}")
    block_N = np.repeat(np.arange(blocks), trace.tokens_CLS.reshape(-1))
    slots_NK = block_N[:, None] * (E + 1) + chosen_NK
    counts = np.bincount(slots_NK.reshape(-1), minlength=blocks * (E + 1)).reshape(blocks, E + 1)
    if not np.array_equal(counts[:, :E].reshape(trace.counts_CLSE.shape), trace.counts_CLSE):
        raise ValueError(f"{path}: counts must be those of the experts in routes")


def _check_alike(traces: Sequence[RoutingTrace], names: Sequence[str], path: Path) -> None:
    first = traces[0]
    for trace in traces[1:]:
        for name in names:
            ours, theirs = getattr(first, name), getattr(trace, name)
            if ours != theirs:
                raise ValueError(
                    f"{path}: {name} ({ours} of senders {list(first.senders)}, {theirs} of "
                    f"senders {list(trace.senders)}) must be equal in all files"
                )
        if (first.routes_NK is None) != (trace.routes_NK is None):
            raise ValueError(f"{path}: all files must have routes, or none")


_SHARED = ("top_k", "layers", "num_experts", "recipe", "seed", "notes")


def _joined(files: Sequence[tuple[int, RoutingTrace]], path: Path) -> RoutingTrace:
    """Files of the same senders, with the calls before each, as one trace."""
    files = sorted(files, key=lambda file: file[0])
    traces = [trace for _, trace in files]
    _check_alike(traces, _SHARED, path)
    calls = 0
    for first_call, trace in files:
        if first_call != calls:
            raise ValueError(f"{path}: a file of senders {list(trace.senders)} must begin with "
                             f"call {calls}, the next one begins with {first_call}")  # fmt: skip
        calls += len(trace.step_C)
    tokens = [trace.tokens_CLS for trace in traces if trace.tokens_CLS is not None]
    routes = [trace.routes_NK for trace in traces if trace.routes_NK is not None]
    return replace(
        traces[0],
        counts_CLSE=np.concatenate([trace.counts_CLSE for trace in traces]),
        step_C=np.concatenate([trace.step_C for trace in traces]),
        tokens_CLS=np.concatenate(tokens) if tokens else None,
        routes_NK=np.concatenate(routes) if routes else None,
    )


def _first_calls(trace: RoutingTrace, calls: int) -> RoutingTrace:
    tokens, routes = trace.tokens_CLS, trace.routes_NK
    if tokens is not None and routes is not None:
        tokens = tokens[:calls]
        routes = routes[: tokens.sum()]
    return replace(
        trace, counts_CLSE=trace.counts_CLSE[:calls], step_C=trace.step_C[:calls],
        tokens_CLS=tokens, routes_NK=routes,
    )  # fmt: skip


def _beside(recordings: Sequence[RoutingTrace], path: Path) -> RoutingTrace:
    """Traces of different senders with as many calls each, as one trace."""
    _check_alike(recordings, _SHARED, path)
    first = recordings[0]
    senders = tuple(sender for recording in recordings for sender in recording.senders)
    if len(set(senders)) < len(senders):
        raise ValueError(f"{path}: senders {list(senders)} must differ: the folder has several "
                         f"recordings")  # fmt: skip
    for recording in recordings:
        if not np.array_equal(recording.step_C, first.step_C):
            raise ValueError(f"{path}: steps of senders {list(first.senders)} and "
                             f"{list(recording.senders)} must be equal")  # fmt: skip
    merged = replace(
        first,
        counts_CLSE=np.concatenate([r.counts_CLSE for r in recordings], axis=2),
        senders=senders,
        tokens_CLS=None,
        routes_NK=None,
    )
    if first.routes_NK is None:
        return merged
    tokens = [r.tokens_CLS for r in recordings if r.tokens_CLS is not None]
    return replace(
        merged,
        tokens_CLS=np.concatenate(tokens, axis=2),
        routes_NK=np.concatenate(list(_blocks(recordings))),
    )


def _blocks(recordings: Sequence[RoutingTrace]) -> Iterator[Routes]:
    calls, layers = recordings[0].counts_CLSE.shape[:2]
    yield np.empty((0, recordings[0].top_k), np.int16)
    for call in range(calls):
        for layer in range(layers):
            for recording in recordings:
                for sender in range(len(recording.senders)):
                    yield recording.routes_of(call, layer, sender)


def _publish(path: Path, content: memoryview) -> None:
    """Write a file that takes its name when it is durable."""
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with hidden.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
