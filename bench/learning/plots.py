"""The table of a study, and its picture as SVG: held-out bits per byte by step, or losses."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.harness import Row, finish, table_text
from bench.learning.curves import Curve
from convoy.report.figures import COLORS, STYLE

_STYLES = ("-", "--", ":", "-.")


def write_study(
    name: str, title: str, rows: Sequence[Row], curves: Sequence[Curve], packages: Sequence[str],
    table: Path, picture: Path,
) -> None:  # fmt: skip
    """Print the rows; write them with the figures of each run as JSON, and draw the curves. The
    losses of steps are in the picture alone."""
    finish(name, rows, packages, table)
    head = json.loads(table.read_text())
    runs = [curve.summary() for curve in curves]
    table.write_text(table_text(head, {"rows": head.pop("rows"), "curves": runs}))
    picture.write_text(draw(title, curves) + "\n")


def draw(title: str, curves: Sequence[Curve]) -> str:
    """A panel for each case; a line is the mean over seeds, and its band has all seeds."""
    cases = list(dict.fromkeys(curve.case for curve in curves))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.4 * max(len(cases), 1.4), 3.4), layout="constrained")
        FigureCanvasSVG(figure)
        figure.suptitle(title)
        for axes, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
            axes.set_title(case)
            _panel(axes, [curve for curve in curves if curve.case == case])
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _panel(axes: Axes, curves: Sequence[Curve]) -> None:
    subjects = list(dict.fromkeys(curve.subject for curve in curves))
    for color, style, subject in zip(COLORS, _STYLES * 2, subjects, strict=False):
        seeds = [curve for curve in curves if curve.subject == subject]
        steps = seeds[0].held_out_steps or list(range(1, len(seeds[0].losses) + 1))
        values = [curve.held_out or curve.losses for curve in seeds]
        columns = list(zip(*values, strict=True))
        mean = [sum(column) / len(column) for column in columns]
        axes.plot(steps, mean, style, color=color, linewidth=1.3, label=subject)
        if len(seeds) > 1:
            low, high = [min(c) for c in columns], [max(c) for c in columns]
            axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
    held_out = bool(curves[0].held_out)
    axes.set_ylabel("bits per byte, held out" if held_out else "loss, nats per token")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
