"""Burn-in: rules as pure functions, and real ranks, some of them slow, wrong, cut off or stuck."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import stat
import subprocess
import sys
import warnings
from dataclasses import replace
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from cluster.burnin import Board, BurnIn, BurnInOptions, ExpectedRates
from cluster.burnin.links import Link, LinkTest, nodes_of_links, rounds_of, slow_links
from cluster.burnin.measures import memory_fault, storage_rates
from cluster.burnin.numerics import arithmetic_hash, differing
from cluster.burnin.verdict import describe_links, slow_ranks
from cluster.detect import open_store
from cluster.members import read_exclusions
from convoy.commands import main
from convoy.commands.burnin import small_steps
from pretrain.parts.faults.process import Pacer
from tests.support.ranks import run_ranks, start_ranks

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_rounds_have_every_pair_of_a_node_and_of_a_rail_once(sizes):
    nodes = [f"n{i}" for i, size in enumerate(sizes) for _ in range(size)]
    local = [rank for size in sizes for rank in range(size)]
    rounds = list(rounds_of(nodes))
    for one in rounds:
        ranks = [rank for pair in one for rank in pair]
        assert len(ranks) == len(set(ranks))
    found = [pair for one in rounds for pair in one]
    expected = {
        (a, b) for a, b in combinations(range(len(nodes)), 2)
        if nodes[a] == nodes[b] or local[a] == local[b]
    }  # fmt: skip
    assert sorted(found) == sorted(expected)
    assert len(rounds) <= max(sizes) + len(sizes)


def test_a_rank_is_slow_against_the_median_of_its_kind():
    kinds = ["fast"] * 4 + ["slow"] * 3 + ["rare"] * 2
    rates = [100, 101, 99, 80, 50, 51, 49, 10, 1]
    assert slow_ranks(rates, kinds, 0.1) == {3: "20 % slower than the median"}
    assert slow_ranks(rates, kinds, 0.25) == {}
    assert slow_ranks([100, 100, 75], ["cpu"] * 3, 0.25) == {2: "25 % slower than the median"}


def test_ranks_that_are_all_slow_are_slow_against_what_is_expected():
    rates, kinds = [50, 51, 49, 100], ["one"] * 3 + ["rare"]
    assert slow_ranks(rates, kinds, 0.25) == {}
    found = slow_ranks(rates, kinds, 0.25, expected=100)
    assert found == {rank: f"{100 - rates[rank]} % slower than expected" for rank in range(3)}


def link(first: int, second: int, rate: float, within: bool = False, **more: Any) -> Link:
    return Link(first, second, within, rate, 1e-5, **more)


def test_a_link_is_slow_against_its_class():
    links = [link(a, b, 10.0) for a, b in combinations(range(4), 2)]
    inside = [link(a, b, 100.0, within=True) for a, b in combinations(range(4, 7), 2)]
    slow = link(7, 8, 4.9)
    failed = link(8, 9, 0.0, error="timed out")
    assert slow_links([*links, *inside, slow, failed], 0.5) == [failed, slow]
    assert slow_links([*links[:1], slow], 0.5) == [], "two links say nothing of each other"
    half = link(7, 8, 5.0)
    assert slow_links([*links, half], 0.5) == [half], "exactly half is slow"
    assert slow_links([*links, link(7, 8, 5.1)], 0.5) == []


def test_links_that_are_all_slow_are_slow_against_what_is_expected():
    links = [link(a, b, 10.0) for a, b in combinations(range(4), 2)]
    inside = [link(4, 5, 100.0, within=True)]
    expected = {True: 110.0, False: 20.0}
    assert slow_links([*links, *inside], 0.5) == []
    assert slow_links([*links, *inside], 0.5, expected) == links
    assert slow_links([*links, *inside], 0.5, {True: 200.0, False: 19.0}) == inside
    (line,) = [describe_links("b", links[:1], links, list("abcd"), expected)]
    assert "100 % of the median, 50 % of what is expected" in line


def test_the_node_with_most_bad_links_is_named_and_no_node_that_only_met_it():
    nodes = ["a", "b", "c", "d", "e"]
    bad = [link(2, other, 1.0) for other in (0, 1, 3, 4)]
    assert {node: len(k) for node, k in nodes_of_links(bad, nodes).items()} == {"c": 4}
    # Of a single link the second end is named; two such links have two nodes.
    assert list(nodes_of_links([link(0, 1, 1.0), link(2, 3, 1.0)], nodes)) == ["d", "b"]
    slow = [link(0, 3, 1.0), link(1, 2, 1.0)]
    assert set(nodes_of_links(slow, nodes, {"b"})) == {"d", "b"}, "b is slow without its link too"


def test_the_minority_computes_wrong():
    kinds = ["x"] * 4 + ["y"] * 2
    assert differing(kinds, [["1", "1"]] * 4 + [["2", "2"]] * 2) == {}
    assert differing(kinds, [["1"], ["1"], ["9"], ["1"], ["2"], ["2"]]) == {
        2: "computes other numbers than 3 ranks of x"
    }
    assert list(differing(kinds, [["1"]] * 4 + [["2"], ["3"]])) == [4, 5]
    assert differing(kinds, [["1", "1"]] * 4 + [["2", "3"], ["3", "3"]]) == {
        4: "computes other numbers each time"
    }


class Wrong(TorchDispatchMode):
    """Products whose first number has one bit more in its mantissa than it should."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and found.dtype == torch.float32:
            found.view(torch.int32).flatten()[0] ^= 1
        return found


