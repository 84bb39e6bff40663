"""Tiny mixture-of-experts models that were really trained, and their checkpoints in all formats."""
