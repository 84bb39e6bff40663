"""``convoy plan``: layout, memory, days and dollars of a run, before it starts."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convoy.commands.parsing import (
    Command,
    argument,
    flag,
    is_first_rank,
    json_file,
    overrides,
)
from convoy.commands.results import check_picture, check_writable, provenance, write_json
from pretrain.errors import EXIT_LOST, InputError
from pretrain.observe import complain, say

if TYPE_CHECKING:
    from convoy.plan import Cluster, LoadProfile, Plan
    from pretrain.spec import JobSpec

_CALIBRATION_TIMEOUT_SECONDS = 600.0
_IMBALANCE = "1.1"
_EPILOG = """\
examples:
  convoy plan tools/recipes/mixtral-8x7b.toml --cluster h100 --gpus 128
  convoy plan tools/recipes/deepseek-v3.toml --cluster h800 --gpus 2048 --json plan.json
  convoy plan mine.toml --cluster my-cluster.toml --layout pp=2,ep=8 --tokens 2e12
  convoy plan mine.toml --cluster h100 --gpus 64 --write planned.toml
  convoy plan mine.toml --cluster h100 --gpus 64 --layout ep=8 --loads zipf:1.2
  torchrun --nproc-per-node 2 -m convoy plan --calibrate here.toml
  convoy plan --validate

Without --layout the best layouts are searched for. --layout takes AXIS=DEGREE pairs, and the spec's
own layout with an empty string; dp_shard takes the GPUs that are left over. Micro-batch, schedule,
ZeRO stage and recomputation are then those of the spec. A layout above the memory is shown; nothing
is written for it where it is above by more than the planner's error.

exit codes:
  0  the plan was shown
  1  with --validate: a bound is missed
  2  the spec, the cluster or the layout cannot be used, or nothing fits
  75 stopped
