"""A corpus made from documents: parts in several processes, shards in order, the manifest last."""

from corpus.prepare.prepare import HoldOut, prepare_corpus

__all__ = [
    "HoldOut",
    "prepare_corpus",
]
