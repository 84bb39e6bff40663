"""torch.distributed.checkpoint and safetensors, read and written."""

from typing import TYPE_CHECKING

from ckpt.interop.dcp_reader import DcpSource, is_dcp
from ckpt.interop.safetensors_reader import (
    SAFETENSORS_DTYPES,
    SAFETENSORS_INDEX,
    SAFETENSORS_SINGLE,
    SafetensorsSource,
    is_safetensors,
)
from ckpt.interop.safetensors_writer import SafetensorsTarget
from parallel.on_demand import on_demand

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


# On demand: the other names need neither torch nor the seconds of its import.
__getattr__ = on_demand(__name__, {"DcpTarget": "ckpt.interop.dcp_writer"})


def __dir__() -> list[str]:
    return __all__
