"""What cases launch, move and wait for on a fake GPU.

``python -m tests.fake_gpu.measure layers [NAME ...]`` prints the counts of cases as JSON; with
``--write`` the counts of all cases go into ``budgets.json``. A case that raises has the error in
the place of its counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BUDGETS = Path(__file__).with_name("budgets.json")
KINDS = ("layers", "steps")


def budgets(kind: str) -> dict[str, Any]:
    """The counts that the repository has of a kind of cases, by name."""
    found: dict[str, Any] = json.loads(BUDGETS.read_text())[kind]
    return found


def measured(kind: str, names: list[str] | None = None) -> dict[str, Any]:
    """The counts of cases of ``tests.fake_gpu.<kind>``, or of all of them, from a new process."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.fake_gpu.measure", kind, *(names or [])],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def _measure(kind: str, names: list[str]) -> dict[str, Any]:
    cases = import_module(f"tests.fake_gpu.{kind}")
    found: dict[str, Any] = {}
    for name in names or cases.CASES:
        try:
            found[name] = cases.measure(name)
        except Exception as error:
            traceback.print_exc()
            last = traceback.extract_tb(error.__traceback__)[-1]
            words = str(error).splitlines()[:1] or [""]
            found[name] = f"{type(error).__name__} at {last.name}: {words[0]}"
    return found


def main(arguments: list[str]) -> None:
    """Print what the arguments ask for, or write all."""
    warnings.simplefilter("ignore")
    if arguments == ["--write"]:
        everything = {kind: measured(kind) for kind in KINDS}
        BUDGETS.write_text(json.dumps(everything, indent=1) + "\n")
    else:
        print(json.dumps(_measure(arguments[0], arguments[1:]), indent=1), flush=True)
        os._exit(0)  # autograd's thread of the fake device does not end


if __name__ == "__main__":
    main(sys.argv[1:])
