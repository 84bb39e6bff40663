"""``convoy prepare``: what a run needs before it starts."""

from __future__ import annotations

import argparse

from convoy.commands.parsing import SHRINK, SPEC, Command, OneOf, argument, flag, overrides
from pretrain.errors import InputError

_EPILOG = """\
examples:
  convoy prepare spec.toml
  convoy prepare spec.toml --processes 8      # of a large corpus
  convoy prepare spec.toml --verify           # compare every byte with the manifest
  convoy prepare spec.toml --reset            # the next start begins at step 0
  convoy prepare spec.toml --load-step 200    # the next start resumes after step 200

A corpus that is there is used as it is. A preparation that was killed goes on with the parts that
are done. --reset removes the run's checkpoints, log, summary and
status, and keeps the corpus. --load-step rolls the run back: manifests of newer checkpoints are
moved to away/ in the checkpoint folder, and node-local copies of them are not loaded. The objects
of those checkpoints stay until convoy inspect gc --unlisted removes them.

exit codes:
  0   done
  2   the spec or the corpus cannot be used, another run holds the folder, or there is no such step
  75  stopped: the same command goes on
"""


def _prepare(args: argparse.Namespace) -> int:
    from convoy.preparation import prepare, verify_data
    from pretrain.spec import load_spec

    spec = load_spec(args.spec, args.overrides, shrunk=args.shrink)
    if args.verify:
        verify_data(spec)
    else:
        prepare(spec, reset=args.reset, load_step=args.load_step, processes=args.processes)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.processes is not None and args.processes < 1:
        raise InputError(f"--processes ({args.processes}) must be at least 1")


_MODES = OneOf((
    flag("--reset", "remove the run's checkpoints, log and summary"),
    argument("--load-step", "N", "roll the run back to the checkpoint of step N", type=int),
    flag("--verify", "compare every byte of the corpus with its manifest"),
))  # fmt: skip
main = Command(
    "convoy prepare",
    "Prepare the corpus of a spec; roll a run back; start it afresh.",
    _EPILOG,
    [
        SPEC,
        overrides(),
        SHRINK,
        _MODES,
        argument("--processes", "N", "processes that read and tokenize documents", type=int),
    ],
    _prepare,
    stopped="the same command goes on",
    check=_check,
)
