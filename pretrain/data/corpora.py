"""All prepared data of a run: its sources and its validation sets."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from corpus.config import DataConfig, is_remote, whole_weights
from corpus.manifest import CorpusManifest, open_corpus
from corpus.tokenizer import end_of_document, load_tokenizer
from pretrain.data.best_fit import BestFitSequences, WholeDocuments, read_packing
from pretrain.data.blend import Blend, Phase
from pretrain.data.cache import ShardCache
from pretrain.data.order import BlendedOrder, GlobalOrder
from pretrain.data.sequences import (
    ConcatenatedSequences,
    PackedSequences,
    Sequences,
    WithoutBoundaryTargets,
)
from pretrain.errors import InputError


@dataclass(frozen=True)
class Corpus:
    """One prepared corpus of a run."""

    name: str
    data: DataConfig
    """The section of a run with this corpus alone."""
    manifest: CorpusManifest


@dataclass(frozen=True)
class Corpora:
    """The prepared corpora of a run.

    Args:
        data: of the spec.
        sources: what is trained on, in the order of the spec.
        validation: further sets to score.
    """

    data: DataConfig
    sources: tuple[Corpus, ...]
    validation: tuple[Corpus, ...] = ()

    @cached_property
    def cache(self) -> ShardCache | None:
        """What keeps the shards of object stores on this node; None where all are in folders."""
        if not any(is_remote(one.data.path) for one in (*self.sources, *self.validation)):
            return None
        return ShardCache(Path(self.data.cache_dir), int(self.data.cache_gib * (1 << 30)))

    @property
    def fingerprint(self) -> str:
        """Of all sources; that of the corpus where there is one."""
        each = sorted(one.manifest.fingerprint for one in self.sources)
        return each[0] if len(each) == 1 else hashlib.sha256("".join(each).encode()).hexdigest()

    @property
    def tokenizer_fingerprint(self) -> str:
        """Of the tokenizer, which all corpora share."""
        return self.sources[0].manifest.tokenizer_fingerprint

    def blend(self) -> Blend:
        """The blend that the spec asks for."""
        keys = {one.name: one.manifest.fingerprint for one in self.sources}
        weights = {name: one.weight for name, one in self.data.sources.items()} or {"corpus": 1.0}
        phases = [(0, weights)] + [
            (math.ceil(stage.from_tokens / self.data.seq_len), stage.weights)
            for stage in self.data.stages
        ]
        return Blend(
            tuple(
                Phase.of(start, {keys[n]: w for n, w in whole_weights("data", each).items()})
                for start, each in phases
            )
        )

    def train_sequences(self) -> Sequences:
        """The sequences to train on, one source after another."""
        each = [self._sequences_of(one) for one in self.sources]
        return each[0] if len(each) == 1 else ConcatenatedSequences(each)

    def _sequences_of(self, one: Corpus) -> Sequences:
        packed: Sequences
        if self.data.packing == "best_fit":
            packed = BestFitSequences(one.data, one.manifest, self.cache)
        else:
            packed = PackedSequences(one.data, one.manifest, "train", cache=self.cache)
        if not self.data.mask_boundary_labels:
            return packed
        end = end_of_document(load_tokenizer(self.data), self.data.end_token)
        return WithoutBoundaryTargets(packed, end)

    def order(self, blend: Blend, sequences: Sequences, seed: int) -> GlobalOrder | BlendedOrder:
        """The global order over :meth:`train_sequences`."""
        keys = [one.manifest.fingerprint for one in self.sources]
        if len(keys) == 1 and blend.sources == keys:  # always this one
            return GlobalOrder(len(sequences), seed)
        each = sequences.each if isinstance(sequences, ConcatenatedSequences) else [sequences]
        sizes = {key: len(one) for key, one in zip(keys, each, strict=True)}
        return BlendedOrder(blend, sizes, seed)

    def epochs_lines(self, samples: int) -> Iterator[str]:
        """How often a run of ``samples`` sequences draws each source, a line for people each."""
        S, drawn = self.data.seq_len, self.blend().drawn(samples)
        for one in self.sources:
            there = self.sequences_of(one)
            count = drawn[one.manifest.fingerprint]
            epochs = f"{count / there:.2f} epochs" if there else "they are too short for a sequence"
            yield (
                f"the run draws {count:,} sequences of {S:,} tokens from the {there:,} in "
                f"{one.data.path}: {epochs}"
            )

    def described(self) -> dict[str, dict[str, Any]]:
        """Each source by its fingerprint, as JSON."""
        return {
            one.manifest.fingerprint: {
                "name": one.name,
                "path": one.data.path,
                "sequences": self.sequences_of(one),
                "tokens": one.manifest.train_tokens,
            }
            for one in self.sources
        }

    def sequences_of(self, one: Corpus) -> int:
        """The sequences of a source to train on."""
        if self.data.packing == "best_fit":
            return read_packing(one.data, one.manifest).sequences
        return sum((shard.tokens - 1) // self.data.seq_len for shard in one.manifest.train)

    def held_out_sequences(self) -> dict[str, Sequences]:
        """The sequences of each set that is scored, by name."""
        if self.data.chat is not None:
            return {
                corpus.name: WholeDocuments(corpus.data, corpus.manifest, self.cache)
                for corpus in (*self.sources, *self.validation)
            }
        return {
            one.name: PackedSequences(one.data, one.manifest, "val", whole=True, cache=self.cache)
            for one in (*self.sources, *self.validation)
        }


def open_corpora(data: DataConfig, vocab_size: int) -> Corpora:
    """The prepared corpora; see :func:`corpus.manifest.open_corpus`.

    Raises InputError also where two sources have other tokenizers, or are the same.
    """
    return checked_corpora(
        Corpora(
            data,
            tuple(Corpus(n, d, open_corpus(d, vocab_size)) for n, d in data.each_source.items()),
            tuple(
                Corpus(n, d, open_corpus(d, vocab_size, "all"))
                for n, d in data.each_validation.items()
            ),
        )
    )


def checked_corpora(corpora: Corpora) -> Corpora:
    """The corpora, if they go together: one tokenizer, and no source twice.

    Raises InputError.
    """
    seen: dict[str, str] = {}
    for one in (*corpora.sources, *corpora.validation):
        if one.manifest.tokenizer_fingerprint != corpora.tokenizer_fingerprint:
            raise InputError(
                f"data: {one.name} ({one.data.path}) must have the tokenizer of "
                f"{corpora.sources[0].name}; remove its folder to prepare it anew"
            )
    for one in corpora.sources:
        other = seen.setdefault(one.manifest.fingerprint, one.name)
        if other != one.name:
            raise InputError(
                f"data.sources.{one.name} ({one.data.path}) must not have the documents of "
                f"data.sources.{other}; raise the weight of one of them instead"
            )
    return corpora
