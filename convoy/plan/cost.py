"""Time, money and energy to a budget of tokens, with failures; and what checkpoints need."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.plan.assessment import mean_and_half_width
from convoy.plan.hardware import Cluster, DtypeName
from convoy.plan.memory import rank_parameters
from convoy.plan.scenario import Scenario
from convoy.plan.search import Plan
from convoy.plan.simulate import simulate_runs
from pretrain.checkpoint import optimal_interval
from pretrain.errors import InputError

_REPETITIONS = 24
_MOST_DAYS = 3650.0


@dataclass(frozen=True)
class Cost:
    """What a plan takes to a budget of tokens. MFU counts model FLOPs of the causal mask's pairs,
    without recomputation, against the dense peak of the dtype of compute."""

    tokens: float
    steps: float
    tokens_per_second: float
    tokens_per_day: float
    """Without failures."""
    teraflops: float
    """Model TFLOP/s of one GPU."""
    mfu: float
    effective: float
    """The share of the wall time in steps that count, by the simulator."""
    days: float
    """Wall time, failures counted."""
    gpu_hours: float
    dollars: float
    megawatt_hours: float
    checkpoint_bytes: float
    """Weights and both moments of the whole model."""
    checkpoint_interval_steps: int
    """Between two saves: by Daly's formula, in whole steps."""
    checkpoint_interval_seconds: float
    """Of these steps."""
    checkpoint_gigabytes_per_second: float
    """To shared storage, so that a save of every tenth interval ends before the next begins."""


def cost_of(plan: Plan, cluster: Cluster, tokens: float) -> Cost:
    """What ``tokens`` take with a plan, with failures at the rates of Llama 3.

    Raises InputError where the run would take longer than ten years.
    """
    work, gpus = plan.work, plan.work.topology.world
    step_tokens = work.global_batch_size * work.seq_len
    rate = step_tokens / plan.seconds
    flops = work.shape.token_flops(work.seq_len) * rate / gpus
    days = tokens / rate / 86_400
    if days > _MOST_DAYS:
        raise InputError(
            f"{tokens:,.0f} tokens (--tokens) take {days:,.0f} days on {gpus:,} GPUs: a plan is "
            f"for at most {_MOST_DAYS:,.0f} days; more --gpus or fewer tokens would do"
        )
    stored = max(rank_parameters(work, stage).stored for stage in {0, work.topology.pp - 1})
    on_gpu = stored * (work.program.parameter_bytes + 8)
    scenario = _scenario(gpus, cluster, days, on_gpu / 2**30)
    interval = optimal_interval(scenario.policy.stall, scenario.seconds_between_failures)
    interval = min(interval, scenario.run.days * 86_400)
    steps_between = max(1, round(interval / plan.seconds))  # a save is at the end of a step
    interval = steps_between * plan.seconds
    load = scenario.nodes_in_repair
    spares = round(load + 2 * load**0.5 + 0.5)
    outcome = simulate_runs(scenario, [interval], [spares])
    effective = float(mean_and_half_width(outcome.effective[0])[0])
    hours = days / effective * 24 * gpus
    # Of compute; attention is in bfloat16 even with float8.
    dtype: DtypeName = "bfloat16" if work.program.dtype == "float8" else work.program.dtype
    saved = work.shape.parameters * (work.program.parameter_bytes + 8.0)
    return Cost(
        tokens=tokens,
        steps=tokens / step_tokens,
        tokens_per_second=rate,
        tokens_per_day=rate * 86_400,
        teraflops=flops / 1e12,
        mfu=flops / cluster.chip.peak(dtype),
        effective=effective,
        days=days / effective,
        gpu_hours=hours,
        dollars=hours * cluster.dollars_per_gpu_hour,
        megawatt_hours=hours * cluster.watts_per_gpu / 1e6,
        checkpoint_bytes=saved,
        checkpoint_interval_steps=steps_between,
        checkpoint_interval_seconds=interval,
        checkpoint_gigabytes_per_second=saved / (10 * interval) / 1e9,
    )


def _scenario(gpus: int, cluster: Cluster, days: float, gib: float) -> Scenario:
    """The simulator's defaults on these GPUs, for at most 30 days: the share stays the same."""
    node = cluster.gpus_per_node if gpus % cluster.gpus_per_node == 0 else 1
    return Scenario.model_validate(
        {
            "run": {
                "gpus": gpus, "gpus_per_node": min(node, gpus),
                "days": min(max(days, 1.0), 30.0), "repetitions": _REPETITIONS,
            },
            "policy": {"state_gib_per_gpu": min(max(gib, 1e-3), 1024.0)},
        }
    )  # fmt: skip
