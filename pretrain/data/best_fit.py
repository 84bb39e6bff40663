"""Best-fit packing: documents are cut only where they are longer than a sequence.

Documents, cut into pieces of at most S + 1 tokens, are put into sequences of S + 1 tokens, the
longest first, each into the fullest sequence that has room for it (Ding et al., "Fewer Truncations
Improve Language Modeling", arXiv 2404.10830, section 3). Which pieces a sequence has is written
once, shard by shard, beside the corpus, in a folder ``best-fit-S``.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left, insort
from collections.abc import Callable
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from corpus.config import DataConfig
from corpus.location import is_there, new_place, read_file
from corpus.manifest import CorpusManifest, Sealed, Shard
from pretrain.data.cache import ShardCache
from pretrain.data.sequences import Indices, ShardFiles, by_shard
from pretrain.errors import InputError

PACKING = "packing.json"
PACKING_FOLDER = re.compile(r"best-fit-\d+")
PIECE = np.dtype([("sequence", "<i8"), ("start", "<i8"), ("tokens", "<i8")])
"""A piece of a document: the sequence that has it, and where its tokens are in the shard. Sorted by
sequence, and within a sequence by start."""


class PackedShard(BaseModel):
    """The sequences of one shard."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    file: str
    sequences: int
    pieces: int
    sha256: str


class Packing(Sealed):
    """``packing.json``: the best-fit packing of a corpus for one length of sequences."""

    fingerprint: str
    seq_len: int
    shards: list[PackedShard]
    padding: int
    """Places of all sequences, S + 1 each, that have no token."""
    cut_documents: int
    """Documents that are longer than a sequence."""

    @property
    def sequences(self) -> int:
        """Sequences of all shards."""
        return sum(shard.sequences for shard in self.shards)

    @property
    def padding_share(self) -> float:
        """The share of places that have no token."""
        return self.padding / max(1, self.sequences * (self.seq_len + 1))


