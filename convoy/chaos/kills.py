"""A campaign of SIGKILLs over layouts, in pieces: one layout is one piece, and one folder.

A piece runs the spec under its layout, kills ranks until it has its number of kills, lets the run
stop, and compares the run with an undisturbed one. A piece that is done has ``piece.json``; a
campaign that is started again takes the pieces that have none.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ckpt
from convoy.audit import arrays_that_differ, audit, audit_data
from convoy.chaos.launched import HangError, Launch
from convoy.chaos.strikes import Striker
from pretrain.data import open_corpora
from pretrain.observe import CheckpointCommitted, LoggedEvent, Regrouped, RunStarted, StepCommitted
from pretrain.observe import read_log as read_events
from pretrain.spec import JobSpec, load_spec

DONE = "piece.json"
_STEPS_AFTER = 3
"""Steps of all ranks between the last kill and the end."""


@dataclass
class Piece:
    """What became of one layout's run."""

    layout: str
    """The overrides of the spec."""
    world: int
    exact: bool
    """The run has ``train.exact``, and is compared with the spec on one rank."""
    recovery: str
    seed: int = 0
    kills: int = 0
    kills_by_moment: dict[str, int] = field(default_factory=dict)
    kills_of_several_ranks: int = 0
    kills_of_parents: int = 0
    starts: int = 0
    """Starts of all ranks after the first."""
    healed: int = 0
    """Times that replicas left and the others went on."""
    steps: int = 0
    steps_taken_again: int = 0
    """Steps that a start from a checkpoint took again."""
    lost_samples: int = 0
    repeated_samples: int = 0
    lost_checkpoints: int = 0
    """Starts from an older checkpoint than the newest that the log calls committed."""
    differing_steps: int = 0
    """Steps whose loss or gradient norm has other bits than in the undisturbed run."""
    differing_arrays: int | None = None
    """Parameters and moments with other bits in the newest checkpoint of both runs."""
    arrays: int = 0
    """How many were compared."""
    compared_step: int = 0
    hangs: int = 0
    leftover_processes: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def is_one_run(self) -> bool:
        """Whether nothing was lost and nothing is wrong."""
        return not self.problems


def run_pieces(
    path: Path,
    overrides: Sequence[str],
    layouts: Sequence[str],
    folder: Path,
    *,
    kills: int,
    seed: int,
    limit_seconds: float,
    say: Callable[[str], None],
) -> list[Piece]:
    """Kill ranks under each layout, and compare; layouts that are done are read and not run.

    Args:
        path: the spec's file; its corpus must be prepared. Exact layouts are compared with it.
        overrides: of the spec, for all layouts.
        layouts: overrides of each layout, with spaces between, ``parallel.pp=2 moe.copies=2``.
        folder: for all runs; made where it is missing.
        kills: of all layouts together, divided evenly.
        seed: of the moments and ranks.
        limit_seconds: as long as a run may go without what it should do; longer is a hang.
        say: takes lines for people.

    Raises InputError for a spec that cannot be used.
    """
    pieces = []
    given = [(text, load_spec(path, [*overrides, *text.split()])) for text in layouts]
    for number, (text, spec) in enumerate(given):
        piece_folder = folder / f"{number:02d}"
        done = piece_folder / DONE
        if done.exists():
            pieces.append(Piece(**json.loads(done.read_text())))
            continue
        shutil.rmtree(piece_folder, ignore_errors=True)
        share = -(-kills // len(layouts))
        began = time.monotonic()
        say(f"{text}: {share} kills")
        piece = _Run(spec, text, piece_folder, limit_seconds).strike(share, seed + number)
        piece.seed = seed + number
        calm = folder / "undisturbed" if piece.exact else piece_folder / "undisturbed"
        base = load_spec(path, list(overrides)) if piece.exact else spec
        try:
            undisturbed_run(base, calm, piece.steps, limit_seconds)
            judge(piece, spec, piece_folder / "run", calm / "run")
        except (HangError, ckpt.CheckpointError, OSError) as error:
            piece.problems.append(f"the comparison: {error}")
        piece.seconds = time.monotonic() - began
        partial = done.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(piece), indent=1) + "\n")
        partial.rename(done)
        pieces.append(piece)
        say(f"{text}: {piece.kills} kills in {piece.seconds:.0f} s; "
            f"{'; '.join(piece.problems) or 'nothing lost, nothing wrong'}")  # fmt: skip
    return pieces


def ranks_of(spec: JobSpec) -> int:
    """How many ranks a spec's layout has."""
    p = spec.parallel
    return p.pp * p.dp_replicate * max(1, p.dp_shard) * p.cp * p.tp  # -1: what is left


def _launch(spec: JobSpec, folder: Path, limit_seconds: float) -> Launch:
    sections = spec.as_dict()
    sections["run_dir"], sections["checkpoint"]["path"] = str(folder / "run"), None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "spec.json"
    path.write_text(json.dumps(sections, indent=1))
    return Launch(
        path, folder / "run", world=ranks_of(spec), output=folder / "output.txt",
        limit_seconds=limit_seconds,
    )  # fmt: skip


