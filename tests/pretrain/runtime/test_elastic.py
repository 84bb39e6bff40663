"""A run that goes on with other ranks: the choice of a layout, spares, and real losses."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from parallel import Topology
from pretrain.elastic import ChosenLayout, choose_layout, stand_by, with_spares
from pretrain.errors import HealthError, InputError
from tests.support.jobs import data_of, events, make_spec, prepare_job, write_spec
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.waits

ELASTIC = {"enabled": True}
TWELVE = {"num_experts": 12, "top_k": 2, "d_ff": 48}


def layout(tmp_path, world: int, ranks_per_node: int | None = None, **sections) -> ChosenLayout:
    spec = make_spec(tmp_path, elastic=ELASTIC, **sections)
    return choose_layout(spec, world, ranks_per_node or world)


def degrees(chosen: ChosenLayout) -> dict[str, int]:
    return {axis: n for axis, n in chosen.topology.as_dict().items() if n > 1}


@pytest.mark.parametrize(
    ("parallel", "world", "found", "spares"),
    [
        # As in [parallel], where that fits; -1 takes what there is.
        ({"dp_shard": 2, "tp": 2}, 4, {"dp_shard": 2, "tp": 2}, 0),
        ({"ep": 2}, 4, {"dp_shard": 4, "ep": 2}, 0),
        # Ranks beyond a fixed layout are spares.
        ({"dp_shard": 2, "ep": 2}, 4, {"dp_shard": 2, "ep": 2}, 2),
        # tp is kept, and a rank that does not make a pair is left over.
        ({"dp_shard": 2, "tp": 2}, 3, {"tp": 2}, 1),
        ({"tp": 2}, 7, {"dp_shard": 3, "tp": 2}, 1),
        # pp is kept, and given up only where there are too few ranks.
        ({"dp_shard": 2, "pp": 2}, 3, {"pp": 2}, 1),
        ({"dp_shard": 2, "pp": 2}, 1, {}, 0),
        # Replicas are lost before shards are, and never become more.
        ({"dp_replicate": 2, "dp_shard": 2}, 3, {"dp_shard": 3}, 0),
        ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, 2, {"dp_shard": 2, "ep": 2}, 0),
        # 4 experts of 48 x 24 on 3 ranks: each holds a third of each expert.
        ({"dp_shard": 4, "ep": 4}, 3, {"dp_shard": 3}, 0),
    ],
)  # fmt: skip
def test_the_layout_keeps_what_the_spec_asks_for(tmp_path, parallel, world, found, spares):
    chosen = layout(tmp_path, world, parallel=parallel, model={"d_model": 48})
    assert (degrees(chosen), chosen.spares) == (found, spares)
    assert chosen.topology.world + chosen.spares == world


def test_experts_that_cannot_be_cut_leave_ranks_over(tmp_path):
    # d_model 32 is not a multiple of 3.
    chosen = layout(tmp_path, 3, parallel={"dp_shard": 4, "ep": 4})
    assert (degrees(chosen), chosen.spares) == ({"dp_shard": 2, "ep": 2}, 1)
    assert chosen.reason == "2 of 3 ranks train, dp_shard 4 -> 2, ep 4 -> 2"


def test_no_more_data_ranks_than_micro_batches(tmp_path):
    # 8 sequences in micro-batches of 2 are 4 micro-batches.
    chosen = layout(tmp_path, 6)
    assert (degrees(chosen), chosen.spares) == ({"dp_shard": 4}, 2)


def test_tensor_parallelism_stays_on_a_machine(tmp_path):
    chosen = layout(tmp_path, 4, 1, parallel={"tp": 2})
    assert degrees(chosen) == {"dp_shard": 4}
    allowed = layout(tmp_path, 4, 1, parallel={"tp": 2, "tp_across_nodes": True})
    assert degrees(allowed) == {"dp_shard": 2, "tp": 2}


def test_straggler_aware_capacity_goes_on_where_one_rank_is_left(tmp_path):
    capacity = {"capacity": {"policy": "straggler_aware"}}
    chosen = layout(tmp_path, 1, parallel={"dp_shard": 2, "ep": 2}, moe=capacity)
    assert chosen.topology == Topology()


def test_every_layout_of_every_number_of_ranks_is_one_that_the_spec_allows(tmp_path):
    spec = make_spec(tmp_path, elastic=ELASTIC, parallel={"pp": 2, "tp": 2, "ep": 4})
    for world in range(1, 17):
        chosen = choose_layout(spec, world, world)
        assert chosen.topology.world + chosen.spares == world
        assert spec.fits(chosen.topology)
    assert choose_layout(spec, 16, 16) == choose_layout(spec, 16, 16)


def test_where_no_layout_fits_one_line_says_so(tmp_path):
    spec = make_spec(tmp_path, elastic=ELASTIC)
    impossible = spec.model_copy(update={"data": spec.data.model_copy(update={"seq_len": 10**9})})
    with pytest.raises(InputError, match="no layout of at most 2 ranks works for this model"):
        choose_layout(impossible, 2, 2)


class NoStop:
    requested = False


def test_spares_end_as_the_run_ends():
    store = dist.HashStore()
    codes: list[int] = []
    spare = threading.Thread(target=lambda: codes.append(stand_by(NoStop(), store)))
    spare.start()
    with with_spares(1, "a", store) as end:
        end(75)
    spare.join(30)
    assert codes == [75]


def test_spares_end_with_the_exit_code_of_an_error():
    store = dist.HashStore()
    codes: list[int] = []
    spare = threading.Thread(target=lambda: codes.append(stand_by(NoStop(), store)))
    spare.start()
    with pytest.raises(HealthError), with_spares(1, "a", store):
        raise HealthError("diverged")
    spare.join(30)
    assert codes == [3]


def test_a_spare_does_not_take_the_end_of_an_earlier_start_for_its_own():
    store = dist.HashStore()
    store.set("end/former", "0")
    store.set("run", "present")
    stop = NoStop()
    codes: list[int] = []
    spare = threading.Thread(target=lambda: codes.append(stand_by(stop, store)))
    spare.start()
    spare.join(1.2)
    assert codes == []
    stop.requested = True
    spare.join(30)
    assert codes == [75]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return prepare_job(tmp_path_factory.mktemp("job"))


def start_once(rank: int, spec: str) -> int:
    from convoy.commands.pretrain import main

    return main([spec])


def test_spares_stand_by_and_another_start_takes_other_ranks(tmp_path, job):
    common = {"data": data_of(job), "elastic": ELASTIC, "moe": TWELVE, "model": {"d_model": 48}}
    parallel = {"dp_shard": 2, "ep": 2}
    first = write_spec(tmp_path, parallel=parallel, train={"steps": 3}, **common)
    assert run_ranks(start_once, 3, str(first), group=False) == [0, 0, 0]
    (began,) = events(tmp_path / "run", "start")
    assert (began["world_size"], began["spares"]) == (2, 1)
    second = write_spec(tmp_path, "second.json", parallel=parallel, **common)
    assert run_ranks(start_once, 1, str(second), group=False) == [0]
    (resized,) = events(tmp_path / "run", "resized")
    assert (resized["step"], resized["epoch"]) == (3, 1)
    assert (resized["before"]["ep"], resized["after"]["ep"]) == (2, 1)
    assert [event["step"] for event in events(tmp_path / "run", "step")] == [1, 2, 3, 4, 5, 6]


def test_a_layout_of_the_spec_that_cannot_be_is_no_crash(tmp_path):
    """ep does not divide the three ranks of [parallel]."""
    chosen = layout(tmp_path, 3, parallel={"dp_shard": 3, "ep": 2}, model={"d_model": 48})
    assert degrees(chosen) == {"dp_shard": 3}
