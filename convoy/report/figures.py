"""The pictures of a report, as SVG by matplotlib.

Each line of a picture has the id ``SERIES:RUN``, so that a reader of the file finds its points.
Points that are not numbers leave a gap.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle, groupby
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from convoy.report.record import RunRecord
from pretrain.observe import PHASES

COLORS = ("#0b62a4", "#d1495b", "#3a8f5c", "#edae49", "#7b52ab", "#5b5b5b", "#00a6a6", "#b5651d")
"""Of runs, in order."""
_PHASE_COLORS = {
    "productive": "#3a8f5c", "data_wait": "#edae49", "communication_exposed": "#7cc4f0",
    "checkpoint_stall": "#0b62a4", "evaluation": "#7b52ab", "skipped": "#e9967a",
    "rework": "#d1495b", "restart": "#b5651d", "hang": "#8b0000", "down": "#5b5b5b",
    "idle": "#e5e5e5", "other": "#b0b0b0",
}  # fmt: skip
_MOMENTS = {
    "start": ("^", "#3a8f5c"), "resize": ("D", "#0b62a4"), "fault": ("X", "#d1495b"),
    "failure": ("x", "#8b0000"), "health": ("s", "#edae49"), "straggler": ("v", "#7b52ab"),
    "checkpoint": ("|", "#888888"), "end": ("o", "#222222"),
}  # fmt: skip
MOST_POINTS = 2000
"""Points of a line in a picture; of more, the lowest and the highest of each part are kept."""
MOST_CELLS = 256
"""Columns, and rows, of a picture of experts' loads: more steps are taken as means, and of more
experts the largest load of neighbours is drawn."""
STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "convoy", "path.simplify": False, "font.size": 9,
    "font.family": "sans-serif", "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#e8e8e8", "axes.edgecolor": "#999999", "axes.titlelocation": "left",
    "axes.titlesize": 10, "axes.titleweight": "bold", "legend.frameon": False,
    "axes.axisbelow": True,
}  # fmt: skip

Points = Sequence[tuple[float, float]]


def picture(
    draw: Callable[[Axes], None], title: str, *, size: tuple[float, float] = (5.4, 2.7)
) -> str:
    """A picture with one pair of axes, as an SVG element whose name is its title."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        axes.set_title(title)
        draw(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, dpi=150)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Ids are unique within one picture only, and a page has many.
    prefix = re.sub(r"\W+", "-", title.lower())
    text = re.sub(r'id="([\w.]+)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r"(xlink:href=\"#|url\(#)(\w+)", rf"\1{prefix}-\2", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def thinned(points: Points) -> Points:
    """At most :data:`MOST_POINTS` points, the extremes of each part among them, in order."""
    if len(points) <= MOST_POINTS:
        return points
    kept: list[tuple[float, float]] = []
    parts = MOST_POINTS // 2
    for number in range(parts):
        some = points[number * len(points) // parts : (number + 1) * len(points) // parts]
        finite = [point for point in some if math.isfinite(point[1])]
        ends = (min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])) if finite else ()
        kept += sorted(ends or some[:1])
    return kept


def _line(axes: Axes, points: Points, gid: str, **style: Any) -> None:
    shown = thinned(points)
    if shown:
        (line,) = axes.plot(*zip(*shown, strict=True), **style)
        line.set_gid(gid)


def _steps(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def loss(runs: Sequence[RunRecord]) -> str:
    """Training loss of each step, and loss of held-out text."""

    def draw(axes: Axes) -> None:
        for color, run in zip(cycle(COLORS), runs, strict=False):
            points = [(s, event.loss) for s, event in run.steps.items()]
            _line(axes, points, f"loss:{run.label}", color=color, linewidth=1, label=run.label)
            held_out = [(s, event.loss) for s, event in run.evaluations.items()]
            _line(axes, held_out, f"validation:{run.label}", color=color, marker="o",
                  markersize=4, linestyle="--", linewidth=1,
                  label=f"{run.label}, held-out text")  # fmt: skip
        axes.set_ylabel("nats per token")
        _steps(axes)
        _legend(axes)

    return picture(draw, "Loss", size=(11, 3.6))


def by_step(
    runs: Sequence[RunRecord], title: str, unit: str, field: str, *, log: bool = False
) -> str:
    """One field of each committed step."""

    def draw(axes: Axes) -> None:
        for color, run in zip(cycle(COLORS), runs, strict=False):
            points = [(s, float(getattr(event, field))) for s, event in run.steps.items()]
            if log:
                points = [(s, v if v > 0 else math.nan) for s, v in points]
            _line(axes, points, f"{field}:{run.label}", color=color, linewidth=1)
        if log and any(line.get_gid() for line in axes.lines):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
            axes.yaxis.set_minor_formatter(FuncFormatter(_two_and_five))
        axes.set_ylabel(unit)
        _steps(axes)
        if field == "tokens_per_second":
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))

    return picture(draw, title)


