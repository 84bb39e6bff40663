"""Which machines are in a launch: when new ones join, and which must not."""

from cluster.members.exclude import Exclusion, exclude, node_name, read_exclusions
from cluster.members.rendezvous import convoy_rendezvous

__all__ = [
    "Exclusion",
    "convoy_rendezvous",
    "exclude",
    "node_name",
    "read_exclusions",
]
