"""The parts of :mod:`bench.gpu`: what runs, for how long at most, and what a failure means."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from bench.gpu_runs import QUICK
from bench.recipe_runs import RECIPE, words


@dataclass(frozen=True)
class Part:
    """One part."""

    name: str
    """Also of its files: ``NAME.log``, ``NAME.json``, and a folder that is removed before."""
    command: list[str]
    seconds: float
    """At most."""
    shows: str
    meaning: str
    """What a failure means, and what to do."""
    with_peers: bool = False
    """``build/peers`` is on the path, where it is there."""


def parts_of(out: Path, gpus: int, *, quick: bool) -> list[Part]:
    """All parts on so many devices, the most worth first.

    Args:
        out: the folder of the report, absolute.
        gpus: devices of this machine. Experts and sequences of the recipe divide by powers of two
            up to 8: the parts on several devices take the largest of those.
        quick: small sizes.
    """
    many = max(n for n in (1, 2, 4, 8) if n <= gpus)
    several = _on_several(out, many, quick) if many > 1 else []
    tests, train, *rest = _on_one(out, many, quick)
    # FSDP and EP are compared with the run of one device.
    return [tests, train, *several[:2], *rest, *several[2:]]


def _kernels() -> Part:
    files = ["tests/router/test_kernels.py", "tests/moe/test_kernels.py",
             "tests/pretrain/model/test_rotary_kernel.py"]  # fmt: skip
    return Part(
        "kernels", [sys.executable, "-m", "pytest", "-v", "-rs", *files], 180,
        "Convoy's kernels in Triton compute what plain operations do on the device",
        "a kernel is compiled wrongly for this device, or plain operations round otherwise: run "
        "the named test alone. The log says by how much the numbers differ.",
    )  # fmt: skip


def _python(out: Path, name: str, quick: bool, *command: str) -> list[str]:
    small = ["--quick"] if quick else []
    return [sys.executable, "-m", *command, *small, "--json", str(out / f"{name}.json")]


def _run_of_recipe(out: Path, name: str, gpus: int, quick: bool) -> list[str]:
    folder = str(out / "runs")
    return _python(out, name, quick, "bench.gpu_runs", name, "--folder", folder,
                   "--gpus", str(gpus))  # fmt: skip


def _on_one(out: Path, many: int, quick: bool) -> list[Part]:
    tests = [sys.executable, "-m", "pytest", "-v", "-rs", "tests/test_cuda.py"]
    if quick:
        tests += ["-k", "the_layer or backward or ordinary or two_devices"]
    steps = _python(out, "step", quick, "bench.train_gpu", "--samples", "5")
    counts = Part(
        "counts", _python(out, "counts", quick, "bench.gpu_counts"), 90,
        "kernels and waits of a layer are those that the fake GPU counts, and how long they take",
        "no failure of the layer: the profiler does not run on this device.",
    )  # fmt: skip
    return [
        Part("tests", tests, 240, "numbers on the device are those on the host; a run resumes with "
             "equal bits; the layer does not wait for the device",
             "a kernel, a dtype or a copy is wrong on this device. Nothing below can be trusted "
             "until the named test passes: run it alone with `pytest tests/test_cuda.py -k NAME`, "
             "with `CUDA_LAUNCH_BLOCKING=1` where CUDA reports an error."),
        Part("train", _run_of_recipe(out, "train", 1, quick), 120,
             "the tiny recipe trains in bfloat16 on one device, and its loss falls",
             "the trainer does not start, or does not learn, on CUDA. The log has the error; a "
             "loss that does not fall while the tests pass points at attention or the optimizer: "
             "train with `--set precision.compute=float32` beside it."),
        Part("moe_layer", _python(out, "moe_layer", quick, "bench.moe_layer"), 180,
             "time of one layer, beside dense products of equal FLOPs and installed peers",
             "an error is a shape or dtype that a kernel does not take; a peer that differs by "
             "more than 2e-2 is named. `--only natural` runs one case.", with_peers=True),
        Part("step", steps, 180, "tokens a second and model FLOPs utilization of training steps",
             "out of memory in every way to recompute: another process holds memory (nvidia-smi), "
             "or the model is too large for this device. An error in one way alone names the "
             "recomputation that fails."),
        Part("exact", _run_of_recipe(out, "exact", many, quick), 240,
             "`train.exact` gives equal bits, twice on one device or on one and on several",
             "a product's bits depend on what is beside it, or a kernel is not deterministic. See "
             "the part grouped_mm and docs/exact.md; do not use `train.exact` on this device."),
        *([] if quick else [_kernels()]),
        Part("grouped_mm", _python(out, "grouped_mm", quick, "bench.grouped_mm"), 60,
             "whether bits of a group of a grouped product depend on the other groups",
             "grouped_mm raises for a size or layout: set `moe.backend = \"loop\"`. Shares below 1 "
             "are a finding and no failure."),
        Part("float8", _python(out, "float8", quick, "bench.float8"), 90,
             "products in float8 agree with their definition, and their time",
             "the layout of the scales or the kernel is wrong here: leave `precision.experts` and "
             "`precision.dense` at their defaults."),
        *([] if quick else [counts]),
    ]  # fmt: skip


def _on_several(out: Path, many: int, quick: bool) -> list[Part]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                f"--nproc-per-node={many}"]  # fmt: skip
    burn_in = ["-m", "convoy", "burn-in", "--quick", "--folder", str(out / "burn_in"),
               "--json", str(out / "burn_in.json")]  # fmt: skip
    burnt_in = Part(
        "burn_in", [*torchrun, *burn_in], 240,
        "each device and each link computes and sends right, about as fast as its neighbours",
        "the log names the device or link. That is the machine, not Convoy: docs/burnin.md.",
    )  # fmt: skip
    return [
        Part("fsdp", _run_of_recipe(out, "fsdp", many, quick), 120,
             "FSDP over NCCL: losses and the first gradient norm are those of one device",
             "gradients are not summed, or summed twice, or parameters are gathered late. An error "
             "of NCCL at the start is the machine's: run with `NCCL_DEBUG=INFO`, see "
             "docs/troubleshooting.md."),
        Part("ep", _run_of_recipe(out, "ep", many, quick), 120,
             "expert parallelism over NCCL: losses and the first gradient norm are those of one "
             "device",
             "where fsdp passes, rows are sent to the wrong expert or back to the wrong token: the "
             "part dispatch, and `--set moe.dispatcher=all_gather` beside it, say which."),
        *([] if quick else [burnt_in]),  # it compares speeds, which small sizes have not
        Part("dispatch", _python(out, "dispatch", quick, "bench.dispatch"), 180,
             "time of dispatch and combine between devices, beside raw all-to-alls",
             "a dispatcher does not run over NCCL; the log names it. Choose another in "
             "`moe.dispatcher`."),
        Part("chaos", _chaos(out, quick), 600,
             "a killed rank, a hang, a lost machine and a slow rank: the run goes on, with the "
             "samples and losses of an undisturbed run",
             "a run does not come back after a fault that the log names; files in the folder chaos "
             "have what each rank printed. A hang that is not ended is NCCL's: look at "
             "`convoy inspect flight`."),
    ]  # fmt: skip


def _chaos(out: Path, quick: bool) -> list[str]:
    corpus = out / "runs" / ("corpus-quick" if quick else "corpus")
    settings = [f"data.path={corpus}", "eval.interval_steps=0", "sample.tokens=0",
                "metrics.port=-1", "train.exact=true", "train.timeout_seconds=120",
                "detection.end_stuck_run=true", f"detection.stuck_seconds={5 if quick else 20}",
                f"train.steps={20 if quick else 60}", *(QUICK if quick else ())]  # fmt: skip
    # With this seed the four faults are a kill, a slow rank, a hang and a lost machine.
    return [sys.executable, "-m", "convoy", "chaos", str(RECIPE), str(out / "chaos"), "--quick",
            "--seed", "67", "--json", str(out / "chaos.json"), *words(settings)]  # fmt: skip