def phases(runs: Sequence[RunRecord]) -> str:
    """The share of each phase of the ledger in the wall time without ``idle``."""

    def draw(axes: Axes) -> None:
        left = [0.0] * len(runs)
        for phase in PHASES:
            shares = [_share(run, phase) for run in runs]
            if phase != "idle" and any(shares):
                axes.barh(
                    [run.label for run in runs], shares, left=left, height=0.6,
                    color=_PHASE_COLORS[phase], label=phase,
                )  # fmt: skip
                left = [a + b for a, b in zip(left, shares, strict=True)]
        axes.set_xlim(0, 1)
        axes.invert_yaxis()
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.set_xlabel("share of the wall time without idle")
        _legend(axes, loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=6)

    return picture(draw, "Where the time went", size=(11, 1.7 + 0.4 * len(runs)))


def _two_and_five(value: float, _: int | None = None) -> str:
    """The label of a minor tick on a logarithmic axis: 2 and 5 of each decade have one."""
    first = round(value / 10 ** math.floor(math.log10(value)), 6)
    return f"{value:g}" if first in (2, 5) else ""


def _share(run: RunRecord, phase: str) -> float:
    ran = sum(run.ledger.microseconds.values()) - run.ledger.microseconds["idle"]
    return run.ledger.microseconds[phase] / ran if ran else 0.0


def goodput(runs: Sequence[RunRecord]) -> str:
    """Goodput from the run's begin up to each log interval; empty for logs without it."""
    if not any(run.goodput for run in runs):
        return ""

    def draw(axes: Axes) -> None:
        for color, run in zip(cycle(COLORS), runs, strict=False):
            _line(axes, run.goodput, f"goodput:{run.label}", color=color)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set_xlabel("hours since the run began")

    return picture(draw, "Goodput so far")


def timeline(run: RunRecord) -> str:
    """Steps over hours, with what happened on the way."""

    def step_at(hour: float) -> int:
        return max((point for point in run.hours if point[0] <= hour), default=(0.0, 0))[1]

    def draw(axes: Axes) -> None:
        points = [(hour, float(step)) for hour, step in run.hours]
        _line(axes, points, f"timeline:{run.label}", color="#444444", linewidth=1)
        for kind, (marker, color) in _MOMENTS.items():
            moments = [(hour, step_at(hour)) for hour, what, _ in run.moments if what == kind]
            if moments:
                axes.plot(*zip(*moments, strict=True), marker, color=color, markersize=6,
                          label=kind, linestyle="none")  # fmt: skip
        axes.set_xlabel("hours since the run began")
        axes.set_ylabel("step")
        _legend(axes, loc="upper left", bbox_to_anchor=(1, 1))

    return picture(draw, f"Time line of {run.label}", size=(11, 3))


def experts(run: RunRecord) -> str | None:
    """Largest over mean load of an expert, of each MoE layer over steps; None without layers."""
    columns = {s: i.layer_imbalances for s, i in run.intervals.items() if i.layer_imbalances}
    layers = run.summary.moe_layers if run.summary is not None else []
    return _heat(
        columns, f"Load of the busiest expert of {run.label}", "over the layer's mean", "MoE layer",
        names=layers, least=1.0,
    )  # fmt: skip


