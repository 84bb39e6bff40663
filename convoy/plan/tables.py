"""The results of a simulation as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
"""An :class:`~convoy.plan.assessment.Assessment` as a dict, as ``--json`` writes it."""

_MOST_CAUSES = 10
PARTS = ("detection", "restart", "rework", "stall", "waiting", "running smaller")


def sizes_table(rows: Sequence[Row]) -> str:
    """One line for each number of GPUs, as a Markdown table."""
    head = ["GPUs", "hours between failures", "effective training time",
            "best interval (95 %)" if rows[0]["interval"] else "interval",
            "best spares (95 %)" if rows[0]["spares_search"] else "spares",
            *PARTS]  # fmt: skip
    cells = [
        [
            f"{row['gpus']:,}",
            "none" if (hours := row["hours_between_failures"]) is None else f"{hours:.3g}",
            f"{_percent(row['effective'])} ± {_percent(row['effective_ci'])}",
            _interval(row),
            _spares(row),
            *(_percent(row["lost"][part]) for part in PARTS),
        ]
        for row in rows
    ]
    return _markdown(head, cells)


def causes_table(row: Row) -> str:
    """Lost time by cause and by part, the largest first, as a Markdown table."""
    parts = ("detection", "restart", "rework", "waiting")
    causes = sorted(row["lost_by_cause"].items(), key=lambda each: -each[1]["all"])
    shown = [(name, lost) for name, lost in causes if lost["all"] > 0][:_MOST_CAUSES]
    hidden = [lost for _, lost in causes[len(shown) :] if lost["all"] > 0]
    if hidden:
        rest = {part: sum(lost[part] for lost in hidden) for part in ("all", *parts)}
        shown.append((f"{len(hidden)} further causes", rest))
    cells = [
        [name, _percent(lost["all"]), *(_percent(lost[part]) for part in parts)]
        for name, lost in shown
    ]
    return _markdown(["cause", "lost", *parts], cells)


def summary(row: Row) -> str:
    """The result for one number of GPUs, in lines."""
    hours = row["hours_between_failures"]
    daly = "" if row["daly_seconds"] is None else f"; Daly's formula {_time(row['daly_seconds'])}"
    kind = ("best " if row["interval"] else "") + "interval"
    spare = ("best " if row["spares_search"] else "") + "spares"
    every = "no failures" if hours is None else f"{row['failures']:.1f}, one in {hours:.3g} h"
    lines = [
        f"{row['gpus']:,} GPUs in {row['nodes']:,} nodes for {row['days']:g} days, "
        f"{row['repetitions']:,} repetitions",
        f"  failures                 {every}",
        f"  effective training time  {_percent(row['effective'])} ± "
        f"{_percent(row['effective_ci'])}",
        f"  {kind:<23}  {_interval(row)}{daly}",
        f"  {spare:<23}  {_spares(row)}; {row['nodes_in_repair']:.1f} nodes in repair on average",
        "  lost                     "
        + ", ".join(f"{part} {_percent(row['lost'][part])}" for part in PARTS),
    ]
    return "\n".join(lines)


def _interval(row: Row) -> str:
    text, found = _time(row["interval_seconds"]), row["interval"]
    if found:
        text += f" ({_time(found['low'])} to {_time(found['high'])})"
    return text


def _spares(row: Row) -> str:
    text, found = f"{row['spares']}", row["spares_search"]
    return text + (f" ({found['low']:.0f} to {found['high']:.0f})" if found else "")


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
