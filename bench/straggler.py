"""Two ranks on a core each, one shared with a noisy neighbour: what each capacity policy costs.

    python -m bench.straggler [--quick] [--json FILE] [--train]
    python -m bench.straggler --simulate [--samples SEEDS]

A MoE layer's forward and backward on 2 ranks (experts spread over both), each pinned to one core. A
process of its own computes on the second core all the time. Subjects are the policies:
``dropless``, ``fixed`` (capacity factor 1.25, rerouting), ``rerouted``, straggler_aware, and
``copies``, straggler_aware with up to 4 copies of experts. ``limit`` is the time of the undisturbed
layer over the mean of the two speeds: all work shared in proportion to what each core has left, and
nothing lost. Plans follow real measurements, step by step, through the same code as pretrain's
barrier. The subjects take turns in blocks of steps, since the stranger's own rhythm is part of the
machine.

With ``--train``, 300 steps of the tiny recipe under each policy as well, beside the same stranger:
loss, rerouted and dropped assignments, and tokens per second.

With ``--simulate``, nothing is timed: plan changes on simulated ranks, see
:mod:`bench.straggler_simulation`.

Legend: T tokens, D d_model, E experts, K top_k.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.harness import Row, arguments, finish
from bench.straggler_simulation import simulate
from moe import MoEConfig, MoELayer
from parallel import ParallelDims, Topology, all_gather_rows, apply_expert_parallel
from router import StragglerAwareCapacity, StragglerBalancer

ROOT = Path(__file__).resolve().parent.parent
SIZES: dict[str, Any] = {"d_model": 512, "d_ff": 1024, "num_experts": 16, "top_k": 4}
T = 2048
POLICIES: dict[str, dict[str, Any]] = {
    "dropless": {},
    "fixed": {"capacity": {"policy": "fixed"}},
    "rerouted": {"capacity": {"policy": "straggler_aware"}},
    "copies": {"capacity": {"policy": "straggler_aware"}, "copies": 4},
}
"""Fields of MoEConfig."""
BY_SPEED = ("rerouted", "copies")
"""The policies with plans of measured speeds."""
RANKS = 2


def burn(core: int, share: float) -> None:
    """Use that share of one core, in turns of a few milliseconds."""
    os.sched_setaffinity(0, {core})
    while True:
        until = time.perf_counter() + 0.010 * share
        while time.perf_counter() < until:
            pass
        time.sleep(0.010 * (1 - share))


class Subject:
    """One policy's layer on this rank, and what it did."""

    def __init__(self, fields: dict[str, Any], dims: ParallelDims) -> None:
        torch.manual_seed(0)
        self.config = MoEConfig(**SIZES, **fields)
        self.layer = MoELayer(self.config)
        apply_expert_parallel(self.layer, dims.ep_mesh)
        self.balance = StragglerBalancer.start(RANKS)
        self.plans = [self.balance.plan.units]
        self.moved = [0, 0, 0]

    def step(self, x_TD: torch.Tensor) -> float:
        """Forward, backward and barrier: the slower rank's seconds."""
        began = time.perf_counter()
        hidden, aux = self.layer(x_TD.detach().requires_grad_())
        (hidden.square().mean() + aux.aux_loss).backward()
        dist.barrier()
        seconds = time.perf_counter() - began
        for parameter in self.layer.parameters():
            parameter.grad = None
        self.moved[0] += int(aux.num_rerouted)
        self.moved[1] += int(aux.num_dropped)
        self.moved[2] += int(aux.num_copied)
        watch = aux.stopwatch
        rows = all_gather_rows(
            torch.tensor([float(watch.rows), watch.seconds(), seconds], dtype=torch.float64)
        )
        capacity = self.layer.router.capacity
        if isinstance(capacity, StragglerAwareCapacity):
            self.balance = self.balance.after(
                rows[:, 0].tolist(), rows[:, 1].tolist(), capacity.config
            )
            capacity.plan = self.balance.plan
            self.plans.append(self.balance.plan.units)
        return float(rows[:, 2].max())


def on_rank(rank: int, port: int, blocks: int, block_steps: int, burning: Any, out: Any) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank),
                      WORLD_SIZE=str(RANKS))  # fmt: skip
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    dims = ParallelDims.build(Topology(dp_shard=RANKS, ep=RANKS), "cpu")
    subjects = {name: Subject(fields, dims) for name, fields in POLICIES.items()}
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(T, SIZES["d_model"], generator=generator)
    free = [subjects["dropless"].step(x_TD) for _ in range(5 + 3 * block_steps)][5:]
    dist.barrier()
    if rank == 0:
        burning.set()
    time.sleep(0.5)
    for _ in range(72):  # the longest rule of the test on speeds, and some steps more
        for name in BY_SPEED:
            subjects[name].step(x_TD)
    settled = len(subjects["copies"].plans)
    speeds = subjects["copies"].balance.speeds
    for subject in subjects.values():
        subject.moved = [0, 0, 0]
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(blocks):
        for name, subject in subjects.items():
            times[name].append(statistics.median(subject.step(x_TD) for _ in range(block_steps)))
    if rank == 0:
        out.put(
            {
                "free": statistics.median(free),
                "speeds": speeds,
                "times": times,
                "plans": subjects["copies"].plans,
                "settled": settled,
                "moved": {
                    name: [count / (blocks * block_steps * T * SIZES["top_k"]) for count in s.moved]
                    for name, s in subjects.items()
                },
            }
        )
    dist.destroy_process_group()


