"""The page of a report: pictures and tables in one HTML file without anything from elsewhere."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from convoy.report.record import RunRecord, read_run
from parallel.layout import Topology, count_ranks
from pretrain.errors import InputError
from pretrain.observe import ledger_table, summed

_MOST_MOMENTS = 200
_CSS = """
:root { color: #222; font: 15px/1.45 system-ui, Helvetica, Arial, sans-serif; }
body { max-width: 1120px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.7em; margin-bottom: 0; } h2 { margin-top: 1.6em; border-bottom: 1px solid #ddd; }
.sub, caption { color: #666; } .note { background: #fff6e0; padding: .4em .8em; }
.grid { display: grid; grid-template-columns: 1fr 1fr; gap: .5em; }
svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; margin: .6em 0; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2em .8em; border-bottom: 1px solid #eee; }
th:first-child, td:first-child, .words :is(th, td), caption { text-align: left; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f7f7f7; padding: .8em; }
@media print {
  body { max-width: none; margin: 0; } figure, svg, table, pre { break-inside: avoid; }
  h2 { break-after: avoid; } details > pre { white-space: pre-wrap; }
}
"""


def write_report(folders: Sequence[Path], output: Path) -> list[str]:
    """Write the report of some runs.

    Args:
        folders: of the runs.
        output: the HTML file; it is replaced as a whole.

    Returns a line for everything that a reader must know of the runs' files.

    Raises InputError: a folder has no log, or the file cannot be written.
    """
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.label = f"{run.name} ({run.folder})"
    labels = [run.label for run in runs]
    if len(set(labels)) < len(labels):
        raise InputError(f"RUN ({', '.join(map(str, folders))}) must name each folder once")
    draft = output.with_name(f".{output.name}.tmp")
    try:
        draft.write_text(render(runs))
        draft.replace(output)
    except OSError as error:
        raise InputError(f"--output ({output}) cannot be written: {error.strerror}") from None
    return [f"{run.label}: {note}" for run in runs for note in run.notes]


def render(runs: Sequence[RunRecord]) -> str:
    """The page as HTML."""
    from convoy.report import figures

    title = ", ".join(run.label for run in runs)
    together = [
        figures.loss(runs),
        '<div class="grid">',
        figures.by_step(runs, "Learning rate", "", "lr"),
        figures.by_step(runs, "Gradient norm", "before clipping", "grad_norm", log=True),
        figures.by_step(runs, "Throughput", "tokens per second", "tokens_per_second"),
        figures.goodput(runs),
        "</div>",
        figures.phases(runs),
    ]
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return "\n".join(
        (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_CSS}</style></head><body>",
            f'<h1>{escape(title)}</h1><p class="sub">Convoy, {made}</p>',
            *(f'<p class="note">{escape(r.label)}: {escape(n)}</p>' for r in runs for n in r.notes),
            _figures_table(runs),
            *together,
            *(element for run in runs for element in _one_run(run)),
            _data(runs),
            "</body></html>\n",
        )
    )


def key_figures(run: RunRecord) -> dict[str, Any]:
    """The numbers of a run at the top of the page; None for what the run does not have."""
    steps = list(run.steps.values())
    newest = steps[-1] if steps else None
    seconds = sum(step.seconds for step in steps)
    score = list(run.evaluations.values())[-1] if run.evaluations else None
    dollars = run.dollars
    tokens = newest.tokens_seen if newest is not None else 0
    peaks = [i.peak_memory_bytes for i in run.intervals.values() if i.peak_memory_bytes]
    return {
        "steps": newest.step if newest is not None else 0,
        "tokens": tokens,
        "parameters": run.start.parameters if run.start is not None else None,
        "ranks": run.start.world_size if run.start is not None else None,
        "loss": newest.loss if newest is not None else None,
        "validation_bits_per_byte": score.bits_per_byte if score is not None else None,
        "tokens_per_second": sum(s.target_tokens for s in steps) / seconds if seconds else None,
        "padding": _padding(run),
        "peak_memory_mib": max(peaks) / 2**20 if peaks else None,
        "goodput": run.ledger.goodput,
        "hours": run.ledger.wall_seconds / 3600,
        "restarts": sum(run.ledger.restarts.values()),
        "dollars": dollars,
        "dollars_per_billion_tokens": dollars / tokens * 1e9 if dollars and tokens else None,
    }


def _padding(run: RunRecord) -> float | None:
    """The share of positions without a target; None where every position has one."""
    seq_len = run.spec.get("data", {}).get("seq_len", 0)
    known = [step for step in run.steps.values() if step.samples is not None]
    positions = sum(seq_len * (step.samples or 0) for step in known)
    targets = sum(step.target_tokens for step in known)
    return 1 - targets / positions if targets < positions else None


_FORMATS = {
    "steps": ("steps", "{:,}"),
    "tokens": ("tokens", "{:,}"),
    "parameters": ("parameters", "{:,}"),
    "ranks": ("ranks", "{:,}"),
    "loss": ("training loss of the last step, nats per token", "{:.4f}"),
    "validation_bits_per_byte": ("validation, bits per byte", "{:.4f}"),
    "tokens_per_second": ("tokens per second of steps", "{:,.0f}"),
    "padding": ("positions without a target", "{:.2%}"),
    "peak_memory_mib": ("peak memory of a rank, MiB", "{:,.1f}"),
    "goodput": ("goodput", "{:.1%}"),
    "hours": ("wall time, hours", "{:,.2f}"),
    "restarts": ("restarts", "{:,}"),
    "dollars": ("cost, dollars", "{:,.2f}"),
    "dollars_per_billion_tokens": ("cost of a billion tokens, dollars", "{:,.2f}"),
}


def _figures_table(runs: Sequence[RunRecord]) -> str:
    values = [key_figures(run) for run in runs]
    rows = []
    for key, (text, form) in _FORMATS.items():
        figures = [of_run[key] for of_run in values]
        if any(value is not None for value in figures):
            cells = ("-" if value is None else form.format(value) for value in figures)
            rows.append([text, *cells])
    return _table(["", *(run.label for run in runs)], rows, gid="key-figures")


def _one_run(run: RunRecord) -> Iterable[str]:
    from convoy.report import figures

    start = run.start
    yield f"<h2>{escape(run.label)}</h2>"
    if start is not None:
        layout = f" ({start.layout})" if start.world_size > 1 else ""
        yield (
            f'<p class="sub">{escape(str(run.folder))}: {start.parameters:,} parameters on '
            f"{count_ranks(start.world_size)}{escape(layout)}, {escape(start.device)}; "
            f"{start.steps:,} steps of {start.step_tokens:,} tokens; spec "
            f"{escape(start.spec_hash[:12])}</p>"
        )
    if run.hours:
        yield figures.timeline(run)
    heats = [
        figures.experts(run), *figures.expert_loads(run), figures.rank_speeds(run),
        figures.capacity_shares(run),
    ]  # fmt: skip
    yield '<div class="grid">' + "".join(heat for heat in heats if heat) + "</div>"
    if table := ledger_table(summed(run.ledger, 0)):
        yield f"<pre>{escape(table)}</pre>"
    moments = [moment for moment in run.moments if moment[1] != "checkpoint"]
    rows = [[f"{hour:.3f}", kind, text] for hour, kind, text in moments[-_MOST_MOMENTS:]]
    left_out = len(moments) - len(rows)
    caption = f"What happened; {left_out} earlier lines are left out" if left_out else ""
    yield _table(["hours", "event", ""], rows, "words", caption=caption or "What happened")
    if run.summary is not None and run.summary.sample:
        yield f"<h3>Text of the model</h3><pre>{escape(run.summary.sample)}</pre>"
    if tokens := run.source_tokens:
        all_ = sum(tokens.values())
        rows = [[name, f"{count:,}", f"{count / all_:.1%}"] for name, count in tokens.items()]
        yield _table(["source", "tokens", "share"], rows, caption="What was drawn")
    if run.manifests:
        yield _lineage(run)
    if start is not None and start.record:
        yield _table(["", ""], list(start.record.items()), "words", caption="Made with")
    if run.spec:
        spec = json.dumps(run.spec, indent=1, ensure_ascii=False)
        yield f"<details><summary>Spec</summary><pre>{escape(spec)}</pre></details>"


def _lineage(run: RunRecord) -> str:
    rows = [
        [
            f"{manifest.step:,}", manifest.created, Topology(**manifest.topology).describe(),
            manifest.save_id, manifest.spec_hash[:12],
        ]
        for manifest in run.manifests
    ]  # fmt: skip
    versions = ", ".join(f"{name} {v}" for name, v in run.manifests[-1].versions.items())
    origin = run.spec.get("init", {}).get("checkpoint")
    text = f"Checkpoints. Written by {versions}"
    text += f"; the run began with the weights of {origin}" if origin else ""
    head = ["step", "written", "layout", "save id", "spec"]
    return _table(head, rows, "words", caption=text)


def _table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    kind: str = "",
    *,
    gid: str = "",
    caption: str = "",
) -> str:
    if not rows:
        return ""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    titled = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<table id="{gid}" class="{kind}">{titled}{line(head, "th")}{body}</table>'


def _data(runs: Sequence[RunRecord]) -> str:
    """The numbers of the page for programs: ``JSON.parse`` of the element ``data``."""
    numbers = [
        {"run": run.label, **key_figures(run), "ledger": asdict(summed(run.ledger, 0))}
        for run in runs
    ]
    text = json.dumps(_finite(numbers), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="data">{text}</script>'


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
