"""Preparing: JSON lines to tokens, with one tokenizer, on all cores; a part of bench.data.

The text is that of the Python standard library, in four files. The limit is the tokenizer alone:
``encode_batch_fast`` on the texts in memory. Against ``datasets.map`` and datatrove's
``DocumentTokenizer``; all write their results.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.harness import Row, interleave
from corpus.config import DataConfig
from corpus.documents.documents import find_documents
from corpus.prepare import prepare_corpus

_FILES = 4
_END = "<|endoftext|>"


def prepare(folder: Path, files: int, samples: int) -> list[Row]:
    """Rows of seconds from JSON lines to tokens on disk."""
    from tokenizers import Tokenizer

    texts = [document.text for document in find_documents("stdlib")][:files]
    (folder / "text").mkdir()
    for number in range(_FILES):
        with (folder / "text" / f"{number}.jsonl").open("w") as file:
            for text in texts[number::_FILES]:
                file.write(json.dumps({"text": text}) + "\n")
    prepare_corpus(config("first", folder), 4096, lambda _: None)
    tokenizer = str(folder / "first" / "tokenizer.json")
    cores = len(os.sched_getaffinity(0))

    def tokenizer_alone() -> None:
        encode = Tokenizer.from_file(tokenizer)  # anew each time: it keeps what it has seen
        for start in range(0, len(texts), 512):
            encode.encode_batch_fast(texts[start : start + 512], add_special_tokens=False)

    def convoy(processes: int) -> None:
        shutil.rmtree(folder / "made", ignore_errors=True)
        prepare_corpus(config("made", folder, tokenizer), 4096, lambda _: None, processes=processes)

    subjects: dict[str, Callable[[], None]] = {
        "limit": tokenizer_alone,
        "convoy": lambda: convoy(1),
        f"convoy, {cores} processes": lambda: convoy(cores),
    }
    with contextlib.suppress(ImportError):
        subjects["datasets.map"] = map_with_datasets(folder, tokenizer, 1)
        subjects[f"datasets.map, {cores} processes"] = map_with_datasets(folder, tokenizer, cores)
    with contextlib.suppress(ImportError):
        subjects["datatrove"] = tokenize_with_datatrove(folder, tokenizer, 1)
        subjects[f"datatrove, {cores} processes"] = tokenize_with_datatrove(
            folder, tokenizer, cores
        )
    size = sum(len(text.encode()) for text in texts)
    rows = interleave(f"prepare {size / 1e6:.0f} MB", "all", subjects, samples)
    for row in rows:
        print(f"{row.subject:<28} {size / row.value / 1e6:7.1f} MB/s on {cores} cores")
    return rows


def config(name: str, folder: Path, tokenizer: str | None = None) -> DataConfig:
    return DataConfig(
        source=str(folder / "text"), path=str(folder / name), seq_len=2048, tokenizer=tokenizer
    )


def map_with_datasets(folder: Path, tokenizer: str, processes: int) -> Callable[[], None]:
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()

    def run() -> None:
        encode = Tokenizer.from_file(tokenizer)
        end = encode.token_to_id(_END)

        def tokens(batch: dict[str, Any]) -> dict[str, Any]:
            found = encode.encode_batch_fast(batch["text"], add_special_tokens=False)
            return {"input_ids": [[*one.ids, end] for one in found]}

        work = folder / "mapped"
        shutil.rmtree(work, ignore_errors=True)
        loaded = datasets.load_dataset(
            "json", data_files=str(folder / "text" / "*.jsonl"), split="train",
            cache_dir=str(work / "cache"),
        )  # fmt: skip
        loaded.map(
            tokens, batched=True, batch_size=512, remove_columns=["text"],
            num_proc=processes if processes > 1 else None,
        ).save_to_disk(str(work / "set"))  # fmt: skip

    return run


def tokenize_with_datatrove(folder: Path, tokenizer: str, processes: int) -> Callable[[], None]:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from loguru import logger

    logger.remove()

    def run() -> None:
        work = folder / "trove"
        shutil.rmtree(work, ignore_errors=True)
        LocalPipelineExecutor(
            pipeline=[
                JsonlReader(str(folder / "text")),
                DocumentTokenizer(
                    str(work / "tokens"), tokenizer, eos_token=_END, shuffle_documents=False
                ),
            ],
            logging_dir=str(work / "logs"), tasks=_FILES, workers=processes,
        ).run()  # fmt: skip

    return run
