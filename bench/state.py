"""Training states for bench/checkpoint.py: a MoE model's, and 200 tensors of mixed sizes.

Legend: V vocab, D d_model, F d_ff, E experts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
"""A parameter and AdamW's two moments, each its own tensor."""


@dataclass(frozen=True)
class Sizes:
    """A MoE language model's."""

    layers: int
    d_model: int
    d_ff: int
    experts: int
    vocab: int

    def layer(self) -> dict[str, tuple[int, ...]]:
        """Logical shapes of one layer's parameters; those of 3 dims are the experts'."""
        d, f, e = self.d_model, self.d_ff, self.experts
        attention = {f"attention/w_{name}": (d, d) for name in ("q", "k", "v", "o")}
        experts = {"w_gate": (e, d, f), "w_up": (e, d, f), "w_down": (e, f, d)}
        return (
            attention
            | {"attention_norm": (d,), "moe_norm": (d,), "moe/router": (e, d)}
            | {f"moe/experts/{name}": shape for name, shape in experts.items()}
        )

    def rest(self) -> dict[str, tuple[int, ...]]:
        """Those outside of layers."""
        v, d = self.vocab, self.d_model
        return {"embed": (v, d), "head": (v, d), "norm": (d,)}


@dataclass(frozen=True)
class State:
    """One rank's part of a training state, all in float32, cut along each tensor's first dim."""

    sizes: Sizes | None
    """None for tensors of mixed sizes, which nothing stacks."""
    rank: int
    world: int
    tensors: dict[str, Tensor]
    """By name; a layer's is called KIND/layers/7/NAME."""
    shapes: dict[str, tuple[int, ...]]
    """Logical."""

    @staticmethod
    def random(sizes: Sizes, rank: int, world: int) -> State:
        """Numbers that no two tensors, and no two ranks, have alike."""
        generator = torch.Generator().manual_seed(rank)
        shapes = {}
        for kind in KINDS:
            for at in range(sizes.layers):
                layer = sizes.layer().items()
                shapes.update({f"{kind}/layers/{at}/{name}": shape for name, shape in layer})
            shapes.update({f"{kind}/{name}": shape for name, shape in sizes.rest().items()})
        tensors = {}
        for name, shape in shapes.items():
            assert shape[0] % world == 0, f"{name} {shape} is not cut evenly over {world} ranks"
            local = (shape[0] // world, *shape[1:])
            tensors[name] = torch.rand(local, generator=generator)
        return State(sizes, rank, world, tensors, shapes)

    @staticmethod
    def mixed(layers: int, rank: int, world: int) -> State:
        """Layers of 20 tensors, each of a shape of its own: 10 have 1 to 64 KiB, as norms and
        biases have, and 10 have 1 to 10 MiB. 10 layers have 0.44 GiB."""
        generator = torch.Generator().manual_seed(rank)
        draw, of_layer = random.Random(0), dict[str, tuple[int, ...]]()
        for i in range(10):
            of_layer[f"norm_{i}"] = (2 * draw.randint(128, 8192),)
            rows, columns = 2 * draw.randint(256, 640), 8 * draw.randint(64, 256)
            of_layer[f"linear_{i}"] = (rows, columns)
        shapes = {
            f"layers/{at}/{name}": shape for at in range(layers) for name, shape in of_layer.items()
        }
        tensors = {
            name: torch.rand((shape[0] // world, *shape[1:]), generator=generator)
            for name, shape in shapes.items()
        }
        return State(None, rank, world, tensors, shapes)

    @property
    def bytes(self) -> int:
        """Of this rank."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def fill_from(self, get: Callable[[str], Tensor]) -> None:
        """Copy every tensor from what a reader has for its name."""
        for name, tensor in self.tensors.items():
            tensor.copy_(get(name))
