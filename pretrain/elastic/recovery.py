"""What becomes of a run when a rank fails: the ways of ``elastic.recovery``."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

from cluster.members import EXCLUDE_LIST
from pretrain.elastic.layout import ChosenLayout
from pretrain.elastic.membership import Seat
from pretrain.elastic.seats import SeatKeeper
from pretrain.elastic.warm import WarmRank
from pretrain.observe import say
from pretrain.runtime import launched_rank, torchrun_process
from pretrain.spec import JobSpec


def why_not_healed(spec: JobSpec, layout: ChosenLayout) -> str:
    """Why replicas of a run cannot go on without one of them; empty where they can."""
    parallel, moe, tiers = spec.parallel, spec.moe, spec.checkpoint.tiers
    if layout.topology.dp_replicate < 2:
        return f"parallel.dp_replicate ({layout.topology.dp_replicate}) must be at least 2"
    if layout.spares:
        return f"the layout leaves {layout.spares} of the ranks over"
    if parallel.gradient_compression != "none":
        return f"parallel.gradient_compression ({parallel.gradient_compression}) must be none"
    if moe is not None and moe.aux_loss_scope == "global_batch":
        return "moe.aux_loss_scope (global_batch) must be micro_batch or previous_step"
    if spec.optimizer.kind == "muon":
        return "optimizer.kind (muon) shares its matrices among replicas"
    if moe is not None and getattr(moe.capacity, "replay_log", None):
        return "moe.capacity.replay_log has the plans of other ranks"
    if tiers.memory or tiers.replicate_to_peer or tiers.local_path:
        return "checkpoint.tiers must be off"
    return ""


def with_recovery(spec: JobSpec, layout: ChosenLayout, train: Callable[[Seat | None], int]) -> int:
    """Call ``train`` as ``elastic.recovery`` says; returns its exit code.

    With ``heal`` and ``warm`` a child process calls ``train``, with ``heal`` given its seat, again
    after each failure. Each child returns from this function too: what follows must be what
    follows ``train``. A process that torchrun has not started, or a system that cannot fork, calls
    ``train`` once.
    """
    torchrun, how = torchrun_process(), spec.elastic.recovery
    if how == "restart" or torchrun is None or not hasattr(os, "fork"):
        return train(None)
    import torch._dynamo  # noqa: F401 - torch's optimizers import it when they are made

    why = why_not_healed(spec, layout) if how == "heal" else ""
    if why and launched_rank() == 0:
        say(f"elastic.recovery (heal) is warm in this run, and a lost rank starts all ranks again: "
            f"{why}")  # fmt: skip
    join = timedelta(seconds=spec.train.timeout_seconds)  # as ranks without a parent join
    exclude_list = spec.run_path / EXCLUDE_LIST
    if how == "warm" or why:
        code = WarmRank(torchrun, exclude_list, join=join).run()
        return train(None) if code is None else code
    keeper = SeatKeeper(torchrun, exclude_list, join=join, topology=layout.topology)
    code = keeper.run()
    return train(keeper.seat) if code is None else code
