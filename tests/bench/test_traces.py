"""The committed traces of natural routing are what their page says of them."""

from __future__ import annotations

import numpy as np
import pytest

from bench.recipe_runs import RECIPE
from bench.traces import TRACES
from bench.traces.__main__ import CALLS, COMMON, RUNS, SENDERS, STEPS
from moe import RoutingTrace, read_trace
from pretrain.spec import load_spec


@pytest.fixture(scope="module")
def traces() -> dict[str, RoutingTrace]:
    return {name: read_trace(TRACES / f"{name}.npz") for name in RUNS}


def test_each_trace_has_the_counts_of_its_calls(traces):
    tokens = 4 * 256
    for name, trace in traces.items():
        assert trace.counts_CLSE.shape == (len(STEPS) * CALLS, 3, SENDERS, 32)
        assert (trace.counts_CLSE.sum(-1) == tokens * trace.top_k).all(), "each token takes 4"
        assert trace.counts_CLSE.max() <= tokens
        assert trace.step_C.tolist() == [step for step in STEPS for _ in range(CALLS)]
        assert (trace.recipe, trace.top_k, trace.layers) == (name, 4, (1, 2, 3))
        assert trace.notes["settings"] == [*COMMON, *RUNS[name]]


def test_all_traces_together_are_small():
    files = list(TRACES.glob("*.npz"))
    assert {file.stem for file in files} == set(RUNS)
    assert sum(file.stat().st_size for file in files) < 1_000_000


def test_routing_is_less_even_without_balancing(traces):
    def worst(name: str) -> float:
        late_LE = traces[name].counts_CLSE[-CALLS:].sum((0, 2))
        return float(np.max(late_LE.max(-1) / late_LE.mean(-1)))

    assert worst("none") > 1.5 * max(worst("switch"), worst("bias"))


@pytest.mark.parametrize("name", RUNS)
def test_every_run_has_a_spec_with_checkpoints_at_its_steps(name):
    spec = load_spec(RECIPE, [*COMMON, *RUNS[name]])
    assert spec.train.steps == STEPS[-1]
    assert all(step % spec.checkpoint.steps_between == 0 for step in STEPS)
    assert all(step % spec.checkpoint.retention.keep_every == 0 for step in STEPS)
    assert spec.moe.num_experts == 32
