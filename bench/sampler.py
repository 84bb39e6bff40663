"""The sampler against the trainer: log-probabilities of sampled tokens, of an exact run.

    OMP_NUM_THREADS=1 python -m bench.sampler [--quick] [--json FILE]

A tiny model with loud weights continues prompts cut from a corpus, on several layouts; then one
rank computes the same sequences in forwards of training, in batches. ``kl`` is the mean over
sampled tokens of log p(sampler) - log p(trainer), an estimate of the divergence of the two
(http://joschu.net/blog/kl-approx.html), and ``differ`` the tokens whose log-probabilities have
other bits. Both must be 0.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.harness import Row, arguments, finish
from pretrain.spec import JobSpec
from pretrain.state import Progress
from tests.support.exact import exact_spec
from tests.support.jobs import data_of, prepare_job, save_loud
from tests.support.layouts import topology_of
from tests.support.ranks import run_ranks
from tests.support.sampling import sample_on_rank, trained_log_probs_on_rank

LAYOUTS = ["dp_shard=1", "dp_shard=2,ep=2", "cp=2,ep=2", "tp=2,ep=2"]
PROMPTS, QUICK_PROMPTS = 10_000, 40
TOKENS = 2
"""Sampled behind each prompt."""
SEQ_LEN = 128


def _spec(folder: Path, data: dict[str, Any], layout: str) -> JobSpec:
    return exact_spec(folder, data, layout)


def prompts_of(text: str, number: int) -> list[str]:
    """Cuts of 4 to 60 characters from all over a text."""
    draw = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - 60, (number,), generator=draw).tolist()
    lengths = torch.randint(4, 60, (number,), generator=draw).tolist()
    return [text[a : a + n] for a, n in zip(starts, lengths, strict=True)]


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
            sample = partial(sample_on_rank, spec(layout), prompts, TOKENS)
            ranks = run_ranks(sample, topology_of(layout).world, timeout=7200, group=False)
            texts = ranks[0]
            assert all(others == texts for others in ranks), "ranks have sampled other texts"
            compute = partial(trained_log_probs_on_rank, spec("dp_shard=1"), texts)
            (wanted,) = run_ranks(compute, 1, timeout=7200, group=False)
            pairs = [
                (a, b)
                for text, trained in zip(texts, wanted, strict=True)
                for a, b in zip(text.log_probs, trained, strict=True)
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