class _Run:
    """The run of one piece, under kills."""

    def __init__(self, spec: JobSpec, text: str, folder: Path, limit_seconds: float) -> None:
        self.spec, self.folder, self.limit_seconds = spec, folder, limit_seconds
        self.piece = Piece(text, ranks_of(spec), spec.train.exact, spec.elastic.recovery)

    def strike(self, kills: int, seed: int) -> Piece:
        """Kill ranks so often, and let the run stop."""
        piece, launch = self.piece, _launch(self.spec, self.folder, self.limit_seconds)
        striker = Striker(launch, seed)
        with closing(launch):
            try:
                while striker.kills < kills:
                    striker.strike()
                striker.wait_until_whole()
                last = launch.watched.step + _STEPS_AFTER
                launch.wait(lambda: launch.watched.step >= last, "steps after the last kill")
                launch.stop()
                left = launch.leftover()
                piece.leftover_processes = len(left)
                if left:
                    piece.problems.append(f"processes {left} outlive the run")
            except HangError as error:
                piece.hangs += 1
                said = launch.output.read_text(errors="replace")[-2000:]
                piece.problems.append(f"{error}; the ranks said: {said}")
        piece.kills, piece.kills_by_moment = striker.kills, dict(striker.by_moment)
        piece.kills_of_several_ranks, piece.kills_of_parents = striker.together, striker.parents
        piece.steps = launch.watched.step
        return piece


def undisturbed_run(spec: JobSpec, folder: Path, steps: int, limit_seconds: float) -> None:
    """Run a spec to at least so many steps, and stop it; goes on from where it stands.

    Raises HangError where it does not come so far.
    """
    log = folder / "run" / "log.jsonl"
    if log.exists() and any(
        isinstance(e, StepCommitted) and e.step >= steps for e in read_events(log).events
    ):
        return
    with closing(_launch(spec, folder, limit_seconds)) as launch:
        while launch.watched.step < steps:
            _wait_for_step(launch)
        launch.stop()


def _wait_for_step(launch: Launch) -> None:
    step = launch.watched.step
    launch.wait(lambda: launch.watched.step > step, "a step of the undisturbed run")


def judge(piece: Piece, spec: JobSpec, run: Path, calm: Path) -> None:
    """Compare a run with an undisturbed run, and write into the piece what was found."""
    lines = read_events(run / "log.jsonl").lines
    expected = [
        line for line in read_events(calm / "log.jsonl").lines
        if not (isinstance(line.event, StepCommitted) and line.event.step > piece.steps)
    ]  # fmt: skip
    result = audit(lines, expected, is_exact=piece.exact)
    bits = audit(lines, expected, is_exact=True)
    piece.differing_steps = len({step for step, _ in bits.losses})
    piece.starts = sum(isinstance(line.event, RunStarted) for line in lines) - 1
    piece.healed = sum(isinstance(e, Regrouped) and bool(e.left) for e in (x.event for x in lines))
    _follow(piece, lines, spec.batch.global_batch_size)
    if result.samples_problem:
        piece.problems.append(result.samples_problem)
    if not result.is_one_run:
        piece.problems.append(f"{len(result.losses)} losses differ from the undisturbed run's")
    data = audit_data(run, open_corpora(spec.data, spec.model.vocab_size))
    if data.problem:
        piece.problems.append(f"convoy audit-data: {data.problem}")
    _compare_checkpoints(piece, run / "checkpoints", calm / "checkpoints")
    for name in ("lost_samples", "repeated_samples", "lost_checkpoints"):
        if number := getattr(piece, name):
            piece.problems.append(f"{number} {name.replace('_', ' ')}")


def _follow(piece: Piece, lines: Sequence[LoggedEvent], batch: int) -> None:
    """Samples and checkpoints that are missing, or come twice without a start between."""
    step = committed = 0
    for event in (line.event for line in lines):
        if isinstance(event, RunStarted):
            piece.lost_checkpoints += event.step < committed
            piece.steps_taken_again += max(0, step - event.step)
            step = event.step
        elif isinstance(event, CheckpointCommitted):
            committed = max(committed, event.step)
        elif isinstance(event, StepCommitted):
            piece.lost_samples += batch * max(0, event.step - step - 1)
            piece.repeated_samples += batch * (event.step <= step)
            step = event.step


def _compare_checkpoints(piece: Piece, root: Path, other: Path) -> None:
    """Every committed checkpoint of the run is whole; one of an exact run has the bits of the
    undisturbed run's."""
    steps = ckpt.committed_steps(root)
    for step in steps:
        try:
            ckpt.verify(root, ckpt.read_manifest(root, step))
        except ckpt.CheckpointError as error:
            piece.problems.append(f"the checkpoint of step {step}: {error}")
    if piece.steps not in steps:
        piece.problems.append(f"the run stopped after step {piece.steps} without a checkpoint")
    common = set(steps) & set(ckpt.committed_steps(other))
    if not common:
        piece.problems.append("both runs have no checkpoint of one step")
        return
    piece.compared_step = max(common)
    piece.arrays = len(ckpt.read_manifest(root, piece.compared_step).arrays)
    differ = arrays_that_differ(root, other, piece.compared_step)
    piece.differing_arrays = len(differ)
    if differ and piece.exact:
        piece.problems.append(f"step {piece.compared_step}: other bits in {', '.join(differ[:3])}")


def totals(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Sums over all pieces."""
    names = ("kills", "starts", "healed", "steps", "lost_samples", "repeated_samples",
             "lost_checkpoints", "hangs", "leftover_processes", "seconds")  # fmt: skip
    sums: dict[str, Any] = {name: sum(getattr(piece, name) for piece in pieces) for name in names}
    return sums | {
        "layouts": len(pieces),
        "layouts_lost_or_wrong": sum(not piece.is_one_run for piece in pieces),
    }
