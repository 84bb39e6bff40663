"""``convoy sample``: text from the model of a checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from convoy.commands.parsing import (
    RANKS,
    STEP,
    Command,
    argument,
    check_ranks,
    flag,
    is_first_rank,
    overrides,
)
from pretrain.errors import InputError
from pretrain.observe import say

_EPILOG = """\
examples:
  convoy sample runs/stdlib-tiny/checkpoints --prompt "def main("
  convoy sample runs/stdlib-tiny/checkpoints --prompt "import " --temperature 0 --tokens 200
  convoy sample s3://bucket/run --step 2000 --prompt "Once" --top-p 0.9 --seed 7 --json
  convoy sample imported/checkpoints --tokenizer imported/tokenizer.json --prompt "The "
  torchrun --nproc-per-node 4 -m convoy sample CKPT --prompt "def " --set parallel.tp=4

The checkpoint holds its spec, and the tokenizer is that of the run's corpus. Keys and values of
earlier tokens are kept. The model is spread over the ranks with its experts; --set parallel.* says
otherwise. Equal settings give equal text on any ranks, unless two tokens have nearly equal logits.

exit codes:
  0  the text was printed
  2  the checkpoint, the tokenizer or the layout cannot be used
  75 stopped
"""


def _check(args: argparse.Namespace) -> None:
    rules = (
        ("--tokens", args.tokens, args.tokens >= 1, "at least 1"),
        ("--temperature", args.temperature, 0 <= args.temperature < float("inf"), "0 or more"),
        ("--top-p", args.top_p, 0 < args.top_p <= 1, "above 0 and at most 1"),
    )
    for option, value, holds, rule in rules:
        if not holds:
            raise InputError(f"{option} ({value}) must be {rule}")
    check_ranks(args)


def _sample(args: argparse.Namespace) -> int:
    if args.ranks > 1:
        from convoy.local_ranks import run_local_ranks

        words = ["-m", "convoy", "sample", *args.words, "--ranks", "1"]
        return run_local_ranks(words, args.ranks)
    from convoy.sampling import sample

    prompts = args.prompt or [""]
    shown = _Shown() if is_first_rank() and not args.json and sys.stdout.isatty() else None
    texts = sample(
        args.checkpoint,
        prompts,
        tokens=args.tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        step=args.step,
        tokenizer=args.tokenizer,
        overrides=args.overrides,
        seen=shown,
    )
    if is_first_rank():
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            if shown is not None:
                shown(number, text.text)
            elif args.json:
                say(json.dumps({"prompt": prompt, **asdict(text)}, ensure_ascii=False))
            else:
                say(text.text)
        if shown is not None:
            say("")
    return 0


class _Shown:
    """Text on a terminal as it grows."""

    def __init__(self) -> None:
        self._written: dict[int, int] = {}

    def __call__(self, number: int, text: str) -> None:
        if number and number not in self._written:
            sys.stdout.write("\n")
        sys.stdout.write(text[self._written.get(number, 0) :])
        sys.stdout.flush()
        self._written[number] = len(text)


main = Command(
    "convoy sample",
    "Generate text with a checkpoint, on any ranks.",
    _EPILOG,
    [
        argument("checkpoint", "CKPT", "a checkpoint folder, URL or manifest"),
        argument("--prompt", "TEXT", "the text to go on from; may be repeated; without it a "
                 "document is begun", action="append"),
        STEP,
        argument("--tokens", "N", "tokens to generate at most; 100", type=int, default=100),
        argument("--temperature", "T", "divides the logits; 0 takes the likeliest token; 0.8",
                 type=float, default=0.8),
        argument("--top-p", "P", "draw from the likeliest tokens whose probabilities reach this "
                 "sum; 1", type=float, default=1.0),
        argument("--seed", "N", "of the draws; 0", type=int, default=0),
        argument("--tokenizer", "FILE", "the model's tokenizer.json", type=Path),
        RANKS,
        flag("--json", "print a line of JSON for each prompt"),
        overrides("a field of the checkpoint's spec"),
    ],
    _sample,
    stopped="nothing was written",
    check=_check,
)  # fmt: skip
