"""Machines, without a model or a checkpoint: who is stuck, slow or gone."""
