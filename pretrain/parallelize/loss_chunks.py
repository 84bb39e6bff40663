"""How many logits the loss takes at a time. The planner reads this file, so it loads no torch."""

CHUNK = 1 << 20
"""Logits whose float32 copies exist at once on a CPU: about those of its last cache."""
CHUNK_OF_DEVICES = 1 << 26
