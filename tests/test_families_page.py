"""docs/families.md says what the declarations say, and leaves out no family of transformers."""

from __future__ import annotations

import re
from pathlib import Path

import transformers

from docs.families_page import families_page, sparse_kinds, sparse_rows

PAGE = Path(__file__).parent.parent / "docs/families.md"
MODELS = Path(transformers.__file__).parent / "models"
_EXPERTS = re.compile(r"^class \w*(?:Experts|MoE|Moe|SparseMLP|SparseMoe?E?Block)\(", re.MULTILINE)


def with_experts() -> set[str]:
    """The folders of the installed transformers whose models have a class of experts."""
    return {
        path.parent.name
        for path in MODELS.glob("*/modeling_*.py")
        if _EXPERTS.search(path.read_text())
    }


def test_the_page_is_current():
    assert PAGE.read_text() == families_page(), "python -m docs.families_page > docs/families.md"


def test_every_family_of_transformers_is_in_the_table_and_no_other():
    """A new version of transformers with a new family needs a row: a declaration, or a reason."""
    there = with_experts()
    assert len(there) > 60
    assert there - sparse_kinds() == set()
    assert sparse_kinds() - there == set()


def test_a_family_has_a_reason_where_it_has_a_no():
    for row in sparse_rows():
        refused = [cell for cell in (row.adopt, row.convert) if cell == "no"]
        assert len(re.findall(r"\*(adopt|convert)\*: \w", row.why_not)) >= len(refused), row
        assert "not declared" not in row.why_not, row
