"""This process as one rank of a run: process groups, signals, locks and memory."""

from pretrain.runtime.launcher import (
    TORCHRUN_PID,
    end_torchrun,
    end_with_parent,
    end_with_torchrun,
    starts_again_without_machine,
    stop_torchrun,
    torchrun_process,
)
from pretrain.runtime.local_ranks import run_local_ranks
from pretrain.runtime.locks import lock_folder, lock_run
from pretrain.runtime.memory import keep_freed_memory, peak_memory_bytes
from pretrain.runtime.notices import NoticeFile, TimeLimit, slurm_end
from pretrain.runtime.ranks import (
    Runtime,
    join_ranks,
    launched_rank,
    launched_world,
    rank_device,
    start,
)
from pretrain.runtime.signals import StopCause, StopRequest
from pretrain.runtime.start_parts import StartParts, process_start

__all__ = [
    "TORCHRUN_PID",
    "NoticeFile",
    "Runtime",
    "StartParts",
    "StopCause",
    "StopRequest",
    "TimeLimit",
    "end_torchrun",
    "end_with_parent",
    "end_with_torchrun",
    "join_ranks",
    "keep_freed_memory",
    "launched_rank",
    "launched_world",
    "lock_folder",
    "lock_run",
    "peak_memory_bytes",
    "process_start",
    "rank_device",
    "run_local_ranks",
    "slurm_end",
    "start",
    "starts_again_without_machine",
    "stop_torchrun",
    "torchrun_process",
]
