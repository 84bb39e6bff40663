"""From documents to batches, in this order through the files:

    copy_source                      objects of a store, copied to this machine
    files, unit, columns, megatron   the files of a source, cut into units of work
    documents, filters               the documents of a unit, and those that are left out
    tokenizer, parts, worker(s)      their tokens: a part for each unit, in several processes
    shards, prepare, manifest        the parts in order, as shards; the manifest, written last
    location, cache                  in a folder or an object store; shards kept on a node's disk
    verify                           every byte against the manifest
    corpora, config, weights         all sources and validation sets of a run
    sequences                        the sequences of a split (through mmap); of several sources
    blend, order                     sample n -> source -> sequence, one permutation an epoch
    loader, division, skipped        sample n to n + B -> the micro-batches of a step on each rank

The manifest is the contract between preparation and training. It names every shard with its tokens
and its SHA-256, and has one hash of all, the fingerprint. Training never looks at the source.

Sample n is a pure function of (fingerprints, seed, n) and of the blend, whose changes are in every
checkpoint. No state is stored but the next n: any
number of ranks, any resize and any resume see the same sequence. A rank's share of a step is cut
from the step's samples by :func:`pretrain.data.loader.micro_batches`.
"""

from pretrain.data.batch import BatchConfig, BatchSizeRampup, BatchStage
from pretrain.data.blend import Blend, Phase
from pretrain.data.cache import CacheCounts, ShardCache
from pretrain.data.config import END_OF_DOCUMENT, DataConfig
from pretrain.data.corpora import Corpora, open_corpora, prepare_corpora
from pretrain.data.division import Division
from pretrain.data.loader import Cursor, Loader
from pretrain.data.location import is_remote, is_there
from pretrain.data.manifest import (
    CorpusManifest,
    open_corpus,
    read_manifest,
    record_manifest,
    recorded_manifest,
)
from pretrain.data.order import BlendedOrder, GlobalOrder
from pretrain.data.prepare import prepare_corpus
from pretrain.data.sequences import (
    ConcatenatedSequences,
    PackedSequences,
    Sequences,
    data_checksum,
    read_batch,
)
from pretrain.data.skipped import kept_samples
from pretrain.data.tokenizer import (
    bytes_per_token,
    end_of_document,
    load_tokenizer,
    read_tokenizer,
    tokenizer_at,
    tokenizer_fingerprint,
)
from pretrain.data.verify import changed_shard, verify_corpus

__all__ = [
    "END_OF_DOCUMENT",
    "BatchConfig",
    "BatchSizeRampup",
    "BatchStage",
    "Blend",
    "BlendedOrder",
    "CacheCounts",
    "ConcatenatedSequences",
    "Corpora",
    "CorpusManifest",
    "Cursor",
    "DataConfig",
    "Division",
    "GlobalOrder",
    "Loader",
    "PackedSequences",
    "Phase",
    "Sequences",
    "ShardCache",
    "bytes_per_token",
    "changed_shard",
    "data_checksum",
    "end_of_document",
    "is_remote",
    "is_there",
    "kept_samples",
    "load_tokenizer",
    "open_corpora",
    "open_corpus",
    "prepare_corpora",
    "prepare_corpus",
    "read_batch",
    "read_manifest",
    "read_tokenizer",
    "record_manifest",
    "recorded_manifest",
    "tokenizer_at",
    "tokenizer_fingerprint",
    "verify_corpus",
]
