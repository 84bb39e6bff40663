"""Weights from and to other projects, and changes of a model's shape."""

from typing import TYPE_CHECKING

from parallel.on_demand import on_demand
from pretrain.convert.megatron import from_megatron, refuse_other_formats
from pretrain.convert.sources import (
    DTYPES,
    in_dtype,
    open_source,
    weights_only,
    with_dots,
    with_names,
    without_tree,
)
from pretrain.convert.torchtitan import from_titan

if TYPE_CHECKING:
    from pretrain.convert.commands import export_hf, import_hf, upcycle
    from pretrain.convert.surgery import operate, parse_surgery

__all__ = [
    "DTYPES",
    "export_hf",
    "from_megatron",
    "from_titan",
    "import_hf",
    "in_dtype",
    "open_source",
    "operate",
    "parse_surgery",
    "refuse_other_formats",
    "upcycle",
    "weights_only",
    "with_dots",
    "with_names",
    "without_tree",
]


# On demand: the other names need neither torch nor the seconds of its import.
__getattr__ = on_demand(
    __name__,
    {
        "export_hf": "pretrain.convert.commands",
        "import_hf": "pretrain.convert.commands",
        "operate": "pretrain.convert.surgery",
        "parse_surgery": "pretrain.convert.surgery",
        "upcycle": "pretrain.convert.commands",
    },
)


def __dir__() -> list[str]:
    return __all__
