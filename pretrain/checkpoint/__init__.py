"""When a run saves, where it saves, and what a start makes of what was saved."""

from pretrain.checkpoint.checkpointer import Saves
from pretrain.checkpoint.contents import checkpoint_arrays
from pretrain.checkpoint.resume import newest_shared_step, restore
from pretrain.checkpoint.run_id import forget_run, go_back
from pretrain.checkpoint.tiers import join_peers, start_saver

__all__ = [
    "Saves",
    "checkpoint_arrays",
    "forget_run",
    "go_back",
    "join_peers",
    "newest_shared_step",
    "restore",
    "start_saver",
]
