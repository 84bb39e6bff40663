"""From documents to batches, in this order through the files:

    files, unit, columns, megatron   the files of a source, cut into units of work
    documents, filters               the documents of a unit, and those that are left out
    tokenizer, parts, worker(s)      their tokens: a part for each unit, in several processes
    shards, prepare, manifest        the parts in order, as shards; the manifest, written last
    verify                           every byte against the manifest
    sequences                        the sequences of a split, read from the shards through mmap
    order                            sample n -> sequence, one permutation an epoch
    loader, division, skipped        sample n to n + B -> the micro-batches of a step on each rank

The manifest is the contract between preparation and training. It names every shard with its tokens
and its SHA-256, and has one hash of all, the fingerprint. Training never looks at the source.

Sample n is a pure function of (fingerprints, seed, n). No state is stored but the next n: any
number of ranks, any resize and any resume see the same sequence. A rank's share of a step is cut
from the step's samples by :func:`pretrain.data.loader.micro_batches`.
"""

from pretrain.data.batch import BatchConfig, BatchSizeRampup
from pretrain.data.config import END_OF_DOCUMENT, DataConfig
from pretrain.data.division import Division
from pretrain.data.loader import Cursor, Loader
from pretrain.data.manifest import CorpusManifest, open_corpus, read_manifest
from pretrain.data.order import GlobalOrder
from pretrain.data.prepare import epochs_line, prepare_corpus
from pretrain.data.sequences import PackedSequences
from pretrain.data.tokenizer import (
    bytes_per_token,
    end_of_document,
    load_tokenizer,
    read_tokenizer,
    tokenizer_fingerprint,
)
from pretrain.data.verify import changed_shard, verify_corpus

__all__ = [
    "END_OF_DOCUMENT",
    "BatchConfig",
    "BatchSizeRampup",
    "CorpusManifest",
    "Cursor",
    "DataConfig",
    "Division",
    "GlobalOrder",
    "Loader",
    "PackedSequences",
    "bytes_per_token",
    "changed_shard",
    "end_of_document",
    "epochs_line",
    "load_tokenizer",
    "open_corpus",
    "prepare_corpus",
    "read_manifest",
    "read_tokenizer",
    "tokenizer_fingerprint",
    "verify_corpus",
]
