"""What every rank of a pipeline does in which order: torch.distributed.pipelining's lists.

Imported where there is a pipeline: with those lists comes all of torch's compiler.
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
"""By place along pp, what the rank there does."""

_FOLDED = {
    PipelineSchedule.ZBV: ScheduleZBVZeroBubble,
    PipelineSchedule.DUALPIPEV: ScheduleDualPipeV,
}


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
        micro_batches: as many as :func:`pretrain.parallelize.schedule.padded_count` says.
        group: the ranks of one pipeline.
    """
    device = torch.device("cpu")
    # PyTorch's schedules take nothing of these but their numbers.
    stages: list[Any] = [
        PipelineStage(part, stage, num_stages, device, group=group) for stage, part in parts.items()
    ]
    options: Any = {"n_microbatches": micro_batches, "loss_fn": lambda *_: None}
    pp = group.size()
    if schedule is PipelineSchedule.GPIPE:
        return ScheduleLoopedBFS(stages, **options).pipeline_order_with_comms
    if schedule.folds_into_v:
        made = _FOLDED[schedule](stages, **options).pipeline_order
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
