"""How each parameter's tensor is split over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from torch import Tensor, nn

from parallel import (
    ShardLayout,
    Topology,
    expert_parameter_names,
    moe_parameter_names,
)
from parallel.layout import dense_splits, expert_splits, spread_splits


def parameter_layouts(
    model: nn.Module,
    topology: Topology,
    tp_dim: Callable[[str], int | None] | None = lambda _: None,
    stage: Callable[[str], int] = lambda _: 0,
) -> dict[str, ShardLayout]:
    """The placement of every parameter and buffer, by name; buffers are whole on every rank.

    Args:
        model: as one process would have the model, on any device.
        topology: the degrees.
        tp_dim: by name, the dim of a dense parameter that tensor parallelism cuts; None where FSDP
            shards it over these ranks too.
        stage: by name, the place along pp that has a parameter or buffer.
    """
    experts, of_moe = expert_parameter_names(model), moe_parameter_names(model)

    def splits(name: str, parameter: Tensor) -> tuple[tuple[str, ...], ...]:
        if not isinstance(parameter, nn.Parameter):
            return ((),) * parameter.ndim
        if name in experts:
            return expert_splits(parameter.ndim)
        if topology.tp > 1 and (tp_dim is None or name in of_moe):
            return spread_splits(parameter.ndim)
        cut = tp_dim(name) if topology.tp > 1 and tp_dim is not None else None
        return dense_splits(parameter.ndim, cut)

    return {
        name: ShardLayout(
            tuple(tensor.shape),
            splits(name, tensor),
            topology,
            (stage(name),) if topology.pp > 1 else (),
        )
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
    }
