"""What a run will cost, before it starts."""

from typing import TYPE_CHECKING

from parallel.on_demand import on_demand
from pretrain.plan.failures import (
    DEVICE_HOURS_PER_FAILURE,
    erlang_b,
    expected_run_seconds,
    optimal_interval,
    young_interval,
)

if TYPE_CHECKING:
    from pretrain.plan.accuracy import MEMORY_ERROR, Accuracy, accuracy_of
    from pretrain.plan.assessment import Assessment, Choice, assess
    from pretrain.plan.auto_layout import automatic, spec_with_plan, without_auto
    from pretrain.plan.calibration import calibrate
    from pretrain.plan.cost import Cost, cost_of
    from pretrain.plan.hardware import Cluster, load_cluster, shipped_clusters
    from pretrain.plan.layout_picture import draw_layout
    from pretrain.plan.plan_tables import (
        accuracy_lines,
        plan_lines,
        plans_table,
        reasons,
        validation_table,
        why_others_lose,
    )
    from pretrain.plan.plot import check_plot, draw
    from pretrain.plan.scenario import Scenario, load_scenario
    from pretrain.plan.search import Found, Plan, no_layout, plan_of, search_layouts
    from pretrain.plan.simulate import Outcome, simulate_runs
    from pretrain.plan.tables import causes_table, sizes_table, summary
    from pretrain.plan.validate import compare, missed_bounds

__all__ = [
    "DEVICE_HOURS_PER_FAILURE",
    "MEMORY_ERROR",
    "Accuracy",
    "Assessment",
    "Choice",
    "Cluster",
    "Cost",
    "Found",
    "Outcome",
    "Plan",
    "Scenario",
    "accuracy_lines",
    "accuracy_of",
    "assess",
    "automatic",
    "calibrate",
    "causes_table",
    "check_plot",
    "compare",
    "cost_of",
    "draw",
    "draw_layout",
    "erlang_b",
    "expected_run_seconds",
    "load_cluster",
    "load_scenario",
    "missed_bounds",
    "no_layout",
    "optimal_interval",
    "plan_lines",
    "plan_of",
    "plans_table",
    "reasons",
    "search_layouts",
    "shipped_clusters",
    "simulate_runs",
    "sizes_table",
    "spec_with_plan",
    "summary",
    "validation_table",
    "why_others_lose",
    "without_auto",
    "young_interval",
]


if not TYPE_CHECKING:  # mypy would otherwise take any name for one of this module
    # On demand: a run needs the formula of the interval only.
    __getattr__ = on_demand(
        __name__,
        {
            "MEMORY_ERROR": "pretrain.plan.accuracy",
            "Accuracy": "pretrain.plan.accuracy",
            "accuracy_of": "pretrain.plan.accuracy",
            "accuracy_lines": "pretrain.plan.plan_tables",
            "Cluster": "pretrain.plan.hardware",
            "load_cluster": "pretrain.plan.hardware",
            "shipped_clusters": "pretrain.plan.hardware",
            "automatic": "pretrain.plan.auto_layout",
            "spec_with_plan": "pretrain.plan.auto_layout",
            "without_auto": "pretrain.plan.auto_layout",
            "calibrate": "pretrain.plan.calibration",
            "Cost": "pretrain.plan.cost",
            "cost_of": "pretrain.plan.cost",
            "Found": "pretrain.plan.search",
            "Plan": "pretrain.plan.search",
            "no_layout": "pretrain.plan.search",
            "plan_of": "pretrain.plan.search",
            "search_layouts": "pretrain.plan.search",
            "compare": "pretrain.plan.validate",
            "missed_bounds": "pretrain.plan.validate",
            "plan_lines": "pretrain.plan.plan_tables",
            "plans_table": "pretrain.plan.plan_tables",
            "reasons": "pretrain.plan.plan_tables",
            "validation_table": "pretrain.plan.plan_tables",
            "why_others_lose": "pretrain.plan.plan_tables",
            "Assessment": "pretrain.plan.assessment",
            "Choice": "pretrain.plan.assessment",
            "Outcome": "pretrain.plan.simulate",
            "Scenario": "pretrain.plan.scenario",
            "assess": "pretrain.plan.assessment",
            "causes_table": "pretrain.plan.tables",
            "check_plot": "pretrain.plan.plot",
            "draw": "pretrain.plan.plot",
            "draw_layout": "pretrain.plan.layout_picture",
            "load_scenario": "pretrain.plan.scenario",
            "simulate_runs": "pretrain.plan.simulate",
            "sizes_table": "pretrain.plan.tables",
            "summary": "pretrain.plan.tables",
        },
    )


def __dir__() -> list[str]:
    return __all__
