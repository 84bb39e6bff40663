"""A search over layouts: the best ones, and why others lose.

The rules are those of the spec: every plan has the whole ``[parallel]`` section that
:func:`convoy.plan.spec_with_plan` writes, and :meth:`pretrain.spec.JobSpec.with_layout` has taken
that section with the plan's micro-batch. Of the layouts that keep the rules, those whose
memory fits are timed, in the order of a time that they cannot beat: without recomputation and
without data parallelism's communication. The search ends where that time is above the best five.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import ValidationError

from convoy.plan.gains import hot_rank
from convoy.plan.hardware import Cluster, load_cluster
from convoy.plan.loads import LoadProfile
from convoy.plan.memory import Memory, memory
from convoy.plan.shape import ModelShape
from convoy.plan.step_time import StepTime, least_seconds, step_time
from convoy.plan.work import Program, Recompute, Work
from moe import MoEConfig
from parallel import ParallelConfig
from parallel.layout import Topology, divisors
from pretrain.errors import InputError
from pretrain.spec import JobSpec, PlanConfig, resolve_spec

IMBALANCE = 1.1
"""Rows of the busiest rank's experts as a multiple of the mean, where nothing else is said."""
_MOST_TIMED = 6000
"""Layouts that a search times: 5 to 10 seconds on one CPU core."""
_SCHEDULES = (("1f1b", 1), ("1f1b", 2), ("1f1b", 4), ("1f1b", 8), ("zbv", 2), ("dualpipev", 2))


@dataclass(frozen=True)
class Plan:
    """One layout with what it takes."""

    work: Work
    parallel: ParallelConfig
    """The ``[parallel]`` section that trains the plan."""
    memory: Memory
    step: StepTime

    @property
    def seconds(self) -> float:
        """Of one step."""
        return self.step.total

    @property
    def degrees(self) -> tuple[int, ...]:
        """What tells one plan from another among the best: pp, cp, tp and ep."""
        t = self.work.topology
        return t.pp, t.cp, t.tp, t.ep

    def describe(self) -> str:
        """The layout for people."""
        w, parts = self.work, [self.work.topology.describe()]
        parts.append(f"micro_batch_size={w.micro_batch_size}")
        if w.topology.pp > 1:
            parts.append(f"schedule={w.schedule} stages_per_rank={w.stages_per_rank}")
        parts.append(f"zero_stage={w.zero_stage} recompute={w.recompute}")
        return " ".join(parts)


@dataclass
class Found:
    """What a search found."""

    best: list[Plan] = field(default_factory=list)
    layouts: int = 0
    """Layouts that keep the rules."""
    timed: int = 0
    too_large: int = 0
    """Layouts of which no micro-batch, recomputation and ZeRO stage fits the memory."""
    refused: Counter[str] = field(default_factory=Counter)
    """By rule: how many layouts it refuses."""
    refused_variants: Counter[str] = field(default_factory=Counter)
    """The same of micro-batches, schedules, ZeRO stages and recomputations of the other layouts."""
    slower: int = 0
    """Layouts whose bound is above the best."""
    nearest: Plan | None = None
    """Of the layouts that do not fit: the one that needs the least memory."""
    complete: bool = True
    """Whether the search ended by itself."""


def program_of(spec: JobSpec) -> Program:
    """How Convoy trains a spec."""
    moe = spec.moe
    chunks = 1 if moe is None else moe.overlap_chunks
    return Program(
        dtype=spec.precision.compute,
        fused_elementwise=spec.train.compile,
        hides_dispatch=0.0 if chunks == 1 else 1 - 1 / chunks,
        sends_once_per_node=moe is not None and moe.dispatcher_traits.once_per_node,
        experts_float8=spec.precision.experts == "float8",
        dense_float8=spec.precision.dense == "float8",
        optimizer=spec.optimizer,
    )


def work_of(spec: JobSpec, world: int, imbalance: float | LoadProfile = 1.0) -> Work:
    """A spec's own layout on ``world`` ranks. Raises InputError where the layout cannot be."""
    return _work(spec, spec.topology(world), ModelShape.of(spec.model, spec.moe), imbalance)


