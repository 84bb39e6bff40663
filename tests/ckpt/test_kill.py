"""SIGKILL in saves by two real ranks, at random moments and at each operation on files: the newest
checkpoint is always whole."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.store.posix import Files
from parallel.layout import Topology
from tests.support.checkpoints import (
    assert_nothing_left_over,
    assert_whole,
    full_values,
    info,
    local_array,
    save_with_threads,
)
from tests.support.ranks import run_ranks, start_ranks

TOPOLOGY = Topology(dp_shard=2, ep=2)
SPECS = [
    ckpt.ArraySpec("model/embed/weight", (256, 512), torch.float32, (("fsdp",), ())),
    ckpt.ArraySpec(
        "model/layers/experts", (2, 8, 64, 128), torch.bfloat16, ((), ("ep",), ("efsdp",), ())
    ),
    ckpt.ArraySpec("optimizer/exp_avg", (256, 512), torch.float32, (("fsdp",), ())),
]


def save_for_ever(rank: int, root: Path) -> None:
    """What a run does: clear leftovers, go on after the newest step, save, keep two."""
    if rank == 0:
        ckpt.lifecycle.remove_uncommitted(root)
        ckpt.retain(root, 2)
    agree(True)
    steps = ckpt.committed_steps(root)
    agree(True)
    step = steps[-1] if steps else 0
    while True:
        step += 1
        arrays = [local_array(s, TOPOLOGY, rank, full_values(s, step)) for s in SPECS]
        ckpt.save(root, info(step, TOPOLOGY), arrays, rank, agree)
        if rank == 0:
            ckpt.retain(root, 2)


def agree(ok: bool) -> bool:
    word = torch.tensor(int(ok))
    dist.all_reduce(word, dist.ReduceOp.MIN)
    return bool(word)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a starved machine is slow, not wrong
def test_twenty_kills_leave_only_whole_checkpoints(tmp_path):
    root = tmp_path / "checkpoints"
    root.mkdir()
    moments = random.Random(20)
    interrupted, newest = 0, 0
    for turn in range(20):
        processes, _ = start_ranks(save_for_ever, 2, root)
        try:
            # Leftovers go first, so a step beyond the newest means that saving has begun.
            while not ckpt.committed_steps(root)[-1:] > [newest] and (
                turn % 4 == 0 or not any((root / "objects").glob(f"{newest + 1:08d}-*"))
            ):
                assert all(p.is_alive() for p in processes), "a rank died by itself"
                time.sleep(0.001)
            time.sleep(moments.uniform(0, 0.15) if turn % 2 else 0)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
        steps = ckpt.committed_steps(root)
        if steps:
            assert steps[-1] >= newest, "a committed checkpoint is gone"
            newest = steps[-1]
        for step in steps:
            assert_whole(root, step, SPECS)
        kept = {ckpt.read_manifest(root, step).save_id for step in steps}
        present = {p.name for p in (root / "objects").iterdir()}
        assert kept <= present
        interrupted += present > kept
        assert len(steps) <= 3, f"turn {turn}: retention fell behind: {steps}"
    assert newest >= 5, "in every fourth turn a commit was awaited"
    assert interrupted >= 5, f"only {interrupted} kills fell into a save: the test shows little"


class DyingFiles(Files):
    """Kills its own process before the ``at``-th operation of any kind, from 0; None: counts."""

    def __init__(self, at: int | None) -> None:
        self.at, self.count = at, 0
        self._lock = threading.Lock()

    def __getattribute__(self, name: str) -> Any:
        if name in OPERATIONS:
            with self._lock:
                if self.count == self.at:
                    os.kill(os.getpid(), signal.SIGKILL)
                self.count += 1
        return super().__getattribute__(name)


OPERATIONS = {name for name in vars(Files) if not name.startswith("_")}


def save_and_retain(rank: int, root: Path, victim: int, at: int | None) -> int:
    files = DyingFiles(at if rank == victim else None)
    store = ckpt.LocalStore(root, files)
    arrays = [local_array(s, TOPOLOGY, rank, full_values(s, 2)) for s in SPECS]
    ckpt.save(store, info(2, TOPOLOGY), arrays, rank, agree)
    if rank == 0:
        ckpt.retain(store, 1)
    return files.count


def kill_one(root: Path, victim: int, at: int) -> bool:
    """One save over another by two ranks, one of which is killed; False where it came through."""
    save_with_threads(root, 1, TOPOLOGY, SPECS, 1)
    processes, _ = start_ranks(save_and_retain, 2, root, victim, at)
    processes[victim].join()
    killed = processes[victim].exitcode == -signal.SIGKILL
    assert killed or processes[victim].exitcode == 0
    # The other learns of it from the connection, or waits for it.
    processes[1 - victim].join(20)
    processes[1 - victim].kill()
    processes[1 - victim].join()

    steps = ckpt.committed_steps(root)
    assert steps
    for step in steps:
        assert_whole(root, step, SPECS)
    ckpt.lifecycle.remove_uncommitted(root)
    assert ckpt.committed_steps(root) == steps
    assert_nothing_left_over(root)
    again = steps[-1] + 1
    save_with_threads(root, again, TOPOLOGY, SPECS, again)
    for step in [*steps, again]:
        assert_whole(root, step, SPECS)
    return killed


def test_a_kill_at_some_operations_of_each_rank(tmp_path):
    save_with_threads(tmp_path / "count", 1, TOPOLOGY, SPECS, 1)
    counts = run_ranks(save_and_retain, 2, tmp_path / "count", 0, None)
    assert counts[0] > counts[1] > 15
    moments = random.Random(6)
    for victim, count in enumerate(counts):
        for at in moments.sample(range(count), 3):
            # The number of operations varies: a rank looks for another rank's file again and again.
            while not kill_one(tmp_path / f"{victim}-{at}", victim, at):
                at -= max(1, count // 10)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_at_every_operation_of_each_rank(tmp_path, victim):
    at = 0
    while kill_one(tmp_path / str(at), victim, at):
        shutil.rmtree(tmp_path / str(at))
        at += 1
    assert at > 15
    assert ckpt.committed_steps(tmp_path / str(at)) == [2, 3]