"""


def _validate(args: argparse.Namespace) -> int:
    from convoy.plan import compare, missed_bounds, validation_table

    rows = compare()
    say(validation_table(rows))
    published = [
        {"group": r.group.name, "run": r.run.name, "kind": r.group.kind,
         "published_teraflops": r.run.teraflops, "planned_teraflops": r.planned,
         "error": r.error, "tuned": r.run.tuned,
         "seconds": r.step.as_dict()}
        for r in rows
    ]  # fmt: skip
    write_json(args.json, {"bench": "planning", **provenance(), "rows": published})
    missed = missed_bounds(rows)
    for line in missed:
        complain(line)
    return EXIT_LOST if missed else 0


def _calibrate(args: argparse.Namespace) -> int:
    """Measure on all ranks that torchrun has started, or in this process; rank 0 writes."""
    check_writable("--calibrate", args.calibrate)
    if args.spec is not None:
        raise InputError(f"SPEC ({args.spec}) must be left out with --calibrate: no run is planned")
    import tomli_w
    import torch.distributed as dist

    from convoy.plan import calibrate, load_cluster
    from pretrain.runtime import join_ranks, rank_device

    device = rank_device()
    if device.type == "cuda" and args.cluster is None:
        raise InputError("--calibrate needs --cluster on GPUs: peaks and prices are not measured")
    base = load_cluster(args.cluster or "cpu")
    join_ranks(device, _CALIBRATION_TIMEOUT_SECONDS)
    try:
        measured = calibrate(base, device)
    finally:
        dist.destroy_process_group()
    if is_first_rank():
        about = provenance("torch")
        heading = (
            f"# {base.name}, measured {about['date']} with torch {about['versions']['torch']}.\n"
        )
        args.calibrate.write_text(heading + tomli_w.dumps(measured.model_dump(mode="json")))
        peaks = ", ".join(f"{k} {v:.3g} TFLOP/s" for k, v in measured.chip.peak_teraflops.items())
        say(f"{peaks}; written to {args.calibrate}: convoy plan SPEC --cluster {args.calibrate}")
    return 0


def _plan(args: argparse.Namespace) -> int:
    import convoy.plan as planner
    from pretrain.spec import load_spec

    cluster = planner.load_cluster(args.cluster)
    gpus = cluster.gpus if args.gpus is None else int(_number("--gpus", args.gpus, is_whole=True))
    named = [] if args.layout is None else _overrides(args.layout)
    spec = planner.unplanned(load_spec(args.spec, [*args.overrides, *named]))
    loads = _loads(args, spec, cluster)
    imbalance = loads or _number("--imbalance", args.imbalance or _IMBALANCE)
    S = spec.data.seq_len
    tokens: float = spec.batch.samples_of(spec.train.steps, S) * S
    if args.tokens is not None:
        tokens = _number("--tokens", args.tokens)
    check_writable("--json", args.json)
    check_writable("--write", args.write)
    if args.draw is not None:
        check_picture("--draw", args.draw)
    cluster.chip.peak(spec.precision.compute)  # a cluster without this dtype is told at once
    known = planner.accuracy_of(spec.moe is not None, cluster)
    if args.layout is not None:
        plans = [planner.plan_of(spec, gpus, cluster, imbalance)]
        _check_memory(plans[0], cluster)
    else:
        search = planner.search_layouts(spec, gpus, cluster, imbalance)
        if not search.best:
            raise planner.no_layout(search, gpus, cluster)
        plans = search.best
        say(planner.plans_table(plans))
        say("")
        for line in planner.reasons(plans[0], plans[1:]):
            say(line)
        say(planner.why_others_lose(search))
        say(planner.accuracy_lines(plans, known, cluster))
        say("")
    costs = [planner.cost_of(plan, cluster, tokens) for plan in plans]
    say(planner.plan_lines(plans[0], costs[0], cluster))
    gains = []
    if loads is not None:
        work = plans[0].work
        gains = planner.gains_of(work, cluster) if work.topology.ep > 1 else []
        say("")
        say(planner.gains_lines(work, gains, cluster))
    if args.layout is not None:
        say(planner.accuracy_lines(plans, known, cluster))
        if plans[0].memory.total > cluster.chip.memory_bytes:
            said = f"planned memory may be off by {planner.MEMORY_ERROR:.0%}"
            say(f"warning: {_above_memory(plans[0], cluster)}; {said}")
    if args.write is not None:
        import tomli_w

        data = planner.spec_with_plan(spec, plans[0]).model_dump(mode="json", exclude_none=True)
        args.write.write_text(tomli_w.dumps(data))
    if args.draw is not None:
        planner.draw_layout(plans[0].work.topology, cluster.gpus_per_node, args.draw)
    copies = {} if loads is None else {
        "loads": loads.source, "copies": [asdict(gain) for gain in gains],
    }  # fmt: skip
    write_json(args.json, {
        **provenance(), "cluster": cluster.model_dump(), "gpus": gpus, "spec": spec.as_dict(),
        "accuracy": known.as_dict(), **copies,
        "plans": [_document(plan, asdict(cost)) for plan, cost in zip(plans, costs, strict=True)],
    })  # fmt: skip
    return 0


def _loads(args: argparse.Namespace, spec: JobSpec, cluster: Cluster) -> LoadProfile | None:
    """The loads of ``--loads``. Raises InputError where they cannot be used."""
    from convoy.plan import load_profile

    if args.loads is None:
        return None
    if args.imbalance is not None:
        raise InputError(
            f"--imbalance ({args.imbalance}) must be left out with --loads ({args.loads}), which "
            f"says how uneven ranks are"
        )
    if spec.moe is None:
        raise InputError(f"--loads ({args.loads}) must be left out: the spec has no [moe]")
    return load_profile(args.loads, spec.moe.num_experts, spec.moe.top_k, cluster.gpus_per_node)


def _overrides(layout: str) -> list[str]:
    """``--layout`` as overrides of the spec, which is checked with the layout only."""
    from convoy.plan import fields_of_no_axis
    from parallel.layout import parse_topology

    if not layout:
        return ["plan={}"]
    try:
        parse_topology(layout)
    except ValueError as error:
        raise InputError(f"--layout: {error}") from None
    degrees = dict(pair.replace(" ", "").split("=") for pair in layout.split(","))
    overrides = [f"parallel.{name}={degree}" for name, degree in degrees.items()]
    reset = fields_of_no_axis({name: int(degree) for name, degree in degrees.items()})
    overrides += [f"parallel.{name}={json.dumps(value)}" for name, value in reset.items()]
    return ["plan={}", "parallel.dp_shard=-1", *overrides]


def _check_memory(plan: Plan, cluster: Cluster) -> None:
    """Show a layout that a person named, and raise InputError, where the layout is above the memory
    by more than the planner's error."""
    from convoy.plan import MEMORY_ERROR, plan_lines

    if plan.memory.total > cluster.chip.memory_bytes * (1 + MEMORY_ERROR):
        say(plan_lines(plan, None, cluster))
        raise InputError(_above_memory(plan, cluster))


