"""Zarr checkpoints: layout, commit, reshard. It knows tensors, not experts."""
