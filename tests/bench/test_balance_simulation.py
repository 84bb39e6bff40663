"""The simulated steps with uneven loads: relays by hand, and the committed rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.balance_simulation import CLUSTERS, MODELS, Steps, exponent_of, relayed
from convoy.plan.loads import GroupLoads, zipf_loads
from convoy.plan.transfers import transfers_of

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "balance-simulated.json"


def test_a_relay_sends_an_expert_over_a_link_once():
    # Six ranks in nodes of two. Rank 0 has an expert with copies on 1, 2, 3 and 4.
    zeros = np.zeros(4, np.int64)
    group = GroupLoads(
        samples=1, own_NG=np.ones((1, 6)), copied_NG=np.zeros((1, 6)), call_C=zeros,
        expert_C=zeros, owner_C=zeros, taker_C=np.array([1, 2, 3, 4]),
        is_near_C=np.array([True, False, False, False]),
    )  # fmt: skip
    alone = transfers_of(group, near=16.0, far=64.0)
    assert alone.busy_NG.tolist() == [[192.0, 16.0, 64.0, 64.0, 64.0, 0.0]]
    chain = relayed(group, 16.0, 64.0, ranks_per_node=2)
    # 0 -> 1 within the node, 0 -> 2 -> 4 between nodes, and 2 -> 3: no link has more than 64 s.
    # Each hop starts a sixteenth of an expert later; gradients are back as much later.
    assert chain.arrived_NG.tolist() == [[0.0, 65.0, 68.0, 69.0, 72.0, 0.0]]
    assert chain.busy_NG.tolist() == [[72.0, 16.0, 64.0, 16.0, 64.0, 0.0]]


def test_committed_shares_are_those_of_the_code():
    rows = json.loads(RESULTS.read_text())["rows"]
    steps = Steps(MODELS["DeepSeek-V3"], CLUSTERS["GB200"], 64)
    loads = zipf_loads(exponent_of(2.0, 64), 256, 8, 64)
    for copies in (0, 2):
        (row,) = [
            r for r in rows
            if (r["case"], r["subject"])
            == ("DeepSeek-V3, GB200, ep 64, hottest 2", f"copies {copies}")
        ]  # fmt: skip
        share = steps.balanced / steps.planned(loads, copies)
        assert share == pytest.approx(row["value"], abs=2e-3)
    # Transfers in place of the plan's own give the plan's step.
    same = steps.with_transfers(loads, 2, relay=False, ahead=False)
    assert same == pytest.approx(steps.planned(loads, 2))
    assert steps.with_transfers(loads, 2, relay=True, ahead=True) < same
