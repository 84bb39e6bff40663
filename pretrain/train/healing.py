"""A run whose replicas leave and come back: the same processes train through one epoch after
another.

What a process keeps is the model, its optimizer and its data. What is made anew in each epoch is
small: the groups that cross replicas, the job's view of its ranks, and the trainer. A step that an
epoch's end broke off is taken again: no rank has changed a parameter. A rank that has not got the
step barrier's vector, while another rank has, gets the vector from that rank, and moves on alike:
:class:`cluster.members.Epoch` says who is behind.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ckpt import AsyncCheckpointer, CheckpointError, open_store
from ckpt.lifecycle import remove_uncommitted
from cluster.detect import is_of_collective
from cluster.members import Epoch
from parallel import all_gather_rows, digest
from parallel.crossing import RegroupError, across
from pretrain.checkpoint import restore, start_saver
from pretrain.data import Blend
from pretrain.elastic import Membership, broadcast_text
from pretrain.errors import CorruptionError, HealthError, LostRankError
from pretrain.job import Built, Job, assemble
from pretrain.observe import Events, Regrouped, StepCommitted, last_event
from pretrain.optim import set_update_count
from pretrain.parts.step import Reports
from pretrain.runtime import Runtime
from pretrain.spec import JobSpec
from pretrain.state import Progress, RunState, blend_of, parse_run_state, seed_rng
from pretrain.train.barrier import Rows
from pretrain.train.trainer import Trainer

_BUCKET_BYTES = 64 << 20
"""Of one broadcast of a replica's state: larger ones gain nothing, and take memory."""
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd: equal changes of two buckets must not cancel."""


@dataclass
class Carried:
    """What this process takes from an epoch to the next."""

    trainer: Trainer | None = None
    """Of the epoch before; None where its trainer had not begun."""
    progress: Progress | None = None
    """The run's counters, as the epoch before began."""
    blend: Blend | None = None
    writer: AsyncCheckpointer | None = None
    ended_at: float = field(default_factory=time.monotonic)
    """When the epoch before was over for this rank."""

    def end(self) -> None:
        """The epoch is over."""
        self.ended_at = time.monotonic()


@dataclass(frozen=True)
class InEpoch:
    """An epoch, and what this process brings to it."""

    members: Membership
    epoch: Epoch
    carried: Carried
    job: Job

    @property
    def begins_run(self) -> bool:
        """Whether the epoch begins with a checkpoint, as a start of the run does."""
        return self.epoch.source is None


def is_lost(error: BaseException) -> bool:
    """Whether an error comes from a collective."""
    if not isinstance(error, RuntimeError):
        return False
    if isinstance(error, RegroupError | CheckpointError | CorruptionError | HealthError):
        return False
    of_store = ("Connection", "Broken pipe", "TCPStore")
    return is_of_collective(error) or any(word in str(error) for word in of_store)


@contextmanager
def errors_end_epochs(members: Membership) -> Iterator[None]:
    """Raise RegroupError in the place of an error of a collective."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        members.over(error)
        raise RegroupError(members.crossing.why) from error


def epoch_runtime(members: Membership, epoch: Epoch, replica: Runtime) -> Runtime:
    """This process in an epoch."""
    crossing = members.crossing
    assert crossing.control is not None
    store = members.store
    replica.comm_monitor.forget()
    launch = store.compare_set("launch", "", secrets.token_hex(8)).decode()
    return replica.in_epoch(
        members.rank,
        members.topology.world,
        control=crossing.control,
        launch_id=launch if epoch.number == 1 else f"{launch}e{epoch.number}",
        store=members.epoch_store,
        lose=members.lose,
    )


def epoch_writer(
    members: Membership, spec: JobSpec, runtime: Runtime, carried: Carried
) -> AsyncCheckpointer:
    """This rank's writer process, another one where the rank has got another number."""
    writer = carried.writer
    if writer is not None and members.epoch is not None and members.epoch.left:
        writer.abandon()
        if members.speaks_for_source:
            # A rank of such a save may be gone: nobody must wait for its part.
            for tier in writer.tiers:
                with suppress(OSError):
                    remove_uncommitted(open_store(tier.location))
    if writer is None or writer.rank != runtime.rank:
        if writer is not None:
            writer.leave()
        # Nobody waits for its start before the first save.
        writer = carried.writer = start_saver(spec, runtime, "")
    return writer


def epoch_job(
    members: Membership, built: Built, runtime: Runtime, events: Events, carried: Carried
) -> Job:
    """The job of an epoch."""
    job = assemble(built, runtime, members.topology, events)
    if carried.blend is not None:
        job.set_blend(carried.blend)
    if job.balance is not None:
        job.balance.apply(job.routers, runtime.rank)
    return job


