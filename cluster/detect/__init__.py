"""Detection of ranks that are stuck, slow or lost."""

from cluster.detect.hang import HangReport

__all__ = [
    "HangReport",
]
