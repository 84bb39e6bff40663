"""``convoy status``: whether a run is running, and how it ended."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

from convoy.commands.parsing import JSON, Command, argument
from convoy.commands.results import say_json
from pretrain.observe import say

_EPILOG = """\
examples:
  convoy status runs/stdlib-tiny
  convoy status runs/stdlib-tiny --json | jq .exit_code

The state is running, done, lost_rank, bad_input, health, try_again, interrupted or crashed. With
--json the fields are those of RUN_DIR/status.json, with "gone" (rank 0 was killed before it could
write how it ended) and the goodput ledger of the whole log, which says where the run's time went.

exit codes:
  0  the status was shown, whatever it is
  2  the folder has no status that can be read
"""


def _show(args: argparse.Namespace) -> int:
    from parallel.layout import count_ranks
    from pretrain import observe

    status, log = observe.read_status(args.run_dir), args.run_dir / "log.jsonl"
    former = observe.read_former(log)
    step, ledger = observe.last_step(log), observe.ledger_of(former)
    changes = [line.event for line in former if isinstance(line.event, observe.Regrouped)]
    sums = observe.summed(ledger, step or 0)
    if args.json:
        say_json(status.model_dump() | {
            "step": step,
            "checkpoint": observe.newest_checkpoint(status.checkpoint_path),
            "gone": status.is_gone,
            "ledger": asdict(sums),
            "regrouped": asdict(changes[-1]) if changes else None,
        })  # fmt: skip
        return 0
    if status.is_gone:
        say(f"killed: process {status.pid}, rank 0, is gone without a word; start the run again")
    elif status.state == "running":
        say(f"running: process {status.pid} on {status.host}, {count_ranks(status.world_size)}")
    else:
        why = f": {status.reason}" if status.reason else ""
        say(f"{status.state}, exit code {status.exit_code}{why}")
    say(f"  started     {status.started}")
    if status.state != "running":
        say(f"  ended       {status.time}")
    if step is not None:
        say(f"  step        {step}")
    if changes:
        say(f"  replicas    {observe.regrouped_text(changes[-1])}")
    checkpoint = observe.newest_checkpoint(status.checkpoint_path)
    if checkpoint is not None:
        say(f"  checkpoint  {checkpoint}")
    if table := observe.ledger_table(sums):
        say(table)
        if status.state == "running" and ledger.end is not None:
            say(f"  last line   {max(0.0, time.time() - ledger.end):.0f} s ago, not in the sums")
    return 0


main = Command(
    "convoy status",
    "Show whether a run is running, how it ended, and where its time went.",
    _EPILOG,
    [argument("run_dir", "RUN_DIR", "the run's folder", type=Path), JSON],
    _show,
)
