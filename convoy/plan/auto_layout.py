"""A spec with the layout of a plan in it."""

from __future__ import annotations

from convoy.plan.hardware import load_cluster
from convoy.plan.search import IMBALANCE, Plan, no_layout, search_layouts
from pretrain.spec import JobSpec, PlanConfig, resolve_spec


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
    found = search_layouts(spec, world, cluster, IMBALANCE)
    if not found.best:
        raise no_layout(found, world, cluster)
    return spec_with_plan(spec, found.best[0]), found.best[0]
