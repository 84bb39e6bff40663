"""``convoy pretrain``: a run, from a spec to an exit code."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convoy.commands.parsing import (
    SHRINK,
    SPEC,
    Command,
    argument,
    ended,
    flag,
    is_first_rank,
    overrides,
    quick_imports,
)
from convoy.commands.results import say_json
from pretrain.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    CorruptionError,
    HealthError,
    InputError,
    LostRankError,
)
from pretrain.observe import complain, say

if TYPE_CHECKING:
    from pretrain.elastic import Seat
    from pretrain.observe import StatusFile
    from pretrain.spec import JobSpec

_EPILOG = """\
examples:
  convoy prepare spec.toml && convoy pretrain spec.toml
  convoy pretrain spec.toml --set train.steps=1000 --set parallel.ep=4
  torchrun --nproc-per-node 8 tools/pretrain.py spec.toml
  torchrun --nproc-per-node 8 -m tools.pretrain spec.toml
  torchrun --nproc-per-node 8 --no-python convoy pretrain spec.toml

The same command resumes a run that was stopped. Ctrl-C and SIGTERM finish the step and commit a
checkpoint; a second Ctrl-C ends the run at once. SIGUSR1 asks for a checkpoint.

exit codes (torchrun ends with 1 for all but 0; RUN_DIR/status.json has the code and the reason, and
convoy status RUN_DIR shows them):
  0   done
  1   a rank was lost or stuck, or an unexpected error: the same command resumes
  2   the spec, the corpus or a checkpoint cannot be used
  3   training diverged, and a rule of [health] stopped the run
  75  stopped on request after a committed checkpoint: the same command resumes
  130 a second Ctrl-C ended the run at once: the same command resumes from the newest checkpoint
"""
_REPORT_SECONDS = 300.0
_ROOT = Path(__file__).resolve().parents[2]


def _act(args: argparse.Namespace) -> int:
    if args.print_spec:
        return ended(lambda: _print_spec(args), debug=args.debug, stopped="nothing was changed")
    try:
        return _pretrain(args)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _print_spec(args: argparse.Namespace) -> int:
    from pretrain.spec import load_spec

    spec = load_spec(args.spec, args.overrides, shrunk=args.shrink)
    if is_first_rank():
        say_json(spec.as_dict())
    return 0


def _pretrain(args: argparse.Namespace) -> int:
    """Train; an error is told once, by rank 0 or by the one rank that has met it."""
    with quick_imports():
        import torch._dynamo  # noqa: F401  # an optimizer's first use would import torch's compiler

        from ckpt import CheckpointError
        from ckpt.errors import OtherRankError
        from convoy.preparation import prepare_corpora
        from pretrain.elastic import launched_layout, with_recovery
        from pretrain.observe import outcome_of
        from pretrain.runtime import end_torchrun, launched_world, torchrun_process
        from pretrain.spec import load_spec
        from pretrain.train import read_window, run

    torchrun = torchrun_process()
    status = _status_file(args.spec, args.overrides, shrunk=args.shrink)
    comes_back: list[Seat] = []
    met_by_all = True  # until ranks act for themselves, every rank meets the same error
    try:
        spec = load_spec(args.spec, args.overrides, shrunk=args.shrink)
        if spec.plan.cluster is not None:
            spec = _planned(spec)
        if launched_world() == 1:  # the ranks of a launch find their corpus prepared
            prepare_corpora(spec.data, spec.model.vocab_size, say)
        layout = launched_layout(spec)
        window = read_window(args.profile, spec.train.steps) if args.profile else None

        def train(seat: Seat | None) -> int:
            if status is not None and seat is not None and seat.life.start:
                status.began = True  # the run has a status, which a replica that comes leaves
            if seat is not None and seat.life.start:
                comes_back.append(seat)
            return run(spec, layout, status, plain=args.plain, profile=window, seat=seat)

        met_by_all = False
        code = with_recovery(spec, layout, train)
        if args.report and code == EXIT_DONE and is_first_rank():
            write_report_apart(spec.run_path.resolve())
        return code
    except BaseException as error:
        if status is not None and not status.began:
            _record_refusal(status, error)
        if args.debug or not isinstance(
            error, InputError | CheckpointError | HealthError | LostRankError
        ):
            raise
        met_by_all |= isinstance(error, HealthError | CorruptionError)
        if is_first_rank() if met_by_all else not isinstance(error, OtherRankError):
            complain(str(error))
        code = outcome_of(error)[1]
        if not comes_back:  # the other replicas go on
            end_torchrun(torchrun, code)
        return code


def write_report_apart(run_dir: Path) -> None:
    """Write the report of a run that is done, and say where it is, below the summary.

    A process of its own writes the report: whatever becomes of it, the run is done.
    """
    page, why = run_dir / "report.html", ""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [env.get("PYTHONPATH")])])
    words = [sys.executable, "-m", "convoy", "report", str(run_dir)]
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=_REPORT_SECONDS,
            env=env,
            check=False,
        )
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["without a word"])[-1]
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    if why:
        complain(f"the run is done, and its report is not written: {why.removeprefix('error: ')}")
    else:
        say(f"report      {page}")


def _planned(spec: JobSpec) -> JobSpec:
    """The spec with the planner's layout for the ranks that were started."""
    from convoy.plan import automatic
    from pretrain.runtime import launched_world

    world = launched_world()
    spec, plan = automatic(spec, world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    if is_first_rank():
        say(f"plan.cluster gives {plan.describe()}; planned {plan.seconds:.3g} s a step")
    return spec


def _status_file(spec: Path, overrides: Sequence[str], *, shrunk: bool) -> StatusFile | None:
    """The run's status.json where this is rank 0 and the run's folder is known.

    A spec that is refused has no resolved ``run_dir``. What its file says is taken then.
    """
    from pretrain.observe import StatusFile
    from pretrain.spec import apply_override, read_table

    if not is_first_rank():
        return None
    values: dict[str, Any] = {}
    with contextlib.suppress(InputError):
        values = read_table(spec, "spec")
        if shrunk:
            values = {"name": f"{values.get('name')}-shrunk"}
    for override in overrides:
        with contextlib.suppress(InputError):
            apply_override(values, override)
    name, run_dir = values.get("name"), values.get("run_dir")
    if isinstance(run_dir, str):
        folder = Path(run_dir)
    elif isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        folder = Path("runs", name)
    else:
        return None
    return StatusFile(folder, int(os.environ.get("WORLD_SIZE", "1")))


def _record_refusal(status: StatusFile, error: BaseException) -> None:
    """Record an error from before the run had its folder, unless another run has the folder."""
    from pretrain.runtime import lock_folder

    with contextlib.suppress(InputError, OSError), lock_folder(status.run_dir, "run_dir"):
        status.fail(error)


main = Command(
    "convoy pretrain",
    "Train a model as a job spec says.",
    _EPILOG,
    [
        SPEC,
        overrides(),
        SHRINK,
        flag("--print-spec", "print the resolved spec and end"),
        flag("--plain", "print lines, no drawing, on a terminal too"),
        argument("--profile", "FIRST:LAST", "trace these steps with torch.profiler, into "
                 "RUN_DIR/profile"),
        flag("--report", "when the run is done, write RUN_DIR/report.html as convoy report does"),
    ],
    _act,
    ends_itself=True,
)  # fmt: skip
