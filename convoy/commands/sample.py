"""``convoy sample``: text from the model of a checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from convoy.commands.parsing import Parser, ended, is_first_rank
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


def main(arguments: Sequence[str]) -> int:
    """Run ``convoy sample``; returns its exit code."""
    parser = Parser("convoy sample", "Generate text with a checkpoint.", _EPILOG)
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint folder, URL or manifest")
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT",
        help="the text to go on from; may be repeated; without it a document is begun",
    )  # fmt: skip
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint's step; the newest")
    parser.add_argument(
        "--tokens", type=int, default=100, metavar="N", help="tokens to generate at most; 100"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T",
        help="divides the logits; 0 takes the likeliest token; 0.8",
    )  # fmt: skip
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P",
        help="draw from the likeliest tokens whose probabilities reach this sum; 1",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws; 0")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="the model's tokenizer.json")
    parser.add_ranks()
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each prompt")
    parser.add_overrides("a field of the checkpoint's spec")
    parser.add_debug()
    args = parser.parse_args(arguments)
    _check(parser, args)
    return ended(lambda: _sample(args, arguments), debug=args.debug, stopped="nothing was written")


def _check(parser: Parser, args: argparse.Namespace) -> None:
    rules = (
        ("--tokens", args.tokens, args.tokens >= 1, "at least 1"),
        ("--temperature", args.temperature, 0 <= args.temperature < float("inf"), "0 or more"),
        ("--top-p", args.top_p, 0 < args.top_p <= 1, "above 0 and at most 1"),
    )
    for flag, value, holds, rule in rules:
        if not holds:
            parser.error(f"{flag} ({value}) must be {rule}")
    parser.check_ranks(args.ranks)


def _sample(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    if args.ranks > 1:
        from convoy.local_ranks import run_local_ranks

        return run_local_ranks(["-m", "convoy", "sample", *_of_a_rank(arguments)],
                               args.ranks)  # fmt: skip
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


def _of_a_rank(arguments: Sequence[str]) -> list[str]:
    """The command line without ``--ranks``."""
    words = list(arguments)
    for index, word in enumerate(words):
        if word == "--ranks":
            return words[:index] + words[index + 2 :]
        if word.startswith("--ranks="):
            return words[:index] + words[index + 1 :]
    return words


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
