"""The first hour on GPUs: all that needs one, in one command, and a report.

    python -m bench.gpu --out FOLDER [--gpus N] [--seconds 500] [--again] [--quick]

Each part of :func:`parts_of` runs in processes of its own, in order of worth, until the time is
over. With ``--gpus N`` there are more parts, on N devices of this machine; 0 is all of them. FOLDER
gets the log and JSON of each part, ``machine.json``, and ``report.md``: what passed, the figures,
and what each failure means. A part that passed there at the same commit, on the same device, is not
run again without ``--again``. ``--quick`` takes small sizes, which say nothing about speed.

Exit codes: 0 all ran and passed, or cannot run on this device; 1 something failed or was not run,
and the rest was run all the same; 2 there are not so many CUDA devices.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.gpu_parts import Part, parts_of

ROOT = Path(__file__).resolve().parent.parent
CANNOT_RUN_HERE = 77
"""The exit code of a part that has nothing to do on this device; the log's last line says why."""
_LEAST_SECONDS = 10.0
_END_SECONDS = 20.0
"""What the processes of a part have to end by themselves after SIGTERM."""


@dataclass(frozen=True)
class Outcome:
    """How a part ended."""

    outcome: str
    """``passed``, ``left out``, ``not run``, ``ran out of time`` or ``failed with CODE``."""
    seconds: float
    command: list[str]
    """What ran: another command is another part."""

    @property
    def is_right(self) -> bool:
        """Whether nothing went wrong."""
        return self.outcome in ("passed", "left out")


def run(part: Part, out: Path, seconds: float) -> str:
    """Run one part and keep what it says in ``NAME.log``; returns how it ended."""
    shutil.rmtree(out / part.name, ignore_errors=True)
    (out / f"{part.name}.json").unlink(missing_ok=True)
    env = {
        **os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "10",
    }  # fmt: skip
    peers = ROOT / "build" / "peers"
    if part.with_peers and peers.is_dir():
        paths = [os.environ.get("PYTHONPATH", ""), str(peers)]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with (out / f"{part.name}.log").open("w") as log:
        process = subprocess.Popen(
            part.command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "ran out of time"
        finally:
            _end(process)
    if code == CANNOT_RUN_HERE:
        return "left out"
    return f"failed with {code}" if code else "passed"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End all processes of a part that are left: a rank that hangs would keep its device."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)


def run_all(
    parts: Sequence[Part], out: Path, machine: dict[str, Any], *, seconds: float, again: bool
) -> dict[str, Outcome]:
    """Run parts in order, and write ``machine.json`` and ``report.md`` after each.

    Args:
        parts: what to run.
        out: the folder of the report, absolute.
        machine: what the results are of; a part is run again where it is another.
        seconds: for all of it.
        again: run what passed before, too.
    """
    deadline, path = time.monotonic() + seconds, out / "machine.json"
    out.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if path.exists() and not again else {}
    kept = before.pop("parts", {})
    kept = kept if before == machine else {}
    found: dict[str, Outcome] = {}
    for part in parts:
        known = Outcome(**kept[part.name]) if part.name in kept else None
        if known is not None and known.is_right and known.command == part.command:
            found[part.name] = known
            print(f"{part.name:<12} {known.outcome} before, not run again", flush=True)
        else:
            print(f"{part.name:<12} ", end="", flush=True)
            left = min(part.seconds, deadline - time.monotonic())
            began = time.monotonic()
            outcome = run(part, out, left) if left >= _LEAST_SECONDS else "not run"
            found[part.name] = Outcome(outcome, round(time.monotonic() - began, 1), part.command)
            print(f"{outcome}, {found[part.name].seconds:.0f} s", flush=True)
        # What a later part has from before stays, should this command be stopped.
        told = kept | {name: asdict(each) for name, each in found.items()}
        path.write_text(json.dumps({**machine, "parts": told}, indent=1) + "\n")
        (out / "report.md").write_text(report(parts, found, out, machine))
    return found


def report(
    parts: Sequence[Part], found: dict[str, Outcome], out: Path, machine: dict[str, Any]
) -> str:
    """The report, in Markdown."""
    wrong = [part for part in parts if part.name in found and not found[part.name].is_right]
    lines = ["# Convoy on GPUs", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    lines += [f"- written: {datetime.now(UTC).isoformat(timespec='seconds')}", ""]
    lines += ["| part | outcome | seconds | shows |", "|---|---|---|---|"]
    for part in parts:
        each = found.get(part.name)
        how, seconds = (each.outcome, f"{each.seconds:.0f}") if each else ("not yet run", "")
        lines.append(f"| {part.name} | {how} | {seconds} | {part.shows} |")
    lines += ["", "## What went wrong", ""]
    for part in wrong:
        how = found[part.name].outcome
        lines += [f"### {part.name}: {how}", ""]
        if how == "not run":
            lines += ["No time was left: run the same command again.", ""]
            continue
        lines += [f"What this means: {part.meaning}", "", f"Log: `{part.name}.log`. Its end:", ""]
        lines += ["```", *_last_lines(out / f"{part.name}.log", 20), "```", ""]
    if not wrong:
        lines += ["Nothing.", ""]
    lines += ["## Figures", ""]
    for part in parts:
        if part.name in found and found[part.name].outcome == "left out":
            lines += [f"{part.name} is left out: {_last_lines(out / f'{part.name}.log', 1)[0]}", ""]
        lines += _figures(part.name, out / f"{part.name}.json")
    return "\n".join(lines)


def _last_lines(log: Path, count: int) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-count:] or ["(nothing)"]


def _figures(name: str, path: Path) -> list[str]:
    """What a part measured: the rows of a bench, or the plain values of another command."""
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    lines = [f"### {name}", ""]
    if "rows" not in table:
        plain = {k: v for k, v in table.items() if isinstance(v, (str, int, float))}
        return [*lines, *(f"- {key}: {value}" for key, value in plain.items()), ""]
    lines += ["| case | subject | metric | value | share of the limit |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['case']} | {row['subject']} | {row['metric']} | {row['value']:.4g} {row['unit']} "
        f"| {row['ratio_to_limit']:.3f} |"
        for row in table["rows"]
    ]
    return [*lines, ""]


def commit() -> str:
    """The commit of this checkout, and a hash of what is changed in it; empty without git."""

    def git(*words: str) -> bytes:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True).stdout

    try:
        changes = git("diff", "HEAD")
        head = git("rev-parse", "--short=12", "HEAD").decode().strip()
    except FileNotFoundError:
        return ""
    return f"{head} with changes {hashlib.sha256(changes).hexdigest()[:8]}" if changes else head


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder of the report")
    parser.add_argument("--gpus", type=int, default=1, help="devices to use; 0 for all")
    parser.add_argument("--seconds", type=float, default=500.0, help="for all of it")
    parser.add_argument("--again", action="store_true", help="also what passed before")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    args = parser.parse_args(arguments)
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = args.gpus or there
    if not 1 <= gpus <= there:
        print(f"error: --gpus ({gpus}) must be 1 to the CUDA devices here ({there}); "
              "python -c 'import torch; torch.cuda.init()' says why there are not more",
              file=sys.stderr)  # fmt: skip
        return 2
    machine = {
        "device": torch.cuda.get_device_name(), "commit": commit(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "python": platform.python_version(),
    }  # fmt: skip
    out = args.out.resolve()
    parts = parts_of(out, gpus, quick=args.quick)
    found = run_all(parts, out, machine, seconds=args.seconds, again=args.again)
    print(f"the report: {args.out / 'report.md'}")
    return 0 if all(each.is_right for each in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
