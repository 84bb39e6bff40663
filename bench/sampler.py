"""The sampler against the trainer: log-probabilities of sampled tokens, of an exact run.

    OMP_NUM_THREADS=1 python -m bench.sampler [--quick] [--json FILE]

A tiny model with loud weights continues prompts cut from a corpus, on several layouts; then one
rank computes the same sequences in forwards of training, in batches. ``kl`` is the mean over
sampled tokens of log p(sampler) - log p(trainer), an estimate of the divergence of the two
(http://joschu.net/blog/kl-approx.html), and ``differ`` the tokens whose log-probabilities have
other bits. Both must be 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.harness import Row, arguments, finish
from corpus.tokenizer import load_tokenizer
from pretrain.spec import JobSpec, SampleConfig
from pretrain.state import Progress
from pretrain.train.generation import Drawing, generate
from tests.support.exact import exact_spec
from tests.support.jobs import data_of, prepare_job, restored_job, save_loud
from tests.support.layouts import topology_of
from tests.support.ranks import run_ranks

LAYOUTS = ["dp_shard=1", "dp_shard=2,ep=2", "cp=2,ep=2", "tp=2,ep=2"]
PROMPTS, QUICK_PROMPTS = 10_000, 40
TOKENS = 2
"""Sampled behind each prompt."""
SEQ_LEN = 128
BATCH = 8
Sampled = tuple[tuple[int, ...], tuple[float, ...]]
"""The ids of a prompt and of what was sampled, and the log-probabilities of the latter."""


def _spec(folder: Path, data: dict[str, Any], layout: str) -> JobSpec:
    return exact_spec(folder, data, layout)


def prompts_of(text: str, number: int) -> list[str]:
    """Cuts of 4 to 60 characters from all over a text."""
    draw = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - 60, (number,), generator=draw).tolist()
    lengths = torch.randint(4, 60, (number,), generator=draw).tolist()
    return [text[a : a + n] for a, n in zip(starts, lengths, strict=True)]


def sample_on_rank(spec: JobSpec, prompts: Sequence[str], rank: int) -> list[Sampled]:
    """What a layout samples."""
    job, words = restored_job(spec), load_tokenizer(spec.data)
    drawing, texts = Drawing(1.0, 1.0), []
    for prompt in prompts:
        made = generate(job, words, SampleConfig(tokens=TOKENS, prompt=prompt), drawing)
        texts.append((made.token_ids, made.log_probs))
    job.runtime.close()
    return texts


def train_on_rank(spec: JobSpec, texts: Sequence[Sampled], rank: int) -> list[list[float]]:
    """The log-probabilities of sampled tokens in forwards of training of whole sequences."""
    job = restored_job(spec)
    job.model.train()
    draw, log_probs = torch.Generator().manual_seed(1), []
    for start in range(0, len(texts), BATCH):
        some = texts[start : start + BATCH]
        batch_BS = torch.randint(8, 300, (len(some), SEQ_LEN), generator=draw)
        for row_S, (ids, _) in zip(batch_BS, some, strict=True):
            row_S[: len(ids)] = torch.tensor(ids)
        out, _ = job.forward(batch_BS)
        assert out is not None
        for logits_SV, (ids, sampled) in zip(out.logits.detach(), some, strict=True):
            first = len(ids) - len(sampled)
            log_SV = logits_SV[first - 1 : len(ids) - 1].float().log_softmax(-1)
            log_probs.append([float(v[i]) for v, i in zip(log_SV, ids[first:], strict=True)])
    job.runtime.close()
    return log_probs


def main() -> None:
    args, rows = arguments(__doc__), []
    with TemporaryDirectory() as name:
        folder = Path(name)
        prepared = prepare_job(folder)
        data: dict[str, Any] = {**data_of(prepared), "seq_len": SEQ_LEN}
        files = sorted(path for path in (folder / "text").rglob("*") if path.is_file())
        text = "".join(path.read_text() for path in files)
        prompts = prompts_of(text, QUICK_PROMPTS if args.quick else PROMPTS)
        spec = partial(_spec, folder, data)
        run_ranks(partial(save_loud, spec("dp_shard=1"), 6.0, Progress(step=1)), 1, group=False)
        for layout in LAYOUTS:
            sample = partial(sample_on_rank, spec(layout), prompts)
            ranks = run_ranks(sample, topology_of(layout).world, timeout=7200, group=False)
            texts = ranks[0]
            assert all(each == texts for each in ranks), "ranks have sampled other texts"
            compute = partial(train_on_rank, spec("dp_shard=1"), texts)
            (wanted,) = run_ranks(compute, 1, timeout=7200, group=False)
            pairs = [
                (a, b)
                for (_, sampled), trained in zip(texts, wanted, strict=True)
                for a, b in zip(sampled, trained, strict=True)
            ]
            differ = sum(a != b for a, b in pairs)
            kl = sum(a - b for a, b in pairs) / len(pairs)
            print(f"{layout:<20} {len(pairs):,} tokens  {differ} differ  kl {kl}", flush=True)
            rows.append(Row(layout, "sampler", "tokens", len(pairs), "tokens", 1.0, []))
            rows.append(Row(layout, "sampler", "differ", differ, "tokens", float(not differ), []))
            rows.append(Row(layout, "sampler", "kl", kl, "nats", float(not kl), []))
            finish("sampler", rows, ["torch", "numpy"], args.json)


if __name__ == "__main__":
    main()
