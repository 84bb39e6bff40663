"""Everything that needs a CUDA device, in one command: its tests, and the benches that run there.

    python -m bench.gpu --out FOLDER [--megablocks] [--seconds 500]

Runs tests/test_cuda.py, then bench/moe_layer.py at the size h200 in bfloat16, bench/grouped_mm.py,
bench/float8.py and bench/train_gpu.py, each in a process of its own with what is left of the time,
and leaves their output, the benches' JSON and ``machine.json`` in FOLDER. ``--megablocks`` installs
MegaBlocks first, as ``make megablocks`` does.

Exit codes: 0 all ran and passed; 1 something failed, and the rest was run all the same; 2 there is
no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def run(name: str, command: list[str], out: Path, deadline: float) -> str:
    """Run one part and keep what it says; returns how it ended."""
    left = deadline - time.monotonic()
    if left < 10:
        return "not run: no time was left"
    log = out / f"{name}.log"
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=left, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return f"ran out of time; see {log.name}"
    return "passed" if code == 0 else f"failed with {code}; see {log.name}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=500.0, help="for all of it")
    parser.add_argument("--megablocks", action="store_true", help="install MegaBlocks first")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: there is no CUDA device", file=sys.stderr)
        return 2
    deadline = time.monotonic() + args.seconds
    args.out.mkdir(parents=True, exist_ok=True)
    python = sys.executable
    parts = {}
    if args.megablocks:
        pip = [
            python,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--no-build-isolation",
            "--no-cache-dir",
        ]
        packages = ["megablocks==0.10.0", "stanford-stk==0.7.1", "grouped_gemm==0.3.0"]
        parts["megablocks"] = run("megablocks", [*pip, *packages], args.out, deadline)
    parts["tests"] = run("tests", [python, "-m", "pytest", "-v", "tests/test_cuda.py"], args.out,
                         deadline)  # fmt: skip
    table = str((args.out / "moe_layer-h200.json").resolve())
    parts["moe_layer"] = run("moe_layer", [python, "-m", "bench.moe_layer", "--json", table],
                             args.out, deadline)  # fmt: skip
    table = str((args.out / "grouped_mm.json").resolve())
    parts["grouped_mm"] = run("grouped_mm", [python, "-m", "bench.grouped_mm", "--json", table],
                              args.out, deadline)  # fmt: skip
    table = str((args.out / "float8.json").resolve())
    parts["float8"] = run("float8", [python, "-m", "bench.float8", "--json", table], args.out,
                          deadline)  # fmt: skip
    table = str((args.out / "train_gpu.json").resolve())
    parts["train"] = run("train", [python, "-m", "bench.train_gpu", "--samples", "5", "--json",
                         table], args.out, deadline)  # fmt: skip
    machine = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "parts": parts,
    }
    (args.out / "machine.json").write_text(json.dumps(machine, indent=1) + "\n")
    for name, outcome in parts.items():
        print(f"{name}: {outcome}")
    return 0 if all(outcome == "passed" for outcome in parts.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
