"""The reference training system: spec, model, data, loop, barrier, metrics."""