def _above_memory(plan: Plan, cluster: Cluster) -> str:
    from convoy.plan import hot_rank

    if said := hot_rank(plan.work, plan.describe(), cluster):
        return said
    memory, available = plan.memory, cluster.chip.memory_bytes / 2**30
    name = memory.largest()
    return (
        f"{plan.describe()} needs {memory.total / 2**30:.1f} GiB of {available:.1f} GiB on a GPU "
        f"of {cluster.name}; the largest part is {name} ({memory.as_dict()[name] / 2**30:.1f} "
        f"GiB); without --layout a layout that fits is searched for"
    )


def _number(option: str, text: str, *, is_whole: bool = False) -> float:
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        value = float("nan")
    if not 1 <= value < 1e18 or (is_whole and value != int(value)):
        kind = "a whole number" if is_whole else "a number"
        raise InputError(f"{option} ({text}) must be {kind} of at least 1")
    return value


def _document(plan: Plan, cost: dict[str, float]) -> dict[str, Any]:
    return {
        "parallel": plan.parallel.model_dump(mode="json"),
        "micro_batch_size": plan.work.micro_batch_size,
        "memory_bytes": plan.memory.as_dict(),
        "step_seconds": plan.seconds,
        "seconds": plan.step.as_dict(),
        "cost": cost,
    }


def _act(args: argparse.Namespace) -> int:
    if args.calibrate is not None:
        return _calibrate(args)
    return _validate(args) if args.validate else _plan(args)


def _check(args: argparse.Namespace) -> None:
    if args.calibrate is None and not args.validate and (args.spec is None or args.cluster is None):
        raise InputError("convoy plan needs SPEC and --cluster")


main = Command(
    "convoy plan",
    "Plan a run: the best layouts, memory and time by part, days, dollars and energy.",
    _EPILOG,
    [
        argument("spec", "SPEC", "a job spec", nargs="?", type=Path),
        argument("--cluster", "NAME_OR_FILE", "a cluster file, or the name of a shipped one"),
        argument("--gpus", "N", "GPUs; by default all of the cluster's"),
        argument("--tokens", "N", "tokens to train on; by default the steps of the spec"),
        argument("--layout", "AXIS=N,...", "plan this layout in place of a search"),
        argument("--imbalance", "X", "rows of the busiest rank's experts as a multiple of the mean "
                 f"({_IMBALANCE})"),
        argument("--loads", "PROFILE", "loads of experts, in place of --imbalance: zipf:EXPONENT, "
                 "a routing trace, or a run's log.jsonl or summary.json; says what moe.copies "
                 "would gain"),
        overrides(),
        json_file("plans"),
        argument("--write", "FILE", "write the spec with the best layout, as TOML", type=Path),
        argument("--draw", "FILE", "draw the best layout over nodes and ranks: *.svg, *.png or "
                 "*.pdf; needs matplotlib", type=Path),
        argument("--calibrate", "FILE", "measure this machine, write --cluster with its rates to "
                 "FILE, and end", type=Path),
        flag("--validate", "compare the planner with published runs, and end"),
    ],
    _act,
    stopped="nothing was written",
    check=_check,
)  # fmt: skip
