"""Plans and the validation as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from convoy.plan.accuracy import Accuracy
from convoy.plan.cost import Cost
from convoy.plan.hardware import Cluster
from convoy.plan.search import Found, Plan
from convoy.plan.validate import Compared, missed_bounds, published_groups

_GIB = 2**30


def plans_table(plans: Sequence[Plan]) -> str:
    """The best layouts, one line each, as a Markdown table."""
    lines = ["| | seconds of a step | GiB of a GPU | layout | what costs most beside GEMMs |",
             "|---|---|---|---|---|"]  # fmt: skip
    for number, plan in enumerate(plans, 1):
        lines.append(
            f"| {number} | {plan.seconds:.3g} | {plan.memory.total / _GIB:.1f} "
            f"| {plan.describe()} | {_costs(plan)} |"
        )
    return "\n".join(lines)


def _costs(plan: Plan) -> str:
    parts = {name: s for name, s in plan.step.as_dict().items() if name != "gemms"}
    ranked = sorted(parts.items(), key=lambda item: -item[1])[:3]
    named = [f"{_words(name)} {s / plan.seconds:.0%}" for name, s in ranked]
    return ", ".join(each for each in named if not each.endswith(" 0%"))


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


def why_others_lose(found: Found) -> str:
    """What became of the layouts that are not among the best, in one line."""
    refused = sum(found.refused.values())
    rules = ", ".join(rule for rule, _ in found.refused.most_common(3))
    parts = [
        f"{found.layouts:,} layouts keep the rules of the spec",
        f"{refused:,} are refused" + (f" (by {rules})" if rules else ""),
        f"{found.too_large:,} of those looked at do not fit the memory",
        f"{found.timed:,} variants were timed",
        f"{found.slower:,} cannot be faster even without data parallelism's communication",
    ]
    ended = "" if found.complete else "; the search stopped at its limit of timed variants"
    return "; ".join(parts) + ended


def plan_lines(plan: Plan, cost: Cost | None, cluster: Cluster) -> str:
    """One plan in full: memory and time by part, then time, money and energy; these are left out
    without ``cost``."""
    chip = cluster.chip
    lines = [f"layout  {plan.describe()}", "", "| memory of a GPU | GiB |", "|---|---|"]
    for name, size in plan.memory.as_dict().items():
        lines.append(f"| {_words(name)} | {size / _GIB:.2f} |")
    lines.append(
        f"| all, of {chip.memory_bytes / _GIB:.1f} | {plan.memory.total / _GIB:.2f} |"
    )  # fmt: skip
    lines += ["", "| part of a step | seconds | share |", "|---|---|---|"]
    for name, seconds in plan.step.as_dict().items():
        if seconds:
            lines.append(f"| {_words(name)} | {seconds:.4g} | {seconds / plan.seconds:.1%} |")
    lines.append(f"| all | {plan.seconds:.4g} | 100 % |")
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
        f"TFLOP/s are {_signed(known.bias)} in the median, {_signed(low.error)} ({low.group}, "
        f"{low.run}) to {_signed(high.error)} ({high.group}, {high.run}); the median error is "
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


def _signed(error: float) -> str:
    return f"{abs(error):.0%} too {'high' if error > 0 else 'low'}"


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count:,} steps"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def validation_table(rows: Sequence[Compared]) -> str:
    """Published and planned TFLOP/s with signed errors, planned memory, and the bounds, as
    Markdown."""
    lines = [
        "| run | published TFLOP/s | planned | error | planned GiB | tuned |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        tuned = "yes" if row.tuned else "left out"
        used = f"{row.memory.total / 2**30:.0f}"
        if not row.fits:
            used += f", of {row.available / 2**30:.0f}"
        lines.append(
            f"| {row.group}, {row.run} | {row.published:.0f} | {row.planned:.0f} "
            f"| {100 * row.error:+.1f} % | {used} | {tuned} |"
        )
    lines.append("")
    for reason in dict.fromkeys(row.exceeds_memory for row in rows if row.exceeds_memory):
        runs = [f"{row.group}, {row.run}" for row in rows if row.exceeds_memory == reason]
        lines.append(f"planned memory above the chip's of {'; '.join(runs)}: {reason}")
    for kind in ("dense", "moe"):
        errors = [abs(row.error) for row in rows if row.kind == kind]
        lines.append(
            f"{kind}: median error {100 * statistics.median(errors):.1f} %, worst "
            f"{100 * max(errors):.1f} %, {len(errors)} rows"
        )
    lines += missed_bounds([*rows])
    return "\n".join(lines)


def sources() -> str:
    """Where the published rows are from, and what was assumed."""
    return "\n".join(
        f"{g.name}: {g.source}" + (f". Assumed: {g.assumed}" if g.assumed else "")
        for g in published_groups()
    )


def _words(name: str) -> str:
    return name.replace("_", " ")
