"""``convoy chaos``: random faults against a live run, and what became of the run."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convoy.commands.parsing import SPEC, Command, argument, flag, json_file, overrides
from convoy.commands.results import check_writable, provenance, write_json
from pretrain.errors import EXIT_LOST, InputError
from pretrain.observe import say

if TYPE_CHECKING:
    from convoy.audit import Audit
    from convoy.chaos import Piece

_EPILOG = """\
examples:
  convoy prepare spec.toml && convoy chaos spec.toml OUT
  convoy chaos spec.toml OUT --quick
  convoy chaos spec.toml OUT --faults 100 --machines 4 --seed 7 --json chaos.json
  convoy chaos spec.toml OUT --kills 200 --set train.exact=true --json kills.json \
      --layout "parallel.dp_shard=2 parallel.ep=2 elastic.recovery=warm" \
      --layout "parallel.dp_replicate=2 elastic.recovery=heal"

The machines are torchrun processes of this computer with one rank each. The spec runs twice: first
undisturbed, then under faults that the seed decides: ranks and machines are killed, hang, lose
their network, are slow, have a full disk, or compute a gradient that is not finite.

With --kills there are only SIGKILLs, to ranks of one torchrun: within steps, in saves, and while
ranks start again. Each --layout is a piece of its own. A second start with the same OUT goes on
with the pieces that are missing. An exact layout is compared with the spec on one rank.

exit codes:
  0  the run went on after every fault, took the samples of the undisturbed run, each once, and its
     losses are those of the undisturbed run: within 1e-5, or within 1e-2 in at most a tenth of the
     steps, where a token's experts have nearly equal scores and another layout has rounded them
     otherwise; with train.exact they have the same bits, and so have gradient norms, and the
     parameters and moments at the end
  1  not so; the table says what differs
  2  the spec or OUT cannot be used, or a run did not end
  75 stopped
"""


def _check(args: argparse.Namespace) -> None:
    for name, least in (("faults", 1), ("machines", 2)):
        if getattr(args, name) < least:
            raise InputError(f"--{name} ({getattr(args, name)}) must be at least {least}")
    if args.kills is not None and args.kills < 1:
        raise InputError(f"--kills ({args.kills}) must be at least 1")
    if (args.kills is None) != (not args.layouts):
        raise InputError("--kills and --layout must be given together")


def _chaos(args: argparse.Namespace) -> int:
    if args.kills is not None:
        return _kills(args)
    from convoy.chaos import draw_faults, run_campaign
    from pretrain.elastic import choose_layout
    from pretrain.spec import load_spec

    if args.quick:
        args.faults, args.machines = 4, 2
    check_writable("--json", args.json)
    spec = load_spec(args.spec, args.overrides)
    layout = choose_layout(spec, args.machines, ranks_per_node=1)
    faults = draw_faults(args.seed, args.faults, spec.train.steps, layout.topology.world)
    result = run_campaign(
        spec,
        faults,
        args.out.resolve(),
        machines=args.machines,
        limit_seconds=args.limit,
        say=say,
    )
    say(chaos_table(result))
    if len(result.faults) < len(faults):
        say(f"{len(faults) - len(result.faults)} faults found no rank: fewer ranks trained then")
    write_json(args.json, _as_json(args, result))
    return 0 if result.is_one_run else EXIT_LOST


def _kills(args: argparse.Namespace) -> int:
    from convoy.chaos import run_pieces, totals

    check_writable("--json", args.json)
    pieces = run_pieces(
        args.spec,
        args.overrides,
        args.layouts,
        args.out.resolve(),
        kills=args.kills,
        seed=args.seed,
        limit_seconds=args.limit,
        say=say,
    )
    say(kills_table(pieces))
    head = {**provenance("torch"), "machine": _machine()}
    rows = [asdict(piece) for piece in pieces]
    write_json(args.json, head | {"totals": totals(pieces), "rows": rows})
    return 0 if all(piece.is_one_run for piece in pieces) else EXIT_LOST


_COLUMNS = {
    "kills": "kills", "starts": "starts", "healed": "healed", "steps": "steps",
    "taken_again": "steps_taken_again", "lost": "lost_samples", "repeated": "repeated_samples",
    "other_bits": "differing_steps", "hangs": "hangs", "leftover": "leftover_processes",
}  # fmt: skip
"""Columns of the table, and the piece's fields."""


