"""Loads of experts in the planner: draws, logs, copies and their transfers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from convoy.commands.command_line import main
from convoy.plan import gains_of, hot_rank, load_cluster, load_profile, no_layout, plan_of
from convoy.plan.gains import Gain, _remedies
from convoy.plan.loads import (
    GroupLoads,
    LoadProfile,
    choice_probabilities,
    zipf_loads,
    zipf_weights,
)
from convoy.plan.memory import memory
from convoy.plan.search import Found
from convoy.plan.shape import ModelShape
from convoy.plan.step_time import copy_seconds, least_seconds, step_time
from convoy.plan.tables import gains_lines
from convoy.plan.transfers import backward_wait, forward_wait, transfers_of
from convoy.plan.work import Work
from moe import MoEConfig, RoutingTrace, write_trace
from parallel.layout import Topology
from pretrain.errors import InputError
from pretrain.model import ModelConfig
from pretrain.spec import load_spec
from tests.support.jobs import events, prepare_job, write_spec

ROOT = Path(__file__).parents[3]
MIXTRAL = str(ROOT / "tools/recipes/mixtral-8x7b.toml")
SHAPE = ModelShape.of(
    ModelConfig(vocab_size=2048, d_model=1024, num_layers=4, num_heads=8, num_kv_heads=8),
    MoEConfig(d_model=1024, d_ff=2048, num_experts=8, top_k=2),
)


def profile(*counts_LE: list[int], node: int = 8) -> LoadProfile:
    return LoadProfile("by hand", np.array([counts_LE]), node)


# ------------------------------------------------------------------------------------------------
# Groups.


def test_the_hottest_rank_of_a_group_is_that_of_the_counts():
    loads = profile([60, 20, 10, 10], [10, 10, 60, 20])
    group = loads.of_group(2)
    assert group.rows_NG.tolist() == [[1.6, 0.4], [0.4, 1.6]]
    assert (group.hottest, group.hottest_call) == (1.6, 1.6)
    # Either rank is the hottest in one of the layers: both keep equally many rows.
    assert group.hottest_stage(2) == 1.0
    assert group.hottest_stage(1) == 1.6
    # With four ranks an expert is a rank's; a capacity of 1.2 bounds each expert by 30 of 100 rows.
    assert loads.of_group(4).hottest == 2.4
    assert loads.of_group(4, capacity_factor=1.2).hottest == 1.2


def test_time_is_of_the_mean_call_and_memory_of_the_worst():
    group = profile([60, 20, 10, 10], [25, 25, 25, 25]).of_group(2)
    assert (group.hottest, group.hottest_call) == (1.3, 1.6)


def test_a_stage_of_an_odd_number_of_layers_is_looked_at_to_its_end():
    loads = profile([1, 1], [1, 1], [3, 1])
    assert loads.of_group(2).hottest_stage(2) == 1.25


def test_copies_take_what_the_plan_gives_them():
    group = profile([60, 20, 10, 10], node=1).of_group(2, copies=1)
    # Rank 0 has 30 of 100 rows too many, all of expert 0.
    assert group.own_NG.tolist() == [[1.0, 0.4]]
    assert group.copied_NG.tolist() == [[0.0, 0.6]]
    assert [group.expert_C.tolist(), group.owner_C.tolist(), group.taker_C.tolist()] == [
        [0], [0], [1],
    ]  # fmt: skip
    assert group.is_near_C.tolist() == [False]
    assert (group.most_lent, group.most_borrowed) == (1, 1)
    assert profile([60, 20, 10, 10], node=2).of_group(2, copies=1).is_near_C.tolist() == [True]


# One call of four ranks, in two nodes of two. Rank 0 sends one expert to 1, 2 and 3; rank 2 another
# one to rank 3. Within a node an expert takes 1 s, between nodes 4 s.
BY_HAND = GroupLoads(
    samples=1,
    own_NG=np.array([[1.0, 0.5, 1.0, 0.25]]),
    copied_NG=np.array([[0.0, 0.5, 0.0, 0.75]]),
    call_C=np.zeros(4, np.int64),
    expert_C=np.array([0, 0, 0, 5]),
    owner_C=np.array([0, 0, 0, 2]),
    taker_C=np.array([1, 2, 3, 3]),
    is_near_C=np.array([True, False, False, True]),
)


def test_the_owners_link_bounds_transfers():
    moved = transfers_of(BY_HAND, near=1.0, far=4.0)
    # Rank 0: 1 s within the node, and beside it two transfers of 4 s to the other one.
    assert moved.busy_NG.tolist() == [[8.0, 1.0, 4.0, 4.0]]
    assert moved.arrived_NG.tolist() == [[0.0, 8.0, 8.0, 8.0]]


def test_a_forward_waits_for_parameters_that_come_after_the_own_experts():
    moved = transfers_of(BY_HAND, near=1.0, far=4.0)
    # The mean rank's experts take 10 s. Rank 3 ends its own after 2.5 s, waits until 8 s, and
    # computes its copies for 7.5 s: 5.5 s after a rank that never waits.
    assert forward_wait(BY_HAND, moved, seconds=10.0) == pytest.approx(5.5)
    # With 40 s of experts, rank 3 has its parameters at 8 s, before the own ones end at 10 s.
    assert forward_wait(BY_HAND, moved, seconds=40.0) == 0.0


def test_a_backward_waits_for_parameters_and_an_owner_for_gradients():
    moved = transfers_of(BY_HAND, near=1.0, far=4.0)
    # 20 s of experts. Rank 3 begins at 8 s, has the copies' gradients at 23 s, and ends at 28 s; so
    # does rank 0. Rank 0's link has all gradients 8 s after rank 3 has sent the last: at 31 s.
    assert backward_wait(BY_HAND, moved, seconds=20.0) == pytest.approx(11.0)
    # Parameters that began to travel 8 s before wait for nothing: 15 s + 8 s, or 20 s of own rows.
    assert backward_wait(BY_HAND, moved, seconds=20.0, ahead=8.0) == pytest.approx(3.0)
    # A call without copies waits for nothing.
    even = profile([25, 25, 25, 25]).of_group(4, copies=2)
    assert backward_wait(even, transfers_of(even, 1.0, 4.0), seconds=20.0) == 0.0


# ------------------------------------------------------------------------------------------------
# Draws.


def test_choices_are_those_of_tokens_that_choose_one_expert_after_another():
    weights_E, draw = zipf_weights(1.0, 64), np.random.default_rng(3)
    rings = draw.exponential(size=(20_000, 64)) / weights_E
    chosen = np.bincount(np.argpartition(rings, 7, axis=1)[:, :8].ravel(), minlength=64) / 20_000
    p_E = choice_probabilities(weights_E, 8)
    assert p_E.sum() == pytest.approx(8)
    assert np.abs(p_E - chosen).max() < 0.02
    assert choice_probabilities(weights_E, 64).tolist() == [1.0] * 64


def test_equal_exponents_give_equal_loads_and_layers_differ():
    first, again = (zipf_loads(1.2, 16, 2, 8) for _ in range(2))
    assert first.counts_SLE.tolist() == again.counts_SLE.tolist()
    assert first.counts_SLE[0, 0].tolist() != first.counts_SLE[0, 1].tolist()
    hottest = [zipf_loads(s, 16, 2, 8).of_group(8).hottest for s in (0.0, 0.5, 1.0, 1.5)]
    assert hottest == sorted(hottest)
    assert hottest[0] < 1.02


def test_a_summary_has_the_counts_of_its_run(tmp_path):
    file = tmp_path / "summary.json"
    file.write_text("{}")
    with pytest.raises(InputError, match=r"must be the summary\.json of a run with MoE layers"):
        load_profile(str(file), 8, 2, 8)


def test_a_trace_has_the_counts_of_every_call_of_all_senders(tmp_path):
    counts = np.arange(2 * 3 * 2 * 4).reshape(2, 3, 2, 4)  # calls, layers, senders, experts
    trace = RoutingTrace(
        counts_CLSE=counts, step_C=np.array([1, 1]), top_k=2, layers=(1, 2, 3), senders=(0, 1)
    )
    write_trace(tmp_path / "routes.npz", trace)
    loads = load_profile(str(tmp_path / "routes.npz"), 4, 2, 8)
    assert loads.counts_SLE.tolist() == (counts[:, :, 0] + counts[:, :, 1]).tolist()
    with pytest.raises(InputError, match=r"the loads of 4 experts, and moe\.num_experts is 8"):
        load_profile(str(tmp_path / "routes.npz"), 8, 2, 8)
    with pytest.raises(InputError, match=r"choices of 2 experts by a token, and moe\.top_k is 3"):
        load_profile(str(tmp_path / "routes.npz"), 4, 3, 8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("zipf:many", "must have an exponent from 0 to 4, as zipf:1.2"),
        ("zipf:-1", "must have an exponent from 0 to 4"),
        ("zipf:", "must have an exponent from 0 to 4"),
        ("", "must be zipf:EXPONENT, a routing trace, or a run's log.jsonl"),
        ("nowhere/log.jsonl", "must be a routing trace, a run's log.jsonl or summary.json, or zip"),
        ("nowhere.npz", "must be a routing trace: "),
    ],
)
def test_loads_that_cannot_be_are_one_line(text, said):
    with pytest.raises(InputError) as error:
        load_profile(text, 8, 2, 8)
    assert str(error.value).startswith(f"--loads ({text}) {said}")


def test_the_log_and_the_summary_of_a_run_are_load_profiles(tmp_path):
    train = {"steps": 3, "log_interval_steps": 1}
    spec, folder = write_spec(prepare_job(tmp_path), train=train), tmp_path / "run"
    assert main("pretrain", [str(spec)]) == 0
    log = load_profile(str(folder / "log.jsonl"), 4, 2, 8)
    assert (load_profile(str(folder), 4, 2, 8).counts_SLE == log.counts_SLE).all()
    recorded = [e["layer_imbalances"] for e in events(folder, "interval")]
    hottest = log.counts_SLE.max(axis=2) * 4 / log.counts_SLE.sum(axis=2)
    assert hottest.shape == np.array(recorded).shape
    assert hottest == pytest.approx(np.array(recorded).clip(max=2.0), abs=0.02)
    counts = json.loads((folder / "summary.json").read_text())["tokens_per_expert"]
    assert load_profile(str(folder / "summary.json"), 4, 2, 8).counts_SLE[0].tolist() == counts
    with pytest.raises(InputError, match=r"the loads of 4 experts, and moe\.num_experts is 8"):
        load_profile(str(folder / "summary.json"), 8, 2, 8)


# ------------------------------------------------------------------------------------------------
# Layouts.


def make(loads: LoadProfile | None, **options) -> Work:
    topology = options.pop("topology", Topology(dp_shard=4, ep=4))
    seq_len = options.pop("seq_len", 1024)
    return Work(SHAPE, topology, seq_len, 16, 4, loads=loads, **options)


HOT = profile([50, 40, 2, 2, 2, 2, 1, 1], [2, 2, 50, 40, 2, 2, 1, 1])


def test_the_hottest_rank_sets_time_and_memory_and_copies_give_both_back():
    h100 = load_cluster("h100")
    even, hot, copied = make(None), make(HOT), make(HOT, copies=2)
    assert (even.busiest, hot.busiest, round(copied.busiest, 2)) == (1.0, 3.6, 1.0)
    seconds = [step_time(work, h100).total for work in (even, copied, hot)]
    assert seconds == sorted(seconds)
    assert step_time(hot, h100).total == step_time(make(None, imbalance=3.6), h100).total
    for work in (even, hot, copied):
        assert least_seconds(work, h100) <= step_time(work, h100).total * (1 + 1e-9)
    used = [memory(work, h100.chip) for work in (even, hot, copied)]
    assert used[0].dispatch < used[1].dispatch
    assert used[2].dispatch == pytest.approx(used[0].dispatch, rel=0.01)
    # Of its four layers the hottest rank is hottest in every other one.
    assert hot.busiest_in_stage == pytest.approx((3.6 + 0.16) / 2)
    # Each rank's copies, their gradients and what of these is sent; or what the owner sends.
    group = copied.group_loads
    held = 2 * SHAPE.expert_parameters * max(3 * group.most_borrowed, group.most_lent)
    assert used[2].gathered - used[0].gathered == held > 0
    # Every rank has all experts: loads cost nothing.
    alone = Topology(dp_shard=4)
    assert step_time(make(HOT, topology=alone), h100) == step_time(make(None, topology=alone), h100)


def test_a_capacity_that_copies_replace_bounds_no_rows():
    bounded = make(HOT, capacity_factor=1.25)
    assert bounded.busiest < make(HOT).busiest
    assert bounded.with_(copies=2).busiest < 0.9, "what is beyond the capacity is dropped"
    assert bounded.with_(copies=2, lossless_with_copies=True).busiest >= 1


def test_rows_beyond_a_capacity_go_where_there_is_room_or_are_dropped():
    counts = profile([50, 40, 2, 2, 2, 2, 1, 1])
    dropped = counts.of_group(4, capacity_factor=1.25)
    moved = counts.of_group(4, capacity_factor=1.25, reroutes=True)
    # At most 16 rows of an expert, of 100 over 4 ranks.
    assert (dropped.own_NG * 25).tolist() == [[32, 4, 4, 2]]
    assert moved.own_NG.sum() == pytest.approx(4)
    assert (moved.own_NG * 25).max() == pytest.approx(32)
    # Two experts have no room to their bound of 1.0 times the mean, and the others take it all.
    full = profile([1, 1, 1, 1, 1, 1, 1, 93]).of_group(4, capacity_factor=1.0, reroutes=True)
    assert full.hottest == pytest.approx(1.0, abs=0.05)


def test_a_spec_that_takes_no_copies_is_told_so():
    chunks = load_spec(Path(MIXTRAL), ["moe.overlap_chunks=2"])
    work = plan_of(chunks, 16, load_cluster("h100"), load_profile("zipf:1.2", 8, 2, 8)).work
    assert work.copies_refused.startswith("moe.overlap_chunks (2) must be 1 with moe.copies (1)")
    gains = [Gain(0, 2.0, 2.0, 2.0, 1e9), Gain(1, 1.2, 1.2, 1.0, 1e9)]
    said = gains_lines(work, gains, load_cluster("h100")).splitlines()
    assert said[-2].startswith("moe.copies = 1 is 100.0% faster")
    assert said[-1] == f"the spec takes no copies: {work.copies_refused}"
    assert "moe.copies" not in " ".join(_remedies(work, load_cluster("h100").chip))


def test_the_fewest_copies_of_equal_steps_are_best():
    seconds = {0: 1.3, 1: 1.004, 2: 1.0, 4: 1.001}
    gains = [Gain(n, 1.0, 1.0, s, 1e9) for n, s in seconds.items()]
    said = gains_lines(make(HOT), gains, load_cluster("h100"))
    assert "moe.copies = 1 is 29.5% faster than no copies" in said
    said = gains_lines(make(HOT), gains[1:2] + gains[2:], load_cluster("h100"))
    assert "moe.copies = 1 is 0.0% faster" in said


def test_gains_count_the_transfers_at_the_links_rates():
    h100 = load_cluster("h100")
    many, few = gains_of(make(HOT), h100, (0, 2)), gains_of(make(HOT, seq_len=8), h100, (0, 2))
    assert many[1].seconds < many[0].seconds
    assert few[1].seconds > few[0].seconds
    assert [gain.hottest for gain in many] == [gain.hottest for gain in few] == [3.6, 1.0]
    near, far = copy_seconds(make(HOT), h100)
    size = 2 * SHAPE.expert_parameters
    assert near == pytest.approx(size / (450e9 * 0.7) + 4e-6)
    assert far == pytest.approx(size / (50e9 * 0.8) + 8e-6)


def test_what_the_hottest_rank_cannot_hold_is_refused_with_what_would_work():
    work, h100 = make(HOT), load_cluster("h100")
    needed = [memory(each, h100.chip).total for each in (work, make(HOT, copies=1))]
    chip = h100.chip.model_copy(update={"memory_gib": sum(needed) / 2 / 2**30, "reserved_gib": 0.0})
    small = h100.model_copy(update={"chip": chip})
    said = hot_rank(work, work.topology.describe(), small)
    assert "\n" not in said
    assert said.startswith(f"dp_shard=4 ep=4 needs {needed[0] / 2**30:.1f} GiB of ")
    assert "they get up to 3.60 times the mean rows by --loads by hand" in said
    assert said.count("moe.copies") == 1
    assert "; moe.copies = 1 or batch.micro_batch_size = 2 or " in said
    assert said.endswith(" would fit")
    # Without loads, and where even loads do not fit, the hottest rank is not the reason.
    assert hot_rank(make(None), "", small) == ""
    tiny_chip = chip.model_copy(update={"memory_gib": 0.01})
    assert hot_rank(work, "", h100.model_copy(update={"chip": tiny_chip})) == ""


# ------------------------------------------------------------------------------------------------
# The command.


def shown(capsys, *words: str) -> str:
    assert main("plan", [MIXTRAL, "--cluster", "h100", "--gpus", "16", *words]) == 0
    return capsys.readouterr().out


def test_a_plan_with_loads_says_what_copies_gain_and_is_always_the_same(capsys, tmp_path):
    file = tmp_path / "plan.json"
    words = ["--layout", "ep=8", "--loads", "zipf:1.2", "--json", str(file)]
    out = shown(capsys, *words)
    assert out == shown(capsys, *words)
    table = out.partition("| moe.copies |")[2].splitlines()
    assert [line.split("|")[1].strip() for line in table[2:6]] == ["0", "1", "2", "4"]
    assert "is 6" in table[7]
    assert table[7].endswith("faster than no copies by --loads zipf:1.2, with ep = 8")
    document = json.loads(file.read_text())
    assert document["loads"] == "zipf:1.2"
    assert [gain["copies"] for gain in document["copies"]] == [0, 1, 2, 4]
    without = shown(capsys, "--layout", "ep=8", "--json", str(file))
    assert "copies" not in without
    assert not {"loads", "copies"} & set(json.loads(file.read_text()))


def test_even_loads_plan_as_no_imbalance_does(capsys):
    loads = profile([1] * 8)
    h100 = load_cluster("h100")
    assert step_time(make(loads), h100) == step_time(make(None, imbalance=1.0), h100)
    assert memory(make(loads), h100.chip) == memory(make(None, imbalance=1.0), h100.chip)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--loads", "zipf:1", "--imbalance", "1.3"],
         "--imbalance (1.3) must be left out with --loads (zipf:1)"),
        # With even loads eight sequences of 4,096 tokens fit.
        (["--loads", "zipf:3", "--layout", "ep=8", "--set", "batch.micro_batch_size=8"],
         "need 64.9 GiB; moe.copies = 1 or batch.micro_batch_size = 4 or moe.capacity.policy ="),
    ],
)  # fmt: skip
def test_loads_that_cannot_be_planned_are_one_line(words, said, capsys):
    assert main("plan", [MIXTRAL, "--cluster", "h100", "--gpus", "16", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_loads_need_experts(capsys, tmp_path):
    data = load_spec(Path(MIXTRAL)).as_dict()
    del data["moe"]
    dense = tmp_path / "dense.json"
    dense.write_text(json.dumps(data | {"parallel": {}, "model": data["model"] | {"d_ff": 1024}}))
    assert main("plan", [str(dense), "--cluster", "h100", "--loads", "zipf:1"]) == 2
    said = "error: --loads (zipf:1) must be left out: the spec has no [moe]\n"
    assert capsys.readouterr().err == said


def test_a_search_that_only_the_hottest_rank_stops_says_so():
    spec, h100 = load_spec(Path(MIXTRAL), ["batch.micro_batch_size=8"]), load_cluster("h100")
    hot = plan_of(spec, 16, h100, load_profile("zipf:3", 8, 2, 8))
    error = no_layout(Found(nearest=hot), 16, h100)
    assert str(error).startswith("the model fits on no layout of 16 GPUs: dp_shard=16 ep=8 ")
    assert "whose experts are the hottest" in str(error)
    even = no_layout(Found(nearest=plan_of(spec, 16, h100)), 16, h100)
    assert "hottest" not in str(even)
