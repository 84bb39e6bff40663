"""A corpus in an object store: a real S3 server, stores that fail, and caches of bounded size."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from convoy.commands import main
from convoy.preparation import prepare_corpora
from corpus.config import DataConfig
from corpus.documents.copied_source import copy_source
from corpus.location import store_at, upload
from corpus.manifest import MANIFEST, read_manifest
from corpus.prepare.prepare import prepare_corpus
from pretrain.data.best_fit import BestFitSequences
from pretrain.data.cache import CacheCounts, CachedFile, ShardCache
from pretrain.data.corpora import open_corpora
from pretrain.data.sequences import PackedSequences, read_batch
from pretrain.errors import InputError, LostRankError
from tests.support.jobs import events, write_corpus, write_spec
from tests.support.ranks import run_ranks
from tests.support.s3 import BUCKET, Server, deaf_port, environment, proxy, use

ROOT = Path(__file__).resolve().parents[3]
VOCAB, S = 320, 32
PLACE = f"s3://{BUCKET}/texts"
SETTINGS = {"seq_len": S, "shard_tokens": 5000}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, server) -> Path:
    """The text, and a corpus of it in a folder ``here`` and in the store."""
    folder = tmp_path_factory.mktemp("store")
    write_corpus(folder / "text", 40)
    prepare_corpora(local(folder), VOCAB, lambda _: None)
    with use(server.port):
        prepare_corpora(remote(folder, "prepared"), VOCAB, lambda _: None)
    return folder


def local(folder: Path, **more) -> DataConfig:
    place = str(folder / "here")
    values = {"source": str(folder / "text"), "path": place, "packing": "best_fit", **SETTINGS}
    return DataConfig(**{**values, **more})


def remote(folder: Path, cache: str, **more) -> DataConfig:
    return local(folder, path=PLACE, cache_dir=str(folder / cache), **more)


def rows_of(sequences) -> np.ndarray:
    return read_batch(sequences, np.random.default_rng(0).permutation(len(sequences))).numpy()


def held(cache: Path) -> dict[str, int]:
    """The files of a cache and their bytes."""
    return {p.name: p.stat().st_size for p in cache.iterdir() if p.name != "lock"}


def test_a_corpus_in_a_store_has_the_sequences_of_one_in_a_folder(folder, server, tmp_path):
    here, there = local(folder), remote(folder, "cache")
    corpus = read_manifest(here.path)
    with use(server.port):
        assert read_manifest(PLACE) == corpus
        assert list((folder / "prepared").iterdir()) == [], "nothing is left of the preparation"
        mine, theirs = open_corpora(here, VOCAB), open_corpora(there, VOCAB)
        cache = theirs.cache
        assert mine.cache is None
        for data in (here, here.model_copy(update={"packing": "concat"})):
            more = {"packing": data.packing}
            kind = BestFitSequences if data.packing == "best_fit" else PackedSequences
            arguments = () if data.packing == "best_fit" else ("train",)
            a = kind(data, corpus, *arguments)
            b = kind(there.model_copy(update=more), corpus, *arguments, cache=cache)
            assert np.array_equal(rows_of(a), rows_of(b))
        for a, b in zip(
            mine.held_out_sequences().values(), theirs.held_out_sequences().values(), strict=True
        ):
            assert np.array_equal(rows_of(a), rows_of(b))
        counts = cache.take_counts()
        wanted = {s.sha256: 2 * s.tokens for s in (*corpus.train, *corpus.val)}
        found = held(folder / "cache")
        assert wanted.items() <= found.items()
        assert counts.fetched_bytes == sum(found.values()), "each file was fetched once"
        # The shards of the second packing, and nothing else, were there already.
        assert (counts.hits, counts.misses) == (len(corpus.train), len(found))
        assert cache.take_counts() == CacheCounts()


@pytest.mark.slow
def test_a_run_on_two_ranks_is_the_run_on_a_folder(folder, server, tmp_path):
    for name, data in (("here", local(folder)), ("there", remote(folder, f"{tmp_path}/cache"))):
        spec = write_spec(
            tmp_path, f"{name}.json", data=data.model_dump(), run_dir=str(tmp_path / name),
            parallel={"dp_replicate": 2},
        )  # fmt: skip
        codes = run_ranks(train_on_rank, 2, [str(spec)], server.port, group=False)
        assert codes == [0, 0]
    here, there = (events(tmp_path / name, "step") for name in ("here", "there"))
    keys = ("loss", "data_checksum", "consumed_samples")
    assert [[s[k] for k in keys] for s in here] == [[s[k] for k in keys] for s in there]
    assert len(there) == 6
    assert not events(tmp_path / "here", "data_cache")
    told = events(tmp_path / "there", "data_cache")
    assert [one["step"] for one in told] == [2, 4, 6]
    assert told[0]["cache_misses"] > 0
    assert sum(one["cache_hits"] for one in told) > 0
    assert sum(one["retries"] for one in told) == 0
    # Two ranks and one folder: no shard was fetched twice.
    files = held(tmp_path / "cache")
    assert sum(one["fetched_bytes"] for one in told) <= sum(files.values())
    assert all(len(name) == 64 for name in files)


def train_on_rank(rank: int, arguments: list[str], port: int) -> int:
    from convoy.commands.pretrain import main as pretrain

    with use(port):
        return pretrain(arguments)


def test_verify_reads_the_store_and_its_packings(folder, server, tmp_path, capsys):
    spec = write_spec(tmp_path, data=remote(folder, "cache").model_dump())
    with use(server.port):
        assert main("prepare", [str(spec), "--verify"]) == 0
        assert "as the manifest says" in capsys.readouterr().out
        store = store_at(PLACE)
        for name in ("train-00001.bin", f"best-fit-{S}/train-00000.pieces"):
            whole = store.read(name)
            replace(store, name, whole[:-1] + bytes([whole[-1] ^ 1]))
            try:
                assert main("prepare", [str(spec), "--verify"]) == 2
                said = capsys.readouterr().err
                assert f"corpus file {PLACE}/{name} is damaged: its SHA-256 is " in said
                assert said.count("\n") == 1
            finally:
                replace(store, name, whole)


def replace(store, name: str, raw: bytes) -> None:
    store.remove(name)
    store.write(name, [raw])


def shard_of(folder: Path, number: int = 0) -> CachedFile:
    shard = read_manifest(local(folder).path).train[number]
    return CachedFile(PLACE, shard.file, shard.sha256, 2 * shard.tokens)


def test_a_shard_with_a_wrong_byte_is_refused_and_not_kept(folder, server, tmp_path):
    file = shard_of(folder, 1)
    cache = ShardCache(tmp_path / "cache", 1 << 30)
    with use(server.port):
        store = store_at(PLACE)
        whole = store.read(file.name)
        for wrong in (whole[:7] + bytes([whole[7] ^ 4]) + whole[8:], whole[:-2], whole + b"ab"):
            replace(store, file.name, wrong)
            with pytest.raises(InputError, match=rf"{file.name} is damaged: its SHA-256 is "):
                cache.begin(file)()
            assert held(tmp_path / "cache") == {}
        replace(store, file.name, whole)
        assert cache.begin(file)().tobytes() == whole
        store.remove(shard_of(folder, 0).name)
        try:
            with pytest.raises(InputError, match=r"train-00000.bin cannot be read: No such file"):
                cache.begin(shard_of(folder, 0))()
        finally:
            store.write("train-00000.bin", [(folder / "here" / "train-00000.bin").read_bytes()])


def test_a_store_that_fails_at_times_changes_nothing_and_is_told_once(folder, server, tmp_path):
    asked, told = [0], []

    def fault(method: str, path: str) -> int | str | None:
        asked[0] += 1
        return {0: 503, 2: "lose"}.get(asked[0] % 4)

    data, corpus = remote(folder, str(tmp_path / "cache")), read_manifest(local(folder).path)
    cache = ShardCache(tmp_path / "cache", 1 << 30)
    cache.tell = lambda text, problem: told.append((text, problem))
    with proxy(server.port, fault) as port, use(port):
        data = data.model_copy(update={"packing": "concat"})
        found = rows_of(PackedSequences(data, corpus, "train", cache=cache))
    expected = rows_of(PackedSequences(local(folder, packing="concat"), corpus, "train"))
    assert np.array_equal(found, expected)
    counts = cache.take_counts()
    assert counts.retries >= 2
    assert counts.misses == len(corpus.train)
    problems = [text for text, problem in told if problem]
    assert problems[0].startswith(f"{PLACE} fails and is asked again: ")
    assert "\n" not in "".join(problems)
    assert len(problems) <= counts.retries
    assert told[-1] == (f"{PLACE} answers again", False)


def test_a_store_that_is_gone_ends_the_rank_with_one_line(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("corpus.location._ATTEMPTS", 2)
    with deaf_port() as port, use(port):
        cache = ShardCache(tmp_path / "cache", 1 << 30)
        with pytest.raises(LostRankError, match=r"train-00000.bin cannot be read: .*; the same co"):
            cache.begin(shard_of(folder))()
        assert held(tmp_path / "cache") == {}
        assert cache.take_counts().retries == 1
        with pytest.raises(InputError, match=r"data.path \(s3://.* cannot be read: the server ref"):
            prepare_corpus(remote(folder, "cache"), VOCAB)


def test_a_cache_smaller_than_the_corpus_is_never_above_its_bound(folder, server, tmp_path):
    corpus = read_manifest(local(folder).path)
    largest = max(2 * shard.tokens for shard in corpus.train)
    limit = 3 * largest
    assert limit < sum(2 * shard.tokens for shard in corpus.train) / 2
    data = remote(folder, str(tmp_path / "cache"), packing="concat")
    cache = ShardCache(tmp_path / "cache", limit)
    expected = PackedSequences(local(folder, packing="concat"), corpus, "train")
    with use(server.port):
        sequences = PackedSequences(data, corpus, "train", cache=cache)
        for seed in range(6):
            some = np.random.default_rng(seed).integers(0, len(sequences), 8)
            assert read_batch(sequences, some).equal(read_batch(expected, some))
            assert sum(held(tmp_path / "cache").values()) <= limit
        counts = cache.take_counts()
        assert counts.fetched_bytes > limit
        # A shard that is mapped stays, whatever is asked for.
        mine = cache.begin(shard_of(folder, 0))()
        for number in range(1, len(corpus.train)):
            cache.begin(shard_of(folder, number))()
        assert corpus.train[0].sha256 in held(tmp_path / "cache")
        assert mine.tobytes() == (folder / "here" / "train-00000.bin").read_bytes()
        # The shard that was used last stays, and the one that was not used for longest goes.
        del mine
        assert corpus.train[-1].sha256 in held(tmp_path / "cache")
        with pytest.raises(InputError, match=r"data.cache_gib \(.*\) must hold two of the largest"):
            PackedSequences(data, corpus, "train", cache=ShardCache(tmp_path, 2 * largest - 1))


FETCH = """
import sys
from pathlib import Path
from pretrain.data.cache import CachedFile, ShardCache
place, name, sha256, size = sys.argv[2:]
cache = ShardCache(Path(sys.argv[1]), 1 << 30)
print(len(cache.begin(CachedFile(place, name, sha256, int(size)))()), flush=True)
"""


def start_fetching(cache: Path, file: CachedFile, port: int) -> subprocess.Popen[str]:
    words = [str(cache), file.place, file.name, file.sha256, str(file.size)]
    env = {**os.environ, **environment(port), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, *words], stdout=subprocess.PIPE, text=True, env=env
    )


def test_a_kill_while_the_cache_fills_leaves_nothing_that_is_read(server, tmp_path):
    raw = np.random.default_rng(0).bytes(20 << 20)  # several requests
    file = CachedFile(PLACE, "large", hashlib.sha256(raw).hexdigest(), len(raw))
    with use(server.port):
        store_at(PLACE).write("large", [raw])
    answered = [0]

    def slow(method: str, path: str) -> None:
        answered[0] += 1
        if answered[0] > 2:
            time.sleep(60 if answered[0] == 3 else 0)

    cache = tmp_path / "cache"
    with proxy(server.port, slow) as port:
        process = start_fetching(cache, file, port)
        part = cache / f"{file.sha256}.part"
        while not (part.exists() and part.stat().st_blocks) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert list(held(cache)) == [part.name]
        # Its place in the cache is free for others, and the next process fetches the file anew.
        with use(server.port):
            assert ShardCache(cache, 1 << 30).begin(file)().tobytes() == raw
        assert held(cache) == {file.sha256: len(raw)}


def test_processes_that_need_a_shard_at_once_fetch_it_once(server, folder, tmp_path):
    gets = []

    def seen(method: str, path: str) -> None:
        gets.append(path)
        time.sleep(0.2)

    file = shard_of(folder)
    with proxy(server.port, seen) as port:
        processes = [start_fetching(tmp_path / "cache", file, port) for _ in range(2)]
        assert [int(p.communicate()[0]) for p in processes] == [file.size] * 2
    assert len([path for path in gets if path.endswith(file.name)]) == 1


def test_whoever_waits_for_a_shard_has_it_while_the_one_who_fetched_it_maps_it(
    server, folder, tmp_path
):
    file, asked = shard_of(folder), Event()

    def slow(method: str, path: str) -> None:
        asked.set()
        time.sleep(0.5)

    with proxy(server.port, slow) as port, use(port):
        one, other = (ShardCache(tmp_path / "cache", 1 << 30) for _ in range(2))
        fetching = one.begin(file)
        assert asked.wait(30)
        waiting = other.begin(file)
        mapped = fetching()
        assert np.array_equal(waiting.__self__.result(timeout=30), mapped)
    assert other.take_counts() == CacheCounts(misses=1)


def test_what_a_killed_process_left_counts_and_is_removed_for_room(server, folder, tmp_path):
    cache, file = tmp_path / "cache", shard_of(folder)
    cache.mkdir()
    left = cache / f"{'0' * 64}.part"
    left.write_bytes(bytes(file.size))
    (cache / "a-stranger's-file").write_bytes(bytes(100))
    with use(server.port):
        assert len(ShardCache(cache, file.size).begin(file)()) == file.size
    assert set(held(cache)) == {file.sha256, "a-stranger's-file"}


def test_an_upload_that_was_killed_goes_on_and_the_manifest_is_last(server, tmp_path):
    place = f"s3://{BUCKET}/upload"
    made = tmp_path / "made"
    made.mkdir()
    for name in ("a.bin", "b.bin", MANIFEST):
        (made / name).write_bytes(name.encode() * 1000)
    puts: list[str] = []

    def fault(method: str, path: str) -> None:
        if method == "PUT":
            puts.append(path.rpartition("/")[2])

    with proxy(server.port, fault) as port, use(port):
        store = store_at(place)
        store.write("a.bin", [b"of another upload"])
        store.write("b.bin", [(made / "b.bin").read_bytes()])
        puts.clear()
        upload(made, place, MANIFEST)
        assert puts[-1] == MANIFEST
        assert puts.count("b.bin") == 1, "asked for and found to be the same"
        for path in made.iterdir():
            assert store.read(path.name) == path.read_bytes()
        with pytest.raises(FileExistsError):
            upload(made, place, MANIFEST)


def test_documents_in_a_store_are_prepared_as_those_in_a_folder(folder, server, tmp_path):
    place, gets = f"s3://{BUCKET}/documents", []

    def seen(method: str, path: str) -> None:
        if method == "GET" and "list-type" not in path:
            gets.append(path.rpartition("/")[2])

    (tmp_path / "text" / "more").mkdir(parents=True)
    for name, text in (("a.jsonl", '{"text": "one"}\n' * 9), ("more/b.txt", "two"), ("c.txt", "3")):
        (tmp_path / "text" / name).write_text(text)
    (tmp_path / "text" / "picture.png").write_bytes(b"\x89PNG\0")
    here = local(tmp_path, packing="concat", seq_len=2)
    expected = prepare_corpus(here, VOCAB, lambda _: None)
    said: list[str] = []
    with proxy(server.port, seen) as port, use(port):
        store = store_at(place)
        for path in (tmp_path / "text").rglob("*.*"):
            store.write(path.relative_to(tmp_path / "text").as_posix(), [path.read_bytes()])
        there = here.model_copy(update={"source": place, "path": str(tmp_path / "there")})
        # An earlier start has copied one object, and one that is gone since.
        work = tmp_path / ".there.preparing" / "source"
        copy_source(place, work, said.append)
        (work / "c.txt").unlink()
        (work / "gone.txt").write_text("gone")
        gets.clear()
        found = prepare_corpus(there, VOCAB, said.append)
        assert gets == ["c.txt"]
        assert "copying 1 objects of s3://bucket/documents, 0.0 MB" in said
        assert found.fingerprint == expected.fingerprint
        assert found.skipped == expected.skipped
        assert not work.parent.exists()
        one = there.model_copy(update={"source": f"{place}/a.jsonl", "path": str(tmp_path / "one")})
        assert prepare_corpus(one, VOCAB, lambda _: None).files == 1
        for source, rule in (("none", "must be a prefix or an object"), ("*.txt", "no wildcards")):
            wrong = there.model_copy(
                update={"source": f"{place}/{source}", "path": str(tmp_path / "wrong")}
            )
            with pytest.raises(InputError, match=rule):
                prepare_corpus(wrong, VOCAB, lambda _: None)
        assert not list(tmp_path.glob(".wrong*"))


def test_what_cannot_be_is_one_line(folder, server, tmp_path):
    with pytest.raises(ValueError, match=r"data.cache_dir \(\) must name a folder on each node's"):
        local(folder, path=PLACE)
    data = remote(folder, "cache", packing="concat")
    corpus = read_manifest(local(folder).path)
    with use(server.port):
        (tmp_path / "file").write_text("")
        cache = ShardCache(tmp_path / "file", 1 << 30)
        with pytest.raises(InputError, match=r"data.cache_dir \(.*file\) cannot take train-00000"):
            read_batch(PackedSequences(data, corpus, "train", cache=cache), [0])
        none = data.model_copy(update={"path": f"s3://{BUCKET}/nothing"})
        with pytest.raises(
            InputError, match=r"has no prepared corpus yet: convoy prepare SPEC makes one"
        ):
            read_manifest(none.path)