def test_a_single_wrong_bit_shows():
    right = arithmetic_hash(CPU)
    assert arithmetic_hash(CPU) == right
    with Wrong():
        assert arithmetic_hash(CPU) != right
    right = small_steps(CPU)
    with Wrong():
        assert small_steps(CPU) != right


def test_memory_that_loses_a_bit_is_found(monkeypatch):
    assert memory_fault(CPU, 1 << 28) is None
    real = torch.bitwise_xor

    def forgets(words, pattern, out):
        real(words, pattern, out=out)
        out[1234] ^= 1 << 40

    monkeypatch.setattr(torch, "bitwise_xor", forgets)
    fault = memory_fault(CPU, 1 << 28)
    assert fault is not None
    assert "the first is word 1234 of block 0" in fault


def test_storage_that_returns_other_bytes_is_found(tmp_path, monkeypatch):
    wrote, read = storage_rates(tmp_path, 0, 1 << 23)
    assert wrote > 0 < read
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "fsync", lambda number: os.pwrite(number, b"x" * 9, (1 << 22) + 4))
    with pytest.raises(ValueError, match="other bytes at offset 4194304"):
        storage_rates(tmp_path, 0, 1 << 23)
    assert not list(tmp_path.iterdir())


def cluster_file(folder: Path, teraflops: float) -> Path:
    """The shipped cluster ``cpu`` with another peak."""
    text = (ROOT / "convoy/plan/clusters/cpu.toml").read_text()
    assert text.count("float32 = 0.055") == 1
    file = folder / "cluster.toml"
    file.write_text(text.replace("float32 = 0.055", f"float32 = {teraflops}"))
    return file


def test_one_rank_without_torchrun_is_sound(tmp_path, capsys):
    file = tmp_path / "verdict.json"
    exclusions = tmp_path / "exclude.json"
    words = [
        "--expect",
        str(cluster_file(tmp_path, teraflops=1e-6)),
        "--exclude-list",
        str(exclusions),
        "--quick",
        "--folder",
        str(tmp_path),
        "--json",
        str(file),
    ]
    try:
        assert main("burn-in", words) == 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert not exclusions.exists()
    assert "1 of 1 machines are sound" in capsys.readouterr().out
    verdict = json.loads(file.read_text())
    assert verdict["is_sound"]
    assert verdict["measured"]["products"][0] > 0
    assert verdict["not_judged"] == ["storage write", "storage read"], "products are expected"


def test_a_rank_alone_that_finds_a_fault_excludes_its_machine(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.optim, "AdamW", _diverges)
    monkeypatch.setenv("CONVOY_NODE_NAME", "here")
    exclusions, expected = tmp_path / "exclude.json", cluster_file(tmp_path, teraflops=1e6)
    words = ["--exclude-list", str(exclusions), "--quick", "--expect", str(expected)]
    try:
        assert main("burn-in", words) == 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    out = capsys.readouterr().out
    assert "here, rank 0: training step: the loss of a training step is nan" in out
    assert "0 of 1 machines are sound" in out
    (one,) = read_exclusions(exclusions)
    assert one.node == "here"
    assert re.fullmatch(r"burn-in, products: \d+ % slower than expected", one.reason)


