"""Installs the versions of peers, asks each in a new interpreter, and writes the rows."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.harness import table_text
from bench.museum_peers.frame import ROOT, Case

FOLDERS = ROOT / "build/museum"
SHOWN, SHOWN_NO_FIX = "seen wrong, and right in the fixed version", "seen wrong, no fixed version"
NOT_WRONG, STILL_WRONG = "not seen wrong", "the fixed version is wrong too"
NOT_RUN = "did not run"
GOOD = (SHOWN, SHOWN_NO_FIX)


@dataclass(frozen=True)
class Row:
    """What one case showed, as it is written to the file."""

    fields: dict[str, Any]

    @property
    def verdict(self) -> str:
        """One of the five verdicts above."""
        return str(self.fields["verdict"])

    def line(self) -> str:
        """The row for a person."""
        f = self.fields
        seen = [f"{' '.join(f[key]['requirements'])}: {f[key]['seen']}"
                for key in ("wrong", "fixed") if f[key]]  # fmt: skip
        return f"{f['verdict']}: {f['thread']}, {f['claim']}\n    " + "\n    ".join(seen)


class NotInstalled(Exception):  # noqa: N818 - an outcome, not a fault
    """The package index gave no such environment; the message has the installer's last words."""


def run(cases: Sequence[Case], path: Path | None, folders: Path = FOLDERS) -> list[Row]:
    """Run the cases that ``path`` has no standing row of; write and print each row as it comes.

    A row stands where the case, its versions and its adapter are those of the row, and where the
    verdict is not ``did not run``.
    """
    written = _read(path)
    rows = []
    for case in cases:
        row = written.get(case.thread)
        if row is None or not _stands(row, case):
            row = show(case, folders)
            written[case.thread] = row
            print(row.line(), flush=True)
            if path is not None:
                _write(path, list(written.values()))
        rows.append(row)
    return rows


def show(case: Case, folders: Path = FOLDERS) -> Row:
    """Ask both versions of one case."""
    wrong = _answer(case, case.wrong, folders)
    fixed = None if case.fixed is None else _answer(case, case.fixed, folders)
    if "error" in wrong or (fixed is not None and "error" in fixed):
        verdict = NOT_RUN
    elif wrong["right"]:
        verdict = NOT_WRONG
    elif fixed is None:
        verdict = SHOWN_NO_FIX
    else:
        verdict = SHOWN if fixed["right"] else STILL_WRONG
    return Row(
        {
            "thread": case.thread, "claim": case.claim, "went_wrong": case.went_wrong,
            "verdict": verdict, "wrong": wrong, "fixed": fixed, "no_fix": case.no_fix,
            "adapter": case.adapter,
        }
    )  # fmt: skip


def install(requirements: Sequence[str], folders: Path = FOLDERS) -> list[Path]:
    """A folder for each requirement, without what it requires in turn; torch is left out.

    Raises:
        NotInstalled: pip ended with an error.
    """
    wanted = [r for r in requirements if not r.startswith("torch==")]
    return [_install_one(requirement, folders) for requirement in wanted]


def _install_one(requirement: str, folders: Path) -> Path:
    folder = folders / requirement
    if folder.is_dir():
        return folder
    folders.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix="installing-", dir=folders))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile",
           "--ignore-requires-python", "--target", str(staging)]  # fmt: skip
    # A source package may need torch to be built: the second try builds in this environment.
    for more in ([], ["--no-build-isolation"]):
        done = subprocess.run(
            [*pip, *more, requirement], capture_output=True, text=True, timeout=900,
            env={**os.environ, "PIP_CONSTRAINT": "", "DS_BUILD_OPS": "0"}, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            break
    else:
        shutil.rmtree(staging)
        raise NotInstalled(f"pip: {done.stderr.strip()[-400:]}")
    try:
        staging.rename(folder)
    except OSError:  # another start of this bench was faster
        shutil.rmtree(staging)
    return folder


def _answer(case: Case, requirements: tuple[str, ...], folders: Path) -> dict[str, Any]:
    """What one version answered: ``right`` and ``seen``, or ``error`` and ``seen`` alike."""
    began = time.monotonic()
    try:
        answer = _ask(case, requirements, install(requirements, folders))
    except NotInstalled as error:
        answer = {"error": str(error)}
    if "error" in answer:
        answer["seen"] = f"did not run: {answer['error']}"
    seconds = round(time.monotonic() - began, 1)
    return {"requirements": list(requirements), **answer, "seconds": seconds}


def _ask(case: Case, requirements: tuple[str, ...], first: list[Path]) -> dict[str, Any]:
    """Run the adapter in a new interpreter that imports from the folders ``first`` first."""
    path = os.pathsep.join([*map(str, first), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer.json"
        words = ["-m", "bench.museum_peers.child", case.ask.__module__, case.ask.__name__]
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", *words, str(answer), *requirements],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                 "TMPDIR": scratch, "TORCH_EXTENSIONS_DIR": scratch, "PYTHONHASHSEED": "0"},
        )  # fmt: skip
        try:
            _, errors = process.communicate(timeout=case.timeout_seconds)
        except subprocess.TimeoutExpired:
            errors = f"no answer in {case.timeout_seconds:g} s"
        finally:
            _end(process)
        if answer.exists():
            fields: dict[str, Any] = json.loads(answer.read_text())
            return fields
    return {"error": f"exit code {process.returncode}: {errors.strip()[-400:]}"}


def _end(process: subprocess.Popen[str]) -> None:
    """End the interpreter and the ranks that it started: they are one session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stderr is not None:
        process.stderr.close()


def _stands(row: Row, case: Case) -> bool:
    f = row.fields
    fixed = None if case.fixed is None else list(case.fixed)
    return (
        f["verdict"] != NOT_RUN
        and (f["claim"], f["adapter"]) == (case.claim, case.adapter)
        and f["wrong"]["requirements"] == list(case.wrong)
        and (f["fixed"] and f["fixed"]["requirements"]) == fixed
    )


def _read(path: Path | None) -> dict[str, Row]:
    if path is None or not path.exists():
        return {}
    return {row["thread"]: Row(row) for row in json.loads(path.read_text())["rows"]}


def _write(path: Path, rows: list[Row]) -> None:
    """Replace the file by one with these rows: a kill leaves the old file or the new one."""
    head = {
        "bench": "museum_peers",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "torch": version("torch")},
    }
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(table_text(head, {"rows": [row.fields for row in rows]}))
    fresh.replace(path)
