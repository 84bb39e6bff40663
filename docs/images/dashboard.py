"""The dashboard of deploy/grafana as a picture, from the answers of a Prometheus."""

from __future__ import annotations

import io
import json
import math
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from convoy.report.figures import COLORS, STYLE
from deploy.grafana.build import dashboard
from pretrain.errors import InputError
from pretrain.observe import LoggedEvent, RunStarted, human_bytes
from pretrain.observe.console import duration

COLUMNS = 24
"""Of Grafana's grid."""
_CELL = (0.62, 0.31)
"""Inches of a cell of the grid."""
_POINTS = 90
_STYLE: Any = {
    "font.size": 7, "axes.titlesize": 8, "font.sans-serif": ["DejaVu Sans"],
    "path.simplify": True, "path.simplify_threshold": 0.2,
}  # fmt: skip
_MOST_NAMES = 6
_UNITS: dict[str, Callable[[float], str]] = {
    "none": lambda v: f"{v:,.4g}" if abs(v) < 1000 else f"{v:,.0f}",
    "percentunit": lambda v: f"{v:.0%}",
    "s": duration,
    "bytes": human_bytes,
    "Bps": lambda v: f"{human_bytes(v)}/s",
    "watt": lambda v: f"{v:,.0f} W",
    "currencyUSD": lambda v: f"${v:,.2f}",
}


@dataclass(frozen=True)
class Line:
    """One series of an answer."""

    labels: Mapping[str, str]
    times: list[float]
    """Unix time of each value."""
    values: list[float]
    """NaN where Prometheus has none between others."""


@dataclass(frozen=True)
class Answers:
    """What a Prometheus answers to the queries of the dashboard."""

    begin: float
    end: float
    of_query: Mapping[str, Sequence[Line]]
    """By the query as the dashboard has it."""


def answers_of(url: str, lines: Sequence[LoggedEvent]) -> Answers:
    """Ask a server about a run, from the first to the last line of its log.

    Raises InputError where the server does not answer, or the log has no start with a time.
    """
    times = [line.time for line in lines if line.time is not None]
    names = [line.event.job for line in lines if isinstance(line.event, RunStarted)]
    if not times or not names:
        raise InputError("the log has no start with a time, so its run cannot be asked for")
    begin, end = times[0], times[-1]
    step = max(1.0, (end - begin) / _POINTS)
    found = {}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            asked = {
                "query": query.replace("$run", re.escape(names[-1]).replace("\\", "\\\\")),
                "start": str(begin), "end": str(end), "step": f"{step:.3f}",
            }  # fmt: skip
            found[query] = [_line(each, step) for each in _ask(url, asked)]
    return Answers(begin, end, found)


def _ask(url: str, asked: Mapping[str, str]) -> list[dict[str, Any]]:
    address = f"{url.rstrip('/')}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
    try:
        with urllib.request.urlopen(address, timeout=30) as response:
            result: list[dict[str, Any]] = json.loads(response.read())["data"]["result"]
    except (OSError, ValueError, KeyError, urllib.error.URLError) as error:
        raise InputError(f"--prometheus ({url}) does not answer as Prometheus: {error}") from None
    return result


def _line(series: Mapping[str, Any], step: float) -> Line:
    times: list[float] = []
    values: list[float] = []
    for at, text in series["values"]:
        if times and at - times[-1] > 1.5 * step:  # a gap, which no line crosses
            times.append(times[-1] + step)
            values.append(math.nan)
        times.append(float(at))
        values.append(float(text))
    return Line(series["metric"], times, values)


def draw(answers: Answers) -> str:
    """The dashboard as SVG; a panel without values says so, as Grafana does.

    Each line has the id ``PANEL:NAME``.
    """
    panels = dashboard()["panels"]
    height = max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in panels)
    with mpl.rc_context({**STYLE, **_STYLE}):
        figure = Figure(figsize=(COLUMNS * _CELL[0], height * _CELL[1]), facecolor="#f4f5f7")
        FigureCanvasSVG(figure)
        for panel in panels:
            place = panel["gridPos"]
            left, top = place["x"] / COLUMNS, 1 - place["y"] / height
            if panel["type"] == "row":
                figure.text(
                    left + 0.004, top - 0.5 / height, panel["title"], weight="bold", size=9,
                    va="center",
                )  # fmt: skip
                continue
            # Room for the title above, and for the labels of the axes.
            space = [
                left + 1.0 / COLUMNS, top - (place["h"] - 1.1) / height,
                (place["w"] - 1.3) / COLUMNS, (place["h"] - 2.2) / height,
            ]  # fmt: skip
            axes = figure.add_axes((space[0], space[1], space[2], space[3]))
            axes.set_title(panel["title"])
            found = [
                (_name(target["legendFormat"], line.labels), line)
                for target in panel["targets"]
                for line in answers.of_query[target["expr"]]
                if any(map(math.isfinite, line.values))
            ]
            unit = _UNITS[panel["fieldConfig"]["defaults"]["unit"]]
            if panel["type"] == "stat" or not found:
                _say(axes, unit(_last(found[0][1])) if found else "No data", big=bool(found))
            else:
                _plot(axes, panel["title"], found, answers.begin, unit)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, facecolor="#f4f5f7")
    return _smaller(buffer.getvalue())


def _smaller(text: str) -> str:
    """The picture without what nobody sees: the XML declaration, numbered ids, indents, and less
    than a tenth of a point."""
    text = text[text.index("<svg") :]
    for pattern in (
        r' transform="rotate\(-0 [^"]*"', r' id="(?:axes|line2d|matplotlib\.axis|patch|text)_\d+"',
        r' id="[xy]tick_\d+"', r"(?<=font-family: )'DejaVu Sans', ",
    ):  # fmt: skip
        text = re.sub(pattern, "", text)
    tags = re.compile(r"<[^>]+>")
    text = tags.sub(lambda tag: re.sub(r"(\d\.\d)\d+", r"\1", tag[0]), text)
    return re.sub(r"\n\s*", "\n", text)


def _name(template: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), template)


def _last(line: Line) -> float:
    return next(value for value in reversed(line.values) if math.isfinite(value))


def _say(axes: Axes, text: str, *, big: bool) -> None:
    axes.text(
        0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center",
        size=14 if big else 8, color="#0b62a4" if big else "#888888",
    )  # fmt: skip
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _plot(
    axes: Axes,
    title: str,
    lines: Sequence[tuple[str, Line]],
    begin: float,
    unit: Callable[[float], str],
) -> None:
    for number, (name, line) in enumerate(lines):
        minutes = [(at - begin) / 60 for at in line.times]
        (drawn,) = axes.plot(
            minutes, line.values, color=COLORS[number % len(COLORS)], linewidth=0.9,
            label=name if number < _MOST_NAMES else None,
        )  # fmt: skip
        drawn.set_gid(f"{title}:{name}")
    values = [v for _, line in lines for v in line.values if math.isfinite(v)]
    if min(values) >= 0:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g} min"))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: unit(v)))
    axes.legend(fontsize=5.5, loc="best", handlelength=1.0, labelspacing=0.2)
