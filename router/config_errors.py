"""One line for a config that a program makes with arguments that do not fit."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)  # pydantic has no public name for it


class OneLineErrors(ModelMetaclass):
    """The metaclass of configs that a program makes too, as ``MoEConfig(top_k=2, ...)``.

    Such a call raises ValueError: one line in the names of the call's arguments. A config that
    pydantic makes, as a section of a job spec, raises pydantic's own error, which says where in the
    spec the field is.
    """

    def __call__(cls, *args: Any, **fields: Any) -> Any:  # noqa: N805
        """Make a config of its fields."""
        if args:
            raise TypeError(f"{cls.__name__} takes keyword arguments only, as top_k=2")
        try:
            return super().__call__(**fields)
        except ValidationError as error:
            raise ValueError(_one_line(cls, error)) from None


def _one_line(config: Any, error: ValidationError) -> str:
    # An unknown field explains why another one is missing.
    errors = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    first = errors[0]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    # Of a union's variant the location has the name too; the name is no field of the call.
    where = [str(part) for part in first["loc"]]
    if len(where) > 1 and where[0] == "capacity":
        del where[1]
    field = ".".join(where)
    match first["type"]:
        case "value_error":
            # The rules of a config are written for a spec, where the config is a section.
            section = "moe." if "capacity" in config.model_fields else "moe.capacity."
            text = str(first["ctx"]["error"]).replace(section, "")
        case "extra_forbidden":
            close = difflib.get_close_matches(field, list(config.model_fields), 1)
            text = f"there is no field {field}" + (f"; did you mean {close[0]}?" if close else "")
        case "missing":
            names = [str(each["loc"][-1]) for each in errors if each["type"] == "missing"]
            text, more = f"there must be a value of {', '.join(names)}", ""
        case _:
            text = f"{field} ({first['input']!r}): {first['msg']}"
    return f"{config.__name__}: {text}{more}"
