"""``convoy audit-data``: which samples each step of a run consumed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from convoy.commands.parsing import Parser, ended
from pretrain.observe import say

_EPILOG = """\
examples:
  convoy audit-data runs/stdlib-tiny
  convoy audit-data runs/stdlib-tiny --tokens spec.toml   # read the tokens of every step again
  convoy audit-data runs/stdlib-tiny --json steps.json    # the samples of every step

The log and the manifests in RUN_DIR/data must show that each sample was consumed exactly once and
in order, over all starts, rollbacks and resizes, that no step comes twice but after a start or a
rollback, and that every start drew earlier samples from the same data. Samples that the divergence
playbook left out are counted. With --tokens the tokens of every step are compared with the checksum
of what its ranks had.

exit codes:
  0   proved
  1   not so: the first step that took other samples, or the first manifest that differs, is named
  2   the run or the spec cannot be read
  75  stopped
"""


def main(arguments: Sequence[str]) -> int:
    """Run ``convoy audit-data``; returns its exit code."""
    parser = Parser("convoy audit-data", "Prove which samples a run consumed.", _EPILOG)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder")
    parser.add_argument(
        "--tokens", type=Path, metavar="SPEC", help="compare the tokens of the spec's data as well"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the samples of every step")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = parser.parse_args(arguments)
    return ended(lambda: _audit(args), debug=args.debug, stopped="nothing was changed")


def _audit(args: argparse.Namespace) -> int:
    from convoy.audit import audit_data
    from pretrain.data import open_corpora
    from pretrain.spec import load_spec

    corpora = None
    if args.tokens is not None:
        spec = load_spec(args.tokens, [])
        corpora = open_corpora(spec.data, spec.model.vocab_size)
    found = audit_data(args.run_dir, corpora)
    if args.json is not None:
        steps = [
            {"step": s.step, "first": s.samples[0], "last": s.samples[-1], "count": len(s.samples)}
            for s in found.steps
        ]
        args.json.write_text(json.dumps(steps, indent=1) + "\n")
    first = found.steps[0].samples[0] if found.steps else 0
    last = found.steps[-1].samples[-1] if found.steps else -1
    say(
        f"{len(found.steps):,} steps consumed {found.samples:,} samples, from {first:,} to "
        f"{last:,}, over {found.starts} starts and {found.resizes} resizes; "
        f"{found.left_out:,} samples were left out; "
        f"{found.taken - len(found.steps):,} steps were taken again"
    )
    for one in found.shares:
        share = one.samples / max(1, found.samples)
        say(f"  {one.name}: {one.samples:,} samples ({share:.2%}), {one.epochs:.3f} epochs")
    if found.checked_steps:
        say(f"  tokens of {found.checked_steps:,} steps are those of the checksums in the log")
    if found.problem:
        say(f"NOT PROVED: {found.problem}")
        return 1
    say("each sample exactly once and in order")
    return 0
