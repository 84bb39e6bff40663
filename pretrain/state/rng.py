"""Random states of every rank, as checkpoint arrays."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from ckpt import ArraySpec, LocalArray
from parallel import (
    Topology,
)


def rng_arrays(
    topology: Topology, rank: int, device: torch.device, states: dict[str, Tensor] | None = None
) -> list[LocalArray]:
    """Every rank's random states, one row each, read from torch or, with ``states``, held there."""
    if states is None:
        states = rng_states(device)
    arrays = []
    for name, state in states.items():
        spec = ArraySpec(
            f"rng/{name}", (topology.world, state.numel()), torch.uint8, (("world",), ())
        )
        arrays.append(LocalArray(spec, spec.layout(topology).boxes(rank), [state.unsqueeze(0)]))
    return arrays


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """This rank's random states as uint8 tensors: ``cpu``, and ``cuda`` on a CUDA device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_states(states: dict[str, Tensor], device: torch.device) -> None:
    """The inverse."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def seed_rng(seed: int, step: int, rank: int) -> None:
    """Random states for a rank that has none of its own: at the start, or after a reshard."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
