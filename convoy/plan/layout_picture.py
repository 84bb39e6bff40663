"""A layout as a picture: nodes, their ranks, and the groups that each rank is in."""

from __future__ import annotations

from pathlib import Path

from parallel.layout import Topology, count_ranks

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""From the outermost to the innermost, as ranks are numbered."""
_MOST_NODES = 32
_SHORT = {"pp": "stage", "dp_replicate": "replica", "dp_shard": "shard", "cp": "cp", "tp": "tp"}


def draw_layout(topology: Topology, gpus_per_node: int, path: Path) -> None:
    """Draw the ranks on their nodes: a column is a node, a colour a pipeline stage.

    The text of a rank has its place along each axis that is divided. At most 32 nodes are drawn,
    and a line says how many there are. Equal layouts give equal bytes of SVG with one version of
    matplotlib.

    Args:
        topology: the layout.
        gpus_per_node: ranks of one node.
        path: the file; its suffix decides the format.
    """
    # Here: matplotlib is optional, and its import takes half a second.
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    world = topology.world
    each = min(gpus_per_node, world)
    nodes = -(-world // each)
    shown = min(nodes, _MOST_NODES)
    divided = [axis for axis in _AXES if topology.size(axis) > 1]
    lines = 1 + len(divided) + (topology.ep > 1)
    colours = mpl.colormaps["tab20"]
    with mpl.rc_context({"svg.hashsalt": "convoy", "svg.fonttype": "none", "font.size": 8}):
        size = (1.2 + 1.15 * shown, 0.9 + 0.17 * lines * each)
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for rank in range(min(world, shown * each)):
            node, row = divmod(rank, each)
            place = topology.place(rank)
            text = [f"rank {rank}", *(f"{_SHORT[axis]} {getattr(place, axis)}" for axis in divided)]
            if topology.ep > 1:
                text.append(f"experts {place.ep}")
            axes.add_patch(
                mpl.patches.Rectangle(
                    (node + 0.04, row + 0.04), 0.92, 0.92,
                    facecolor=colours(2 * (place.pp % 10) + 1), edgecolor="0.3", linewidth=0.6,
                )
            )  # fmt: skip
            axes.text(node + 0.5, row + 0.5, "\n".join(text), ha="center", va="center")
        axes.set_xlim(0, shown)
        axes.set_ylim(each, 0)
        axes.set_xticks([node + 0.5 for node in range(shown)], [f"node {n}" for n in range(shown)])
        axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
        axes.set_yticks([])
        for side in axes.spines.values():
            side.set_visible(False)
        more = f"; {shown} of {nodes:,} nodes are drawn" if nodes > shown else ""
        axes.set_xlabel(f"{count_ranks(world)}: {topology.describe()}{more}")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
