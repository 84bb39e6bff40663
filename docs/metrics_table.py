"""The tables of Prometheus metrics in docs/metrics.md, made from the declarations at the events.

python -m docs.metrics_table
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from pretrain.observe.metric import Metric
from pretrain.observe.prometheus import all_metrics

PAGE = Path(__file__).parent / "metrics.md"
_BEGIN, _END = "<!-- `make docs/metrics.md` writes this table: {} -->\n", "<!-- end -->\n"
_SCOPES = {"of the run": ("run", "ledger"), "of a rank": ("rank",)}


def table(metrics: Iterable[Metric]) -> str:
    """A table in Markdown with a row for each metric."""
    lines = ["| metric | type | unit | meaning |", "|---|---|---|---|"]
    for declaration in metrics:
        labels = f"{{{','.join(declaration.labels)}}}" if declaration.labels else ""
        kind = "gauge" if declaration.kind == "info" else declaration.kind
        text = declaration.help[0].lower() + declaration.help[1:].removesuffix(".")
        meaning = re.sub(r"^unix", "Unix", "; ".join(filter(None, [text, declaration.note])))
        lines.append(f"| `{declaration.name}{labels}` | {kind} | {declaration.unit} | {meaning} |")
    return "\n".join(lines) + "\n"


def metrics_page(text: str) -> str:
    """The page with today's tables in the place of those that it has."""
    for title, scopes in _SCOPES.items():
        begin = _BEGIN.format(title)
        before, _, rest = text.partition(begin)
        rows = table(m for m in all_metrics() if m.scope in scopes)
        text = before + begin + rows + _END + rest.partition(_END)[2]
    return text


if __name__ == "__main__":
    PAGE.write_text(metrics_page(PAGE.read_text()))
