"""The results of a simulation as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from convoy.plan.tables import PARTS, Row
from pretrain.errors import InputError


def check_plot(path: Path, flag: str = "--plot") -> None:
    """Refuse a picture that could not be drawn, before anything is computed.

    Args:
        path: the file.
        flag: the option that names the file, for errors.

    Raises InputError: one line that names the file and the rule.
    """
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise InputError(f"{flag} ({path}) must be a file named *.svg, *.png or *.pdf")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{flag} ({path}): the folder {path.absolute().parent} does not exist")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError(
            f"{flag} ({path}) needs matplotlib: pip install -e '.[plot]' in Convoy's checkout, or "
            f"pip install matplotlib"
        ) from None


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the effective training time over the interval, and the parts of the lost time.

    Equal rows give equal bytes of SVG with one version of matplotlib.

    Args:
        rows: results, as ``--json`` writes them.
        path: the file; its suffix decides the format.
    """
    # Here: matplotlib is optional, and its import takes half a second.
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "convoy", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(10, 4), layout="constrained")
        FigureCanvasAgg(figure)
        searched = [row for row in rows if row["interval"]]
        places = figure.subplots(1, 2 if searched else 1, squeeze=False)[0]
        if searched:
            axes = places[0]
            for row in searched:
                found = row["interval"]
                (line,) = axes.plot(
                    [seconds / 60 for seconds in found["candidates"]],
                    [100 * share for share in found["scores"]],
                    label=f"{row['gpus']:,} GPUs",
                )
                axes.plot(found["value"] / 60, 100 * max(found["scores"]), "o",
                          color=line.get_color())  # fmt: skip
            axes.set_xscale("log")
            axes.set_xlabel("minutes between saves; the dot is the best")
            axes.set_ylabel("effective training time, %")
            axes.grid(alpha=0.3)
            axes.legend()
        axes = places[-1]
        bottom = [0.0] * len(rows)
        names = [f"{row['gpus']:,}" for row in rows]
        for part in PARTS:
            heights = [100 * row["lost"][part] for row in rows]
            axes.bar(names, heights, bottom=bottom, label=part, width=0.6)
            bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
        axes.set_xlabel("GPUs")
        axes.set_ylabel("lost time, % of the wall time")
        axes.legend()
        # Without a date, which would differ from one drawing to the next.
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
