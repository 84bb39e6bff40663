"""What drafts of multi-token prediction save: forwards of the model and time for each token.

    OMP_NUM_THREADS=1 python -m bench.drafts [--quick] [--json FILE]

The tiny recipe with two layers of multi-token prediction is trained for 240 steps on one rank. The
checkpoint then continues four prompts without drafts, and with one and two drafts for each forward,
at two temperatures. The limit of tokens for each forward is 1 + drafts, where every draft is
accepted; that of time is the time without drafts over 1 + drafts. Texts must be equal, or the
benchmark stops.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.harness import Row, arguments, finish
from bench.recipe_runs import one_rank, prepare_corpus
from convoy.sampling import sample
from pretrain.train import Generated

PROMPTS = ("import os\n", "def main(", "class Reader:\n", "    for name in ")
DRAFTS = (0, 1, 2)
TEMPERATURES = (0.0, 0.8)


def continued(root: Path, drafts: int, temperature: float, tokens: int) -> tuple[list[Generated],
                                                                                float]:  # fmt: skip
    """The texts, and the seconds for each token after the first ones."""
    moments: dict[int, list[float]] = {number: [] for number in range(len(PROMPTS))}
    texts = sample(
        str(root), PROMPTS, tokens=tokens, temperature=temperature, drafts=drafts,
        seen=lambda number, text: moments[number].append(time.perf_counter()),
    )  # fmt: skip
    seconds = sum(each[-1] - each[0] for each in moments.values())
    return texts, seconds / sum(one.tokens - 1 for one in texts)


def main() -> None:
    args = arguments(__doc__)
    steps, tokens, samples = (10, 24, 1) if args.quick else (240, 120, args.samples)
    rows = []
    with TemporaryDirectory() as name:
        corpus, run = prepare_corpus(Path(name)), Path(name) / "trained"
        one_rank(run, corpus, steps, ["model.num_mtp_layers=2"], seed=0)
        for temperature in TEMPERATURES:
            found: dict[int, list[Generated]] = {}
            seconds: dict[int, list[float]] = {drafts: [] for drafts in DRAFTS}
            for _ in range(samples):
                for drafts in DRAFTS:
                    found[drafts], each = continued(
                        run / "checkpoints", drafts, temperature, tokens
                    )
                    seconds[drafts].append(each)
            assert all([one.text for one in texts] == [one.text for one in found[0]]
                       for texts in found.values()), found  # fmt: skip
            case, plain = f"temperature {temperature}", statistics.median(seconds[0])
            for drafts, texts in found.items():
                made, forwards = sum(t.tokens for t in texts), sum(t.forwards for t in texts)
                accepted, drafted = sum(t.accepted for t in texts), sum(t.drafted for t in texts)
                middle, limit = statistics.median(seconds[drafts]), 1 + drafts
                subject = f"{drafts} drafts"
                rows += [
                    Row(case, subject, "tokens_per_forward", made / forwards, "tokens",
                        made / forwards / limit, []),
                    Row(case, subject, "accepted", accepted / max(drafted, 1), "share", 1.0, []),
                    Row(case, subject, "token_seconds", middle, "s", plain / limit / middle,
                        seconds[drafts]),
                ]  # fmt: skip
                print(
                    f"{case}  {subject}  {made / forwards:.2f} tokens a forward, "
                    f"{accepted} of {drafted} accepted, {middle * 1e3:.1f} ms a token"
                )
    finish("drafts", rows, ["torch", "numpy"], args.json)


if __name__ == "__main__":
    main()