def cut(ends: np.ndarray, tokens: int, length: int) -> tuple[np.ndarray, int]:
    """The pieces of a shard's documents, and how many documents were cut.

    A document that is longer than ``length`` becomes pieces that share one token, so that every
    token but a document's first is a target once. A last piece of one token has no target and is
    left out.

    Args:
        ends: int64, one past the last token of each document that ends in the shard.
        tokens: of the shard; a document that goes on in the next shard ends here.
        length: tokens of a sequence, S + 1.

    Returns:
        int64 [pieces, 2]: start and tokens of each piece, in order.
    """
    stops = ends if len(ends) and ends[-1] == tokens else np.append(ends, tokens)
    starts = np.concatenate([[0], stops[:-1]])
    sizes, S = stops - starts, length - 1
    counts = np.maximum(1, -(-(sizes - 1) // S))
    document = np.repeat(np.arange(len(sizes)), counts)
    within = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = starts[document] + within * S
    size = np.minimum(length, stops[document] - first)
    pieces = np.stack([first, size], 1)
    return pieces[size > 1], int((sizes > length).sum())


def best_fit(sizes: np.ndarray, length: int) -> tuple[np.ndarray, int]:
    """The sequence of each piece, int64, and the number of sequences.

    Args:
        sizes: tokens of each piece, at most ``length``.
        length: places of a sequence.
    """
    found = np.empty(len(sizes), np.int64)
    open_with: dict[int, list[int]] = {}  # sequences by the places that they have left
    rooms: list[int] = []  # the keys, sorted
    count = 0
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        at = bisect_left(rooms, size)
        if at == len(rooms):
            sequence, left = count, length - size
            count += 1
        else:
            room = rooms[at]
            sequence, left = open_with[room].pop(), room - size
            if not open_with[room]:
                del open_with[room], rooms[at]
        found[piece] = sequence
        if left:
            if left not in open_with:
                open_with[left] = []
                insort(rooms, left)
            open_with[left].append(sequence)
    return found, count


def packing_folder(data: DataConfig) -> str:
    """Where the packing of a corpus is."""
    return f"{data.path}/best-fit-{data.seq_len}"


def pack_corpus(data: DataConfig, corpus: CorpusManifest, say: Callable[[str], None]) -> Packing:
    """The packing of a corpus, which is made where there is none.

    Raises InputError where the folder cannot be written.
    """
    folder = packing_folder(data)
    try:
        if not is_there(f"{folder}/{PACKING}"):
            with new_place(folder, data.cache_dir, last=PACKING) as work:
                _write(data, corpus, work)
    except FileExistsError:
        pass  # another process has made it meanwhile
    except OSError as error:
        raise InputError(
            f"data.path ({data.path}) cannot be packed: {error.strerror}: {error.filename}"
        ) from None
    packing = read_packing(data, corpus)
    say(
        f"best-fit packing of {data.path}: {packing.sequences:,} sequences of {data.seq_len:,} "
        f"tokens, {packing.padding_share:.2%} padding; {packing.cut_documents:,} documents are "
        f"longer than a sequence and are cut"
    )
    return packing


def _write(data: DataConfig, corpus: CorpusManifest, folder: Path) -> None:
    shards, padding, cut_documents, length = [], 0, 0, data.seq_len + 1
    for shard in corpus.train:
        ends = np.frombuffer(read_file(f"{data.path}/{shard.ends_file}"), "<i8")
        pieces, cuts = cut(ends, shard.tokens, length)
        if data.chat is not None:
            # A piece of a long conversation may have no answer: a step must have some.
            tokens = np.frombuffer(read_file(f"{data.path}/{shard.file}"), corpus.dtype)
            pairs = pieces.tolist()
            has_answer = [bool((tokens[start + 1 : start + n] >= 0).any()) for start, n in pairs]
            pieces = pieces[np.array(has_answer, bool)]
        sequence, count = best_fit(pieces[:, 1], length)
        rows = np.empty(len(pieces), PIECE)
        rows["sequence"], rows["start"], rows["tokens"] = sequence, pieces[:, 0], pieces[:, 1]
        rows.sort(order=["sequence", "start"])
        file = Path(shard.file).with_suffix(".pieces").name
        (folder / file).write_bytes(rows.tobytes())
        digest = hashlib.sha256(rows.tobytes()).hexdigest()
        shards.append(PackedShard(file=file, sequences=count, pieces=len(rows), sha256=digest))
        padding += count * length - int(pieces[:, 1].sum())
        cut_documents += cuts
    packing = Packing(
        fingerprint=corpus.fingerprint,
        seq_len=data.seq_len,
        shards=shards,
        padding=padding,
        cut_documents=cut_documents,
    ).sealed()
    (folder / PACKING).write_text(json.dumps(packing.model_dump(), indent=1) + "\n")


def read_packing(data: DataConfig, corpus: CorpusManifest) -> Packing:
    """The packing of a corpus for the spec's sequences; see :func:`read_packing_at`."""
    return read_packing_at(packing_folder(data), corpus)


def read_packing_at(folder: str, corpus: CorpusManifest) -> Packing:
    """The packing in a folder. Raises InputError where there is none, or it is of another corpus or
    another length, or damaged."""
    try:
        packing = Packing.model_validate_json(read_file(f"{folder}/{PACKING}"))
    except OSError as error:
        raise InputError(
            f"data.packing (best_fit) needs {folder}, which convoy prepare makes: {error.strerror}"
        ) from None
    except ValidationError:
        raise InputError(f"{folder} is damaged; remove it to pack the corpus anew") from None
    if not packing.is_sealed:
        raise InputError(
            f"{folder} has a {PACKING} that was changed after it was written; put it back, or "
            f"remove the folder to pack the corpus anew"
        )
    if packing.fingerprint != corpus.fingerprint or not folder.endswith(f"-{packing.seq_len}"):
        raise InputError(f"{folder} is of another corpus; remove it to pack the corpus anew")
    return packing


class WholeDocuments:
    """The held-out documents of one corpus, each in sequences of its own, padded with -1.

    Documents that are longer than a sequence are cut as by :func:`cut`: what is scored has the
    context that training has.

    Raises InputError where a file is not as long as it must be.
    """

    def __init__(
        self, data: DataConfig, corpus: CorpusManifest, cache: ShardCache | None = None
    ) -> None:
        self.seq_len = data.seq_len
        self._tokens = ShardFiles(data, corpus, corpus.val, cache=cache)
        self._tokens.check_lengths()
        pieces = []
        for number, shard in enumerate(corpus.val):
            ends = np.frombuffer(read_file(f"{data.path}/{shard.ends_file}"), "<i8")
            own, _ = cut(ends, shard.tokens, data.seq_len + 1)
            pieces.append(np.insert(own, 0, number, axis=1))
        self._pieces = np.concatenate(pieces) if pieces else np.empty((0, 3), np.int64)

    def __len__(self) -> int:
        return len(self._pieces)

    def read(self, indices: Indices) -> np.ndarray:
        """See :meth:`pretrain.data.sequences.Sequences.read`."""
        wanted = self._pieces[np.asarray(indices, np.int64)]
        rows = np.full((len(wanted), self.seq_len + 1), -1, np.int64)
        shards = by_shard(wanted[:, 0])
        for numbers, tokens in zip(
            shards.values(), self._tokens.in_turn(list(shards)), strict=True
        ):
            for row in numbers:
                _, start, size = wanted[row].tolist()
                rows[row, :size] = tokens[start : start + size]
        return rows


class BestFitSequences:
    """The training sequences of one corpus, packed best-fit, and padded with -1.

    A document that goes on in the next shard has no end token in this one. Its piece is the last
    one of the shard, and so the last one of its sequence: no other document follows it there.

    Raises InputError where a file is not as long as it must be, or there is no packing.
    """

    def __init__(
        self, data: DataConfig, corpus: CorpusManifest, cache: ShardCache | None = None
    ) -> None:
        self.seq_len = data.seq_len
        self.packing = read_packing(data, corpus)
        folder = packing_folder(data).rpartition("/")[2]
        pieces = [
            Shard(file=f"{folder}/{each.file}", tokens=each.pieces, sha256=each.sha256)
            for each in self.packing.shards
        ]
        self._tokens = ShardFiles(data, corpus, corpus.train, cache=cache)
        self._pieces = ShardFiles(data, corpus, pieces, PIECE, cache)
        self._tokens.check_lengths()
        self._pieces.check_lengths()
        counts = np.array([shard.sequences for shard in self.packing.shards], np.int64)
        self._ends = np.cumsum(counts)
        self._firsts = self._ends - counts

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: Indices) -> np.ndarray:
        """See :meth:`pretrain.data.sequences.Sequences.read`."""
        wanted = np.asarray(indices, np.int64)
        numbers = np.searchsorted(self._ends, wanted, side="right")
        within = (wanted - self._firsts[numbers]).tolist()
        found = np.full((len(wanted), self.seq_len + 1), -1, np.int64)
        shards = by_shard(numbers)
        which = list(shards)
        both = zip(self._pieces.in_turn(which), self._tokens.in_turn(which), strict=True)
        for places, (pieces, tokens) in zip(shards.values(), both, strict=True):
            sequences = pieces["sequence"]
            for place in places:
                first, stop = np.searchsorted(sequences, [within[place], within[place] + 1])
                row, at = found[place], 0
                for _, start, size in pieces[first:stop].tolist():
                    row[at : at + size] = tokens[start : start + size]
                    at += size
        return found
