"""Checkpoints of any state dict: nested tensors, DTensors and plain values."""

from ckpt.state_dict.load import load_state_dict
from ckpt.state_dict.save import save_state_dict
from ckpt.state_dict.saver import AsyncSaver

__all__ = ["AsyncSaver", "load_state_dict", "save_state_dict"]
