"""RUN_DIR/log.jsonl: one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.errors import InputError
from pretrain.observe.console import say


@dataclass(frozen=True)
class History:
    """What a run's log says of its failures."""

    failures: int = 0
    """Starts that were not followed by an orderly end."""
    seconds: float = 0.0
    """Of training."""

    @classmethod
    def read(cls, path: Path) -> History:
        """From the log of the starts so far; lines that are no events are passed over."""
        starts, ends, seconds = 0, 0, 0.0
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            return cls()
        for line in lines:
            try:
                event = json.loads(line)
                name = event["event"]
            except (ValueError, TypeError, KeyError):
                continue
            starts += name == "start"
            ends += name in ("stopped", "done")
            if name == "step" and isinstance(event.get("seconds"), int | float):
                seconds += event["seconds"]
        return cls(max(0, starts - ends), seconds)


class RunLog:
    """One JSON object a line in ``RUN_DIR/log.jsonl``; only rank 0 writes."""

    def __init__(self, path: Path, spec_hash: str, enabled: bool) -> None:
        self.spec_hash = spec_hash
        try:
            self._file = path.open("a", buffering=1) if enabled else None
        except OSError as error:
            raise InputError(f"run_dir: {path} cannot be written: {error.strerror}") from None

    def write(self, event: str, **values: Any) -> None:
        """Append one event."""
        if self._file is not None:
            # JSON has no NaN and no infinity.
            finite = {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in values.items()
            }
            line = {"event": event, **finite, "spec_hash": self.spec_hash}
            try:
                self._file.write(json.dumps(line, allow_nan=False) + "\n")
            except OSError as error:
                # Training is worth more than its log; what matters is in the checkpoints.
                say(f"{self._file.name} cannot be written ({error.strerror}); logging ends here")
                self._give_up()

    def close(self) -> None:
        """No more events."""
        if self._file is not None:
            self._give_up()

    def _give_up(self) -> None:
        file, self._file = self._file, None
        with contextlib.suppress(OSError):  # what could not be written is still in its buffer
            if file is not None:
                file.close()
