"""Draw the pictures of the documentation: ``python -m docs.images.draw`` writes them anew.

The rank numbers in ``meshes.svg`` come from :mod:`parallel.layout`, which also places parameters in
a run. A test compares the committed files with what this script draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from parallel.layout import ShardLayout, Topology

HERE = Path(__file__).parent
TOPOLOGY = Topology(dp_shard=4, tp=2, ep=4)
NUM_EXPERTS = 8
BLUES = ("#c6dbef", "#9ecae1", "#6baed6", "#4292c6")
GREENS = ("#c7e9c0", "#a1d99b", "#74c476", "#41ab5d")
GREY, DARK, RED = "#eeeeee", "#222222", "#b2182b"


def text(
    x: float, y: float, words: str, size: int = 13, anchor: str = "middle", **style: str
) -> str:
    """A ``<text>`` element; ``style`` has further attributes."""
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{extra}>'
        f"{escape(words)}</text>"
    )


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    """A ``<rect>`` with a border."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
        f'fill="{fill}" stroke="{DARK}" stroke-width="1"/>'
    )


def line(x1: float, y1: float, x2: float, y2: float, color: str = DARK, **style: str) -> str:
    """A ``<line>``; ``style`` has further attributes."""
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" '
        f'stroke="{color}" stroke-width="1.5"{extra}/>'
    )


def svg(width: int, height: int, parts: Iterator[str]) -> str:
    """A whole picture."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" fill="{DARK}">\n'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{DARK}"/></marker></defs>\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def coordinate(rank: int, axis: str) -> int:
    """The place of ``rank`` along ``axis``: the index of a dim that only this axis cuts."""
    size = TOPOLOGY.size(axis)
    return ShardLayout((size,), ((axis,),), TOPOLOGY).box(rank)[0][0]


def meshes() -> Iterator[str]:
    """Which rank holds what of a dense matrix, and of the experts."""
    left, cell, gap, t = 150, 78, 6, TOPOLOGY
    x = [left + rank * (cell + gap) for rank in range(t.world)]
    yield text(20, 30, "Two meshes over the same 8 ranks", 17, "start", font_weight="bold")
    yield text(20, 50, "dp_shard=4, tp=2, ep=4; the experts have efsdp=8/4=2", 13, "start")

    yield text(20, 108, "Attention and", 13, "start", font_weight="bold")
    yield text(20, 125, "dense layers", 13, "start", font_weight="bold")
    yield text(20, 142, f"fsdp={t.fsdp} x tp={t.tp}", 13, "start")
    for rank in range(t.world):
        shard, half = coordinate(rank, "fsdp"), coordinate(rank, "tp")
        yield box(x[rank], 86, cell, 62, BLUES[2 * half])
        yield text(x[rank] + cell / 2, 78, f"rank {rank}", 12, font_weight="bold")
        yield text(x[rank] + cell / 2, 110, f"tp half {half}", 12)
        yield text(x[rank] + cell / 2, 130, f"shard {shard} of {t.fsdp}", 12)
        if half == 0:
            yield line(x[rank], 160, x[rank + t.tp - 1] + cell, 160)
            yield text((x[rank] + x[rank + t.tp - 1] + cell) / 2, 176, "tp group", 12)

    each = NUM_EXPERTS // t.ep
    yield text(20, 228, "Experts", 13, "start", font_weight="bold")
    yield text(20, 245, f"efsdp={t.efsdp} x ep={t.ep}", 13, "start")
    for rank in range(t.world):
        block, half = coordinate(rank, "ep"), coordinate(rank, "efsdp")
        yield box(x[rank], 200, cell, 62, GREENS[block])
        first = block * each
        yield text(x[rank] + cell / 2, 224, f"experts {first}-{first + each - 1}", 12)
        yield text(x[rank] + cell / 2, 244, f"shard {half} of {t.efsdp}", 12)
        if block == 0:
            yield line(x[rank], 274, x[rank + t.ep - 1] + cell, 274)
            yield text(
                (x[rank] + x[rank + t.ep - 1] + cell) / 2, 290, "ep group: exchanges tokens", 12
            )
    yield text(
        left, 318,
        "A column is one process. FSDP gathers the shards in cells of one color.", 12, "start",
    )  # fmt: skip


def commit() -> Iterator[str]:
    """The four stages of a save, and what a kill leaves."""
    columns = ("1  mark", "2  shard files", "3  receipt", "4  manifest")
    x, width, edge = (170, 330, 490, 650), 140, 645
    yield text(20, 30, "Commit of a checkpoint on 2 ranks", 17, "start", font_weight="bold")
    for at, name in zip(x, columns, strict=True):
        yield text(at + width / 2, 62, name, 13, font_weight="bold")
    for rank in range(2):
        y = 80 + rank * 66
        yield text(20, y + 20, f"rank {rank}", 13, "start", font_weight="bold")
        yield text(20, y + 37, "copies to host memory;", 11, "start")
        yield text(20, y + 51, "its writer process writes", 11, "start")
        for at, name in zip(
            x, (f"rank-{rank}.begun", f"c.{rank}.0, ...", f"rank-{rank}.json"), strict=False
        ):
            yield box(at, y, width - 20, 44, BLUES[0])
            yield text(at + (width - 20) / 2, y + 27, name, 12)
        for at in x[:2]:
            yield line(at + width - 20, y + 22, at + 160 - 2, y + 22, marker_end="url(#tip)")
        yield line(x[2] + width - 20, y + 22, x[3] + 14, 135, marker_end="url(#tip)")
    yield box(x[3] + 16, 112, width - 10, 46, GREENS[1])
    yield text(x[3] + 81, 132, "manifests/", 12)
    yield text(x[3] + 81, 148, "step-00000240.json", 12)
    yield line(edge, 72, edge, 240, RED, stroke_dasharray="5,4")
    yield text(edge - 10, 232, "a kill on this side: no new checkpoint, older ones stay",
               12, "end", fill=RED)  # fmt: skip
    yield text(edge + 10, 216, "a kill on this side:", 12, "start", fill=RED)
    yield text(edge + 10, 232, "the checkpoint is whole", 12, "start", fill=RED)
    yield text(20, 264, "Rank 0's writer process reads all receipts, checks that they cover "
               "every array, and publishes the manifest last.", 12, "start")  # fmt: skip


PICTURES = {"meshes.svg": svg(840, 334, meshes()), "commit.svg": svg(840, 280, commit())}

if __name__ == "__main__":
    for name, drawing in PICTURES.items():
        (HERE / name).write_text(drawing)
