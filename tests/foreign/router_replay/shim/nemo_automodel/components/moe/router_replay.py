"""Automodel's registry of recorded choices: what is recorded and replayed is Convoy's."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence

from torch import Tensor


class RouterReplayMode(enum.Enum):
    RECORD = "record"
    REPLAY = "replay"


class RouterReplay:
    """What one gate records, or is to replay."""

    _all: list[RouterReplay] = []

    def __init__(self) -> None:
        self.mode: RouterReplayMode | None = None
        self.recorded_indices: Tensor | None = None
        self.target_indices: Tensor | None = None
        self._all.append(self)

    def set_target(self, indices: Tensor) -> None:
        self.target_indices = indices

    @classmethod
    def instances(cls) -> list[RouterReplay]:
        return list(cls._all)

    @classmethod
    def clear_registry(cls) -> None:
        cls._all.clear()

    @classmethod
    def clear_indices(cls) -> None:
        for replay in cls._all:
            replay.recorded_indices = replay.target_indices = None

    @classmethod
    def set_mode(cls, mode: RouterReplayMode | None) -> None:
        for replay in cls._all:
            replay.mode = mode

    @classmethod
    def set_replay_indices(cls, captured: Sequence[Tensor]) -> None:
        if len(captured) != len(cls._all):
            raise ValueError(f"{len(captured)} replay tensors for {len(cls._all)} gates")
        for replay, indices in zip(cls._all, captured, strict=True):
            replay.set_target(indices)

    @classmethod
    def collect(cls) -> list[Tensor]:
        if any(replay.recorded_indices is None for replay in cls._all):
            raise RuntimeError("a gate has no recorded selection")
        return [replay.recorded_indices for replay in cls._all]

    @classmethod
    @contextlib.contextmanager
    def record(cls) -> Iterator[None]:
        cls.set_mode(RouterReplayMode.RECORD)
        try:
            yield
        finally:
            cls.set_mode(None)

    @classmethod
    @contextlib.contextmanager
    def replay(cls, captured: Sequence[Tensor]) -> Iterator[None]:
        cls.set_replay_indices(captured)
        cls.set_mode(RouterReplayMode.REPLAY)
        try:
            yield
        finally:
            cls.set_mode(None)
            for replay in cls._all:
                replay.target_indices = None


def replay_selection(replay: RouterReplay | None, indices: Tensor) -> Tensor:
    """The recorded choice in the place of ``indices``."""
    return indices if replay is None or replay.target_indices is None else replay.target_indices
