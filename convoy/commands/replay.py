"""``convoy replay``: steps of a recorded run once more, and where two runs part."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.commands.parsing import (
    RANKS,
    Command,
    OneOf,
    argument,
    check_ranks,
    is_first_rank,
    overrides,
)
from pretrain.errors import EXIT_LOST
from pretrain.observe import say

if TYPE_CHECKING:
    from convoy.audit import ReplayedStep

_EPILOG = """\
examples:
  convoy replay runs/stdlib-tiny --step 95
  convoy replay runs/stdlib-tiny --step 95 --ranks 2 --set parallel.ep=2
  convoy replay runs/stdlib-tiny --against runs/other

--step: the run's newest checkpoint of before the step is loaded, and the steps up to it are taken
again, in one replica that all ranks shard unless --set says otherwise. Nothing of the run is
changed. A run with train.exact has the bits of its log on any layout.

--against: finds the first step of two runs with train.exact that differs, and in it the first layer
and tensor, by their logs and checkpoints; then takes that step of RUN_DIR again, and says which of
the logs has its bits.

exit codes:
  0  every step has the bits of the log; or the two runs are equal
  1  a step differs
  2  a run, the step or the layout cannot be used
  75 stopped
"""


def _act(args: argparse.Namespace) -> int:
    if args.against is not None:
        return _compare(args)
    return _replay(args, args.step)


def _replay(args: argparse.Namespace, step: int) -> int:
    if args.ranks > 1:
        from convoy.local_ranks import run_local_ranks

        words = [str(args.run_dir), "--step", str(step), *_options(args)]
        return run_local_ranks(["-m", "convoy", "replay", *words], args.ranks)
    from convoy.audit import replay

    steps = replay(args.run_dir, step, args.overrides, _show)
    return EXIT_LOST if any(replayed.difference for replayed in steps) else 0


def _options(args: argparse.Namespace) -> list[str]:
    overrides = [word for override in args.overrides for word in ("--set", override)]
    return [*overrides, *(["--debug"] if args.debug else [])]


def _compare(args: argparse.Namespace) -> int:
    from convoy.audit import compare_runs

    comparison = compare_runs(args.run_dir, args.against)
    for line in comparison.lines():
        _tell(line)
    if comparison.differing is not None:
        step = comparison.differing[0].step
        _tell(f"step {step} of {args.run_dir} once more:")
        same = _replay(args, step) == 0
        _tell(
            f"{args.run_dir} computes its log again: look at {args.against}, and replay that run's "
            f"step {step} too"
            if same
            else f"{args.run_dir} does not compute its log again: look there"
        )
    return 0 if comparison.is_equal else EXIT_LOST


def _show(replayed: ReplayedStep) -> None:
    now, logged = replayed.now, replayed.logged
    _tell(f"step {now.step}: loss {now.loss!r}, gradient norm {now.grad_norm!r}")
    if replayed.difference:
        _tell(f"  the log has loss {logged.loss!r}, gradient norm {logged.grad_norm!r}")
        _tell(f"  {replayed.difference}")
    else:
        _tell("  as in the log")


def _tell(line: str) -> None:
    if is_first_rank():
        say(line)


_WHAT = OneOf((
    argument("--step", "N", "take this step again, from 1", type=int),
    argument("--against", "OTHER", "compare with another run", type=Path),
), required=True)  # fmt: skip
main = Command(
    "convoy replay",
    "Take a step of a recorded run again, on any ranks.",
    _EPILOG,
    [
        argument("run_dir", "RUN_DIR", "the run's folder", type=Path),
        _WHAT,
        RANKS,
        overrides("a field of the run's spec"),
    ],
    _act,
    check=check_ranks,
)