def expert_loads(run: RunRecord) -> list[str]:
    """Load of every expert over steps: of the first, the middle and the last MoE layer, and of the
    layer that was most unequal in most intervals; none for logs without loads."""
    logged = {s: i.expert_loads for s, i in run.intervals.items() if i.expert_loads}
    if not logged:
        return []
    most_unequal = Counter(
        max(by_layer, key=lambda layer: max(by_layer[layer])) for by_layer in logged.values()
    )
    always = set.intersection(*map(set, logged.values())) or set(most_unequal)
    layers = sorted(always, key=int)
    chosen = {
        layers[0],
        layers[(len(layers) - 1) // 2],
        layers[-1],
        most_unequal.most_common()[0][0],
    }
    pictures = []
    for layer in sorted(chosen, key=int):
        of_layer = {s: by_layer[layer] for s, by_layer in logged.items() if layer in by_layer}
        title = f"Load of experts in layer {layer} of {run.label}"
        pictures.append(picture(partial(draw_loads, loads=of_layer, title=title), title))
    return pictures


def draw_loads(axes: Axes, *, loads: Mapping[int, Sequence[int]], title: str) -> None:
    """Percent of the mean [E] by step, as colors on a logarithmic scale."""
    edges, columns = _binned(loads)
    num_experts = max(map(len, loads.values()))
    beside = math.ceil(num_experts / MOST_CELLS)
    rows = np.arange(0, num_experts, beside)
    cells = np.maximum.reduceat(np.stack(columns, 1), rows, axis=0) / 100
    colors = mpl.colormaps["coolwarm"].with_extremes(under="black")
    mesh = axes.pcolormesh(
        edges, [*rows, num_experts], cells.clip(min=1e-3), cmap=colors, norm=LogNorm(1 / 8, 8),
        rasterized=True,
    )  # fmt: skip
    mesh.set_gid(re.sub(r"\W+", "-", title.lower()))
    axes.grid(visible=False)
    _steps(axes)
    axes.set_ylabel("expert" if beside == 1 else f"expert (the largest of {beside})")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    ticks = [0.125, 0.25, 0.5, 1, 2, 4, 8]
    axes.figure.colorbar(
        mesh, ax=axes, extend="both", ticks=ticks, format=FuncFormatter(lambda v, _: f"{v:g}"),
        label="over the mean (black: < 1/8)",
    ).minorticks_off()  # fmt: skip


def _binned(
    loads: Mapping[int, Sequence[int]],
) -> tuple[list[int], list[NDArray[np.float64]]]:
    """The steps between columns, and the columns: means over equal spans of steps."""
    steps = sorted(loads)
    begin = steps[0] - (steps[1] - steps[0] if len(steps) > 1 else 1)
    span = (steps[-1] - begin) / MOST_CELLS
    bins = [list(some) for _, some in groupby(steps, lambda step: math.ceil((step - begin) / span))]
    edges = [begin, *(some[-1] for some in bins)]
    return edges, [np.mean([loads[step] for step in some], axis=0) for some in bins]


def rank_speeds(run: RunRecord) -> str | None:
    """Speed of each rank over the mean of ranks, from its time without waits; None for one rank."""
    columns = {}
    for step, interval in run.intervals.items():
        seconds = interval.rank_seconds or []
        if len(seconds) > 1 and min(seconds) > 0:
            mean = sum(seconds) / len(seconds)
            columns[step] = [mean / of_rank for of_rank in seconds]
    return _heat(columns, f"Speed of ranks of {run.label}", "over the mean", "rank")


def capacity_shares(run: RunRecord) -> str | None:
    """Planned expert work of each rank over its group's mean; None without such plans."""
    return _heat(run.shares, f"Capacity shares of {run.label}", "over the mean", "rank")


def _heat(
    columns: dict[int, list[float]],
    title: str,
    unit: str,
    rows: str,
    *,
    names: Sequence[int] = (),
    least: float | None = None,
) -> str | None:
    if not columns:
        return None
    height = max(map(len, columns.values()))  # a resize changes the number of ranks

    def draw(axes: Axes) -> None:
        steps = sorted(columns)
        kept = steps[:: math.ceil(len(steps) / 500)]
        cells = [
            [columns[s][row] if row < len(columns[s]) else math.nan for s in kept]
            for row in range(height)
        ]
        edges = [kept[0] - (kept[1] - kept[0] if len(kept) > 1 else 1), *kept]
        values = [v for row in cells for v in row if math.isfinite(v)]
        spread = max([0.1, *(abs(v - 1) for v in values)])
        low, high, colors = (
            (1 - spread, 1 + spread, "RdYlGn") if least is None
            else (least, max(1.5, *values), "YlOrRd")
        )  # fmt: skip
        mesh = axes.pcolormesh(
            edges, range(height + 1), cells, cmap=colors, vmin=low, vmax=high, rasterized=True
        )
        mesh.set_gid(re.sub(r"\W+", "-", title.lower()))
        axes.grid(visible=False)
        _steps(axes)
        axes.set_ylabel(rows)
        labels = names if len(names) == height else range(height)
        ticks = range(0, height, max(1, math.ceil(height / 12)))
        axes.set_yticks([tick + 0.5 for tick in ticks], [str(labels[tick]) for tick in ticks])
        axes.figure.colorbar(mesh, ax=axes, label=unit)

    return picture(draw, title)


def _legend(axes: Axes, **where: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(**where)
