"""RUN_DIR/status.json: whether a run is running, and how its last start ended.

torchrun ends with 1 whatever the exit code of its ranks was; the file has that exit code, and the
reason. Rank 0 writes the file when its run begins and when its run ends. Another file of the
folder's is never half written: each write replaces the file as a whole. A run whose file cannot be
written goes on.

:class:`Status` is the schema. ``convoy status RUN_DIR`` shows the file.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from pretrain.errors import (
    EXIT_BAD_INPUT,
    EXIT_CRASHED,
    EXIT_HEALTH,
    EXIT_INTERRUPTED,
    EXIT_LOST,
    EXIT_TRY_AGAIN,
    HealthError,
    InputError,
    LostRankError,
)
from pretrain.observe.console import STOP_CAUSES
from pretrain.observe.events import LedgerSummed, RunStopped
from pretrain.observe.jsonl import last_event, last_step

State = Literal[
    "running", "done", "lost_rank", "bad_input", "health", "try_again", "interrupted", "crashed"
]

STATUS_FILE = "status.json"
"""In the run's folder."""


class Status(BaseModel):
    """``RUN_DIR/status.json``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = 1
    """Of this schema."""
    state: State
    """``running``, or how the run ended: ``done`` (exit code 0), ``lost_rank`` (1: a rank was lost
    or stuck), ``bad_input`` (2: a spec, a corpus or a checkpoint that cannot be used), ``health``
    (3: training diverged), ``try_again`` (75: stopped on request after a committed checkpoint),
    ``interrupted`` (130: a second Ctrl-C), ``crashed`` (1: an unexpected error)."""
    exit_code: int | None = None
    """Of rank 0, which torchrun hides; None while the run is running."""
    reason: str = ""
    """One line for people; the error's own where there was one."""
    step: int | None = None
    """The newest step in the run's log; None where the log has none."""
    checkpoint: str | None = None
    """The manifest of the newest checkpoint that was committed when the file was written; None
    where there is none, or where the checkpoints are in an object store, which is not asked."""
    checkpoint_path: str | None = None
    """Where the run's checkpoints are; None where the spec was refused."""
    pid: int
    """The process of rank 0."""
    host: str
    """The machine of rank 0."""
    world_size: int = 1
    """The number of ranks."""
    started: str
    """When rank 0 began, in UTC, as in ISO 8601."""
    time: str
    """When the file was written, in UTC, as in ISO 8601."""
    ledger: LedgerSummed | None = None
    """The goodput ledger as the log last had it; None where the log has none."""

    @property
    def is_gone(self) -> bool:
        """Whether the file says ``running``, and the process of rank 0 is no more.

        Only a process of this machine can be looked for; of another machine's this is False.
        """
        if self.state != "running" or self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # somebody else's process: it is there
        return False


class StatusFile:
    """The status of one start of a run, written by rank 0.

    Args:
        run_dir: the run's folder; created where it is missing.
        world_size: the number of ranks.
    """

    def __init__(self, run_dir: Path, world_size: int = 1) -> None:
        self.run_dir, self.world_size = run_dir, world_size
        self.checkpoint_path: Path | str | None = None
        self.began = False
        """Whether the file says of this start that it is running, or how it ended."""
        self._started = _now()

    @contextmanager
    def during(self, checkpoint_path: Path | str) -> Iterator[None]:
        """Say ``running`` at the beginning, and how the run ended where an error ends it.

        The caller must hold the lock of the run's folder.
        """
        self.checkpoint_path = (
            checkpoint_path.resolve() if isinstance(checkpoint_path, Path) else checkpoint_path
        )
        self._write("running", None, "")
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def end(self, exit_code: int) -> None:
        """Say how a run ended that returned its exit code."""
        stopped = exit_code == EXIT_TRY_AGAIN
        reason = ""
        if stopped:
            event = last_event(self.run_dir / "log.jsonl", RunStopped)
            why = STOP_CAUSES.get("" if event is None else event.cause, " on request")
            reason = f"stopped{why}; the same command resumes"
        self._write("try_again" if stopped else "done", exit_code, reason)

    def fail(self, error: BaseException) -> None:
        """Say how a run ended that ``error`` ended."""
        self._write(*outcome_of(error))

    def _write(self, state: State, exit_code: int | None, reason: str) -> None:
        self.began = True
        status = Status(
            state=state,
            exit_code=exit_code,
            reason=reason,
            step=last_step(self.run_dir / "log.jsonl"),
            checkpoint=newest_checkpoint(self.checkpoint_path),
            checkpoint_path=None if self.checkpoint_path is None else str(self.checkpoint_path),
            pid=os.getpid(),
            host=socket.gethostname(),
            world_size=self.world_size,
            started=self._started,
            time=_now(),
            ledger=last_event(self.run_dir / "log.jsonl", LedgerSummed),
        )
        path = self.run_dir / STATUS_FILE
        draft = path.with_name(f".status.{os.getpid()}.tmp")
        with contextlib.suppress(OSError):  # training is worth more than its status
            try:
                self.run_dir.mkdir(parents=True, exist_ok=True)
                draft.write_text(status.model_dump_json(indent=1) + "\n")
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)


def read_status(run_dir: Path) -> Status:
    """The status of a run. Raises InputError where there is none that can be read."""
    path = run_dir / STATUS_FILE
    try:
        return Status.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        what = (
            "has no status.json: no run has begun there" if run_dir.is_dir() else "does not exist"
        )
        raise InputError(f"RUN_DIR ({run_dir}) {what}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise InputError(f"{path} is no status of a run: {field}: {first['msg']}") from None


def outcome_of(error: BaseException) -> tuple[State, int, str]:
    """The state, the exit code and the reason of a run that ``error`` ends."""
    from ckpt.errors import CheckpointError  # here: importing ckpt takes half a second

    text = " ".join(str(error).split())
    match error:
        case LostRankError():
            return "lost_rank", EXIT_LOST, text
        case HealthError():
            return "health", EXIT_HEALTH, text
        case InputError() | CheckpointError():
            return "bad_input", EXIT_BAD_INPUT, text
        case KeyboardInterrupt():
            return "interrupted", EXIT_INTERRUPTED, "a second Ctrl-C ended it at once"
        case SystemExit(code=code) if code == EXIT_BAD_INPUT:
            return "bad_input", EXIT_BAD_INPUT, "another rank could not go on, and printed why"
        case SystemExit(code=code) if code == EXIT_LOST:
            return "lost_rank", EXIT_LOST, "another rank has failed, and printed how"
    return "crashed", EXIT_CRASHED, f"{type(error).__name__}: {text}".removesuffix(": ")


def newest_checkpoint(location: Path | str | None) -> str | None:
    """The manifest of the newest checkpoint in a folder; None for an object store, or for none."""
    if location is None or "://" in str(location):
        return None
    from ckpt import committed_steps, open_store  # here: as above
    from ckpt.format import manifest_key

    try:
        folder = Path(location).resolve()
        steps = committed_steps(folder)
        return open_store(folder).where(manifest_key(steps[-1])) if steps else None
    except Exception:  # whatever it is, a run that ends must end as it would have
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
