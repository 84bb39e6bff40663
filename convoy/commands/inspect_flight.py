"""``convoy inspect flight``: the first collective at which the ranks of a failed run differ."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.commands.parsing import JSON, Command, argument
from convoy.commands.results import say_json
from pretrain.errors import InputError
from pretrain.observe import say

if TYPE_CHECKING:
    from cluster.detect import FlightDump

EXIT_MISMATCH = 1
_CODES = """\
exit codes:
  0   all ranks did the same collectives
  1   the ranks differ
  2   there are no dumps
  75  stopped
"""


def _show(args: argparse.Namespace) -> int:
    from cluster.detect import first_mismatch, read_dumps

    folder = _newest(args.folder)
    try:
        dumps = read_dumps(folder)
    except (OSError, ValueError) as error:
        raise InputError(str(error)) from None
    mismatch = first_mismatch(dumps)
    if args.json:
        fields = None if mismatch is None else asdict(mismatch)
        say_json({"folder": str(folder), "mismatch": fields})
    elif mismatch is None:
        say(f"the {len(dumps)} dumps in {folder} do not differ; the last collective of each rank:")
        _show_places(dumps)
    else:
        say("\n".join([*mismatch.lines(), f"{len(dumps)} dumps in {folder}"]))
    return 0 if mismatch is None else EXIT_MISMATCH


def _show_places(dumps: list[FlightDump]) -> None:
    from parallel.layout import name_ranks

    places: dict[str, list[int]] = {}
    for dump in dumps:
        places.setdefault(dump.place(), []).append(dump.rank)
    for where, ranks in places.items():
        say(f"  {name_ranks(ranks)}: {where}")


def _newest(folder: Path) -> Path:
    """The folder with dumps: the given one, or the newest launch of a run."""
    for parent in (folder, folder / "flight"):
        launches = [parent, *(path for path in parent.glob("*") if path.is_dir())]
        dumped = [path for path in launches if any(path.glob("rank-*.json"))]
        if dumped:
            return max(dumped, key=lambda path: path.stat().st_mtime)
    raise InputError(
        f"FOLDER ({folder}) must hold rank-N.json or be the folder of a run that has dumps of "
        f"collectives in flight/"
    )


main = Command(
    "convoy inspect flight",
    "Show the first collective at which ranks differ, from the dumps of a failed run.",
    f"example:\n  convoy inspect flight runs/a\n\n{_CODES}",
    [
        argument("folder", "FOLDER", "the run's folder, or one with rank-N.json; of a run the "
                 "newest dumps are read", type=Path),
        JSON,
    ],
    _show,
)  # fmt: skip
