"""Pictures of a layout, and of the results of a simulation.

Equal input gives equal bytes of SVG with one version of matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from convoy.plan.tables import PARTS, Row
from parallel.layout import Topology, count_ranks

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""From the outermost to the innermost, as ranks are numbered."""
_MOST_NODES = 32
_SHORT = {"pp": "stage", "dp_replicate": "replica", "dp_shard": "shard", "cp": "cp", "tp": "tp"}


@contextmanager
def _figure(path: Path, size: tuple[float, float], font_size: int) -> Iterator[Any]:
    """A figure of matplotlib that is in the file ``path`` when the block ends."""
    # Here: matplotlib is optional, and its import takes half a second.
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "convoy", "svg.fonttype": "none", "font.size": font_size}):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        # Without a date, which would differ from one drawing to the next.
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_layout(topology: Topology, gpus_per_node: int, path: Path) -> None:
    """Draw the ranks on their nodes: a column is a node, a colour a pipeline stage.

    The text of a rank has its place along each axis that is divided. At most 32 nodes are drawn,
    and a line says how many there are.

    Args:
        topology: the layout.
        gpus_per_node: ranks of one node.
        path: the file; its suffix decides the format.
    """
    import matplotlib as mpl

    world = topology.world
    per_node = min(gpus_per_node, world)
    nodes = -(-world // per_node)
    shown = min(nodes, _MOST_NODES)
    divided = [axis for axis in _AXES if topology.size(axis) > 1]
    lines = 1 + len(divided) + (topology.ep > 1)
    colours = mpl.colormaps["tab20"]
    size = (1.2 + 1.15 * shown, 0.9 + 0.17 * lines * per_node)
    with _figure(path, size, font_size=8) as figure:
        axes = figure.subplots()
        for rank in range(min(world, shown * per_node)):
            node, row = divmod(rank, per_node)
            axis_ranks = topology.place(rank)
            text = [f"rank {rank}"]
            text += [f"{_SHORT[axis]} {getattr(axis_ranks, axis)}" for axis in divided]
            if topology.ep > 1:
                text.append(f"experts {axis_ranks.ep}")
            colour = colours(2 * (axis_ranks.pp % 10) + 1)
            axes.add_patch(mpl.patches.Rectangle(
                (node + 0.04, row + 0.04), 0.92, 0.92,
                facecolor=colour, edgecolor="0.3", linewidth=0.6,
            ))  # fmt: skip
            axes.text(node + 0.5, row + 0.5, "\n".join(text), ha="center", va="center")
        axes.set_xlim(0, shown)
        axes.set_ylim(per_node, 0)
        axes.set_xticks([node + 0.5 for node in range(shown)], [f"node {n}" for n in range(shown)])
        axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
        axes.set_yticks([])
        for side in axes.spines.values():
            side.set_visible(False)
        more = f"; {shown} of {nodes:,} nodes are drawn" if nodes > shown else ""
        axes.set_xlabel(f"{count_ranks(world)}: {topology.describe()}{more}")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the effective training time over the interval, and the parts of the lost time.

    Args:
        rows: results, as ``--json`` writes them.
        path: the file; its suffix decides the format.
    """
    with _figure(path, (10, 4), font_size=9) as figure:
        searched = [row for row in rows if row["interval"]]
        panels = figure.subplots(1, 2 if searched else 1, squeeze=False)[0]
        if searched:
            axes = panels[0]
            for row in searched:
                search = row["interval"]
                (line,) = axes.plot(
                    [seconds / 60 for seconds in search["candidates"]],
                    [100 * share for share in search["scores"]],
                    label=f"{row['gpus']:,} GPUs",
                )
                axes.plot(search["value"] / 60, 100 * max(search["scores"]), "o",
                          color=line.get_color())  # fmt: skip
            axes.set_xscale("log")
            axes.set_xlabel("minutes between saves; the dot is the best")
            axes.set_ylabel("effective training time, %")
            axes.grid(alpha=0.3)
            axes.legend()
        axes = panels[-1]
        bottom = [0.0] * len(rows)
        names = [f"{row['gpus']:,}" for row in rows]
        for cost in PARTS:
            heights = [100 * row["lost"][cost] for row in rows]
            axes.bar(names, heights, bottom=bottom, label=cost, width=0.6)
            bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
        axes.set_xlabel("GPUs")
        axes.set_ylabel("lost time, % of the wall time")
        axes.legend()
