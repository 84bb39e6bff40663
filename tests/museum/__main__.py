"""The museum of defects from a shell.

python -m tests.museum                  list the cases
python -m tests.museum --prove          put each case's defect into a copy of Convoy, and see the
                                        case fail there; exit code 1 unless each fails
python -m tests.museum --prove clip     only cases that have the word in their name or thread
python -m tests.museum --prove --json FILE   and write what each said
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from tests.museum.cases import Case, all_cases
from tests.museum.prove import Proof, prove


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.museum", description=__doc__)
    parser.add_argument("words", nargs="*", help="only cases with one of these words")
    parser.add_argument("--prove", action="store_true", help="see each case fail")
    parser.add_argument("--json", type=Path, help="where the proofs are written")
    parser.add_argument("--workers", type=int, default=2, help="cases at a time; default 2")
    asked = parser.parse_args()
    cases = [c for c in all_cases() if not asked.words or _has_word(c, asked.words)]
    if not cases:
        parser.error(
            f"words ({' '.join(asked.words)}) must be in a case's file, test or thread; without "
            f"words all cases are listed"
        )
    if not asked.prove:
        for shown in cases:
            print(f"{shown.thread}: {shown.claim}")
        return 0
    proofs = []
    for proof in prove(cases, asked.workers):
        proofs.append(proof)
        print(
            f"{'red' if proof.red else 'NOT PROVEN':10} {proof.case.node}: {proof.said}", flush=True
        )
    red = sum(proof.red for proof in proofs)
    print(f"{red} of {len(proofs)} cases fail with their defect")
    if asked.json:
        asked.json.write_text(json.dumps(_table(proofs), indent=1) + "\n")
    return 0 if proofs and red == len(proofs) else 1


def _has_word(shown: Case, words: list[str]) -> bool:
    return any(word in shown.node or word in shown.thread for word in words)


def _table(proofs: list[Proof]) -> dict[str, object]:
    """What the proofs said, by thread."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {platform.system()}",
        "versions": {name: version(name) for name in ("torch", "numpy", "zarr")},
        "rows": [
            {
                "thread": proof.case.thread,
                "case": proof.case.node,
                "edited": sorted({edit.file for edit in proof.case.edits}),
                "red": proof.red,
                "said": proof.said,
            }
            for proof in sorted(proofs, key=lambda proof: proof.case.node)
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