def _diverges(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=float("inf"))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--slow", "100"], "--slow (100) must be between 0 and 100"),
        (["--timeout", "0"], "--timeout (0) must be above 0"),
        (["--json", "nowhere/v.json"], "--json (nowhere/v.json): its folder does not exist"),
        (["nowhere.toml"], "nowhere.toml"),
        (["--expect", "h300"], "--expect (h300) must be a file, or one of"),
    ],
)
def test_arguments_that_cannot_be_used(words, line, capsys):
    assert main("burn-in", words) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def options(**more: Any) -> BurnInOptions:
    small = {
        "device": CPU, "local_rank": 0, "local_world": 1,
        "timeout": timedelta(seconds=60), "slow": 0.35, "link_bytes": 1 << 21,
        "reduce_bytes": 1 << 16, "rows": 256, "row_bytes": 256, "memory_bytes": 1 << 20,
        "storage_bytes": 1 << 22, "training_step": small_steps,
    }  # fmt: skip
    return BurnInOptions(**(small | more))


def sockets() -> dict[str, socket.socket]:
    """This process's TCP connections, by ``LOCAL-REMOTE`` ports."""
    warnings.simplefilter("ignore", ResourceWarning)  # only some of the copies are needed
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        try:
            if stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                one = socket.socket(fileno=os.dup(int(path.name)))
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    found[f"{one.getsockname()[1]}-{one.getpeername()[1]}"] = one
        except OSError:
            continue
    return found


def gloo_sockets(rank: int, world: int) -> dict[int, list[socket.socket]]:
    """The connections to each other rank; the store's are left out."""
    store = open_store("sockets")
    mine = sockets()
    store.set(str(rank), json.dumps(list(mine)))
    found = {}
    for other in set(range(world)) - {rank}:
        theirs = {"-".join(reversed(k.split("-"))) for k in json.loads(store.get(str(other)))}
        found[other] = [one for key, one in mine.items() if key in theirs]
        assert found[other]
    return found


SO_MAX_PACING_RATE = 47


def burned_in(rank: int, plants: dict[str, int], nodes: int, more: dict[str, Any]) -> Any:
    """The verdict of a burn-in in which some ranks have a fault, rank -1 for all; JSON."""
    o = options(**more)
    dist.init_process_group("gloo", timeout=o.timeout)
    world = dist.get_world_size()
    os.environ["CONVOY_NODE_NAME"] = f"n{rank * nodes // world}"
    dist.barrier()
    mine = {kind for kind, who in plants.items() if who in (rank, -1)}
    links = gloo_sockets(rank, world)
    throttled = [(rank + 1) % world] if "throttled" in mine else []
    if "throttled everywhere" in mine:
        throttled = list(links)
    for one in [one for other in throttled for one in links[other]]:
        one.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 2_000_000)

    if "broken" in mine:
        LinkTest._measure = lambda test, pair, group=None: test._failed(
            pair, RuntimeError("no route")
        )
    if "unmounted" in mine:
        o = replace(o, folder=o.folder / "elsewhere")

    def told(check: str) -> None:
        if ("cut " + check) in mine:
            for each in links.values():
                for one in each:
                    one.shutdown(socket.SHUT_RDWR)
        if check == "all-to-all" and "stuck" in mine:
            os.kill(os.getpid(), signal.SIGSTOP)

    # The ranks share this machine's cores, whatever the names of their nodes: they take turns.
    o = replace(o, local_rank=rank, local_world=world)
    board = Board(open_store("burn-in"), rank, world=world, seconds=3 * o.timeout.total_seconds())
    pacer = Pacer(10.0) if "slow" in mine else None
    try:
        if "wrong" in mine:
            with Wrong():
                verdict = BurnIn(board, o).run(told)
        else:
            verdict = BurnIn(board, o).run(told)
    finally:
        if pacer is not None:
            pacer.end()
    return verdict.as_dict()


def found_in(verdict: dict[str, Any]) -> set[tuple[str, int | None, str]]:
    return {(f["node"], f["rank"], f["check"]) for f in verdict["findings"]}


