"""What a checkpoint's life is made of: saves by ranks and by a writer, loads, and faults."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import ckpt
from ckpt.background.messages import SaveRequest
from ckpt.background.staged import StagedPart
from ckpt.background.writer import TierWriter
from ckpt.format.shard_layout import ObjectLayout
from ckpt.format.shard_writer import aligned
from parallel.layout import Topology
from pretrain.errors import InputError
from tests.fuzz.machine import check_refusal
from tests.fuzz.stores import FlatStore, HookedFiles, InTurns, Trigger, failing, kill_self
from tests.support.checkpoints import SMALL_SPECS, bits, full_values, local_array, pieces

TOPOLOGIES = (
    Topology(),
    Topology(dp_shard=2, ep=2),
    Topology(dp_shard=3),
    Topology(dp_replicate=2, dp_shard=2, ep=2),
    Topology(dp_shard=4, ep=2),
)
REFUSALS = (ckpt.CheckpointError, InputError, OSError)
"""The errors that a person may get."""
FAULTS = {
    "full": (errno.ENOSPC, True),
    "broken": (errno.EIO, True),
    "flaky": (errno.EIO, False),
    "lost": (errno.EIO, False),
}
"""The error of each fault, and whether later operations fail too. ``lost``: the operation that
fails has taken effect, where the store can do that."""


def nothing(_: str) -> None:
    """Nothing happens."""


def open_site(root: Path, remote: bool, hook: Callable[[str], None], lost: bool) -> ckpt.Store:
    """The store of a folder, with something that happens at operations."""
    if remote:
        return ckpt.Retrying(FlatStore(root, hook, lost), attempts=3, sleep=lambda _: None)
    return ckpt.LocalStore(root, HookedFiles(hook))


def about(step: int, topology: Topology, save_id: str, seed: int, score: int) -> ckpt.SaveInfo:
    """What a manifest says; ``seed`` tells a reader which values belong to the checkpoint."""
    state = {"seed": seed, "run_id": "0" * 16} | ({"validation": float(score)} if score else {})
    return ckpt.SaveInfo(save_id, step, topology, state, {"d_model": 6}, "0" * 64)


def save_by_ranks(store: ckpt.Store, info: ckpt.SaveInfo, seed: int) -> None:
    """A save by all ranks of a topology, which are threads that take turns."""
    world, topology = info.topology.world, info.topology
    turns = InTurns(world)

    def run(rank: int) -> None:
        arrays = [local_array(s, topology, rank, full_values(s, seed)) for s in SMALL_SPECS]
        turns.wait_for(rank)
        try:
            ckpt.save(store, info, arrays, rank, turns.agree_of(rank))
        finally:
            turns.pass_on(rank)

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(run, rank) for rank in range(world)]
    errors = [future.exception() for future in futures]
    first = next((error for error in errors if error is not None), None)
    if first is not None:
        assert all(isinstance(error, ckpt.CheckpointError) for error in errors), errors
        raise first


def save_by_writer(store: ckpt.Store, info: ckpt.SaveInfo, seed: int) -> None:
    """A save as the writer process of a single rank does it: what has not changed is linked."""
    tier = ckpt.Tier(name="shared", location="unused", keep=None)
    writer = TierWriter.__new__(TierWriter)
    hello = SimpleNamespace(rank=0)
    writer.process = SimpleNamespace(hello=hello, others_may_come=lambda began: False)  # type: ignore[assignment]
    writer.tier, writer._previous, writer._told = tier, None, False
    writer.store = store if isinstance(store, ckpt.Retrying) else ckpt.Retrying(store, attempts=1)
    records, parts = [spec.record(info.topology) for spec in SMALL_SPECS], []
    for spec, record in zip(SMALL_SPECS, records, strict=True):
        layout = ObjectLayout(record, (0,) * len(spec.shape))
        buffer = aligned(layout.padded_bytes)
        array = local_array(spec, info.topology, 0, full_values(spec, seed))
        for number, (_, box) in enumerate(layout.chunks):
            start = number * layout.chunk_stride
            layout.fill(box, buffer[start : start + layout.chunk_stride], array.read_into)
        parts.append(StagedPart(layout, buffer))
    request = SaveRequest(info=info, tiers=["shared"], arrays=records, objects=[], staged_bytes=0)
    writer._save(request, parts, threading.Semaphore(0))


def load_as(root: ckpt.Location, manifest: ckpt.Manifest, topology: Topology, seed: int) -> None:
    """Every rank of a topology loads its slices; each number must be that of the seed."""
    for rank in range(topology.world):
        arrays = [local_array(spec, topology, rank) for spec in SMALL_SPECS]
        ckpt.load(root, manifest, arrays)
        for array in arrays:
            expected = local_array(array.spec, topology, rank, full_values(array.spec, seed))
            same = torch.equal(bits(pieces(array)), bits(pieces(expected)))
            assert same, f"{array.spec.name} of step {manifest.step} has other bits"


def in_a_process_that_dies(act: Callable[[Callable[[str], None]], Any], moment: int) -> str:
    """Run ``act`` in a fork, with a hook that is a SIGKILL before the operation ``moment``.

    Returns "killed", or "done" where there were fewer operations.
    """
    with tempfile.TemporaryFile() as said:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forks beside threads
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                act(Trigger(moment, kill_self))
                code = 0
            except BaseException:
                said.write(traceback.format_exc().encode())
                said.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        said.seek(0)
        assert code in (0, -signal.SIGKILL), said.read().decode()
        return "done" if code == 0 else "killed"


def with_fault(
    act: Callable[[Callable[[str], None], bool], Any],
    fault: str,
    moment: int,
    read: Callable[[str], None],
) -> str:
    """Run ``act`` with a fault at one of its operations; returns what became of it.

    Args:
        act: takes what happens at operations, and whether answers are lost.
        fault: "none", "kill", "read", or a key of :data:`FAULTS`.
        moment: the number of the operation.
        read: what happens with "read", while ``act`` stands still.

    Returns "done", "survived" (done, and an operation had failed), "refused", or "killed".
    """
    if fault == "kill":
        return in_a_process_that_dies(lambda hook: act(hook, False), moment)
    if fault in ("none", "read"):
        act(nothing if fault == "none" else Trigger(moment, read), False)
        return "done"
    number, lasts = FAULTS[fault]
    trigger = Trigger(moment, failing(number), lasts=lasts)
    try:
        act(trigger, fault == "lost")
    except REFUSALS as error:
        check_refusal(error, trigger.fired)
        return "refused"
    return "survived" if trigger.fired else "done"
