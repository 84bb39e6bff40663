"""The table of ``budgets.json`` for docs/benchmarks.md: ``python -m tests.fake_gpu.table``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.fake_gpu.measure import budgets

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- of tests/fake_gpu/budgets.json -->\n", "<!-- end -->\n"


def lines() -> list[str]:
    """The rows of layers, and those of steps."""
    found = []
    for kind, first, parts in (
        ("layers", "layer", ("forward", "backward")),
        ("steps", "step", ("forward and backward", "update")),
    ):
        found += [
            f"| {first} | kernels | collectives | GB moved | waits |",
            "|---|---|---|---|---|",
            *(_row(name, [counts[part] for part in parts]) for name, counts in _all(kind)),
            "",
        ]
    return found


def _all(kind: str) -> list[tuple[str, dict[str, Any]]]:
    return list(budgets(kind).items())


def _row(name: str, halves: list[dict[str, Any]]) -> str:
    numbers = [
        " + ".join(f"{half[key]:,}" for half in halves)
        for key in ("kernels", "collectives", "gigabytes")
    ]
    waits = " + ".join(str(sum(half["waits"].values())) for half in halves)
    return f"| {' | '.join([name, *numbers, waits])} |"


def write() -> None:
    """Put the table into the page."""
    page = PAGE.read_text()
    start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    PAGE.write_text(page[:start] + "\n" + "\n".join(lines()) + page[end:])


if __name__ == "__main__":
    write()
