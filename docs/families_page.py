"""The table of model families, docs/families.md, made from their declarations.

python -m docs.families_page > docs/families.md
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from convoy.convert.hf import FAMILIES, NOT_CONVERTED
from moe.adoption.families import TABLE

_HEAD = """\
<!-- Made by `python -m docs.families_page` from the declarations in moe/adoption/families.py and
convoy/convert/hf/; edit those, not this page. -->

# Model families

These are all families of transformers 5.23 with routed experts, by the `model_type` of their
`config.json`. [Hugging Face models](huggingface.md) says how to use them.

- **adopt**: `moe.adopt` puts Convoy's layers into a model of transformers.
- **in**: `convoy convert import` makes a checkpoint for Convoy's trainer.
- **out**: `convoy convert export` writes a folder that transformers loads.
- **train**: a spec says a decoder of the family, to be trained from random weights.

Of {count} families {adopted} can be adopted, wholly or in part, and {converted} can be converted
and trained from the start. Another one is refused with the reason that is here.
"""
_CONVERTED = """\
Each family that can be converted is held to transformers on a small random model: logits to 1e-4,
the loss and a gradient, all tensors bit by bit after import and export, and what a `config.json`
leaves out. A value of a `config.json` that Convoy has not is refused by its name. A field of a spec
that a family has not is refused on export, whatever fields are added: a family speaks of a field,
or the field must say nothing.
"""
_DENSE = """\
## Dense families

These are converted too, and `convoy convert upcycle` makes a mixture of experts of them.
"""


class Row(NamedTuple):
    """One family."""

    model_type: str
    name: str
    adopt: str
    convert: str
    """``yes``, ``no``, or on which condition."""
    why_not: str


def sparse_rows() -> list[Row]:
    """A row for each family with routed experts, by ``model_type``."""
    return [_row(kind) for kind in sorted(sparse_kinds())]


def sparse_kinds() -> set[str]:
    """Every family with routed experts that a declaration knows."""
    converted = {kind for kind, family in FAMILIES.items() if family.sparse}
    return converted | set(NOT_CONVERTED) | {family.model_type for family in TABLE}


def _row(kind: str) -> Row:
    blocks = [family for family in TABLE if family.model_type == kind]
    takes = [family.name for family in blocks if family.adopt]
    adopt = "no" if not takes else "yes" if len(takes) == len(blocks) else ", ".join(takes)
    reasons = [_reason("adopt", family.why_not) for family in blocks if not family.adopt]
    family = FAMILIES.get(kind)
    convert = "no" if family is None else f"if {family.only}" if family.only else "yes"
    if family is None:
        reasons.append(_reason("convert", NOT_CONVERTED.get(kind, "not declared")))
    name = family.name if family is not None else ", ".join(block.name for block in blocks) or kind
    return Row(kind, name, adopt, convert, " ".join(dict.fromkeys(reasons)))


def _reason(what: str, why: str) -> str:
    return f"*{what}*: {why}."


def families_page() -> str:
    """The text of docs/families.md."""
    rows = sparse_rows()
    head = _HEAD.format(
        adopted=sum(row.adopt != "no" for row in rows),
        count=len(rows),
        converted=sum(row.convert != "no" for row in rows),
    )
    columns = ("`model_type`", "family", "adopt", "in", "out", "train", "why not")
    cells = [
        (f"`{r.model_type}`", r.name, r.adopt, r.convert, r.convert, r.convert, r.why_not)
        for r in rows
    ]
    dense = [(f"`{kind}`", of.name) for kind, of in FAMILIES.items() if not of.sparse]
    parts = [head, _table(columns, cells), _CONVERTED, _DENSE,
             _table(("`model_type`", "family"), dense)]  # fmt: skip
    return "\n".join(parts)


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(families_page(), end="")