def kills_table(pieces: Sequence[Piece]) -> str:
    """The pieces for people."""
    width = max(len(piece.layout) for piece in pieces)
    lines = [f"{'layout':<{width}}" + "".join(f"{name:>12}" for name in _COLUMNS)]
    for piece in pieces:
        values = (getattr(piece, field) for field in _COLUMNS.values())
        lines.append(f"{piece.layout:<{width}}" + "".join(f"{value:>12,}" for value in values))
    wrong = [f"{piece.layout}: {problem}" for piece in pieces for problem in piece.problems]
    sums = (sum(getattr(piece, field) for piece in pieces) for field in _COLUMNS.values())
    lines.append(f"{'all':<{width}}" + "".join(f"{value:>12,}" for value in sums))
    return "\n".join([*lines, "", *(wrong or ["nothing lost, nothing wrong"])])


def _machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores"


def chaos_table(result: Audit) -> str:
    """The results for people."""
    lines = [f"{'fault':<16}{'step':>6}{'rank':>6}{'seconds until the step was committed':>39}"]
    for fault in result.faults:
        seconds = "never" if fault.seconds is None else f"{fault.seconds:.1f}"
        lines.append(f"{fault.kind:<16}{fault.step:>6}{fault.rank:>6}{seconds:>39}")
    known = [fault.seconds for fault in result.faults if fault.seconds is not None]
    lines += [
        "",
        f"recovered      {result.recovered} of {len(result.faults)} faults, in "
        f"{statistics.median(known) if known else 0:.1f} s (median); {result.starts} starts",
        f"samples        {result.samples_problem or 'those of the undisturbed run, each once'}",
    ]
    if result.losses_exact:
        how = "bit for bit, as are gradient norms" if result.is_exact else "within 1e-5"
        lines.append(f"losses         those of the undisturbed run, {how}")
    else:
        far = max(result.losses, key=lambda loss: abs(loss[1]))
        by = "" if result.is_exact else " by more than 1e-5"
        lines.append(
            f"losses         {len(result.losses)} differ{by}, that of step {far[0]} by {far[1]:.1e}"
        )
    if result.is_exact:
        differ = ", ".join(result.arrays[:3]) + (" ..." if len(result.arrays) > 3 else "")
        same = "parameters and moments of the undisturbed run, bit for bit"
        lines.append(f"last state     {f'differs in {differ}' if differ else same}")
    goodput = "unknown" if result.goodput is None else f"{result.goodput:.0%}"
    lines.append(
        f"ledger         goodput {goodput}; its phases differ by {result.ledger_error:.2%} from "
        f"the wall time"
    )
    return "\n".join(lines)


def _as_json(args: argparse.Namespace, result: Audit) -> dict[str, Any]:
    return {
        **provenance("torch"),
        "machine": _machine(),
        "seed": args.seed,
        "machines": args.machines,
        "drawn": args.faults,
        "faults": len(result.faults),
        "recovered": result.recovered,
        "samples_exact": result.samples_exact,
        "exact": result.is_exact,
        "losses_exact": result.losses_exact,
        "arrays_that_differ": list(result.arrays),
        "ledger_error": result.ledger_error,
        "goodput": result.goodput,
        "starts": result.starts,
        "samples_problem": result.samples_problem,
        "losses": [{"step": step, "difference": far} for step, far in result.losses],
        "recoveries": [
            {"kind": fault.kind, "step": fault.step, "rank": fault.rank, "seconds": fault.seconds}
            for fault in result.faults
        ],
    }


main = Command(
    "convoy chaos",
    "Run a spec under random faults, and say what became of the run.",
    _EPILOG,
    [
        SPEC,
        argument("out", "OUT", "a folder for both runs, made new", type=Path),
        overrides(),
        argument("--faults", "N", "how many; 30", type=int, default=30),
        argument("--machines", "N", "how many; 3", type=int, default=3),
        argument("--seed", "N", "of the faults; 0", type=int, default=0),
        flag("--quick", "4 faults on 2 machines"),
        argument(
            "--limit",
            "S",
            "seconds a run may take; with --kills, seconds that a run may go "
            "without a step of all ranks; 3600",
            type=float,
            default=3600.0,
        ),
        argument("--kills", "N", "SIGKILLs and nothing else, divided among the layouts", type=int),
        argument(
            "--layout",
            "OVERRIDES",
            "what --kills run: fields of the spec with their values, "
            "with spaces between; may be repeated",
            dest="layouts",
            action="append",
            default=[],
        ),
        json_file(),
    ],
    _chaos,
    stopped="the run under faults is cut off",
    check=_check,
)
