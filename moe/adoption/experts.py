"""Experts whose parameters are laid out as in ``transformers``.

Legend: E experts, D d_model, F d_ff.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moe.adoption.kinds import Layout
from moe.adoption.routers import inner
from moe.config import MoEConfig
from moe.experts import ExpertWeights, GroupedExperts
from parallel.dtensor import local_shard


def sizes_of(layout: Layout, experts: Any) -> tuple[int, int, int]:
    """E, D and F of a block's experts."""
    down = parameter(experts, layout.down)
    if layout.flat:
        E = int(experts.num_experts)
        return E, down.shape[1], down.shape[0] // E
    E, a, b = down.shape
    return (E, b, a) if layout.input_first else (E, a, b)


def shapes_of(layout: Layout, E: int, D: int, F: int) -> dict[str, tuple[int, ...]]:
    """The shape that each parameter must have."""
    G = 2 * F if layout.fused else F
    if layout.flat:
        return dict.fromkeys(layout.names, (E * F, D))
    shapes: dict[str, tuple[int, ...]] = {}
    for name in layout.gate_up:
        shapes[name] = (E, D, G) if layout.input_first else (E, G, D)
    shapes[layout.down] = (E, F, D) if layout.input_first else (E, D, F)
    for name, width in zip(layout.biases, (G, D), strict=False):
        shapes[name] = (E, width)
    return shapes


def parameter(experts: nn.Module, path: str) -> Any:
    """The parameter at a path, None where there is none."""
    owner, name = inner(experts, path)
    return owner._parameters.get(name)


class AdoptedExperts(GroupedExperts):
    """Experts with the parameters, their names and their layout, of a block of ``transformers``.

    The experts compute with views; nothing is copied in the forward, but for gates and ups that
    take turns: backends of grouped products take no such views, and copy them.
    """

    def __init__(self, config: MoEConfig, layout: Layout, experts: nn.Module) -> None:
        super().__init__(config)
        self.layout = layout
        self.sizes = sizes_of(layout, experts)
        """E of all ranks, D and F."""
        for path, _ in list(experts.named_parameters()):  # optimizers know them by their order
            where, _, name = path.rpartition(".")
            owner: nn.Module = self
            if where:
                if where not in self._modules:
                    self.add_module(where, nn.Module())
                owner = self.get_submodule(where)
            owner.register_parameter(name, parameter(experts, path))

    def make_parameters(self, E: int, D: int, F: int, bias: bool) -> None:
        """None: the constructor takes those of the block."""

    def reset_parameters(self) -> None:
        """Normal, with standard deviation fan_in ** -0.5; biases are zeros."""
        if "layout" not in vars(self):
            return  # called by the constructor of the base, before there are any
        layout, (_, D, F) = self.layout, self.sizes
        for path in layout.names:
            weight = parameter(self, path)
            if path in layout.biases:
                nn.init.zeros_(weight)
            else:
                nn.init.normal_(weight, std=(F if path == layout.down else D) ** -0.5)

    def local_weights(self) -> ExpertWeights:
        """Views of this rank's parameters, as the backends take them."""
        layout = self.layout
        first, *second = (local_shard(parameter(self, path)) for path in layout.gate_up)
        down = local_shard(parameter(self, layout.down))
        if layout.flat:
            F = self.sizes[2]
            gate_EFD, up_EFD, down_EFD = (w.unflatten(0, (-1, F)) for w in (first, *second, down))
            return ExpertWeights(gate_EFD.mT, up_EFD.mT, down_EFD)
        down_EFD = down if layout.input_first else down.mT
        if not layout.fused:
            return ExpertWeights(None, first if layout.input_first else first.mT, down_EFD)
        gate, up = _halves(first, 2 if layout.input_first else 1, layout.interleaved)
        if not layout.input_first:
            gate, up = gate.mT, up.mT
        if not layout.biases:
            return ExpertWeights(gate, up, down_EFD)
        b_gate_up, b_down = (local_shard(parameter(self, path)) for path in layout.biases)
        b_gate, b_up = _halves(b_gate_up, 1, layout.interleaved)
        return ExpertWeights(gate, up, down_EFD, b_gate, b_up, b_down)

    def stored_gate_up(self) -> Tensor | None:
        """[E, 2 F, D] of which the gate and up weights are halves; None where they are not."""
        layout = self.layout
        if not layout.fused or layout.interleaved:
            return None
        stored = local_shard(parameter(self, layout.gate_up[0]))
        return stored.mT if layout.input_first else stored

    def extra_repr(self) -> str:
        """The fields that ``print`` shows."""
        E, D, F = self.sizes
        return f"num_experts={E}, d_model={D}, d_ff={F}, {self.activation}, backend={self.backend}"


def _halves(tensor: Tensor, dim: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gates and ups along a dim."""
    # One unbind, and not two slices: its backward writes the fused gradient once.
    gates, ups = tensor.unflatten(dim, (-1, 2) if interleaved else (2, -1)).unbind(
        dim + interleaved
    )
    return gates, ups
