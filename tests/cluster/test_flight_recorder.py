"""Dumps of the collectives of all ranks, and the collective at which ranks disagree."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cluster.detect.flight_recorder import (
    Collective,
    FlightDump,
    dump_collectives,
    first_mismatch,
    read_dumps,
    turn_on_flight_recorder,
)
from convoy.commands.command_line import main
from tests.support.ranks import start_ranks

pytestmark = pytest.mark.waits

SUM = Collective("1", 1, "all_reduce", ((4,),), ("Float",), p2p=False, ended=True, created_ns=1)
GROUPS = {"1": (0, 1), "2": (1, 2)}


def dump_of(rank: int, *collectives: Collective) -> FlightDump:
    return FlightDump(rank, {n: ranks for n, ranks in GROUPS.items() if rank in ranks}, collectives)


def test_ranks_that_did_the_same_do_not_part():
    assert first_mismatch([dump_of(0, SUM), dump_of(1, SUM)]) is None


def test_operations_whose_sizes_may_differ_do_not_part_by_sizes():
    uneven = replace(SUM, op="all_to_all", sizes=((9, 2),))
    assert (
        first_mismatch([dump_of(0, uneven), dump_of(1, replace(uneven, sizes=((7, 2),)))]) is None
    )
    mismatch = first_mismatch([dump_of(0, SUM), dump_of(1, replace(SUM, sizes=((5,),)))])
    assert mismatch is not None
    assert mismatch.by_other_ops


def test_collectives_that_have_left_a_ring_buffer_are_not_missing():
    later = replace(SUM, number=2)
    assert first_mismatch([dump_of(0, SUM, later), dump_of(1, later)]) is None


def test_where_ranks_wait_for_ranks_that_wait_the_one_outside_collectives_is_named():
    # Rank 0 waits for rank 1 since long, and rank 1 waits for rank 2, which is in no collective.
    early = replace(SUM, number=2, ended=False, created_ns=5)
    late = replace(SUM, group="2", ended=False, created_ns=9)
    mismatch = first_mismatch([dump_of(0, SUM, early), dump_of(1, SUM, late), dump_of(2)])
    assert mismatch is not None
    assert (mismatch.group, mismatch.number, set(mismatch.missing)) == ("2", 1, {2})
    # Without a dump of rank 2 the answer is the same.
    mismatch = first_mismatch([dump_of(0, SUM, early), dump_of(1, SUM, late)])
    assert mismatch is not None
    assert (mismatch.group, set(mismatch.missing)) == ("2", {2})


# ------------------------------------------------------------------------------------------------
# Real ranks.


def _has_ended(folder: str, rank: int) -> bool:
    dump_collectives(Path(folder), rank)
    return FlightDump.read(Path(folder, f"rank-{rank}.json")).waits_in is None


def steps(rank: int, folder: str, case: str) -> None:
    group = dist.new_group(timeout=timedelta(seconds=3 if case != "kill" else 60))
    for _ in range(2):
        dist.all_reduce(torch.ones(4), group=group)
    waits_in = None
    try:
        if case == "less" and rank == 1:
            # PyTorch notes the end of a collective a moment after the wait.
            while not _has_ended(folder, rank):
                time.sleep(0.05)
        elif case == "other" and rank == 1:
            dist.broadcast(torch.ones(4), 1, group=group)
        elif case == "kill" and rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        elif case == "size":
            # Gloo completes this broadcast on both ranks; nobody else sees the mistake.
            dist.broadcast(torch.ones(7 if rank == 1 else 5), 0, group=group)
        else:
            dist.all_reduce(torch.ones(5), group=group)
    except RuntimeError:
        waits_in = group.group_name
    dump_collectives(Path(folder), rank, waits_in)
    dist.destroy_process_group()


def on_rank(rank: int, folder: str, case: str, world: int) -> None:
    turn_on_flight_recorder()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    steps(rank, folder, case)


@pytest.mark.parametrize(
    ("case", "world", "shown"),
    [
        ("less", 2, [
            "  rank 0: entered all_reduce of Float [5]",
            "  rank 1: has not entered; outside collectives, after all_reduce of Float [4], "
            "number 2 of group 1",
        ]),
        ("size", 2, [
            "  rank 0: entered broadcast of Float [5]",
            "  rank 1: entered broadcast of Float [7]",
        ]),
        ("other", 3, [
            "  rank 1: entered broadcast of Float [4]",
            "  ranks 0, 2: entered all_reduce of Float [5]",
        ]),
        ("kill", 3, [
            "  rank 2: has not entered; no dump: the process has ended or was stopped",
            "  ranks 0-1: entered all_reduce of Float [5]",
        ]),
    ],
)  # fmt: skip
def test_the_collective_at_which_real_ranks_part_is_named(case, world, shown, tmp_path, capsys):
    folder = tmp_path / "flight" / "0123"
    processes, results = start_ranks(on_rank, world, str(folder), case, world, group=False)
    for process in processes:
        process.join(60)
    with contextlib.suppress(queue.Empty):
        while True:
            _, ok, value = results.get(timeout=0.1)
            assert ok, value
    assert len(read_dumps(folder)) == world - (case == "kill")
    assert main("inspect", ["flight", str(tmp_path)]) == 1
    members = "ranks 0-1" if world == 2 else "ranks 0-2"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"ranks disagree at collective number 3 of group 1 ({members}):"
    assert lines[1:3] == shown


def test_a_folder_without_dumps_is_refused(tmp_path, capsys):
    assert main("inspect", ["flight", str(tmp_path)]) == 2
    assert f"FOLDER ({tmp_path}) must hold" in capsys.readouterr().err
    (tmp_path / "rank-0.json").write_text(json.dumps({"rank": 0}))
    assert main("inspect", ["flight", str(tmp_path)]) == 2
    assert "rank-0.json is no dump of collectives" in capsys.readouterr().err
