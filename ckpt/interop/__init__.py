"""torch.distributed.checkpoint and safetensors, read and written."""

from typing import TYPE_CHECKING, Any

from ckpt.interop.dcp_reader import DcpSource, is_dcp
from ckpt.interop.safetensors_reader import (
    SAFETENSORS_DTYPES,
    SAFETENSORS_INDEX,
    SAFETENSORS_SINGLE,
    SafetensorsSource,
    is_safetensors,
)
from ckpt.interop.safetensors_writer import SafetensorsTarget

if TYPE_CHECKING:
    from ckpt.interop.dcp_writer import DcpTarget

__all__ = [
    "SAFETENSORS_DTYPES",
    "SAFETENSORS_INDEX",
    "SAFETENSORS_SINGLE",
    "DcpSource",
    "DcpTarget",
    "SafetensorsSource",
    "SafetensorsTarget",
    "is_dcp",
    "is_safetensors",
]

_WITH_TORCH = {"DcpTarget": "ckpt.interop.dcp_writer"}


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
