"""From text to batches: the corpus, the global order of samples, and the loader."""

from pretrain.data.batch import BatchConfig, BatchSizeRampup
from pretrain.data.config import END_OF_DOCUMENT, DataConfig
from pretrain.data.division import Division
from pretrain.data.loader import Cursor, Loader
from pretrain.data.manifest import CorpusManifest, open_corpus
from pretrain.data.order import GlobalOrder
from pretrain.data.prepare import prepare_corpus
from pretrain.data.sequences import PackedSequences
from pretrain.data.tokenizer import (
    bytes_per_token,
    end_of_document,
    load_tokenizer,
    read_tokenizer,
    tokenizer_fingerprint,
)

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
    "end_of_document",
    "load_tokenizer",
    "open_corpus",
    "prepare_corpus",
    "read_tokenizer",
    "tokenizer_fingerprint",
]