def measure(blocks: int, block_steps: int) -> dict[str, Any]:
    """Run the ranks and the stranger."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    burning, out = context.Event(), context.Queue()
    cores = sorted(os.sched_getaffinity(0))
    ranks = [
        context.Process(target=on_rank, args=(r, port, blocks, block_steps, burning, out))
        for r in range(RANKS)
    ]
    stranger = context.Process(target=burn, args=(cores[1 % len(cores)], 1.0), daemon=True)
    for process in ranks:
        process.start()
    try:
        burning.wait(timeout=120)
        stranger.start()
        result: dict[str, Any] = out.get(timeout=600)
        for process in ranks:
            process.join(timeout=60)
        return result
    finally:
        for process in (*ranks, stranger):
            if process.pid is not None and process.is_alive():
                process.kill()
                process.join()


def report(result: dict[str, Any]) -> list[Row]:
    medians = {name: statistics.median(values) for name, values in result["times"].items()}
    fast, slow = sorted(result["speeds"], reverse=True)
    ideal = result["free"] * 2 / (1 + slow / fast)
    print(f"the slower rank has {slow / fast:.2f} of the other's speed")
    units = [plan[1] for plan in result["plans"]]
    changes = [i for i in range(1, len(units)) if units[i] != units[i - 1]]
    early = [i for i in changes if i < result["settled"]]
    print(
        f"its share: {units[-1] / 1024:.2f} of the mean; plans changed at steps {early} of the "
        f"first {result['settled'] - 1}, and {len(changes) - len(early)} times in the "
        f"{len(units) - result['settled']} after"
    )
    for name in BY_SPEED:
        gain = (medians["dropless"] - medians[name]) / (medians["dropless"] - ideal)
        print(f"{name}: {gain:.0%} of the ideal gain")
    for name, (rerouted, dropped, copied) in result["moved"].items():
        print(f"{name}: {rerouted:.1%} rerouted, {dropped:.1%} dropped, {copied:.1%} copied")
    rows = [
        Row("half a core", name, "step_seconds", value, "s", ideal / value, result["times"][name])
        for name, value in medians.items()
    ]
    return [Row("half a core", "limit", "step_seconds", ideal, "s", 1.0, [ideal]), *rows]


def train(name: str, fields: dict[str, Any], folder: Path, steps: int) -> None:
    """The tiny recipe beside the stranger; prints its loss and what moved."""
    run_dir = folder / name
    settings = [f"run_dir={run_dir}", f"train.steps={steps}", "eval.interval_steps=0",
                "metrics.port=-1", f"checkpoint.interval_steps={steps}", "sample.tokens=0",
]  # fmt: skip
    capacity = fields.get("capacity", {})
    settings += [f"moe.capacity.{key}={value}" for key, value in capacity.items()]
    settings.append(f"moe.copies={fields.get('copies', 0)}")
    recipe = [str(ROOT / "tools/pretrain.py"), str(ROOT / "tools/recipes/stdlib-tiny.toml")]
    with_settings = [part for setting in settings for part in ("--set", setting)]
    cores = sorted(os.sched_getaffinity(0))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    stranger = multiprocessing.get_context("spawn").Process(
        target=burn, args=(cores[1 % len(cores)], 0.5), daemon=True
    )
    stranger.start()
    try:
        ranks = []
        for rank in range(RANKS):
            environment = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS),
                "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            core = cores[rank % len(cores)]
            ranks.append(
                subprocess.Popen(
                    ["taskset", "-c", str(core), sys.executable, *recipe, *with_settings],
                    cwd=ROOT, env=environment, stdout=subprocess.DEVNULL,
                )
            )  # fmt: skip
        codes = [process.wait(timeout=1800) for process in ranks]
    finally:
        stranger.kill()
        stranger.join()
    assert codes == [0] * RANKS, f"{name} ended with {codes}"
    events = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    intervals = [e for e in events if e["event"] == "interval"]
    losses = [e["loss"] for e in events if e["event"] == "step"][-20:]
    summary = json.loads((run_dir / "summary.json").read_text())
    plans = [e["step"] for e in events if e["event"] == "capacity_plan"]
    assignments = summary["tokens"] * 2 * len(summary["moe_layers"])
    moved = {key: sum(e[key] for e in intervals) for key in ("rerouted", "dropped")}
    print(
        f"{name}: after {steps} steps loss {statistics.mean(losses):.4f} (mean of the last 20), "
        f"{summary['val_bits_per_byte']:.4f} bits per byte of held-out text, "
        f"{summary['tokens_per_second']:,.0f} tokens/s, "
        f"{moved['rerouted'] / assignments:.1%} rerouted, {moved['dropped'] / assignments:.1%} "
        f"dropped; new plans after steps {plans}"
    )


def main() -> None:
    extra, simulated = "--train" in sys.argv, "--simulate" in sys.argv
    sys.argv = [a for a in sys.argv if a not in ("--train", "--simulate")]
    args = arguments(__doc__ or "")
    if simulated:
        simulate(args.samples)
        return
    blocks, block_steps = (3, 5) if args.quick else (args.samples, 10)
    rows = report(measure(blocks, block_steps))
    finish("straggler", rows, ["torch"], args.json)
    if extra:
        with tempfile.TemporaryDirectory() as folder:
            for name, fields in POLICIES.items():
                train(name, fields, Path(folder), 300)


if __name__ == "__main__":
    main()
