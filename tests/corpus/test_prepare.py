"""Preparation: formats, what is left out and why, several processes, kills, damage."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckpt.store import lock_file
from convoy.commands.command_line import main
from corpus.config import DataConfig
from corpus.documents.documents import DOCUMENT_BYTES, find_documents
from corpus.documents.files import cut_into_units, find_files
from corpus.manifest import read_manifest, record_manifest, recorded_manifest
from corpus.prepare.prepare import prepare_corpus
from corpus.tokenizer import end_of_document, load_tokenizer
from pretrain.data.verify import verify_corpus
from pretrain.errors import InputError
from tests.support.jobs import write_corpus, write_spec

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 300
TEXTS = [f"document {i}: " + "the quick brown fox " * (i % 7) for i in range(60)]


def config(folder: Path, **fields) -> DataConfig:
    values = {"source": str(folder / "text"), "path": str(folder / "corpus"), "seq_len": 16}
    return DataConfig(**{**values, "shard_tokens": 2000, **fields})


def lines(texts=TEXTS, field="text") -> bytes:
    return b"".join(json.dumps({field: text, "id": 3}).encode() + b"\n" for text in texts)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def texts_of(data: DataConfig) -> list[str]:
    """All documents of a prepared corpus, decoded, in the order of their shards."""
    corpus, tokenizer = read_manifest(Path(data.path)), load_tokenizer(data)
    found = []
    for shards in (corpus.train, corpus.val):
        tokens = [np.fromfile(Path(data.path) / s.file, corpus.dtype) for s in shards]
        tokens = np.concatenate(tokens)
        ends = np.flatnonzero(tokens == end_of_document(tokenizer)) + 1
        found += [tokenizer.decode(p[:-1].tolist()) for p in np.split(tokens, ends)[:-1]]
    return found


# ------------------------------------------------------------------------------------------------
# Formats.


def write_zstd(path: Path, raw: bytes) -> None:
    import pyarrow

    with pyarrow.output_stream(str(path), compression="zstd") as file:
        file.write(raw)


def write_parquet(path: Path, **columns) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=17)


def write_arrow(folder: Path, **columns) -> None:
    """As ``datasets.Dataset.save_to_disk`` writes it."""
    import pyarrow

    folder.mkdir(parents=True)
    table = pyarrow.table(columns)
    with pyarrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as out:
        out.write_table(table, max_chunksize=13)
    (folder / "state.json").write_text('{"_data_files": []}')
    (folder / "dataset_info.json").write_text("{}")


def write_megatron(path: Path, documents: list[list[int]]) -> None:
    """As Megatron-LM's IndexedDatasetBuilder writes it, two sequences a document where long."""
    sequences, firsts = [], [0]
    for ids in documents:
        half = len(ids) // 2 if len(ids) > 4 else len(ids)
        sequences += [part for part in (ids[:half], ids[half:]) if part]
        firsts.append(len(sequences))
    np.array([i for ids in documents for i in ids], "<u2").tofile(path)
    sizes = np.array([len(s) for s in sequences], "<i4")
    offsets = np.concatenate([[0], np.cumsum(sizes.astype("<i8") * 2)[:-1]]).astype("<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(sequences), len(firsts))
    path.with_suffix(".idx").write_bytes(
        head + sizes.tobytes() + offsets.tobytes() + np.array(firsts, "<i8").tobytes()
    )


@pytest.fixture(params=["jsonl", "ndjson.gz", "jsonl.zst", "parquet", "arrow"])
def one_format(request, tmp_path) -> Path:
    folder, kind = tmp_path / "text", request.param
    folder.mkdir()
    if kind == "jsonl":
        (folder / "a.jsonl").write_bytes(lines())
    elif kind == "ndjson.gz":
        (folder / "a.ndjson.gz").write_bytes(gzip.compress(lines()))
    elif kind == "jsonl.zst":
        write_zstd(folder / "a.jsonl.zst", lines())
    elif kind == "parquet":
        write_parquet(folder / "a.parquet", text=TEXTS, other=list(range(60)))
    else:
        write_arrow(folder / "set", text=TEXTS, other=list(range(60)))
    return tmp_path


def test_every_format_gives_the_documents(one_format):
    found = list(find_documents(str(one_format / "text")))
    assert [d.text for d in found] == TEXTS
    assert len({d.name for d in found}) == 60
    assert found[59].name.endswith("#60")
    corpus = prepare_corpus(config(one_format), VOCAB, lambda _: None)
    assert sorted(texts_of(config(one_format))) == sorted(TEXTS)
    assert corpus.train_documents + corpus.val_documents == 60


def test_compressed_text_and_other_fields(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt.gz").write_bytes(gzip.compress(b"one whole text\nof two lines"))
    (folder / "b.jsonl").write_bytes(lines(["in another field"], "content"))
    found = [d.text for d in find_documents(str(folder), "content")]
    assert found == ["one whole text\nof two lines", "in another field"]
    with pytest.raises(InputError, match=r"b.jsonl line 1 must be a JSON object with a text in "):
        list(find_documents(str(folder)))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.txt.gz"])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path, monkeypatch, name):
    monkeypatch.setattr("corpus.documents.files._RANGE_BYTES", 500)
    folder = tmp_path / "text"
    folder.mkdir()
    raw = codecs.BOM_UTF8 + (lines() if "jsonl" in name else b"one text\n")
    (folder / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    (folder / "b.txt").write_bytes("in UTF-16".encode("utf-16"))
    (folder / "b.txt.gz").write_bytes(gzip.compress("in UTF-16".encode("utf-16")))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress('{"text": "in UTF-16"}\n'.encode("utf-16")))
    write_zstd(folder / "b.jsonl.zst", '{"text": "in UTF-16"}\n'.encode("utf-16"))
    (folder / "c.txt").write_bytes(codecs.BOM_UTF8)
    found = [d.text for d in find_documents(str(folder))]
    assert found == (TEXTS if "jsonl" in name else ["one text\n"])
    skipped = find_files(str(folder)).skipped
    (reason,) = skipped
    assert reason == "files in UTF-16, an encoding that is not read"
    assert [file for file, _ in skipped[reason]] == [
        "b.jsonl.gz", "b.jsonl.zst", "b.txt", "b.txt.gz"
    ]  # fmt: skip


@pytest.fixture
def tokenizer(tmp_path) -> Path:
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "a.jsonl").write_bytes(lines())
    data = config(tmp_path, source=str(tmp_path / "words"), path=str(tmp_path / "for-tokenizer"))
    prepare_corpus(data, VOCAB, lambda _: None)
    return Path(data.path) / "tokenizer.json"


@pytest.mark.parametrize("kind", ["megatron", "arrow", "parquet"])
@pytest.mark.parametrize("ended", [False, True])
def test_tokens_are_taken_as_they_are(tmp_path, tokenizer, kind, ended):
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(tokenizer))
    end = end_of_document(encode)
    ids = [encode.encode(text).ids + [end] * ended for text in TEXTS]
    (tmp_path / "text").mkdir()
    if kind == "megatron":
        write_megatron(tmp_path / "text" / "a.bin", ids)
    elif kind == "arrow":
        write_arrow(tmp_path / "text" / "set", input_ids=ids)
    else:
        write_parquet(tmp_path / "text" / "a.parquet", input_ids=ids)
    field = "text" if kind == "megatron" else "input_ids"
    data = config(tmp_path, tokenizer=str(tokenizer), text_field=field)
    corpus = prepare_corpus(data, VOCAB, lambda _: None)
    assert sorted(texts_of(data)) == sorted(TEXTS)
    assert corpus.train_bytes + corpus.val_bytes == sum(len(text.encode()) for text in TEXTS)
    with pytest.raises(InputError, match=r"data.tokenizer must name the tokenizer.json of the tok"):
        prepare_corpus(config(tmp_path, path=str(tmp_path / "c2"), text_field=field), VOCAB)
    ids[3][0] = 999
    if kind == "parquet":
        write_parquet(tmp_path / "text" / "a.parquet", input_ids=ids)
        with pytest.raises(InputError, match=r"a.parquet#4 has the token 999; tokens must be from"):
            prepare_corpus(data.model_copy(update={"path": str(tmp_path / "c3")}), VOCAB)


