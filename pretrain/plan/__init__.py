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
    from pretrain.plan.assessment import Assessment, Choice, assess
    from pretrain.plan.plot import check_plot, draw
    from pretrain.plan.scenario import Scenario, load_scenario
    from pretrain.plan.simulate import Outcome, simulate_runs
    from pretrain.plan.tables import causes_table, sizes_table, summary

__all__ = [
    "DEVICE_HOURS_PER_FAILURE",
    "Assessment",
    "Choice",
    "Outcome",
    "Scenario",
    "assess",
    "causes_table",
    "check_plot",
    "draw",
    "erlang_b",
    "expected_run_seconds",
    "load_scenario",
    "optimal_interval",
    "simulate_runs",
    "sizes_table",
    "summary",
    "young_interval",
]


if not TYPE_CHECKING:  # mypy would otherwise take any name for one of this module
    # On demand: a run needs the formula of the interval only.
    __getattr__ = on_demand(
        __name__,
        {
            "Assessment": "pretrain.plan.assessment",
            "Choice": "pretrain.plan.assessment",
            "Outcome": "pretrain.plan.simulate",
            "Scenario": "pretrain.plan.scenario",
            "assess": "pretrain.plan.assessment",
            "causes_table": "pretrain.plan.tables",
            "check_plot": "pretrain.plan.plot",
            "draw": "pretrain.plan.plot",
            "load_scenario": "pretrain.plan.scenario",
            "simulate_runs": "pretrain.plan.simulate",
            "sizes_table": "pretrain.plan.tables",
            "summary": "pretrain.plan.tables",
        },
    )


def __dir__() -> list[str]:
    return __all__
