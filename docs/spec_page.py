"""The reference of the spec, docs/spec.md, made from the config models.

python -m docs.spec_page > docs/spec.md
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
import types
from enum import Enum
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from pretrain.spec.job import JobSpec
from pretrain.spec.on_resume import on_resume
from pretrain.spec.read import models_in, options_of, tag_of
from router import OpenKind

_HEAD = """\
<!-- Made by `make docs/spec.md` from the config models; edit their docstrings, not this page. -->

# The job spec

A spec is a TOML or JSON file with the tables below. `--set section.field=value` changes one field,
`--set moe.capacity.policy=fixed` for example, and `--print-spec` shows the spec with all defaults.
A field without a default is required. A resume may change what is `free`; another value of what is
`fixed` would make another run, and `fixed if exact` is fixed with `train.exact`.
[Options that were dropped](options-dropped.md) has what holds in their place.
"""
_TABLE = ("| field | type | default | at a resume | meaning |", "| --- | --- | --- | --- | --- |")


def spec_reference() -> str:
    """The text of docs/spec.md: a section for each table, a row for each field."""
    lines = [_HEAD]
    _section(JobSpec, "", lines, own=True)
    return "\n".join(lines).rstrip() + "\n"


def _section(
    model: type[BaseModel],
    path: str,
    lines: list[str],
    *,
    own: bool = False,
    repeated: bool = False,
) -> None:
    if path:
        head = f"[[{path}]]" if repeated else f"[{path}]"
        lines += [f"## `{head}`", "", _about(model), ""]
    tables: list[tuple[str, FieldInfo]] = []
    rows = []
    for name, field in options_of(model).items():
        if models_in(field.annotation):
            tables.append((name, field))
        if not (models_in(field.annotation) and own):
            rows.append(_row(model, name, field))
    lines += _table(rows)
    for name, field in tables:
        inner = f"{path}.{name}" if path else name
        variants = models_in(field.annotation)
        if len(variants) == 1:
            origin = get_origin(field.annotation)
            inner += ".NAME" if origin is dict else ""
            _section(variants[0], inner, lines, repeated=origin is list)
        else:
            _union(variants, inner, field, docstrings_of_fields(model)[name], lines)


def _union(
    variants: list[type[BaseModel]], path: str, field: FieldInfo, about: str, lines: list[str]
) -> None:
    lines += [f"## `[{path}]`", "", _prose(about), ""]
    tag = tag_of(field)
    for variant in variants:
        lines += [f'### `{tag} = "{variant.model_fields[tag].default}"`', "", _about(variant), ""]
        rows = [_row(variant, n, f) for n, f in options_of(variant).items() if n != tag]
        lines += _table(rows)


def _table(rows: list[str]) -> list[str]:
    return [*_TABLE, *rows, ""] if rows else []


@cache
def docstrings_of_fields(model: type[BaseModel]) -> dict[str, str]:
    """The string behind each field of a model, by the field's name.

    pydantic can read these strings where a class is made (``use_attribute_docstrings``): then every
    start of a run would read and parse the source of all models.
    """
    found: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if issubclass(each, BaseModel) and each is not BaseModel:
            (made,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
            assert isinstance(made, ast.ClassDef)
            for field, behind in pairwise(made.body):
                if isinstance(field, ast.AnnAssign) and isinstance(behind, ast.Expr):
                    assert isinstance(field.target, ast.Name)
                    assert isinstance(behind.value, ast.Constant)
                    found[field.target.id] = inspect.cleandoc(str(behind.value.value))
    return found


def _row(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    about = docstrings_of_fields(model).get(name, "")
    rule = on_resume(model, name)
    cells = (f"`{name}`", _type(field), _default(field), str(rule), _prose(about))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(field: FieldInfo) -> str:
    if models_in(field.annotation):
        return "table"
    kinds = [rule.names for rule in field.metadata if isinstance(rule, OpenKind)]
    if kinds:
        return ", ".join(f"`{name}`" for name in kinds[0])
    return _names(field.annotation) + _bounds(field)


def _names(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_names(a) for a in arguments if a is not type(None))
    if origin is Annotated:
        return _names(arguments[0])
    if origin is dict:
        return "table of names"
    if origin is list:
        return f"list of {_names(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{member.value}`" for member in annotation)
    known = {bool: "true or false", int: "integer", float: "number", str: "text"}
    return known[annotation]


def _bounds(field: FieldInfo) -> str:
    bounds = []
    for rule in field.metadata:
        if isinstance(rule, Ge):
            bounds.append(f"at least {_number(rule.ge)}")
        elif isinstance(rule, Gt):
            bounds.append(f"above {_number(rule.gt)}")
        elif isinstance(rule, Le):
            bounds.append(f"at most {_number(rule.le)}")
        elif isinstance(rule, Lt):
            bounds.append(f"below {_number(rule.lt)}")
        elif isinstance(rule, MinLen) and rule.min_length == 1:
            bounds.append("not empty")
    return ", " + ", ".join(bounds) if bounds else ""


def _number(value: Any) -> str:
    if isinstance(value, int) and value > 1 << 20 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return "as below"
    if isinstance(value, dict) and any(isinstance(inner, BaseModel) for inner in value.values()):
        return ", ".join(f"`{name}`" for name in value)
    return f"`{json.dumps(value)}`"


def _about(model: type[BaseModel]) -> str:
    """A model's docstring without its examples and without the name of its section."""
    paragraphs = inspect.cleandoc(model.__doc__ or "").split("\n\n")
    text = " ".join(p for p in paragraphs if not p.startswith(("Example", "Raises")))
    text = re.sub(r"^The ``\[+[\w.]+\]+`` (section|tables)[:;.] ?", "", text)
    return _prose(text[:1].upper() + text[1:])


def _prose(text: str) -> str:
    """A docstring on one line, in Markdown."""
    return " ".join(text.replace("``", "`").split())


if __name__ == "__main__":
    print(spec_reference(), end="")
