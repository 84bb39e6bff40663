"""``convoy audit-data``: which samples each step of a run consumed."""

from __future__ import annotations

import argparse
from pathlib import Path

from convoy.commands.parsing import Command, argument
from convoy.commands.results import write_json
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


def _audit(args: argparse.Namespace) -> int:
    from convoy.audit import audit_data
    from pretrain.data import open_corpora
    from pretrain.spec import load_spec

    corpora = None
    if args.tokens is not None:
        spec = load_spec(args.tokens, [])
        corpora = open_corpora(spec.data, spec.model.vocab_size)
    audit = audit_data(args.run_dir, corpora)
    steps = [
        {"step": s.step, "first": s.samples[0], "last": s.samples[-1], "count": len(s.samples)}
        for s in audit.steps
    ]
    write_json(args.json, steps)
    first, last = (steps[0]["first"], steps[-1]["last"]) if steps else (0, -1)
    say(
        f"{len(steps):,} steps consumed {audit.samples:,} samples, from {first:,} to "
        f"{last:,}, over {audit.starts} starts and {audit.resizes} resizes; "
        f"{audit.left_out:,} samples were left out; "
        f"{audit.taken - len(steps):,} steps were taken again"
    )
    for source in audit.shares:
        share = f"{source.samples:,} samples ({source.samples / max(1, audit.samples):.2%})"
        say(f"  {source.name}: {share}, {source.epochs:.3f} epochs")
    if audit.checked_steps:
        say(f"  tokens of {audit.checked_steps:,} steps are those of the checksums in the log")
    if audit.problem:
        say(f"NOT PROVED: {audit.problem}")
        return 1
    say("each sample exactly once and in order")
    return 0


main = Command(
    "convoy audit-data",
    "Prove which samples a run consumed.",
    _EPILOG,
    [
        argument("run_dir", "RUN_DIR", "the run's folder", type=Path),
        argument("--tokens", "SPEC", "compare the tokens of the spec's data as well", type=Path),
        argument("--json", "FILE", "write the samples of every step", type=Path),
    ],
    _audit,
)
