"""A spec with the layout of a plan in it."""

from __future__ import annotations

from pretrain.errors import InputError
from pretrain.plan.hardware import load_cluster
from pretrain.plan.search import Plan, no_layout, search_layouts
from pretrain.spec import JobSpec, resolve_spec


def without_auto(spec: JobSpec) -> JobSpec:
    """``spec`` with ``plan.auto`` off: layouts can be tried on this spec."""
    return spec.model_copy(update={"plan": spec.plan.model_copy(update={"auto": False})})


def spec_with_plan(spec: JobSpec, plan: Plan) -> JobSpec:
    """``spec`` with the layout of ``plan``, fixed: every degree is a number, and ``plan.auto`` is
    off.

    Raises InputError where a rule of the spec refuses the plan.
    """
    data, work = spec.as_dict(), plan.work
    parallel = data["parallel"] | work.topology.as_dict()
    if work.topology.pp > 1:
        parallel["pipeline"] |= {
            "schedule": work.schedule, "stages_per_rank": work.stages_per_rank
        }  # fmt: skip
    parallel["memory"] |= {
        "zero_stage": work.zero_stage, "recompute": work.recompute,
        "recompute_layer_freq": work.recompute_layer_freq,
    }  # fmt: skip
    data["parallel"] = parallel
    data["batch"]["micro_batch_size"] = work.micro_batch_size
    data["plan"]["auto"] = False
    return resolve_spec(data, f"the plan {plan.describe()}")


def automatic(spec: JobSpec, world: int, ranks_per_node: int) -> tuple[JobSpec, Plan]:
    """The spec with the best layout on ``world`` ranks that its rules take, and the plan.

    A pure function: every rank finds the same layout.

    Args:
        spec: with ``plan.auto`` and a cluster.
        world: the number of ranks.
        ranks_per_node: in the place of the cluster's ``gpus_per_node``.

    Raises InputError where the cluster cannot be read, or no layout fits.
    """
    assert spec.plan.cluster is not None
    cluster = load_cluster(spec.plan.cluster, "plan.cluster")
    cluster = cluster.model_copy(update={"gpus_per_node": ranks_per_node})
    cluster.chip.peak(spec.precision.compute)  # a cluster without this dtype is told at once
    spec = without_auto(spec)
    found = search_layouts(spec, world, cluster, spec.plan.imbalance)
    if not found.best:
        raise no_layout(found, world, cluster)
    for plan in found.best:
        try:
            return spec_with_plan(spec, plan), plan
        except InputError as error:
            refused = error
    raise refused
