"""Detection of ranks that are stuck, slow or gone."""

from cluster.detect.hang import RollCall

__all__ = [
    "RollCall",
]