def test_a_long_file_of_lines_is_cut_between_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("corpus.documents.files._RANGE_BYTES", 500)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(lines() + b"\n\n" + lines(["last"]).rstrip())
    source = str(tmp_path / "text")
    units = list(cut_into_units(find_files(source).files, "text"))
    assert len(units) > 5
    found = list(find_documents(source))
    assert [d.text for d in found] == [*TEXTS, "last"]
    assert [d.name for d in found[-2:]] == ["a.jsonl#60", "a.jsonl#63"]


# ------------------------------------------------------------------------------------------------
# What is not taken, and what is said of it.


def test_what_is_skipped_and_left_out_is_said(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    doubled = [*TEXTS, *TEXTS[:5], "", "tiny"]
    (folder / "a.jsonl").write_bytes(lines(doubled))
    (folder / "b.txt").write_bytes(b"caf\xe9 in another encoding, long enough to stay in")
    (folder / "c.bin").write_bytes(b"a\0b")
    (folder / "d.txt.xz").write_bytes(b"....")
    (folder / ".hidden").write_text("no")
    (folder / "empty.txt").write_text("")
    said: list[str] = []
    data = config(tmp_path, deduplicate=True, filter={"min_characters": 5})
    corpus = prepare_corpus(data, VOCAB, said.append)
    assert sorted(texts_of(data)) == sorted(
        [*TEXTS, "caf� in another encoding, long enough to stay in"]
    )
    text = "\n".join(said)
    for line in (
        "2 files, 61 documents, ", "skipped 1 .xz files, a compression that is not read",
        "skipped 1 binary files", "c.bin", "skipped 1 empty files", "skipped 1 hidden files",
        "left out 5 documents, 0.0 MB: duplicates", "left out 1 documents, 0.0 MB: empty",
        ": fewer than 5 characters", "1 documents have bytes that are not UTF-8",
    ):  # fmt: skip
        assert line in text, line
    assert corpus.left_out["duplicates"].documents == 5
    assert corpus.skipped["binary files"].names == ["c.bin"]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_document_that_is_too_long_is_left_out_and_the_rest_goes_on(
    tmp_path, tokenizer, processes
):
    """A line, a text and a compressed bomb of each; one line is as long as a line may be."""
    folder = tmp_path / "text"
    folder.mkdir()
    bomb = b"0" * (48 << 20)
    others = len(b'{"text": "", "more": ""}\n')
    longest = b'{"text": "", "more": "%s"}' % (b"y" * (DOCUMENT_BYTES - others))
    raw = lines(TEXTS[:30]) + bomb + b"\n" + longest + b"\n" + lines(TEXTS[30:])
    (folder / "a.jsonl").write_bytes(raw)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(["after"]) + bomb, 1))
    write_zstd(folder / "c.txt.zst", bomb)
    (folder / "d.txt.gz").write_bytes(gzip.compress(bomb, 1))
    (folder / "e.txt").write_bytes(bomb[: DOCUMENT_BYTES + 1])
    said: list[str] = []
    data = config(tmp_path, tokenizer=str(tokenizer))
    corpus = prepare_corpus(data, VOCAB, said.append, processes=processes)
    assert sorted(texts_of(data)) == sorted([*TEXTS, "after"])
    assert corpus.left_out["longer than 8 MiB"].documents == 5
    assert corpus.left_out["empty"].documents == 1, "the longest line was read"
    assert any("left out 5 documents" in line and "longer than 8 MiB" in line for line in said)


