"""Reports of all ranks in columns, and decisions that are those of a loop over ranks."""

from __future__ import annotations

import math
from functools import reduce
from operator import add

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel import Topology
from pretrain.parts.step import Report, Reports
from pretrain.parts.stragglers.config import StragglersConfig
from pretrain.parts.stragglers.rule import Stragglers
from pretrain.train.barrier import decide, sum_in_order

SIZES = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0])
COUNTS = st.integers(0, 1 << 40).map(float)
TIMES = st.floats(0, 1e4)
REPORTS = st.builds(
    Report, loss_sum=SIZES, target_tokens=COUNTS, grad_square_sum=SIZES,
    stop_requested=st.integers(0, 9).map(float), save_requested=st.sampled_from([0.0, 1.0]),
    step_seconds=TIMES, data_wait_seconds=TIMES, exposed_seconds=TIMES, expert_rows=COUNTS,
    expert_seconds=TIMES, bad_layer=st.integers(-1, 5).map(float), data_checksum=COUNTS,
    regroup_wanted=st.sampled_from([0.0, 1.0]),
)  # fmt: skip


def bits(x: float) -> bytes:
    return b"nan" if math.isnan(x) else np.float64(x).tobytes()


@settings(max_examples=200, deadline=None)
@given(st.lists(REPORTS, min_size=1, max_size=40), st.integers(1, 1 << 30))
def test_a_decision_is_that_of_a_loop_over_ranks(reports, planned):
    def total(name: str) -> float:
        return reduce(add, (getattr(report, name) for report in reports), 0.0)

    def most(name: str) -> float:
        return max(getattr(report, name) for report in reports)

    decision = decide(Reports.of(reports), planned, 4.0)
    tokens, square = total("target_tokens"), total("grad_square_sum")
    loss = total("loss_sum") / max(tokens, 1.0)
    norm = math.sqrt(square) * planned / max(tokens, 1.0) if square >= 0 else math.nan
    bad = [(int(r.bad_layer), rank) for rank, r in enumerate(reports) if r.bad_layer >= 0]
    assert bits(decision.loss) == bits(loss)
    assert bits(decision.grad_norm) == bits(norm)
    assert decision.target_tokens == int(tokens)
    assert decision.data_checksum == int(total("data_checksum"))
    assert decision.bad_router == (min(bad) if bad else None)
    sound = math.isfinite(loss) and tokens > 0 and not bad
    assert (decision.action.value == "commit") == (sound and math.isfinite(norm))
    assert decision.overflow == (sound and not math.isfinite(norm))
    assert decision.stop == (most("stop_requested") > 0)
    assert decision.stop_cause == most("stop_requested")
    assert decision.save == (most("save_requested") > 0)
    assert decision.regroup == (most("regroup_wanted") > 0)
    assert decision.step_seconds == most("step_seconds")
    assert decision.data_wait_seconds == most("data_wait_seconds")


def test_sums_over_many_ranks_have_the_bits_of_one_addition_after_another():
    losses = np.random.default_rng(0).normal(size=1000)
    assert losses.sum() != reduce(add, losses.tolist()), "numpy's own sum has others"
    assert bits(sum_in_order(losses)) == bits(reduce(add, losses.tolist()))


@given(st.lists(REPORTS.filter(lambda r: not math.isnan(r.loss_sum + r.grad_square_sum)),
                min_size=1, max_size=9))  # fmt: skip
def test_reports_are_a_sequence_of_what_they_were_made_of(reports):
    columns = Reports.of(reports)
    assert list(columns) == reports
    assert list(columns[1:]) == reports[1:]
    assert columns[-1] == reports[-1]
    assert columns.column("expert_rows").tolist() == [r.expert_rows for r in reports]


@given(st.data(), st.sampled_from([Topology(dp_shard=6, ep=3), Topology(dp_replicate=2, tp=2, cp=2),
                                   Topology(pp=2, dp_shard=3, ep=3), Topology()]))  # fmt: skip
def test_work_is_that_of_a_loop_over_ranks(data, topology):
    numbers = st.lists(COUNTS, min_size=topology.world, max_size=topology.world)
    tokens, rows = data.draw(numbers), data.draw(numbers)
    speeds = Stragglers(StragglersConfig(), topology, token_flops=7.0, row_flops=3.0)
    own = [0.0] * (topology.dp_replicate * topology.dp_shard)
    for rank, count in enumerate(tokens):
        own[topology.dp_rank(rank)] += count
    shared = topology.cp * topology.tp * topology.pp
    expected = [
        7.0 * own[topology.dp_rank(rank)] / shared + 3.0 * count
        if own[topology.dp_rank(rank)]
        else 0.0
        for rank, count in enumerate(rows)
    ]
    assert speeds.work(tokens, rows).tolist() == expected
