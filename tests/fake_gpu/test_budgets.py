"""Kernels, bytes and waits of layers and steps on fake GPUs are those that the repository says.

Every case also shows that no operator gets tensors of two devices, and that each has a shape on
CUDA.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.fake_gpu import graphs, layers, steps, table
from tests.fake_gpu.measure import budgets, measured
from tests.support.fake_gpu.build import why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is a fake GPU")
UPDATE = "is this meant? then python -m tests.fake_gpu.measure --write"
SHORT = {
    "layers": ["1 rank: plain", "1 rank: straggler_aware", "ep 8: all_to_all", "ep 8: padded"],
    "steps": ["fsdp 8, ep 8"],
}


@pytest.fixture(scope="module")
def all_layers() -> dict[str, Any]:
    """The counts of all cases of layers."""
    return measured("layers")


@pytest.fixture(scope="module")
def all_steps() -> dict[str, Any]:
    """The counts of all cases of steps."""
    return measured("steps")


@pytest.mark.parametrize("kind", SHORT)
def test_a_few_cases_keep_their_budgets(kind):
    expected = budgets(kind)
    for name, counts in measured(kind, SHORT[kind]).items():
        assert counts == expected[name], UPDATE


@pytest.mark.slow
@pytest.mark.parametrize("name", layers.CASES)
def test_a_layer_keeps_its_budget(name, all_layers):
    assert all_layers[name] == budgets("layers")[name], UPDATE


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", steps.CASES)
def test_a_step_keeps_its_budget(name, all_steps):
    assert all_steps[name] == budgets("steps")[name], UPDATE


@pytest.mark.parametrize("name", layers.CASES)
def test_a_layer_without_ranks_never_waits_and_with_ranks_once(name):
    """But for those that say why: loops over experts, two hops, bounded capacity, copies."""
    counts = budgets("layers")[name]
    waits = sum((counts["forward"]["waits"] | counts["backward"]["waits"]).values())
    most = 0 if name.startswith("1 rank") or "padded" in name else 1
    loops = any(word in name for word in ("float32", "float16", "loop", "float8 experts"))
    bounded = any(word in name for word in ("reroute", "max_tokens_per_rank", "straggler_aware"))
    most += loops + bounded + ("hierarchical" in name) + ("2 chunks" in name and "hier" in name)
    most += "copies" in name
    assert waits <= most
    assert not any("copy" in site for half in counts.values() for site in half["waits"])


@pytest.mark.parametrize(
    ("name", "forward", "backward"), [("1 rank: plain", 25, 32), ("ep 8: all_to_all", 49, 40)]
)
def test_a_layer_launches_no_more_kernels_than_it_has_come_down_to(name, forward, backward):
    counts = budgets("layers")[name]
    assert counts["forward"]["kernels"] <= forward
    assert counts["backward"]["kernels"] <= backward


@pytest.mark.parametrize("name", steps.CASES)
def test_no_step_copies_in_a_way_that_the_host_waits_for(name):
    """But for a sum of exact mode, and FSDP's own copies of an offloaded optimizer."""
    counts = budgets("steps")[name]
    copies = {site for half in counts.values() for site in half["waits"] if "copy" in site}
    allowed = {"exact": "parallel/exact/sums.py square_sum", "offload optimizer": "torch"}
    assert all(site.endswith(f": {allowed.get(name)}") for site in copies)


def test_exact_sums_take_at_most_twenty_times_the_kernels_of_a_plain_step():
    exact, plain = (
        sum(half["kernels"] for half in budgets("steps")[name].values())
        for name in ("exact", "fsdp 8, ep 8")
    )
    assert exact <= 20 * plain


def test_the_page_has_the_table():
    page = table.PAGE.read_text()
    start, end = page.index(table.BEGIN) + len(table.BEGIN), page.index(table.END)
    assert page[start:end].strip().split("\n") == "\n".join(table.lines()).strip().split("\n"), (
        "python -m tests.fake_gpu.table"
    )


@pytest.mark.slow
def test_layers_are_one_graph_for_a_compiler():
    assert measured("graphs") == {name: {"graphs": 1} for name in graphs.CASES}
