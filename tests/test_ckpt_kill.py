"""SIGKILL at random moments of saves by two real ranks: the newest checkpoint is always whole."""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ckpt
from parallel.layout import Topology
from tests.checkpoints import bits, full_values, info, local_array, pieces
from tests.dist import start_ranks

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

    def agree(ok: bool) -> bool:
        word = torch.tensor(int(ok))
        dist.all_reduce(word, dist.ReduceOp.MIN)
        return bool(word)

    if rank == 0:
        ckpt.remove_uncommitted(root)
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


def assert_whole(root: Path, step: int) -> None:
    manifest = ckpt.read_manifest(root, step)
    ckpt.verify(root, manifest)
    arrays = [local_array(spec, Topology(), 0) for spec in SPECS]
    ckpt.load(root, manifest, arrays)
    for array in arrays:
        assert torch.equal(bits(pieces(array)), bits(full_values(array.spec, step))), step


def test_twenty_kills_leave_only_whole_checkpoints(tmp_path):
    root = tmp_path / "checkpoints"
    root.mkdir()
    moments = random.Random(20)
    interrupted, newest = 0, 0
    for turn in range(20):
        processes, _ = start_ranks(save_for_ever, 2, root)
        try:
            deadline = time.monotonic() + 60
            # Leftovers go first, so a step beyond the newest means that saving has begun.
            while not any((root / "objects").glob(f"{newest + 1:08d}-*")) and (
                ckpt.committed_steps(root)[-1:] <= [newest]
            ):
                assert time.monotonic() < deadline, "no save began"
                assert all(p.is_alive() for p in processes), "a rank died by itself"
                time.sleep(0.001)
            time.sleep(moments.uniform(0, 0.15))
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
            assert_whole(root, step)
        kept = {ckpt.read_manifest(root, step).save_id for step in steps}
        present = {p.name for p in (root / "objects").iterdir()}
        assert kept <= present
        interrupted += present > kept
        assert len(steps) <= 3, f"turn {turn}: retention fell behind: {steps}"
    assert newest > 0, "nothing was ever committed"
    assert interrupted >= 5, f"only {interrupted} kills fell into a save: the test shows little"
