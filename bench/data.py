"""What feeds a step: loaders, preparation, and start-up.

    OMP_NUM_THREADS=1 python -m bench.data [--quick] [--json FILE]

``load``: all sequences of one corpus of random tokens (uint16, 2,048 a sequence) in a shuffled
order, as int64 batches of 8, on one core that all subjects share, from a warm page cache. The limit
is one sequential read of the same bytes into one buffer. Every peer reads the same sequences:
mosaicml-streaming from its own shards, datasets from Arrow, torchdata's StatefulDataLoader and
megatron-core's IndexedDataset from the tokens themselves. Peers shuffle as each does.

``prepare``: see bench/data_prepare.py.

``start-up``: seconds and memory from the manifest to the first batch, for corpora of 10^9 and of
10^12 tokens in sparse files, each in a process of its own.

A peer that is not installed is left out; bench/requirements-peers.txt has the versions.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from bench.data_prepare import prepare
from bench.harness import Row, arguments, finish, interleave
from corpus.config import DataConfig
from corpus.manifest import CorpusManifest, Shard
from pretrain.data import Cursor, GlobalOrder, Loader, PackedSequences

S, BATCH = 2048, 8
SHARD_TOKENS = 1 << 22
ROOT = Path(__file__).resolve().parent.parent


def manifest_of(folder: Path, tokens: int, shard_tokens: int = SHARD_TOKENS) -> CorpusManifest:
    """A manifest of training shards of equal length."""
    shards = [
        Shard(
            file=f"train-{i:05d}.bin", tokens=shard_tokens, documents=1, sha256="0", ends_sha256="0"
        )
        for i in range(tokens // shard_tokens)
    ]
    return CorpusManifest(
        version=2, source="random", vocab_size=1 << 16, shard_tokens=shard_tokens,
        tokenizer_bytes=1, dtype="uint16", train=shards, val=[], train_documents=1,
        val_documents=0, train_bytes=1, val_bytes=1,
        fingerprint="0",
    )  # fmt: skip


def config_of(folder: Path, shard_tokens: int = SHARD_TOKENS) -> DataConfig:
    return DataConfig(source="random", path=str(folder), seq_len=S, shard_tokens=shard_tokens)


# ------------------------------------------------------------------------------------------------
# Loading.


def convoy_loader(folder: Path, manifest: CorpusManifest) -> Callable[[], None]:
    sequences = PackedSequences(config_of(folder), manifest, "train")
    order, steps = GlobalOrder(len(sequences), 0), len(sequences) // (8 * BATCH)
    # Steps of 8 micro-batches. Without the thread that reads ahead: it would be a second core.
    loader = Loader(sequences, order, lambda _: 8 * BATCH, BATCH, 0, 1, read_ahead=False)
    at = [0]

    def epoch() -> None:
        for _ in range(steps):
            batches, after = loader.step(Cursor(at[0]))
            assert [batch.shape for batch in batches] == [(BATCH, S + 1)] * 8
            at[0] = after.sample_index

    return epoch


def limit(folder: Path, manifest: CorpusManifest) -> Callable[[], None]:
    buffer = bytearray(1 << 20)

    def read() -> None:
        for shard in manifest.train:
            with (folder / shard.file).open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    return read


def rows_of(folder: Path, manifest: CorpusManifest) -> Iterator[np.ndarray]:
    for shard in manifest.train:
        tokens = np.fromfile(folder / shard.file, np.uint16)
        for i in range((len(tokens) - 1) // S):
            yield tokens[i * S : i * S + S + 1]


def mosaic(folder: Path, manifest: CorpusManifest, work: Path) -> Callable[[], None]:
    with _stand_in_for_torchvision():
        from streaming import MDSWriter, StreamingDataset

    with MDSWriter(out=str(work), columns={"tokens": "ndarray:uint16"}, size_limit=1 << 26) as out:
        for row in rows_of(folder, manifest):
            out.write({"tokens": row})
    dataset = StreamingDataset(local=str(work), shuffle=True, batch_size=BATCH)

    def epoch() -> None:
        batch = []
        for sample in dataset:
            batch.append(sample["tokens"])
            if len(batch) == BATCH:
                assert torch.from_numpy(np.stack(batch).astype(np.int64)).shape == (BATCH, S + 1)
                batch = []

    return epoch


@contextlib.contextmanager
def _stand_in_for_torchvision() -> Iterator[None]:
    """streaming imports torchvision for data sets of pictures, which are not read here."""
    import transformers.feature_extraction_utils  # noqa: F401 - it looks for the real one

    names = ("torchvision", "torchvision.datasets", "torchvision.transforms",
             "torchvision.transforms.functional")  # fmt: skip
    for name in names:
        module = sys.modules.setdefault(name, types.ModuleType(name))
        for attribute in ("VisionDataset", "to_tensor"):
            module.__dict__.setdefault(attribute, object)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def hf_datasets(folder: Path, manifest: CorpusManifest, work: Path) -> Callable[[], None]:
    import datasets

    features = datasets.Features({"tokens": datasets.List(datasets.Value("uint16"), length=S + 1)})

    def generate() -> Iterator[dict[str, np.ndarray]]:
        for row in rows_of(folder, manifest):
            yield {"tokens": row}

    datasets.disable_progress_bars()
    made = datasets.Dataset.from_generator(
        generate, features=features, cache_dir=str(work / "cache"), writer_batch_size=256
    )
    made.save_to_disk(str(work / "set"))
    dataset = datasets.load_from_disk(str(work / "set")).with_format("numpy")
    epochs = [0]

    def epoch() -> None:
        epochs[0] += 1
        order = np.random.default_rng(epochs[0]).permutation(len(dataset))
        for i in range(len(order) // BATCH):
            rows = dataset[order[i * BATCH : (i + 1) * BATCH]]["tokens"]
            assert torch.from_numpy(np.asarray(rows).astype(np.int64)).shape == (BATCH, S + 1)

    return epoch


class Memmapped(torch.utils.data.Dataset):
    """The sequences as a map-style dataset: what torchdata has loaders for, and no storage."""

    def __init__(self, folder: Path, manifest: CorpusManifest) -> None:
        self.shards = [np.memmap(folder / s.file, np.uint16, "r") for s in manifest.train]
        self.each = (SHARD_TOKENS - 1) // S

    def __len__(self) -> int:
        return self.each * len(self.shards)

    def __getitem__(self, index: int) -> torch.Tensor:
        shard, i = divmod(index, self.each)
        return torch.from_numpy(self.shards[shard][i * S : i * S + S + 1].astype(np.int64))


def torchdata(folder: Path, manifest: CorpusManifest, work: Path) -> Callable[[], None]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(
        Memmapped(folder, manifest), batch_size=BATCH, shuffle=True, drop_last=True
    )

    def epoch() -> None:
        for batch in loader:
            assert batch.shape == (BATCH, S + 1)

    return epoch


def megatron(folder: Path, manifest: CorpusManifest, work: Path) -> Callable[[], None]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    work.mkdir()
    builder = IndexedDatasetBuilder(str(work / "all.bin"), dtype=np.uint16)
    for row in rows_of(folder, manifest):
        builder.add_document(torch.from_numpy(row.astype(np.int32)), [len(row)])
    builder.finalize(str(work / "all.idx"))
    dataset = IndexedDataset(str(work / "all"))
    epochs = [0]

    def epoch() -> None:
        epochs[0] += 1
        order = np.random.default_rng(epochs[0]).permutation(len(dataset))
        for i in range(len(order) // BATCH):
            rows = np.stack([dataset[int(j)] for j in order[i * BATCH : (i + 1) * BATCH]])
            assert torch.from_numpy(rows.astype(np.int64)).shape == (BATCH, S + 1)

    return epoch


PEERS = {"streaming": mosaic, "datasets": hf_datasets, "torchdata": torchdata,
         "megatron-core": megatron}  # fmt: skip


def load(folder: Path, tokens: int, samples: int) -> list[Row]:
    """Rows of seconds of an epoch; the ratio is to the sequential read."""
    data = folder / "tokens"
    data.mkdir()
    manifest, random = manifest_of(data, tokens), np.random.default_rng(0)
    for shard in manifest.train:
        random.integers(0, 1 << 16, shard.tokens, np.uint16).tofile(data / shard.file)
    subjects = {"limit": limit(data, manifest), "convoy": convoy_loader(data, manifest)}
    for name, make in PEERS.items():
        try:
            subjects[name] = make(data, manifest, folder / name)
        except ImportError as error:
            print(f"{name} is left out: {error}")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        rows = interleave(f"load {tokens >> 20}Mi tokens", "epoch", subjects, samples)
    finally:
        os.sched_setaffinity(0, before)
    for row in rows:
        print(f"{row.subject:<14} {tokens / row.value / 1e6:9.1f} million tokens/s on one core")
    return rows


# ------------------------------------------------------------------------------------------------
# Start-up.


def start_up(folder: Path, sizes: Sequence[int]) -> list[Row]:
    """Rows of seconds and bytes from a manifest to the first batch."""
    rows = []
    for tokens in sizes:
        data, each = folder / f"sparse-{tokens}", 1 << 26
        data.mkdir()
        manifest = manifest_of(data, -(-tokens // each) * each, each)
        for shard in manifest.train:
            with (data / shard.file).open("wb") as file:
                file.truncate(2 * shard.tokens)
        (data / "manifest.json").write_text(json.dumps(manifest.model_dump()))
        command = [sys.executable, "-m", "bench.data", "--open", str(data)]
        found = json.loads(subprocess.check_output(command, cwd=ROOT))
        case = f"start-up {tokens:.0e} tokens"
        print(f"{case}: {found['seconds']:.3f} s, {found['bytes'] / 1e6:.0f} MB")
        rows.append(Row(case, "convoy", "start-up", found["seconds"], "s", 0.0, []))
        rows.append(Row(case, "convoy", "memory", found["bytes"], "bytes", 0.0, []))
        shutil.rmtree(data)
    return rows


def open_and_report(folder: Path) -> None:
    """In a process of its own: what a start of a run does with its data."""
    from corpus.manifest import read_manifest
    from pretrain.data import read_batch

    torch.zeros(1)
    before = _memory("VmRSS")
    began = time.perf_counter()
    sequences = PackedSequences(config_of(folder, 1 << 26), read_manifest(folder), "train")
    order = GlobalOrder(len(sequences), 0)
    read_batch(sequences, order.many(np.arange(BATCH)))
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "bytes": _memory("VmHWM") - before}))


def _memory(field: str) -> int:
    """Bytes that this process has now (VmRSS), or had at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    if sys.argv[1:2] == ["--open"]:
        open_and_report(Path(sys.argv[2]))
        return
    args = arguments(__doc__)
    warnings.simplefilter("ignore")
    base = Path(os.environ.get("CONVOY_BENCH_DIR", ROOT / "build" / "bench"))
    base.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    tokens, files = (1 << 24, 200) if args.quick else (1 << 25, 400)
    for name, run in {
        "load": lambda folder: load(folder, tokens, args.samples),
        "prepare": lambda folder: prepare(folder, files, max(1, args.samples // 2)),
        "start-up": lambda folder: start_up(folder, [10**9, 10**12]),
    }.items():
        if args.only and args.only not in name:
            continue
        with TemporaryDirectory(dir=base) as folder:
            rows += run(Path(folder))
    packages = ["torch", "numpy", "tokenizers", "mosaicml-streaming", "datasets", "torchdata",
                "megatron-core", "datatrove"]  # fmt: skip
    finish("data", rows, packages, args.json)


if __name__ == "__main__":
    main()