def begin_epoch(within: InEpoch) -> Progress:
    """Give every rank of an epoch the run's state; returns its counters. Every rank must call."""
    members, epoch, carried, job = within.members, within.epoch, within.carried, within.job
    standing = members.standing
    if epoch.source is None:
        assert carried.writer is not None
        # After the writer processes of earlier starts, which may still commit a save.
        job.runtime.together(carried.writer.ready)
        progress = restore(job, carried.writer.tiers)
        standing.ready, standing.turn, standing.done_step = True, 0, progress.step
        carried.blend, carried.progress = job.loader.blend, progress
        if epoch.left:
            lost = "; ".join(f"replica {life.seat} left ({why})" for life, why in epoch.left)
            text = f"{lost}: no replica had the run's state, and all begin again"
            job.events.note(text, step=progress.step, problem=True)
        return progress
    settle(members, epoch, carried)
    job.optimizer.zero_grad()  # of a step that was broken off, or that is committed by now
    own = carried.progress if carried.trainer is None else carried.trainer.progress
    if epoch.joined:
        own = hand_over(within, own)
        standing.ready, standing.turn = True, epoch.turn
    assert own is not None
    progress = replace(own, topology_epoch=own.topology_epoch + 1)
    carried.blend = job.loader.blend
    standing.done_step = epoch.done_step
    if job.runtime.is_first and carried.trainer is not None:
        logged = last_event(job.spec.run_path / "log.jsonl", StepCommitted)
        if logged is None or logged.step < progress.step:
            carried.trainer.job = job
            carried.trainer.publish_newest()
    carried.progress = progress
    job.events.publish(
        Regrouped(
            step=progress.step,
            epoch=epoch.number,
            left=[
                {"replica": life.seat, "start": life.start, "why": why} for life, why in epoch.left
            ],
            joined=[life.seat for life in epoch.joined],
            replicas=len(epoch.lives),
            world_size=job.runtime.world,
            topology=job.topology.as_dict(),
            seconds=time.monotonic() - carried.ended_at,
        )
    )
    return progress


def settle(members: Membership, epoch: Epoch, carried: Carried) -> None:
    """Let the ranks that lack the newest barrier's vector have it, and move on."""
    standing, trainer = members.standing, carried.trainer
    if not epoch.some_behind or not standing.ready:
        return
    store = members.epoch_store("rows")
    if standing.turn == epoch.turn:
        # A rank that has come since has the state, and no rows.
        if trainer is not None and trainer.rows is not None:
            reports, columns = trainer.rows
            lists = {name: column.tolist() for name, column in columns.items()}
            text = json.dumps([reports.rows.tolist(), lists])
            store.compare_set("rows", "", text)
        return
    assert trainer is not None
    until = time.monotonic() + members.patience
    while not store.check(["rows"]):
        members.crossing.check()
        if time.monotonic() > until:
            members.leave("no living rank has the newest barrier's vector")
        time.sleep(0.005)
    reports, columns = json.loads(store.get("rows"))
    rows: Rows = (Reports(np.array(reports)), {k: np.array(v) for k, v in columns.items()})
    try:
        trainer.advance(rows)
    except LostRankError as error:
        members.leave(str(error))


def hand_over(within: InEpoch, progress: Progress | None) -> Progress:
    """Give the replicas that come the state of the source replica; every rank must call.

    A rank gets its shards from the rank of the source that holds equal shards, and nothing else
    moves. Then both have equal digests, or the replica that comes is refused.
    """
    members, epoch, job = within.members, within.epoch, within.job
    assert epoch.source is not None
    crossing, runtime = members.crossing, job.runtime
    comes = members.seat.life in epoch.joined
    column: Any = crossing.column
    text = ""
    if epoch.lives.index(members.seat.life) == epoch.source:
        assert progress is not None
        state = RunState(
            progress=progress,
            corpus=job.corpora.fingerprint,
            parts={},
            blend=None if job.loader.blend is None else job.loader.blend.as_json(),
        )
        text = json.dumps(state.as_dict())
    text = broadcast_text(text, column, epoch.source)
    pieces = [piece.detach() for array in job.arrays() for piece in array.pieces]
    total = torch.zeros(1, dtype=torch.int64)
    for bucket in _buckets(pieces):
        words = _words(bucket, runtime.device)
        # Of ranks that do not come this is a copy: what breaks off changes nothing.
        begin = partial(dist.broadcast, words, group=column, group_src=epoch.source, async_op=True)
        across(column, begin).wait()
        total = total * _FACTOR + digest([words]).cpu()
        if comes:
            _take(bucket, words)
    rows = all_gather_rows(total, column, "dp")
    if comes:
        if int(rows[epoch.source]) != int(total):
            members.leave("its copy of the run's state has another digest")
        values = json.loads(text)
        state = parse_run_state(values, int(values["step"]))
        progress = state.progress
        job.set_blend(blend_of(state))
        progress = job.continue_step_counts(progress)
        set_update_count(job.optimizer, progress.step)
        seed_rng(job.spec.train.seed, progress.step, runtime.rank)
    assert progress is not None
    return progress


def _buckets(pieces: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbouring pieces, of some bytes together."""
    bucket: list[torch.Tensor] = []
    size = 0
    for piece in pieces:
        if bucket and size + piece.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(piece)
        size += piece.nbytes
    if bucket:
        yield bucket


def _words(pieces: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The bytes of tensors, one after the other, in new memory on ``device``."""
    rows = [piece.contiguous().view(-1).view(torch.uint8).to(device) for piece in pieces]
    return torch.cat(rows)


def _take(pieces: Sequence[torch.Tensor], words: torch.Tensor) -> None:
    """Write what :func:`_words` gave of equal tensors."""
    rows = words.split([piece.nbytes for piece in pieces])
    for piece, row in zip(pieces, rows, strict=True):
        # A clone is aligned for any dtype.
        piece.copy_(row.clone().view(piece.dtype).view(piece.shape))
