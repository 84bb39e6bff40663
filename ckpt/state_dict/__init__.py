"""Checkpoints of any state dict: nested tensors, DTensors and plain values."""
