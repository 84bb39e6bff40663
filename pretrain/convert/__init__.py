"""Weights from and to other projects, and changes of a model's shape."""

from typing import TYPE_CHECKING, Any

from pretrain.convert.sources import DTYPES, in_dtype, open_source, weights_only, with_names
from pretrain.convert.torchtitan import from_titan

if TYPE_CHECKING:
    from pretrain.convert.commands import export_hf, import_hf, upcycle
    from pretrain.convert.surgery import operate, parse_surgery

__all__ = [
    "DTYPES",
    "export_hf",
    "from_titan",
    "import_hf",
    "in_dtype",
    "open_source",
    "operate",
    "parse_surgery",
    "upcycle",
    "weights_only",
    "with_names",
]

_WITH_TORCH = {
    "export_hf": "pretrain.convert.commands",
    "import_hf": "pretrain.convert.commands",
    "operate": "pretrain.convert.surgery",
    "parse_surgery": "pretrain.convert.surgery",
    "upcycle": "pretrain.convert.commands",
}


def __getattr__(name: str) -> Any:
    # On demand: the other names need neither torch nor the seconds of its import.
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_WITH_TORCH[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
