"""A job small enough to run many times, on a corpus of real text."""

from __future__ import annotations

import contextlib
import json
import sysconfig
from pathlib import Path
from typing import Any

import torch

import ckpt
from corpus.documents.documents import Document, is_held_out
from corpus.prepare.prepare import prepare_corpus
from pretrain.checkpoint.contents import save_info
from pretrain.checkpoint.resume import restore
from pretrain.job import Job, build_job
from pretrain.runtime.ranks import start
from pretrain.spec.job import JobSpec
from pretrain.spec.read import load_spec
from pretrain.state import Progress


def write_corpus(folder: Path, files: int = 40) -> Path:
    """Some of the standard library, a few kilobytes of each; little of what is held out, all of
    which each run scores at its end."""
    root = Path(sysconfig.get_paths()["stdlib"])
    folder.mkdir(parents=True)
    for path in sorted(root.glob("*.py"))[:files]:
        size = 600 if is_held_out(Document(path.name, path)) else 3000
        (folder / path.name).write_bytes(path.read_bytes()[:size])
    return folder


def prepare_job(folder: Path) -> Path:
    """A folder with the corpus of the tiny job, prepared."""
    write_corpus(folder / "text")
    spec = make_spec(folder)
    prepare_corpus(spec.data, spec.model.vocab_size)
    return folder


def data_of(job: Path) -> dict[str, str]:
    """What ``[data]`` says of such a folder."""
    return {"source": str(job / "text"), "path": str(job / "corpus")}


def tiny(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """The spec as a dict, under ``folder``; ``sections`` are laid over it."""
    spec: dict[str, Any] = {
        "name": "tiny",
        "run_dir": str(folder / "run"),
        "model": {
            "vocab_size": 320, "d_model": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2,
            "d_ff": 48, "first_k_dense": 1,
        },
        "moe": {"num_experts": 4, "top_k": 2, "d_ff": 24},
        "data": {
            "source": str(folder / "text"), "path": str(folder / "corpus"), "seq_len": 32,
            "shard_tokens": 20_000,
        },
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "train": {"steps": 6, "log_interval_steps": 2, "timeout_seconds": 60.0},
        "eval": {"sequences": 8},
        "optimizer": {"lr": 0.003},
        "schedule": {"warmup_steps": 2},
        "checkpoint": {"interval_steps": 3},
    }  # fmt: skip
    for name, values in sections.items():
        if isinstance(values, dict):
            spec[name] = {**spec.get(name, {}), **values}
        else:
            spec[name] = values
    return spec


def write_spec(folder: Path, name: str = "spec.json", **sections: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps(tiny(folder, **sections)))
    return path


def make_spec(folder: Path, **sections: Any) -> JobSpec:
    return load_spec(write_spec(folder, **sections))


def save_checkpoint(job: Job, progress: Progress) -> None:
    """Commit the state as it is after ``progress.step`` steps, while every rank waits."""
    root, arrays = job.spec.checkpoint_path, job.checkpoint_arrays()
    ckpt.save(root, save_info(job, progress), arrays, job.runtime.rank, job.runtime.agree)


def restored_job(spec: JobSpec) -> Job:
    """The job of this rank, from the spec's newest checkpoint."""
    job = build_job(spec, start(spec.train.timeout_seconds))
    restore(job)
    return job


def save_loud(spec: JobSpec, factor: float, progress: Progress, rank: int) -> None:
    """A checkpoint of first values whose weights are ``factor`` times as large: of small weights
    every token is about as likely."""
    job = restored_job(spec)
    with torch.no_grad():
        for name, parameter in job.model.named_parameters():
            if "norm" not in name:
                parameter.mul_(factor)
    save_checkpoint(job, progress)
    job.runtime.close()


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "log.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def events_so_far(run: Path) -> list[dict[str, Any]]:
    """The log of a run that may be about to begin, or to write a line."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in (run / "log.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found
