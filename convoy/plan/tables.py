"""Plans, the validation and simulated runs as text."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from convoy.plan.cost import Cost
from convoy.plan.gains import Gain
from convoy.plan.hardware import Cluster
from convoy.plan.search import Found, Plan
from convoy.plan.validate import Accuracy, Compared, missed_bounds
from convoy.plan.work import Work

_GIB = 2**30
_MOST_CAUSES = 10
PARTS = ("detection", "restart", "rework", "stall", "waiting", "running smaller")
Row = Mapping[str, Any]
"""An :class:`~convoy.plan.assessment.Assessment` as a dict, as ``--json`` writes it."""


def plans_table(plans: Sequence[Plan]) -> str:
    """The best layouts, one line each, as a Markdown table."""
    rows = [
        [str(number), f"{plan.seconds:.3g}", f"{plan.memory.total / _GIB:.1f}", plan.describe(),
         _costs(plan)]
        for number, plan in enumerate(plans, 1)
    ]  # fmt: skip
    head = ["", "seconds of a step", "GiB of a GPU", "layout", "what costs most beside GEMMs"]
    return _markdown(head, rows)


def _costs(plan: Plan) -> str:
    parts = {name: s for name, s in plan.step.as_dict().items() if name != "gemms"}
    ranked = sorted(parts.items(), key=lambda item: -item[1])[:3]
    named = [f"{_words(name)} {s / plan.seconds:.0%}" for name, s in ranked]
    return ", ".join(name for name in named if not name.endswith(" 0%"))


def reasons(best: Plan, others: Sequence[Plan]) -> list[str]:
    """For each other plan, in which parts it loses to the best one."""
    lines = []
    for number, plan in enumerate(others, 2):
        mine, theirs = best.step.as_dict(), plan.step.as_dict()
        behind = sorted(
            ((theirs[name] - mine[name], name) for name in mine), reverse=True
        )[:2]  # fmt: skip
        why = " and ".join(
            f"{_words(name)} ({seconds:+.3g} s)" for seconds, name in behind if seconds > 0
        )
        lines.append(
            f"layout {number} takes {plan.seconds / best.seconds - 1:.1%} longer: {why or 'equal'}"
        )
    return lines


def why_others_lose(search: Found) -> str:
    """What became of the layouts that are not among the best, in one line."""
    refused = sum(search.refused.values())
    rules = ", ".join(rule for rule, _ in search.refused.most_common(3))
    parts = [
        f"{search.layouts:,} layouts keep the rules of the spec",
        f"{refused:,} are refused" + (f" (by {rules})" if rules else ""),
        f"{search.too_large:,} of those looked at do not fit the memory",
        f"{search.timed:,} variants were timed",
        f"{search.slower:,} cannot be faster even without data parallelism's communication",
    ]
    ended = "" if search.complete else "; the search stopped at its limit of timed variants"
    return "; ".join(parts) + ended


def plan_lines(plan: Plan, cost: Cost | None, cluster: Cluster) -> str:
    """One plan in full: memory and time by part, then time, money and energy; these are left out
    without ``cost``."""
    room_gib = f"{cluster.chip.memory_bytes / _GIB:.1f}"
    sizes = [[_words(name), f"{size / _GIB:.2f}"] for name, size in plan.memory.as_dict().items()]
    sizes.append([f"all, of {room_gib}", f"{plan.memory.total / _GIB:.2f}"])
    times = [
        [_words(name), f"{seconds:.4g}", f"{seconds / plan.seconds:.1%}"]
        for name, seconds in plan.step.as_dict().items()
        if seconds
    ]
    times.append(["all", f"{plan.seconds:.4g}", "100 %"])
    lines = [
        f"layout  {plan.describe()}", "", _markdown(["memory of a GPU", "GiB"], sizes), "",
        _markdown(["part of a step", "seconds", "share"], times),
    ]  # fmt: skip
    if cost is None:
        return "\n".join(lines)
    lines += [
        "",
        f"{cost.teraflops:.4g} model TFLOP/s of a GPU, MFU {cost.mfu:.1%} (causal pairs, no "
        f"recomputation counted)",
        f"{cost.tokens_per_day / 1e9:,.4g} billion tokens a day without failures",
        f"{cost.tokens / 1e9:,.4g} billion tokens in {cost.days:,.4g} days with failures, "
        f"{cost.effective:.1%} of them effective training time",
        f"{_amount(cost.gpu_hours)} GPU-hours, {_amount(cost.dollars)} dollars, "
        f"{cost.megawatt_hours:,.4g} MWh",
        f"a checkpoint has {cost.checkpoint_bytes / 1e9:,.4g} GB; a save every "
        f"{_steps(cost.checkpoint_interval_steps)} ({cost.checkpoint_interval_seconds:,.3g} s), "
        f"every tenth of them to shared storage at "
        f"{cost.checkpoint_gigabytes_per_second:,.3g} GB/s",
    ]
    return "\n".join(lines)


def accuracy_lines(plans: Sequence[Plan], known: Accuracy, cluster: Cluster) -> str:
    """How far the planner was from published runs, and which plans that leaves in doubt."""
    low, high = known.lowest, known.highest
    name = "MoE" if known.kind == "moe" else "dense"
    there = {0: "none of them", known.rows: "all of them"}.get(
        known.rows_on_cluster, f"{known.rows_on_cluster} of them"
    )
    lines = [
        f"the planner against {known.rows} published {name} runs, {there} on {cluster.name}: its "
        f"TFLOP/s are {_signed(known.bias)} in the median, {_signed(low.error)} ({low.name}) to "
        f"{_signed(high.error)} ({high.name}); the median error is "
        f"{known.median_error:.0%}; see convoy plan --validate"
    ]
    close = [
        number for number, plan in enumerate(plans, 1)
        if plan.seconds <= plans[0].seconds * (1 + known.median_error)
    ]  # fmt: skip
    if len(close) > 1:
        lines.append(
            f"layouts {', '.join(map(str, close))} are within that error of each other: measure "
            f"them before a long run"
        )
    return "\n".join(lines)


_EQUAL = 0.01
"""Steps whose times differ by less are taken for equal: of those the fewest copies are best."""


def gains_lines(work: Work, gains: Sequence[Gain], cluster: Cluster) -> str:
    """What ``moe.copies`` would do to one layout, as a Markdown table, and what is best."""
    if not gains:
        return "without parallel.ep every rank has all experts: loads of experts cost nothing"
    rows = []
    for gain in gains:
        fits = gain.memory <= cluster.chip.memory_bytes
        rows.append([
            f"{gain.copies}", f"{gain.hottest:.3f}", f"{gain.hottest_call:.3f}",
            f"{gain.seconds:.4g}", f"{gains[0].seconds / gain.seconds - 1:+.1%}",
            f"{gain.memory / _GIB:.1f}" + ("" if fits else ", too much"),
        ])  # fmt: skip
    head = ["moe.copies", "hottest rank over the mean", "at most", "seconds of a step",
            "tokens a second", "GiB of a GPU"]  # fmt: skip
    least = min(gain.seconds for gain in gains) * (1 + _EQUAL)
    best = min((gain for gain in gains if gain.seconds <= least), key=lambda gain: gain.copies)
    share = gains[0].seconds / best.seconds - 1
    said = f"moe.copies = {best.copies} is {share:.1%} faster than no copies"
    if best.copies == 0:
        said = "copies gain nothing: their transfers take longer than what they save"
        if least < gains[0].seconds * (1 + _EQUAL):
            said = f"copies gain nothing that the planner can tell ({_EQUAL:.0%})"
    source = "" if work.loads is None else f" by --loads {work.loads.source}"
    text = f"{_markdown(head, rows)}\n\n{said}{source}, with ep = {work.topology.ep}"
    refused = best.copies and work.copies_refused
    return f"{text}\nthe spec takes no copies: {refused}" if refused else text


def _signed(error: float) -> str:
    return f"{abs(error):.0%} too {'high' if error > 0 else 'low'}"


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count:,} steps"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def validation_table(rows: Sequence[Compared]) -> str:
    """Published and planned TFLOP/s with signed errors, planned memory, and the bounds, as
    Markdown."""
    cells = []
    for row in rows:
        used = f"{row.memory.total / _GIB:.0f}"
        cells.append([
            row.name, f"{row.run.teraflops:.0f}", f"{row.planned:.0f}",
            f"{100 * row.error:+.1f} %",
            used if row.fits else f"{used}, of {row.available / _GIB:.0f}",
            "yes" if row.run.tuned else "left out",
        ])  # fmt: skip
    head = ["run", "published TFLOP/s", "planned", "error", "planned GiB", "tuned"]
    lines = [_markdown(head, cells), ""]
    for reason in dict.fromkeys(row.run.exceeds_memory for row in rows):
        if not reason:
            continue
        runs = [row.name for row in rows if row.run.exceeds_memory == reason]
        lines.append(f"planned memory above the chip's of {'; '.join(runs)}: {reason}")
    for kind in ("dense", "moe"):
        errors = [abs(row.error) for row in rows if row.group.kind == kind]
        lines.append(
            f"{kind}: median error {100 * statistics.median(errors):.1f} %, worst "
            f"{100 * max(errors):.1f} %, {len(errors)} rows"
        )
    lines += missed_bounds([*rows])
    return "\n".join(lines)


def _words(name: str) -> str:
    return name.replace("_", " ")


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
            *(_percent(row["lost"][cost]) for cost in PARTS),
        ]
        for row in rows
    ]
    return _markdown(head, cells)


def causes_table(row: Row) -> str:
    """Lost time by cause and by part, the largest first, as a Markdown table."""
    parts = ("detection", "restart", "rework", "waiting")
    causes = sorted(row["lost_by_cause"].items(), key=lambda item: -item[1]["all"])
    shown = [(name, lost) for name, lost in causes if lost["all"] > 0][:_MOST_CAUSES]
    hidden = [lost for _, lost in causes[len(shown) :] if lost["all"] > 0]
    if hidden:
        rest = {cost: sum(lost[cost] for lost in hidden) for cost in ("all", *parts)}
        shown.append((f"{len(hidden)} further causes", rest))
    cells = [
        [name, _percent(lost["all"]), *(_percent(lost[cost]) for cost in parts)]
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
        + ", ".join(f"{cost} {_percent(row['lost'][cost])}" for cost in PARTS),
    ]
    return "\n".join(lines)


def _interval(row: Row) -> str:
    text, search = _time(row["interval_seconds"]), row["interval"]
    if search:
        text += f" ({_time(search['low'])} to {_time(search['high'])})"
    return text


def _spares(row: Row) -> str:
    text, search = f"{row['spares']}", row["spares_search"]
    return text + (f" ({search['low']:.0f} to {search['high']:.0f})" if search else "")


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