@pytest.mark.slow
def test_each_planted_fault_is_found_and_no_other_rank_is_named(tmp_path):
    plants = {"slow": 1, "wrong": 2, "throttled": 3}
    verdicts = run_ranks(burned_in, 4, plants, 4, {"folder": tmp_path}, timeout=300, group=False)
    assert all(one == verdicts[0] for one in verdicts)
    # A rank that stands still for most of the time may read, write and send slowly too.
    found = {one for one in found_in(verdicts[0]) if one[0] != "n1" or one[2] == "products"}
    assert found == {
        ("n1", 1, "products"), ("n2", 2, "numerics"), ("n2", 2, "training step"),
        ("n3", None, "links"),
    }  # fmt: skip
    findings = verdicts[0]["findings"]
    (line,) = [f["reason"] for f in findings if (f["node"], f["check"]) == ("n3", "links")]
    assert "1 of 3 links are bad" in line
    assert "the other end is n0" in line


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_links_that_are_all_throttled_are_found_against_what_is_expected():
    """Two machines of two ranks. A link within a machine names it; those between them name none."""
    expected = ExpectedRates(products=1.0, links={True: 4e7, False: 4e7})
    more = {"expected": expected, "slow": 0.9, "link_bytes": 1 << 19, "training_step": None}
    plants = {"throttled everywhere": -1}
    verdict = run_ranks(burned_in, 4, plants, 2, more, timeout=500, group=False)[0]
    links = [Link(**one) for one in verdict["measured"]["links"]]
    assert slow_links(links, 0.5) == [], "among themselves they are equal"
    assert found_in(verdict) == {("n0", None, "links"), ("n1", None, "links")}
    (failure,) = verdict["failures"]
    assert "links: all 2 between nodes are slow" in failure
    assert not verdict["is_sound"]
    assert verdict["not_judged"] == []


@pytest.mark.slow
@pytest.mark.parametrize("check", ["links", "all-to-all"])
def test_connections_that_break_once_name_nobody(check):
    """In the all-to-all every rank fails, and only a test of each link tells them apart."""
    more = {"timeout": timedelta(seconds=20)}
    verdicts = run_ranks(burned_in, 4, {f"cut {check}": 1}, 4, more, group=False)
    assert all(one == verdicts[0] for one in verdicts)
    assert verdicts[0]["ended_in"] == check
    assert verdicts[0]["findings"] == [], "a link that works when it is tried again is sound"
    assert not verdicts[0]["is_sound"]


@pytest.mark.slow
def test_a_rank_whose_links_stay_broken_is_named_and_its_partners_are_not():
    more = {"timeout": timedelta(seconds=8)}
    verdict = run_ranks(burned_in, 4, {"broken": 1}, 4, more, timeout=300, group=False)[0]
    assert found_in(verdict) == {("n1", None, "links")}


@pytest.mark.slow
def test_a_machine_that_does_not_see_the_folder_is_named(tmp_path):
    more = {"folder": tmp_path / "run"}
    verdict = run_ranks(burned_in, 3, {"unmounted": 2}, 3, more, group=False)[0]
    assert found_in(verdict) == {("n2", 2, "storage")}
    assert "No such file" in verdict["findings"][0]["reason"]
    assert verdict["measured"]["all-to-all"], "the checks go on"


@pytest.mark.slow
def test_what_fails_everywhere_names_nobody(tmp_path):
    (tmp_path / "file").write_text("")
    more = {"folder": tmp_path / "file" / "run"}
    verdict = run_ranks(burned_in, 2, {}, 2, more, group=False)[0]
    assert (verdict["findings"], verdict["is_sound"]) == ([], False)
    assert "storage failed on 1 of 2 ranks, rank 0" in verdict["failures"][0]


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tmp_path):
    more = {"timeout": timedelta(seconds=3)}
    processes, results = start_ranks(burned_in, 3, {"stuck": 2}, 3, more, group=False)
    try:
        for _ in range(2):
            _, ok, value = results.get(timeout=200)
            assert ok, value
            verdict = pickle.loads(value)
            assert found_in(verdict) == {("n2", 2, "all-to-all")}
            assert verdict["ended_in"] == "all-to-all"
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nobody_healthy_is_named_in_twenty_runs(tmp_path):
    for _ in range(20):
        verdict = run_ranks(burned_in, 4, {}, 2, {"folder": tmp_path}, timeout=300, group=False)[0]
        assert verdict["findings"] == []


@pytest.mark.slow
def test_the_command_under_torchrun(tmp_path):
    verdict = tmp_path / "verdict.json"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
         "-m", "convoy", "burn-in", "--quick", "--json", str(verdict),
         "--slow", "90", "--slow-link", "90"],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 of 1 machines are sound") == 1
    assert len(json.loads(verdict.read_text())["measured"]["links"]) == 6
