"""Pipeline schedules: where each stage is, and what every rank does in which order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _ComputationType

from parallel import PipelineSchedule

Orders = dict[int, list[_Action]]
"""By place along pp, what the rank there does."""

_V = {"zbv": ScheduleZBVZeroBubble, "dualpipev": ScheduleDualPipeV}


def place_of(stage: int, pp: int, schedule: PipelineSchedule) -> int:
    """Which of ``pp`` places along the pipeline has a stage: one after another, round and round,
    or under ``zbv`` and ``dualpipev`` there and back, so that the first has the last stage too."""
    turn, place = divmod(stage, pp)
    return pp - 1 - place if schedule in _V and turn % 2 else place


def bubble(
    pp: int, stages_per_rank: int, micro_batches: int, schedule: PipelineSchedule = "1f1b"
) -> float:
    """The share of a step that ranks wait where all stages and passes take the same time.

    (p - 1) / (v · m + p - 1) for p ranks of v stages and m micro-batches (Narayanan et al., arXiv
    2104.04473, section 2.2, as a share of the whole step).

    Under ``zbv`` and ``dualpipev`` the first rank never waits, nor do others once their first
    micro-batch has come (Qi et al., arXiv 2401.10241, section 6): what is left is that the last
    begins, and ends, p - 1 forwards of a stage later. A rank's step is 6 · m passes of a stage, so
    that is (p - 1) / (6 · m + p - 1), for 2 · p - 1 micro-batches and more, where a backward's two
    passes each take as long as a forward. The more of the weights' gradients are computed in the
    first of them, the less is left to fill the gaps with.
    """
    waits = pp - 1
    passes = 6 * micro_batches if schedule in _V else stages_per_rank * micro_batches
    return waits / (passes + waits)


def padded_count(
    micro_batches: int, pp: int, stages_per_rank: int, schedule: PipelineSchedule
) -> int:
    """How many micro-batches a schedule takes, that many at least: the interleaved one a multiple
    of the ranks, DualPipeV as many as there are stages."""
    if schedule == "dualpipev":
        return max(micro_batches, pp * stages_per_rank)
    if schedule == "1f1b" and stages_per_rank > 1:
        return -(-micro_batches // pp) * pp
    return micro_batches


def make_orders(
    schedule: PipelineSchedule,
    parts: Mapping[int, nn.Module],
    num_stages: int,
    micro_batches: int,
    group: dist.ProcessGroup,
) -> Orders:
    """What every rank of ``group`` does in a step, sends and receives included.

    Args:
        schedule: its name.
        parts: by stage, this rank's parts of the model.
        num_stages: of the whole model.
        micro_batches: as many as :func:`padded_count` says.
        group: the ranks of one pipeline.
    """
    device = torch.device("cpu")
    # PyTorch's schedules take nothing of these but their numbers.
    stages: list[Any] = [
        PipelineStage(part, stage, num_stages, device, group=group) for stage, part in parts.items()
    ]
    options: Any = {"n_microbatches": micro_batches, "loss_fn": lambda *_: None}
    pp = group.size()
    if schedule == "gpipe":
        return ScheduleLoopedBFS(stages, **options).pipeline_order_with_comms
    if schedule in _V:
        made = _V[schedule](stages, **options).pipeline_order
        orders = {rank: _flat(actions) for rank, actions in made.items()}
    elif len(stages) > 1:
        return ScheduleInterleaved1F1B(stages, **options).pipeline_order_with_comms
    else:
        orders = {rank: _one_f_one_b(rank, pp, micro_batches) for rank in range(pp)}
    return _add_send_recv(orders, lambda stage: place_of(stage, pp, schedule), num_stages)


def _flat(actions: Iterable[_Action | None]) -> list[_Action]:
    """Overlapped passes one after another: what the first gives is sent before the second."""
    return [
        part
        for action in actions
        if action is not None
        for part in (action.sub_actions or (action,))
    ]


def _one_f_one_b(stage: int, num_stages: int, micro_batches: int) -> list[_Action]:
    """One stage's passes under 1F1B (Narayanan et al., arXiv 1806.03377, section 3.2).

    PyTorch's interleaved schedule wants certain numbers of micro-batches even of one stage, and its
    plain one's list begins the last stage with the second of them (2.13).
    """
    forwards = [_Action(stage, _ComputationType.FORWARD, i) for i in range(micro_batches)]
    backwards = [_Action(stage, _ComputationType.FULL_BACKWARD, i) for i in range(micro_batches)]
    ahead = min(num_stages - 1 - stage, micro_batches)
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[micro_batches - ahead :]
