"""``convoy replay``: a step of a recorded run once more, compared with the log."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.commands.parsing import Parser, ended, is_first_rank
from pretrain.observe import say

if TYPE_CHECKING:
    from pretrain.train import ReplayedStep

_EPILOG = """\
examples:
  convoy replay runs/stdlib-tiny --step 95
  torchrun --nproc-per-node 2 -m tools.replay runs/stdlib-tiny --step 95 --set parallel.ep=2

The run's newest checkpoint of before the step is loaded, and the steps up to it are taken again, on
one rank or on torchrun's, in one replica that all ranks shard unless --set says otherwise. Nothing
of the run is changed. A run with train.exact has the bits of its log on any layout.

exit codes:
  0  every step has the loss and the gradient norm of the log, bit for bit
  1  a step differs
  2  the run, the step or the layout cannot be used
  75 stopped
"""


def main(arguments: Sequence[str]) -> int:
    """Run ``convoy replay``; returns its exit code."""
    parser = Parser("convoy replay", "Take a step of a recorded run again.", _EPILOG)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step, from 1")
    parser.add_overrides("a field of the run's spec")
    parser.add_debug()
    args = parser.parse_args(arguments)
    return ended(lambda: _replay(args), debug=args.debug, stopped="nothing was changed")


def _replay(args: argparse.Namespace) -> int:
    from pretrain.train import replay

    found = replay(args.run_dir, args.step, args.overrides, _show)
    return 0 if all(one.is_equal for one in found) else 1


def _show(one: ReplayedStep) -> None:
    if not is_first_rank():
        return
    say(f"step {one.step}: loss {one.loss!r}, gradient norm {one.grad_norm!r}")
    if one.is_equal:
        say("  as in the log")
    else:
        say(f"  the log has loss {one.logged_loss!r}, gradient norm {one.logged_grad_norm!r}")
