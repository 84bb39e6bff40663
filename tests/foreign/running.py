"""Run a suite of another project in processes of its own, a part each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.foreign.counting import Tally, tally
from tests.foreign.exclusions import read_exclusions
from tests.foreign.fetching import packages_of, source_of
from tests.foreign.recorder import EXCLUSIONS, RECORD, SOURCE
from tests.foreign.suites import HERE, Suite
from tests.foreign.touching import TOUCHED

ROOT = HERE.parents[1]
PART = "FOREIGN_PART"


def run_suite(
    suite: Suite,
    parts: Sequence[str],
    *,
    checkouts: Sequence[Path] = (),
    jobs: int = 1,
    arguments: Sequence[str] = (),
    keep: Path | None = None,
) -> Tally:
    """Run parts of a suite, and count its cases. ``arguments`` are of pytest.

    With a folder ``keep`` what a part did is kept there, and a part that is there is not run again.

    Raises ValueError for a wrong line of the exclusions, and NotHereError for missing tests.
    """
    exclusions = read_exclusions(suite.exclusions)
    source, packages = source_of(suite, checkouts), packages_of(suite)
    complete = set(parts) == set(suite.parts) and not arguments
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(jobs) as pool:

        def run(part: str) -> list[dict[str, Any]]:
            kept = None if keep is None else keep / f"{suite.name}-{part or 'all'}.jsonl"
            if kept is not None and kept.exists():
                return _read(kept)
            folder = Path(scratch, str(parts.index(part)))
            folder.mkdir()
            lines = _run_part(suite, part, folder, source, packages, arguments)
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text("".join(json.dumps(line) + "\n" for line in lines))
            return lines

        records = [record for lines in pool.map(run, parts) for record in lines]
    return tally(records, exclusions, complete=complete)


def _run_part(
    suite: Suite,
    part: str,
    scratch: Path,
    source: Path | None,
    packages: Path,
    arguments: Sequence[str],
) -> list[dict[str, Any]]:
    top = source if suite.theirs and source else suite.folder
    files = [str(top / name) for name in suite.files]
    record, output = scratch / "record.jsonl", scratch / "output.txt"
    shim = [suite.folder / "shim"] if suite.shim else []
    env = os.environ | {
        RECORD: str(record),
        TOUCHED: str(scratch / "touched"),
        EXCLUSIONS: str(suite.exclusions),
        PART: part,
        # Of ours first: another project's folder of tests may be called tests too.
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *shim, packages])),
        "TMPDIR": str(scratch),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        # Of PyTorch's cases on several ranks, in seconds: a busy machine starts ranks slowly.
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "800",
    }
    if source:
        env[SOURCE] = str(source)
    command = [
        sys.executable, "-m", "pytest", "-c", str(HERE / "foreign.ini"), "--rootdir", str(top),
        "--confcutdir", str(top), "-p", "no:cacheprovider", "-p", "tests.foreign.recorder",
        *files, *arguments,
    ]  # fmt: skip
    with output.open("w") as file:
        code = subprocess.run(
            command, cwd=scratch, env=env, stdout=file, stderr=subprocess.STDOUT
        ).returncode
    records = _read(record) if record.exists() else []
    # 0: all passed; 1: some failed, and the record says which; 2: a file was not collected.
    if code not in (0, 1) and not any(line["case"].endswith("::collection") for line in records):
        why = f"pytest ended with {code}:\n{output.read_text()[-1500:]}"
        case = f"{part or suite.name}::process"
        records.append({"case": case, "outcome": "failed", "why": why, "touched": {}})
    return records


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