def _work(
    spec: JobSpec, topology: Topology, shape: ModelShape, imbalance: float | LoadProfile
) -> Work:
    parallel, factor, lossless, reroutes, refused = spec.parallel, 0.0, False, False, ""
    even = spec.moe is None or isinstance(imbalance, LoadProfile)
    if spec.moe is not None:
        factor = getattr(spec.moe.capacity, "capacity_factor", 0.0)
        lossless = spec.moe.capacity.traits.lossless_with_copies
        reroutes = getattr(spec.moe.capacity, "drop_policy", "reroute") == "reroute"
        refused = _why_no_copies(spec.moe)
    return Work(
        shape=shape,
        topology=topology,
        seq_len=spec.data.seq_len,
        global_batch_size=spec.batch.global_batch_size,
        micro_batch_size=spec.batch.micro_batch_size,
        schedule=parallel.pipeline.schedule.value,
        stages_per_rank=parallel.pipeline.stages_per_rank,
        zero_stage=parallel.memory.zero_stage,
        recompute=parallel.memory.recompute,
        recompute_layer_freq=parallel.memory.recompute_layer_freq,
        imbalance=1.0 if even else cast(float, imbalance),
        capacity_factor=factor,
        reroutes=reroutes,
        lossless_with_copies=lossless,
        copies_refused=refused,
        loads=imbalance if isinstance(imbalance, LoadProfile) else None,
        copies=0 if spec.moe is None else spec.moe.copies,
        program=program_of(spec),
    )


def _why_no_copies(moe: MoEConfig) -> str:
    """The rule by which a spec takes no copies; empty where it takes them."""
    try:
        type(moe).model_validate(moe.model_dump() | {"copies": max(moe.copies, 1)})
    except ValidationError as error:
        return error.errors()[0]["msg"].removeprefix("Value error, ")
    return ""


def plan_of(
    spec: JobSpec, world: int, cluster: Cluster, imbalance: float | LoadProfile = 1.0
) -> Plan:
    """The plan of a spec's own layout, whether it fits the memory or not. ``imbalance`` has the
    rows of the busiest rank's experts as a multiple of the mean, or the loads of all experts.

    Raises InputError where the layout cannot be.
    """
    work = work_of(spec, world, imbalance)
    spec.check_nodes(work.topology, min(cluster.gpus_per_node, world))
    used = memory(work, cluster.chip)
    return Plan(work, parallel_of(spec, work), used, step_time(work, cluster))


def parallel_of(spec: JobSpec, work: Work) -> ParallelConfig:
    """The ``[parallel]`` section of ``spec`` with the layout of ``work``, and with the fields that
    depend on the layout, see :func:`fields_of_no_axis`.

    Raises ValueError where a rule between fields of the section refuses the layout.
    """
    data = spec.parallel.model_dump() | work.topology.as_dict()
    data |= fields_of_no_axis(work.topology.as_dict())
    if work.topology.pp > 1:
        data["pipeline"] = {"schedule": work.schedule, "stages_per_rank": work.stages_per_rank}
    data["memory"] |= {
        "zero_stage": work.zero_stage, "recompute": work.recompute,
        "recompute_layer_freq": work.recompute_layer_freq,
    }  # fmt: skip
    return ParallelConfig.model_validate(data)


def fields_of_no_axis(degrees: Mapping[str, int]) -> dict[str, Any]:
    """The fields of ``[parallel]`` that must have their defaults where an axis has one rank: one
    stage has no schedule, and one replica compresses no sums."""
    fields: dict[str, Any] = {}
    if degrees.get("pp") == 1:
        fields["pipeline"] = {}
    if degrees.get("dp_replicate") == 1:
        fields["gradient_compression"] = "none"
    return fields


def search_layouts(
    spec: JobSpec, world: int, cluster: Cluster, imbalance: float | LoadProfile = 1.0
) -> Found:
    """The best five layouts on ``world`` ranks, of different pp, cp, tp or ep. ``imbalance`` as in
    :func:`plan_of`."""
    result = Found()
    candidates = sorted(
        _candidates(spec, world, cluster, imbalance, result), key=lambda candidate: candidate[0]
    )
    best: dict[tuple[int, ...], Plan] = {}
    fits: set[Topology] = set()
    seen: set[Topology] = set()
    for number, (bound, work) in enumerate(candidates):
        ranking = sorted(plan.seconds for plan in best.values())
        if len(ranking) >= 5 and bound >= ranking[4]:
            result.slower = len(candidates) - number
            break
        if result.timed >= _MOST_TIMED:
            result.complete = False
            break
        seen.add(work.topology)
        for sized, parallel, used in _fitting(spec, work, cluster, result):
            fits.add(work.topology)
            result.timed += 1
            plan = Plan(sized, parallel, used, step_time(sized, cluster))
            key = plan.degrees
            if key not in best or plan.seconds < best[key].seconds:
                best[key] = plan
    result.too_large = len(seen - fits)
    result.best = sorted(best.values(), key=lambda plan: plan.seconds)[:5]
    return result


