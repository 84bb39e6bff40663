"""The reference of the library, docs/api.md, made from the docstrings of the public names.

python -m docs.api_page > docs/api.md
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

_HEAD = """\
<!-- Made by `make docs/api.md` from the docstrings; edit those, not this page. -->

# The library

What `moe`, `router`, `parallel` and `ckpt` offer to import. Upper-case endings of names are shapes:
`x_TD` is [T, D], T tokens and D `d_model`. The pages of [the layer](layer.md),
[parallelism](parallelism.md) and [checkpoints](checkpoints.md) have the examples.
"""
_DOORS = {
    "moe": "The MoE layer",
    "router": "Choosing experts",
    "parallel": "Meshes, layouts, and functions that spread a model",
    "ckpt": "Checkpoints",
}
_WIDTH = 100
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):$")


def api_page() -> str:
    """The text of docs/api.md: a part for each package, an entry for each public name."""
    lines = [_HEAD]
    for package, title in _DOORS.items():
        module = importlib.import_module(package)
        lines += [f"## `{package}`: {title}", ""]
        for name in sorted(dir(module), key=str.lower):
            value = getattr(module, name)
            if not name.startswith("_") and not inspect.ismodule(value):
                lines += [*_entry(name, value), ""]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines))
    return text.rstrip() + "\n"


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"### `{name}`"
    yield ""
    if inspect.isclass(value) or inspect.isfunction(value):
        if not _is_plain(value):
            yield from ("```text", *_signature(name, value), "```", "")
        yield from _prose(inspect.getdoc(value) if "__doc__" in vars(value) or
                          inspect.isfunction(value) else "")  # fmt: skip
        if inspect.isclass(value):
            yield from _methods(value)
        if inspect.isclass(value) and issubclass(value, BaseModel) and value.model_fields:
            fields = ", ".join(f"`{field}`" for field in value.model_fields)
            yield from ("", *_wrapped(f"Fields: {fields}."))
    elif isinstance(value, dict):
        yield from _wrapped("Of " + ", ".join(f"`{key}`" for key in value) + ".")
    elif get_args(value):
        yield from _wrapped("One of " + ", ".join(f"`{_short(each)}`" for each in _one_of(value)))
    else:
        yield from _wrapped(f"`{value}`")


def _one_of(value: Any) -> tuple[Any, ...]:
    """The choices of a type alias."""
    choices = get_args(value)
    return get_args(choices[0]) or choices if get_origin(value) is Annotated else choices


def _short(value: Any) -> str:
    return value.__name__ if inspect.isclass(value) else str(value)


def _is_plain(value: Any) -> bool:
    """Whether a call's signature says nothing: configs, enumerations and errors."""
    kinds = (BaseModel, enum.Enum, BaseException)
    return inspect.isclass(value) and (issubclass(value, kinds) or inspect.isabstract(value)
                                       or getattr(value, "_is_protocol", False))  # fmt: skip


def _signature(name: str, value: Any) -> list[str]:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return [name]
    parts = [_parameter(each) for each in signature.parameters.values()]
    kinds = [each.kind for each in signature.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parts.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    returned = signature.return_annotation
    after = "" if returned is inspect.Signature.empty or inspect.isclass(value) else (
        f" -> {_annotation(returned)}"
    )  # fmt: skip
    line = f"{name}({', '.join(parts)}){after}"
    if len(line) <= _WIDTH:
        return [line]
    return [f"{name}(", *(f"    {part}," for part in parts), f"){after}"]


def _parameter(each: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    text = stars.get(each.kind, "") + each.name
    if each.annotation is not inspect.Parameter.empty:
        text += f": {_annotation(each.annotation)}"
    if each.default is inspect.Parameter.empty:
        return text
    shown = repr(each.default)
    # A function, a class, or what dataclasses have for a field's factory.
    if "<" in shown:
        shown = "..."
    return f"{text} = {shown}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _methods(value: type) -> Iterator[str]:
    found = []
    for name, member in vars(value).items():
        function = member.fget if isinstance(member, property) else member
        function = getattr(function, "__func__", function)
        if name.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        first = inspect.cleandoc(function.__doc__).split("\n\n")[0].replace("\n", " ")
        found.append((name if isinstance(member, property) else f"{name}()", first))
    if found and not issubclass(value, BaseException):
        yield ""
        for name, first in found:
            yield from _wrapped(f"`.{name}`: {_marked(first)}", "- ", "  ")


def _prose(doc: str | None) -> Iterator[str]:
    """A docstring as Markdown: paragraphs, and the parts of its sections as lists."""
    told, marks, code = (doc or "").partition("::\n")
    for block in (told + marks[:1]).split("\n\n"):
        head, _, rest = block.partition("\n")
        section = _SECTION.match(head)
        if section:
            yield from (head, "")
            # An item begins where the indentation of the section's text begins.
            for item in re.split(r"\n(?=\S)", textwrap.dedent(rest)):
                yield from _item(" ".join(item.split()))
        else:
            yield from _wrapped(_marked(" ".join(block.split())))
        yield ""
    if code:
        yield from ("```text", textwrap.dedent(code).strip("\n"), "```")


def _item(text: str) -> list[str]:
    """A line of a section: of arguments and errors the name comes first."""
    name, colon, meaning = text.partition(": ")
    if colon and " " not in name:
        text = f"`{name}`: {meaning}"
    return _wrapped(_marked(text), "- ", "  ")


def _marked(text: str) -> str:
    """Roles and double backticks as Markdown's."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text)
    return text.replace("``", "`")


def _wrapped(text: str, first: str = "", later: str = "") -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=later,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


if __name__ == "__main__":
    print(api_page(), end="")
