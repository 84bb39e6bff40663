"""A report of runs: one HTML file that needs nothing else."""

from typing import TYPE_CHECKING

from parallel.on_demand import on_demand

if TYPE_CHECKING:
    from pretrain.observe.report.page import write_report

__all__ = ["write_report"]

# On demand: matplotlib is optional, and its import takes half a second.
__getattr__ = on_demand(__name__, {"write_report": "pretrain.observe.report.page"})


def __dir__() -> list[str]:
    return __all__