def _fitting(
    spec: JobSpec, work: Work, cluster: Cluster, result: Found
) -> Iterator[tuple[Work, ParallelConfig, Memory]]:
    """For each ZeRO stage the least recomputation that the spec takes and that fits: more of it
    only costs time."""
    chip = cluster.chip
    shards = work.topology.fsdp > 1 or work.topology.efsdp > 1
    for zero in (1, 2, 3) if shards else (3,):
        for how, freq in _recomputations(spec):
            sized = work.with_(zero_stage=zero, recompute=how, recompute_layer_freq=freq)
            used = memory(sized, chip)
            fits = used.total <= chip.memory_bytes
            nearer = result.nearest is None or used.total < result.nearest.memory.total
            if not fits and not nearer:
                continue
            parallel = _taken(spec, sized, cluster, result)
            if parallel is None:
                continue
            if fits:
                yield sized, parallel, used
                break
            result.nearest = Plan(sized, parallel, used, _NOTHING)


def _recomputations(spec: JobSpec) -> list[tuple[Recompute, int]]:
    """What is recomputed, and of which layers: in the order of what it costs."""
    freq = spec.parallel.memory.recompute_layer_freq
    some: tuple[int, ...] = (freq, 1) if freq > 1 else (1,)
    return [
        ("none", 1),
        *(("selective", freq) for freq in some),
        *(("full", each) for each in some),
    ]


def _taken(spec: JobSpec, work: Work, cluster: Cluster, result: Found) -> ParallelConfig | None:
    """The ``[parallel]`` section of ``work``; None where a rule of the spec refuses it."""
    try:
        parallel = parallel_of(spec, work)
        spec.with_layout(
            parallel, work.micro_batch_size, work.topology.world, cluster.gpus_per_node
        )
    except ValueError as error:
        result.refused_variants[_rule(str(error))] += 1
        return None
    return parallel


_NOTHING = StepTime(*(0.0,) * 12)


def _candidates(
    spec: JobSpec, world: int, cluster: Cluster, imbalance: float | LoadProfile, result: Found
) -> Iterator[tuple[float, Work]]:
    """Layouts whose degrees keep the rules, each with a time that it cannot beat."""
    shape = ModelShape.of(spec.model, spec.moe)
    across, most = spec.parallel.tp_across_nodes, spec.parallel.max_nodes_per_token
    for degrees in _degree_choices(spec, world, cluster):
        options = {"tp_across_nodes": across, "max_nodes_per_token": most}
        parallel = ParallelConfig.model_validate(degrees | options)
        try:
            spec.with_layout(parallel, 1, world, cluster.gpus_per_node)
        except ValueError as error:
            result.refused[_rule(str(error))] += 1
            continue
        result.layouts += 1
        topology = Topology(**degrees)
        for mb in _micro_batches(spec, topology):
            for schedule, stages in _SCHEDULES if topology.pp > 1 else (("1f1b", 1),):
                if topology.pp * stages > shape.num_layers:
                    continue
                work = _work(spec, topology, shape, imbalance).with_(
                    micro_batch_size=mb, schedule=schedule, stages_per_rank=stages
                )
                yield least_seconds(work, cluster), work


def _rule(message: str) -> str:
    """The field that a message begins with, without its value."""
    return message.partition(" (")[0]


