"""Expert parallelism: each rank keeps its share of every MoE layer's experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor


class ExpertParallelModule(Protocol):
    """A layer whose experts can live on different ranks.

    Every parameter of ``experts`` has the expert as its first dim.
    """

    experts: nn.Module

    def use_expert_group(
        self,
        group: dist.ProcessGroup,
        across_nodes: dist.ProcessGroup | None = None,
        within_node: dist.ProcessGroup | None = None,
    ) -> None:
        """Exchange tokens over ``group``; called once the experts' parameters are cut."""
        ...


def expert_modules(model: nn.Module) -> Iterator[ExpertParallelModule]:
    """The layers of ``model`` that have experts, in the order of ``model.modules()``."""
    for module in model.modules():
        # Not isinstance: since Python 3.12 that looks past nn.Module's own way to hold submodules.
        if isinstance(getattr(module, "experts", None), nn.Module) and callable(
            getattr(module, "use_expert_group", None)
        ):
            yield cast(ExpertParallelModule, module)


def expert_parameter_names(model: nn.Module) -> set[str]:
    """The names, as in ``model.named_parameters()``, of the parameters that belong to experts."""
    return _names_of(model, (module.experts for module in expert_modules(model)))


def moe_parameter_names(model: nn.Module) -> set[str]:
    """The same for all parameters of layers that have experts."""
    return _names_of(model, (cast(nn.Module, module) for module in expert_modules(model)))


def _names_of(model: nn.Module, modules: Iterable[nn.Module]) -> set[str]:
    ids = {id(parameter) for module in modules for parameter in module.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


def apply_expert_parallel(
    model: nn.Module,
    ep_mesh: DeviceMesh,
    node_meshes: tuple[DeviceMesh, DeviceMesh] | None = None,
) -> nn.Module:
    """Give each rank of ``ep_mesh`` its block of every layer's experts, and a dispatcher.

    Parameters become DTensors cut along the expert dim, with the logical shape [E, ...], so that
    any tool that understands DTensor sees the whole layer. No values move: as with fully_shard,
    every rank must have built the same ones (from one seed, or on the meta device).

    An expert's gradient is the sum over the tokens of all ranks of the mesh. The gradients of the
    router and of everything else are each rank's own: :func:`apply_fsdp`, or an all-reduce (sum) of
    yours, adds them up.

    Args:
        model: anything that holds such layers.
        ep_mesh: the ranks that share the experts.
        node_meshes: ``ParallelDims.ep_node_meshes``, for dispatchers that treat nodes apart.

    Raises ValueError where a layer's experts are not a multiple of the ranks.
    """
    nodes = [] if node_meshes is None else [mesh.get_group() for mesh in node_meshes]
    ranks = ep_mesh.size()
    if ranks == 1:
        return model
    for module in expert_modules(model):
        for owner in module.experts.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                if parameter.shape[0] % ranks:
                    raise ValueError(
                        f"moe.num_experts ({parameter.shape[0]}) must be a multiple of "
                        f"parallel.ep ({ranks})"
                    )
                cut = distribute_tensor(parameter, ep_mesh, [Shard(0)], src_data_rank=None)
                owner.register_parameter(
                    name, nn.Parameter(cut, requires_grad=parameter.requires_grad)
                )
        module.use_expert_group(ep_mesh.get_group(), *nodes)
    return model
