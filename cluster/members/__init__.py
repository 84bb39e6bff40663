"""Which machines are in a launch: when new ones join, and which must not."""

from typing import TYPE_CHECKING

from cluster.members.exclude import (
    EXCLUDE_LIST,
    Exclusion,
    exclude,
    node_name,
    read_exclusions,
)
from parallel.on_demand import on_demand

if TYPE_CHECKING:
    from cluster.members.rendezvous import convoy_rendezvous

__all__ = [
    "EXCLUDE_LIST",
    "Exclusion",
    "convoy_rendezvous",
    "exclude",
    "node_name",
    "read_exclusions",
]

# On demand: torchrun's rendezvous takes long to import, and itself imports this package.
__getattr__ = on_demand(__name__, {"convoy_rendezvous": "cluster.members.rendezvous"})


def __dir__() -> list[str]:
    return __all__