def _degree_choices(spec: JobSpec, world: int, cluster: Cluster) -> Iterator[dict[str, int]]:
    """Degrees that multiply to ``world``.

    Only what cannot be best is left out: tensor parallelism over nodes (``tp_across_nodes`` aside),
    context parallelism of sequences that a micro-batch of one fits without (below 4,096 tokens on
    a rank), and more ranks of data parallelism than sequences.
    """
    node = world if spec.parallel.tp_across_nodes else cluster.gpus_per_node
    longest = max(1, spec.data.seq_len // 4096)
    for pp in divisors(world):
        if pp > spec.model.num_layers:
            break
        for tp in (d for d in divisors(world // pp) if d <= node):
            for cp in (d for d in divisors(world // pp // tp) if d <= longest):
                data = world // pp // tp // cp
                if data > spec.batch.global_batch_size:
                    continue
                for dp_replicate in divisors(data):
                    inner = world // pp // dp_replicate
                    experts = 1 if spec.moe is None else spec.moe.num_experts
                    for ep in (d for d in divisors(inner) if d <= experts):
                        yield {
                            "pp": pp, "dp_replicate": dp_replicate, "cp": cp, "tp": tp, "ep": ep,
                            "dp_shard": data // dp_replicate,
                        }  # fmt: skip


def _micro_batches(spec: JobSpec, topology: Topology) -> Iterator[int]:
    sequences = spec.batch.global_batch_size // (topology.dp_replicate * topology.dp_shard)
    size = 1
    while size <= min(sequences, 16):
        yield size
        size *= 2


def no_layout(result: Found, world: int, cluster: Cluster) -> InputError:
    """Why nothing fits, in one line: the rule, or the part of memory that is too large."""
    if result.nearest is None:
        refused = result.refused + result.refused_variants
        rules = ", ".join(f"{rule} ({count:,})" for rule, count in refused.most_common(3))
        return InputError(
            f"no layout of {world:,} GPUs keeps the rules of the spec; refused by {rules or 'all'}"
        )
    plan, chip = result.nearest, cluster.chip
    if said := hot_rank(plan.work, plan.describe(), cluster):
        return InputError(f"the model fits on no layout of {world:,} GPUs: {said}")
    largest = plan.memory.largest()
    size = plan.memory.as_dict()[largest]
    state = plan.memory.weights + plan.memory.gradients + plan.memory.optimizer
    times = state / chip.memory_bytes
    hint = (
        f"about {world * -(-plan.memory.total // chip.memory_bytes):,.0f} GPUs would fit the state"
        if times > 0.5
        else "a shorter data.seq_len or a smaller batch.micro_batch_size would fit"
    )
    return InputError(
        f"the model fits on no layout of {world:,} GPUs of {cluster.name}: the smallest needs "
        f"{plan.memory.total / 2**30:.1f} GiB of {chip.memory_bytes / 2**30:.1f} GiB on a GPU, and "
        f"its largest part is {largest} ({size / 2**30:.1f} GiB) with {plan.describe()}; {hint}"
    )


def unplanned(spec: JobSpec) -> JobSpec:
    """``spec`` without ``plan.cluster``: layouts can be tried on this spec."""
    return spec.model_copy(update={"plan": PlanConfig()})


def spec_with_plan(spec: JobSpec, plan: Plan) -> JobSpec:
    """``spec`` with the layout of ``plan``, fixed: every degree is a number, and there is no
    ``plan.cluster``.

    Raises InputError where a rule of the spec refuses the plan.
    """
    data = spec.as_dict()
    data["parallel"] = plan.parallel.model_dump(mode="json")
    data["batch"]["micro_batch_size"] = plan.work.micro_batch_size
    data["plan"] = {}
    return resolve_spec(data, f"the plan {plan.describe()}")


def automatic(spec: JobSpec, world: int, ranks_per_node: int) -> tuple[JobSpec, Plan]:
    """The spec with the best layout on ``world`` ranks, and the plan.

    A pure function: every rank finds the same layout.

    Args:
        spec: with ``plan.cluster``.
        world: the number of ranks.
        ranks_per_node: in the place of the cluster's ``gpus_per_node``.

    Raises InputError where the cluster cannot be read, or no layout fits.
    """
    assert spec.plan.cluster is not None
    cluster = load_cluster(spec.plan.cluster, "plan.cluster")
    cluster = cluster.model_copy(update={"gpus_per_node": ranks_per_node})
    cluster.chip.peak(spec.precision.compute)  # a cluster without this dtype is told at once
    spec = unplanned(spec)
    result = search_layouts(spec, world, cluster, IMBALANCE)
    if not result.best:
        raise no_layout(result, world, cluster)
    return spec_with_plan(spec, result.best[0]), result.best[0]
