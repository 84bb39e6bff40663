"""Documents to token shards, once.

A prepared corpus is a folder::

    tokenizer.json        byte-level BPE, or the file that data.tokenizer names
    train-00000.bin ...   token ids, little-endian uint16 or uint32, documents end to end
    train-00000.ends ...  int64, where documents end in the shard
    val-00000.bin ...     the held-out documents
    manifest.json         written last

The work is done in a hidden folder beside it. Units of the source become parts
(:mod:`corpus.prepare.parts`), in several processes; the parts become shards; the folder of the
shards takes the name ``data.path`` at the end. A folder at ``data.path`` is never half written, and
a preparation that was killed goes on with the parts that are done. The result depends neither on
the number of processes nor on kills.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from ckpt.store import lock_file, publish_folder
from corpus.config import DataConfig, is_remote
from corpus.documents import Found, Unit, copy_source, cut_into_units, find_files, skipped_as_json
from corpus.errors import InputError
from corpus.location import is_there, read_file, upload
from corpus.manifest import (
    MANIFEST,
    MANIFEST_VERSION,
    CorpusManifest,
    LeftOut,
    open_corpus,
    settings_of,
)
from corpus.prepare.parts import PartCounts, PartSettings, part_path, read_part
from corpus.prepare.progress import progress
from corpus.prepare.shards import ShardWriter, first_of_equal, read_documents, write_split
from corpus.prepare.workers import is_full_disk, make_parts, make_tokenizer
from corpus.tokenizer import read_tokenizer, tokenizer_fingerprint

HoldOut = Literal["some", "all"]
Say = Callable[[str], None]

_ALONE_BYTES = 64 << 20
"""A smaller source is read by one process: others would take longer to start."""


def prepare_corpus(
    data: DataConfig,
    vocab_size: int,
    say: Say = print,
    *,
    processes: int | None = None,
    hold_out: HoldOut = "some",
    count_files: bool = False,
) -> CorpusManifest:
    """Prepare the corpus of ``data``; where ``data.path`` exists, check and use what is there.

    Args:
        data: of the spec.
        vocab_size: of the model.
        say: told of what is done, one line each.
        processes: how many read and tokenize; by default one for a small source, and otherwise one
            for each core.
        hold_out: hold out about one document in 20, or all documents, for a validation set.
        count_files: where the corpus is there, say if the source has another number of files now.

    Raises InputError where the source has fewer than two documents or cannot be read, where
    ``data.path`` holds another corpus or none, where another process prepares it, or where it
    cannot be written.
    """
    if _is_prepared(data):
        manifest = open_corpus(data, vocab_size, hold_out)
        say(_in_use(data, manifest if count_files else None))
        return manifest
    files = None if is_remote(data.source) else find_files(data.source)
    home = _home(data)
    try:
        with _work_folder(home, data) as work:
            if _is_prepared(data):  # another process has prepared the corpus meanwhile
                return open_corpus(data, vocab_size, hold_out)
            if files is None:
                files = find_files(str(copy_source(data.source, work / "source", say)))
            return _prepare(data, vocab_size, files, work, say, processes, hold_out)
    except OSError as error:
        more = "; free some room, and the same command goes on" if is_full_disk(error) else ""
        raise InputError(
            f"data.path ({data.path}) cannot be prepared: {error.strerror}: "
            f"{error.filename or home}{more}"
        ) from None


def _is_prepared(data: DataConfig) -> bool:
    """Whether there is anything at ``data.path``; a half-made upload is nothing."""
    if not is_remote(data.path):
        return Path(data.path).exists()
    try:
        return is_there(f"{data.path}/{MANIFEST}")
    except OSError as error:
        raise InputError(f"data.path ({data.path}) cannot be read: {error.strerror}") from None


def _home(data: DataConfig) -> Path:
    """The folder beside which the corpus is prepared."""
    if not is_remote(data.path):
        return Path(data.path).absolute()
    name = hashlib.sha256(data.path.encode()).hexdigest()[:16]
    return Path(data.cache_dir).absolute() / f"corpus-{name}"


def _in_use(data: DataConfig, manifest: CorpusManifest | None) -> str:
    line = f"using the corpus at {data.path}; data.source is not read again"
    is_local = data.source != "stdlib" and not is_remote(data.source)
    if manifest is not None and manifest.files is not None and is_local:
        try:
            now = len(find_files(data.source).files)
        except InputError:
            return line
        if now != manifest.files:
            line += f" (it had {manifest.files} files, and has {now} now)"
    return line


@contextmanager
def _work_folder(home: Path, data: DataConfig) -> Iterator[Path]:
    """The hidden folder of a preparation, which one process holds; it is kept where it has parts
    and no corpus was made of them."""
    work = home.with_name(f".{home.name}.preparing")
    work.mkdir(parents=True, exist_ok=True)
    try:
        handle = lock_file(work / ".lock")
    except BlockingIOError:
        raise InputError(
            f"data.path ({data.path}) is being prepared by another process; wait for it, or choose "
            f"another data.path"
        ) from None
    done = False
    try:
        yield work
        done = True
    finally:
        if done or Path(data.path).exists() or not any(work.glob("parts/*.json")):
            shutil.rmtree(work, ignore_errors=True)
        os.close(handle)


def _prepare(
    data: DataConfig,
    vocab_size: int,
    files: Found,
    work: Path,
    say: Say,
    processes: int | None,
    hold_out: HoldOut,
) -> CorpusManifest:
    units = list(cut_into_units(files.files, data.text_field))
    size = sum(unit.bytes for unit in units)
    say(f"preparing {data.path}: {len(files.files):,} files, {size / 1e6:,.1f} MB")
    (work / "parts").mkdir(exist_ok=True)
    tokenizer_path = work / f"tokenizer-{_key(data, vocab_size, units)}.json"
    if not tokenizer_path.exists():
        if data.tokenizer is None:
            tokenizer = make_tokenizer(units, data, vocab_size)
        else:
            tokenizer = read_tokenizer(data.tokenizer, vocab_size, data.end_token)
        _write(tokenizer_path, tokenizer.to_str().encode())
    settings = PartSettings(
        tokenizer=str(tokenizer_path),
        tokenizer_fingerprint=tokenizer_fingerprint(Tokenizer.from_file(str(tokenizer_path))),
        vocab_size=vocab_size,
        end_token=data.end_token,
        dtype=_dtype(data, vocab_size),
        text_field=data.text_field,
        chat=None if data.chat is None else data.chat.model_dump(),
        filter=data.filter.model_dump(),
        folder=str(work / "parts"),
    )
    if processes is None:
        processes = 1 if size < _ALONE_BYTES else len(os.sched_getaffinity(0))
    counts = _make_all_parts(units, settings, processes, say)
    manifest = _assemble(data, files, units, counts, settings, work / "corpus", hold_out)
    if is_remote(data.path):
        say(f"uploading to {data.path}")
        upload(work / "corpus", data.path, MANIFEST)
    else:
        publish_folder(work / "corpus", Path(data.path).absolute())
    for line in summary_lines(manifest):
        say(line)
    return manifest


def _dtype(data: DataConfig, vocab_size: int) -> str:
    if data.chat is not None:
        return "int32"  # has complements of tokens that are no targets
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def _key(data: DataConfig, vocab_size: int, units: Sequence[Unit]) -> str:
    """What a tokenizer depends on."""
    settings = json.dumps(settings_of(data, vocab_size), sort_keys=True)
    if data.tokenizer is not None:
        try:
            settings += hashlib.sha256(read_file(data.tokenizer)).hexdigest()
        except OSError as error:
            raise InputError(
                f"data.tokenizer ({data.tokenizer}) cannot be read: {error.strerror}"
            ) from None
    keys = [unit.key(settings) for unit in units]
    return hashlib.sha256("".join([settings, *keys]).encode()).hexdigest()[:16]


def _make_all_parts(
    units: Sequence[Unit], settings: PartSettings, processes: int, say: Say
) -> list[PartCounts]:
    """The counts of all parts, those that an earlier start has made included."""
    folder = Path(settings.folder)
    made = [read_part(part_path(folder, i, unit, settings)) for i, unit in enumerate(units)]
    work = [(i, unit) for i, unit in enumerate(units) if made[i] is None]
    if len(work) < len(units):
        say(f"{len(units) - len(work)} of {len(units)} parts are done already")
    with progress(sum(unit.bytes for _, unit in work), say) as advance:

        def done(number: int, counts: PartCounts) -> None:
            made[number] = counts
            advance(units[number].bytes, counts.tokens)

        make_parts(work, settings, processes, done)
    return [counts for counts in made if counts is not None]


def _assemble(
    data: DataConfig,
    files: Found,
    units: Sequence[Unit],
    counts: Sequence[PartCounts],
    settings: PartSettings,
    folder: Path,
    hold_out: HoldOut,
) -> CorpusManifest:
    """Write the folder of a corpus from its parts."""
    parts = [part_path(Path(settings.folder), i, unit, settings) for i, unit in enumerate(units)]
    documents = read_documents(parts)
    left_out = _summed([part_counts.left_out for part_counts in counts])
    kept = first_of_equal(documents) if data.deduplicate else np.ones(len(documents), dtype=bool)
    if not kept.all():
        gone = documents[~kept]
        left_out["duplicates"] = LeftOut(documents=len(gone), bytes=int(gone["bytes"].sum()))
    refused = _too_few(data, hold_out, int(kept.sum()), files, left_out)
    held_out = _held_out(documents, kept, hold_out, refused)
    shutil.rmtree(folder, ignore_errors=True)  # of a start that was killed
    folder.mkdir()
    text = Path(settings.tokenizer).read_bytes()
    tokenizer = Tokenizer.from_str(text.decode())
    tokenizer.save(str(folder / "tokenizer.json"))
    digest = hashlib.sha256(text)
    splits: dict[str, Any] = {}
    for split, mask in (("train", kept & ~held_out), ("val", kept & held_out)):
        writer = ShardWriter(folder, split, data.shard_tokens, digest.update)
        splits[split] = write_split(writer, parts, documents, mask, settings.dtype)
        splits[f"{split}_documents"] = int(mask.sum())
        splits[f"{split}_bytes"] = int(documents["bytes"][mask].sum())
    manifest = CorpusManifest(
        version=MANIFEST_VERSION,
        **settings_of(data, settings.vocab_size),
        hold_out=hold_out,
        dtype=settings.dtype,
        **splits,
        files=len(files.files),
        skipped=skipped_as_json(files.skipped),
        left_out=left_out,
        replaced_documents=sum(part_counts.replaced for part_counts in counts),
        tokenizer_tokens=tokenizer.get_vocab_size(),
        tokenizer_fingerprint=settings.tokenizer_fingerprint,
        fingerprint=digest.hexdigest(),
    ).sealed()
    _write(folder / MANIFEST, (json.dumps(manifest.model_dump(), indent=1) + "\n").encode())
    return manifest


def _held_out(
    documents: np.ndarray, kept: np.ndarray, hold_out: HoldOut, refused: str
) -> np.ndarray:
    """A mask of the held-out documents. Raises InputError, with the line ``refused``, where there
    are too few."""
    count = int(kept.sum())
    if hold_out == "all":
        if not count:
            raise InputError(refused)
        return np.ones(len(documents), dtype=bool)
    mask: np.ndarray = documents["held_out"].copy()
    if not (mask & kept).any() and count > 1:
        chosen = np.flatnonzero(kept)
        mask[chosen[np.argmin(documents["name"][chosen])]] = True
    if not (mask & kept).any() or not (~mask & kept).any():
        raise InputError(refused)
    return mask


def _too_few(
    data: DataConfig, hold_out: HoldOut, count: int, source: Found, left_out: dict[str, LeftOut]
) -> str:
    least, what = (1, "to score") if hold_out == "all" else (
        2, "one to train on and one to hold out"
    )  # fmt: skip
    gone = [f"skipped: {len(files)} {reason}" for reason, files in source.skipped.items()]
    gone += [f"left out: {out.documents} {reason}" for reason, out in left_out.items()]
    return (
        f"data.source ({data.source}) must have at least {least} documents with text, {what}; "
        f"it has {count}" + (f" ({', '.join(gone)})" if gone else "")
    )


def _summed(left_out: Sequence[dict[str, list[int]]]) -> dict[str, LeftOut]:
    sums: dict[str, list[int]] = {}
    for reasons in left_out:
        for reason, (documents, size) in reasons.items():
            before = sums.setdefault(reason, [0, 0])
            before[0], before[1] = before[0] + documents, before[1] + size
    return {r: LeftOut(documents=n, bytes=size) for r, (n, size) in sorted(sums.items())}


def summary_lines(manifest: CorpusManifest) -> Iterator[str]:
    """What a preparation took, and what it did not take and why, a line each."""
    documents = manifest.train_documents + manifest.val_documents
    size = manifest.train_bytes + manifest.val_bytes
    tokens = manifest.train_tokens + manifest.val_tokens
    yield (
        f"corpus {manifest.fingerprint[:12]}: {manifest.files:,} files, {documents:,} documents, "
        f"{size / 1e6:,.1f} MB of text, {tokens:,} tokens; {manifest.val_documents:,} documents "
        f"with {manifest.val_tokens:,} tokens are held out"
    )
    for reason, files in manifest.skipped.items():
        names = ", ".join(files.names) + (", ..." if files.files > len(files.names) else "")
        yield f"  skipped {files.files:,} {reason}, {files.bytes / 1e6:,.1f} MB: {names}"
    for reason, gone in manifest.left_out.items():
        yield f"  left out {gone.documents:,} documents, {gone.bytes / 1e6:,.1f} MB: {reason}"
    if manifest.replaced_documents:
        yield (
            f"  {manifest.replaced_documents:,} documents have bytes that are not UTF-8; U+FFFD "
            f"stands in their place"
        )
    known = manifest.tokenizer_tokens
    if manifest.tokenizer is None and known is not None and known < manifest.vocab_size:
        yield (
            f"  the tokenizer has {known:,} tokens and model.vocab_size is "
            f"{manifest.vocab_size:,}: the text is too short for more"
        )


def _write(path: Path, raw: bytes) -> None:
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as file:
        file.write(raw)
        file.flush()
        # After a cut of power the name may be there without the bytes: no start would get past it.
        os.fsync(file.fileno())
    draft.replace(path)
