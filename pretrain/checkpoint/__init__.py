"""When a run saves, where it saves, and what a start makes of what was saved."""

from pretrain.checkpoint.checkpointer import Checkpointer
from pretrain.checkpoint.contents import checkpoint_arrays
from pretrain.checkpoint.go_back import go_back
from pretrain.checkpoint.progress import CheckpointProgress, newest_shared_step
from pretrain.checkpoint.resume import load_step, restore, saved_spec
from pretrain.checkpoint.roll_back import roll_back
from pretrain.checkpoint.run_id import launch_secret, remove_run
from pretrain.checkpoint.tiers import join_peers, start_saver
from pretrain.checkpoint.verified import leave_verified

__all__ = [
    "CheckpointProgress",
    "Checkpointer",
    "checkpoint_arrays",
    "go_back",
    "join_peers",
    "launch_secret",
    "leave_verified",
    "load_step",
    "newest_shared_step",
    "remove_run",
    "restore",
    "roll_back",
    "saved_spec",
    "start_saver",
]
