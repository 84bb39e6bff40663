"""The ``[elastic]`` section of the spec."""

from __future__ import annotations

from typing import Literal

from pretrain.section import OnResume, Section


class ElasticConfig(Section):
    """The ``[elastic]`` section: a run that goes on with other ranks."""

    on_resume = OnResume.FREE

    enabled: bool = False
    """Choose a layout for the ranks that a start has, where the layout of ``[parallel]`` needs
    another number of ranks, and resume a checkpoint of any layout. The global batch, the samples
    and their order stay as they are. Ranks that the layout leaves over stand by as spares."""

    recovery: Literal["heal", "warm", "restart"] = "restart"
    """What a failed rank does to a run under torchrun. ``restart``: torchrun starts all ranks again
    as new processes. ``warm``: the process that torchrun starts imports everything and forks the
    process that trains, as often as ``--max-restarts`` says, and all ranks start again without new
    interpreters. ``heal``: as ``warm``, but only the ranks of the replica that has failed start
    again; the other replicas (``parallel.dp_replicate``) take its micro-batches over, go on with
    the step, and take the replica in when it is back. On GPUs each process makes its own CUDA
    context; no GPU has run ``warm`` and ``heal`` yet."""