READ = """
import sys
from pathlib import Path
from corpus.documents.documents import read_unit
from corpus.documents.files import cut_into_units, find_files
def peak():
    # Of this process alone: getrusage gives the peak of the process that started it, where larger.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = peak()
for unit in cut_into_units(find_files(sys.argv[1]).files, "text"):
    for document in read_unit(unit, "text"):
        assert document.too_long and document.is_empty, document.name
print((peak() - before) << 10)
"""


def test_memory_does_not_grow_with_a_document(tmp_path):
    """Ten times the bound, in each kind of file that has no bound of its own."""
    folder = tmp_path / "text"
    folder.mkdir()
    bomb = b"0" * (10 * DOCUMENT_BYTES)
    (folder / "a.jsonl").write_bytes(bomb)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(bomb, 1))
    (folder / "c.txt.gz").write_bytes(gzip.compress(bomb, 1))
    write_zstd(folder / "d.jsonl.zst", bomb)
    command = [sys.executable, "-c", READ, str(folder)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(run.stdout) < len(bomb)


def test_the_first_of_equal_documents_stays_whatever_part_it_is_in(tmp_path, monkeypatch):
    monkeypatch.setattr("corpus.documents.files._RANGE_BYTES", 300)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(lines(TEXTS + TEXTS[::-1]))
    data = config(tmp_path, deduplicate=True)
    corpus = prepare_corpus(data, VOCAB, lambda _: None)
    held_out = {text for text, d in zip(TEXTS, find_documents(data.source), strict=False)
                if d.hash % 20 == 0}  # fmt: skip
    expected = [t for t in TEXTS if t not in held_out] + [t for t in TEXTS if t in held_out]
    assert texts_of(data) == expected
    assert corpus.left_out["duplicates"].documents == 60


def test_ends_of_documents_are_those_of_the_tokens(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(lines())
    data = config(tmp_path, shard_tokens=101)
    corpus = prepare_corpus(data, VOCAB, lambda _: None)
    end = end_of_document(load_tokenizer(data))
    assert len(corpus.train) > 5
    for shard in (*corpus.train, *corpus.val):
        path = Path(data.path) / shard.file
        ends = np.fromfile(path.with_suffix(".ends"), "<i8")
        tokens = np.fromfile(path, corpus.dtype)
        assert np.array_equal(ends, np.flatnonzero(tokens == end) + 1)
        assert shard.documents == len(ends)
    assert sum(s.documents for s in corpus.train) == corpus.train_documents


def test_a_source_that_filters_leave_nothing_of_is_one_line(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(lines())
    data = config(tmp_path, filter={"min_characters": 10_000})
    with pytest.raises(InputError, match=r"must have at least 2 documents .*it has 0"):
        prepare_corpus(data, VOCAB, lambda _: None)
    (tmp_path / "text" / "a.jsonl").write_bytes(b"")
    with pytest.raises(InputError, match=r"it has 0 \(skipped: 1 empty files\)"):
        prepare_corpus(config(tmp_path), VOCAB, lambda _: None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer": "tokenizer.json"}, "model.vocab_size (300) must be above the largest id (3"),
        ({"sources": {"a": {"weight": 0.0}, "b": {}}}, "data.sources.a.weight (0.0): "),
        ({"sources": {"a": {"weight": -1.0}, "b": {}}}, "data.sources.a.weight (-1.0): "),
    ],
)
def test_a_spec_that_no_corpus_fits_is_one_line_and_leaves_nothing(tmp_path, capsys, change, said):
    write_corpus(tmp_path / "text", 12)
    place = {"source": str(tmp_path / "text"), "path": str(tmp_path / "corpus")}
    if "tokenizer" in change:  # of a larger vocabulary
        larger = config(tmp_path, path=str(tmp_path / "larger"))
        prepare_corpus(larger, 320, lambda _: None)
        data = {**place, "tokenizer": f"{larger.path}/tokenizer.json"}
    else:
        each = {n: {**place, "path": str(tmp_path / n), **v} for n, v in change["sources"].items()}
        data = {"source": "", "path": "", "sources": each}
    model = {"vocab_size": VOCAB, "d_model": 32, "num_layers": 3, "num_heads": 4,
             "num_kv_heads": 2, "d_ff": 48, "first_k_dense": 1}  # fmt: skip
    values = {"seq_len": 16, "shard_tokens": 2000, **data}
    spec = write_spec(tmp_path, model=model, data=values)
    before = sorted(p.name for p in tmp_path.iterdir())
    assert main("prepare", [str(spec)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_input_that_is_cut_off_is_one_line(tmp_path, tokenizer):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines())[:-20])
    with pytest.raises(InputError, match=r"a.jsonl.gz is cut off or damaged"):
        prepare_corpus(config(tmp_path), VOCAB, lambda _: None)
    (folder / "a.jsonl.gz").unlink()
    write_zstd(folder / "a.jsonl.zst", lines(TEXTS * 50))
    raw = (folder / "a.jsonl.zst").read_bytes()
    (folder / "a.jsonl.zst").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(InputError, match=r"a.jsonl.zst (is cut off|cannot be read|line \d+ must)"):
        prepare_corpus(config(tmp_path), VOCAB, lambda _: None)
    (folder / "a.jsonl.zst").unlink()
    (folder / "a.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(InputError, match=r"a.parquet cannot be read: "):
        prepare_corpus(config(tmp_path), VOCAB, lambda _: None)
    write_parquet(folder / "a.parquet", body=TEXTS)
    with pytest.raises(InputError, match=r"data.text_field \(text\) must be a column .* has body"):
        prepare_corpus(config(tmp_path), VOCAB, lambda _: None)
    (folder / "a.parquet").unlink()
    write_megatron(folder / "a.bin", [[1, 2, 3]] * 40)
    (folder / "a.bin").write_bytes((folder / "a.bin").read_bytes()[:-2])
    with pytest.raises(InputError, match=r"a.bin has 238 bytes, its index says 240"):
        prepare_corpus(config(tmp_path, tokenizer=str(tokenizer)), VOCAB, lambda _: None)


# ------------------------------------------------------------------------------------------------
# Processes, kills, locks, disks.


def test_the_corpus_does_not_depend_on_the_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr("corpus.documents.files._GROUP_BYTES", 8000)
    write_corpus(tmp_path / "text", 12)
    prepare_corpus(config(tmp_path), VOCAB, lambda _: None)
    many = config(tmp_path, path=str(tmp_path / "many"))
    prepare_corpus(many, VOCAB, lambda _: None, processes=2)
    assert files_of(tmp_path / "many") == files_of(tmp_path / "corpus")


PREPARE = """
import os, sys
import corpus.documents.files
from corpus.config import DataConfig
from corpus.prepare.parts import PartWriter
from corpus.prepare.prepare import prepare_corpus
corpus.documents.files._GROUP_BYTES = 4000
made, make = 0, PartWriter.make
def slow(self, number, unit):
    global made
    if made == int(sys.argv[2]):
        print("waits", flush=True)
        sys.stdin.read()
    made += 1
    return make(self, number, unit)
PartWriter.make = slow
prepare_corpus(DataConfig.model_validate_json(sys.argv[1]), 300)
"""


def start_preparing(data: DataConfig, parts: int) -> subprocess.Popen[str]:
    """A process that prepares, and stops at a part until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", PREPARE, data.model_dump_json(), str(parts)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line == "waits\n":
            return process
    raise AssertionError("the preparation ended")


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    process.stdin.close()
    process.stdout.close()


def test_a_killed_preparation_goes_on_and_a_second_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("corpus.documents.files._GROUP_BYTES", 4000)
    write_corpus(tmp_path / "text", 12)
    prepare_corpus(config(tmp_path, path=str(tmp_path / "at-once")), VOCAB, lambda _: None)
    data = config(tmp_path)
    process = start_preparing(data, 3)
    try:
        with pytest.raises(InputError, match="is being prepared by another process; wait for it"):
            prepare_corpus(data, VOCAB, lambda _: None)
    finally:
        end(process)
    assert not (tmp_path / "corpus").exists()
    done = sorted((tmp_path / ".corpus.preparing" / "parts").glob("*.json"))
    assert len(done) == 3
    parts = sum(1 for _ in cut_into_units(find_files(data.source).files, "text"))
    victim = done[1].with_suffix(".tokens")
    victim.write_bytes(victim.read_bytes()[:-2])
    said: list[str] = []
    prepare_corpus(data, VOCAB, said.append)
    assert f"2 of {parts} parts are done already" in said
    assert files_of(tmp_path / "corpus") == files_of(tmp_path / "at-once")
    assert not (tmp_path / ".corpus.preparing").exists()


def test_a_lost_process_is_one_line_and_the_parts_stay(tmp_path, monkeypatch):
    monkeypatch.setattr("corpus.documents.files._GROUP_BYTES", 4000)
    write_corpus(tmp_path / "text", 400)  # so many that the kill comes before the last part
    data = config(tmp_path)

    def killing(line: str) -> None:
        if line.startswith("preparing"):
            threading_kill(tmp_path)

    with pytest.raises(InputError, match=r"a process that prepares the corpus ended with -9; the "):
        prepare_corpus(data, VOCAB, killing, processes=2)
    assert list((tmp_path / ".corpus.preparing" / "parts").glob("*.json"))
    prepare_corpus(data, VOCAB, lambda _: None)
    assert not (tmp_path / ".corpus.preparing").exists()


def threading_kill(folder: Path) -> None:
    """Kill one worker once a part is there."""
    import threading

    def watch() -> None:
        while not list((folder / ".corpus.preparing" / "parts").glob("*.json")):
            time.sleep(0.005)
        mine = subprocess.run(
            ["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True
        ).stdout
        for line in mine.splitlines():
            if "multiprocessing.spawn" in line:
                os.kill(int(line.split()[0]), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


MODEL = {
    "vocab_size": VOCAB, "d_model": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2,
    "d_ff": 48, "first_k_dense": 1,
}  # fmt: skip


@pytest.mark.parametrize("trained", [False, True])
def test_a_stop_ends_a_preparation_in_the_middle_of_a_document(tmp_path, tokenizer, trained):
    """The tokenizer's library takes long for one word, and a line is long skipped."""
    (tmp_path / "text").mkdir()
    if trained:
        word = np.random.default_rng(0).integers(97, 123, 7 << 20, np.uint8)
        (tmp_path / "text" / "a.txt").write_bytes(word.tobytes())
        data = config(tmp_path)
    else:
        (tmp_path / "text" / "a.jsonl.gz").write_bytes(gzip.compress(b"0" * (1 << 24)) * 200)
        data = config(tmp_path, tokenizer=str(tokenizer))
    spec = write_spec(tmp_path, model=MODEL, data=data.model_dump(mode="json"))
    process = subprocess.Popen(
        [sys.executable, "-m", "convoy", "prepare", str(spec)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        workers = workers_of(process.pid)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 75, err
    assert err.endswith("stopped; the same command goes on\n")
    assert not (tmp_path / "corpus").exists()
    assert not any(map(is_running, workers))


INTERRUPTED = """
import signal, sys
from multiprocessing import util
from convoy.__main__ import main
spawn = util.spawnv_passfds
def interrupted(path, words, handles):
    pid = spawn(path, words, handles)
    if any("spawn_main" in str(word) for word in words):
        signal.raise_signal(signal.SIGTERM)
    return pid
util.spawnv_passfds = interrupted
sys.exit(main("prepare", sys.argv[1:]))
"""


def test_a_stop_while_a_worker_starts_ends_a_preparation(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(b"word " * (1 << 19))
    data = config(tmp_path).model_dump(mode="json")
    spec = write_spec(tmp_path, model=MODEL, data=data)
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(spec)],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 75, ended.stderr
    assert ended.stderr == "error: stopped; the same command goes on\n"


def test_a_worker_ends_with_its_preparation_in_the_middle_of_a_document(tmp_path, tokenizer):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(b"w" * (7 << 20))
    data = config(tmp_path, tokenizer=str(tokenizer))
    process = subprocess.Popen(
        [sys.executable, "-c", PREPARE, data.model_dump_json(), "-1"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        workers = workers_of(process.pid)
    finally:
        end(process)
    wait_for(lambda: not any(map(is_running, workers)))


def workers_of(pid: int) -> list[int]:
    """The processes of a preparation, once there is one."""
    found: list[int] = []

    def any_worker() -> bool:
        listed = subprocess.run(
            ["ps", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True
        ).stdout
        found[:] = [int(x.split()[0]) for x in listed.splitlines() if "multiprocessing.spawn" in x]
        return bool(found)

    wait_for(any_worker)
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(holds: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if holds():
            return
        time.sleep(0.005)
    raise AssertionError("it never held")


def limited(data: DataConfig) -> str:
    """The refusal of a preparation whose files cannot grow."""
    code = (
        "import resource, sys\n"
        "from corpus.config import DataConfig\n"
        "from corpus.prepare.prepare import prepare_corpus\n"
        "from pretrain.errors import InputError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "try:\n"
        "    prepare_corpus(DataConfig.model_validate_json(sys.argv[1]), 300, lambda _: None)\n"
        "except InputError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", code, data.model_dump_json()]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(tmp_path):
    assert resource.RLIMIT_FSIZE is not None
    write_corpus(tmp_path / "text", 12)
    data = config(tmp_path, shard_tokens=1 << 20)
    said = limited(data)
    assert "cannot be prepared: File too large: " in said
    assert said.endswith("; free some room, and the same command goes on\n")
    assert said.count("\n") == 1
    assert not (tmp_path / "corpus").exists()
    prepare_corpus(data, VOCAB, lambda _: None)
    verify_corpus(Path(data.path), read_manifest(Path(data.path)))


# ------------------------------------------------------------------------------------------------
# The manifest.


@pytest.fixture
def prepared(tmp_path) -> DataConfig:
    write_corpus(tmp_path / "text", 12)
    data = config(tmp_path)
    prepare_corpus(data, VOCAB, lambda _: None)
    return data


def test_verify_reads_every_byte_and_names_the_file(prepared, tmp_path, capsys):
    spec = write_spec(tmp_path, model={
        "vocab_size": VOCAB, "d_model": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2,
        "d_ff": 48, "first_k_dense": 1,
    }, data=prepared.model_dump())  # fmt: skip
    assert main("prepare", [str(spec), "--verify"]) == 0
    assert "as the manifest says" in capsys.readouterr().out
    for name in ("train-00001.bin", "val-00000.bin", "train-00002.ends"):
        path = Path(prepared.path) / name
        whole = path.read_bytes()
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        assert main("prepare", [str(spec), "--verify"]) == 2
        assert f"{name} is damaged: its SHA-256 is " in capsys.readouterr().err
        path.write_bytes(whole)
    (Path(prepared.path) / "train-00001.bin").unlink()
    assert main("prepare", [str(spec), "--verify"]) == 2
    assert "train-00001.bin cannot be read: No such file" in capsys.readouterr().err


def edit(data: DataConfig, **fields) -> None:
    path = Path(data.path) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_manifest_that_was_edited_or_is_of_another_version_is_one_line(prepared):
    edit(prepared, train_documents=3)
    with pytest.raises(InputError, match=r"has a manifest that was changed after it was written"):
        prepare_corpus(prepared, VOCAB)
    for version in (1, 3):
        edit(prepared, version=version)
        refused = rf"manifest of version {version}; this version of Convoy reads version 2: take"
        with pytest.raises(InputError, match=refused):
            prepare_corpus(prepared, VOCAB)
    (Path(prepared.path) / "manifest.json").write_text("{")
    with pytest.raises(InputError, match=r"has a damaged manifest; remove it"):
        prepare_corpus(prepared, VOCAB)


def test_a_manifest_with_sizes_under_gzip_and_xz_is_read_verified_and_recorded(prepared, tmp_path):
    """Corpora of before have them, under the checksum."""
    path = Path(prepared.path) / "manifest.json"
    former = {"val_gzip_bytes": 7, "val_xz_bytes": 6, "val_compressed_bytes": None}
    now = json.loads(path.read_text())
    old = {name: value for name, value in now.items() if name != "checksum"} | former
    old["checksum"] = hashlib.sha256(json.dumps(old, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(old))
    corpus = prepare_corpus(prepared, VOCAB, lambda _: None)
    assert corpus.model_dump() == {**now, "checksum": old["checksum"]}
    verify_corpus(path.parent, corpus)
    record_manifest(tmp_path / "run", corpus)
    kept = recorded_manifest(tmp_path / "run", corpus.fingerprint)
    assert kept is not None
    assert kept.is_sealed
    edit(prepared, val_gzip_bytes=8)
    with pytest.raises(InputError, match=r"has a manifest that was changed after it was written"):
        prepare_corpus(prepared, VOCAB)


def test_a_tokenizer_that_was_replaced_is_refused(prepared):
    path = Path(prepared.path) / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["pre_tokenizer"]["add_prefix_space"] = True
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(InputError, match=r"has a tokenizer.json that is not the one that made"):
        prepare_corpus(prepared, VOCAB)


def test_a_lock_is_let_go_with_its_process(tmp_path):
    write_corpus(tmp_path / "text", 12)
    work = tmp_path / ".corpus.preparing"
    work.mkdir()
    handle = lock_file(work / ".lock")
    with pytest.raises(InputError, match="is being prepared by another process"):
        prepare_corpus(config(tmp_path), VOCAB)
    os.close(handle)
    prepare_corpus(config(tmp_path), VOCAB, lambda _: None)


def test_a_file_that_changed_since_a_kill_is_read_again(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr("corpus.documents.files._GROUP_BYTES", 4000)
    write_corpus(tmp_path / "text", 12)
    data = config(tmp_path, tokenizer=str(tokenizer))
    end(start_preparing(data, 3))
    first = sorted((tmp_path / "text").iterdir())[0]
    first.write_text("changed")
    prepare_corpus(data, VOCAB, lambda _: None)
    assert "changed" in texts_of(data)


def test_a_source_that_has_other_files_now_is_told_to_whoever_prepares(prepared, tmp_path):
    (tmp_path / "text" / "new.txt").write_text("more")
    said: list[str] = []
    prepare_corpus(prepared, VOCAB, said.append)
    prepare_corpus(prepared, VOCAB, said.append, count_files=True)
    assert said[0].endswith("data.source is not read again")
    assert said[1].endswith("data.source is not read again (it had 12 files, and has 13 now)")


def test_a_short_text_gives_a_small_tokenizer_and_that_is_said(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(lines(["ab", "cd", "ef"] * 9))
    said: list[str] = []
    prepare_corpus(config(tmp_path, seq_len=2), VOCAB, said.append)
    assert any("tokens and model.vocab_size is 300: the text is too short" in s for s in said)
