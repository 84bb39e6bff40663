"""The actions of every rank of a pipeline, in order, by torch.distributed.pipelining.

Imported only where there is a pipeline: the import loads all of torch's compiler.
"""

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
from pretrain.parallelize.schedule import place_of

Orders = dict[int, list[_Action]]
"""The actions of each rank of the pipeline, by its place along pp."""

_FOLDED = {
    PipelineSchedule.ZBV: ScheduleZBVZeroBubble,
    PipelineSchedule.DUALPIPEV: ScheduleDualPipeV,
}


def make_orders(
    schedule: PipelineSchedule,
    stages: Mapping[int, nn.Module],
    *,
    num_stages: int,
    micro_batches: int,
    group: dist.ProcessGroup,
) -> Orders:
    """The actions of every rank of ``group`` in a step, with sends and receives.

    Args:
        schedule: the schedule's name.
        stages: this rank's stages, by number.
        num_stages: the number of stages of the model.
        micro_batches: a number that :func:`pretrain.parallelize.schedule.padded_count` returned.
        group: the ranks of one pipeline.
    """
    device = torch.device("cpu")
    # PyTorch's schedules read only the numbers of these stages.
    torch_stages: list[Any] = [
        PipelineStage(model, stage, num_stages, device, group=group)
        for stage, model in stages.items()
    ]
    options: Any = {"n_microbatches": micro_batches, "loss_fn": lambda *_: None}
    pp = group.size()
    if schedule is PipelineSchedule.GPIPE:
        return ScheduleLoopedBFS(torch_stages, **options).pipeline_order_with_comms
    if schedule.folds_into_v:
        made = _FOLDED[schedule](torch_stages, **options).pipeline_order
        orders = {rank: _flat(actions) for rank, actions in made.items()}
    elif len(stages) > 1:
        return ScheduleInterleaved1F1B(torch_stages, **options).pipeline_order_with_comms
    else:
        orders = {rank: _one_f_one_b(rank, pp, micro_batches) for rank in range(pp)}
    return _add_send_recv(orders, lambda stage: place_of(stage, pp, schedule), num_stages)


def _flat(actions: Iterable[_Action | None]) -> list[_Action]:
    """Actions without OVERLAP_F_B: its sub-actions one after another."""
    return [
        part
        for action in actions
        if action is not None
        for part in (action.sub_actions or (action,))
    ]


def _one_f_one_b(stage: int, num_stages: int, micro_batches: int) -> list[_Action]:
    """One stage's forwards and backwards under 1F1B (Narayanan et al., arXiv 1806.03377, section
    3.2).

    PyTorch's interleaved schedule refuses some numbers of micro-batches even for one stage a rank.
    The list of PyTorch's plain 1F1B starts the last stage with the second micro-batch (torch 2.13).
    """
    forwards = [_Action(stage, _ComputationType.FORWARD, i) for i in range(micro_batches)]
    backwards = [_Action(stage, _ComputationType.FULL_BACKWARD, i) for i in range(micro_batches)]
    ahead = min(num_stages - 1 - stage, micro_batches)
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[micro_batches - ahead :]
