"""The page of the museum of defects, docs/museum.md, made from its cases.

python -m docs.museum_page > docs/museum.md
"""

from __future__ import annotations

import json
from typing import Any

from tests.museum.cases import ROOT, Case, themes

PEERS = ROOT / "bench" / "results" / "museum_peers.json"
_HEAD = """\
<!-- Made by `python -m docs.museum_page` from the cases in tests/museum/; edit those, not this
page. -->

# The museum of defects

Most complaints about the training of mixtures of experts are of one kind: a run goes on, each
number looks plausible, and one is wrong. Below are {cases} such defects that users and developers
of {repositories} other projects have published. For each there is a test of Convoy that would see
the defect.

```sh
make museum         # runs the cases, on a CPU
make museum-prove   # shows that each case can fail
```

`make museum-prove` puts each defect, or its nearest relative, into a copy of Convoy: an edit of a
few words, which is written above the case. The case must fail there. An edit whose text Convoy no
longer has fails the default test suite, so that no proof goes stale. `bench/results/museum.json`
has what each case said of its defect.

The name of a project leads to the report. "Here" is what Convoy's test holds true, and leads to the
test. A case does not say that the project has the defect today: most of these defects are mended.
"""
_PEERS = """\
## Seen in the projects themselves

`python -m bench.museum_peers` installs the releases below and asks each of them for the number that
the report is about. The releases run on a CPU. Measured on {date} with torch {torch}.
"""


def page() -> str:
    """The whole page."""
    by_theme = themes()
    cases = [shown for shown_cases in by_theme.values() for shown in shown_cases]
    repositories = {shown.repository for shown in cases}
    parts = [_HEAD.format(cases=len(cases), repositories=len(repositories))]
    for theme, shown_cases in by_theme.items():
        rows = sorted(shown_cases, key=lambda shown: shown.thread.lower())
        parts.append("\n".join([f"## {theme}", "", *_table(rows)]) + "\n")
    if PEERS.exists():
        parts.append(_peers(json.loads(PEERS.read_text())))
    return "\n".join(parts)


def _table(cases: list[Case]) -> list[str]:
    lines = ["| report | what went wrong | here |", "|---|---|---|"]
    for shown in cases:
        name = shown.thread.partition("/")[2]
        test = f"[{_cell(shown.claim)}](../{shown.file})"
        lines.append(f"| [{name}]({shown.url}) | {_cell(shown.went_wrong)} | {test} |")
    return lines


def _peers(table: dict[str, Any]) -> str:
    lines = ["| report | release | answer | mended release | answer |", "|---|---|---|---|---|"]
    for row in sorted(table["rows"], key=lambda row: row["thread"].lower()):
        if not row["verdict"].startswith("seen wrong"):
            continue
        name = row["thread"].partition("/")[2]
        url = f"https://github.com/{row['thread'].replace('#', '/issues/')}"
        wrong, fixed = row["wrong"], row["fixed"]
        mended = f"none: {_cell(row['no_fix'])} | "
        if fixed:
            mended = f"{fixed['requirements'][0]} | {_cell(fixed['seen'])}"
        release = wrong["requirements"][0]
        lines.append(f"| [{name}]({url}) | {release} | {_cell(wrong['seen'])} | {mended} |")
    head = _PEERS.format(date=table["date"][:10], torch=table["versions"]["torch"])
    return "\n".join([head, *lines]) + "\n"


def _cell(text: str) -> str:
    """Text that a cell of a table can hold."""
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    print(page(), end="")
