"""Expert parallelism: each rank holds a block of every MoE layer's experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor


class ExpertParallelModule(Protocol):
    """A layer whose experts can be sharded over ranks.

    The first dim of every parameter of ``experts`` is the expert.
    """

    experts: nn.Module

    def use_expert_group(
        self,
        group: dist.ProcessGroup,
        across_nodes: dist.ProcessGroup | None = None,
        within_node: dist.ProcessGroup | None = None,
    ) -> None:
        """Dispatch tokens over ``group``; called after the experts' parameters are sharded."""
        ...


def expert_modules(model: nn.Module) -> Iterator[ExpertParallelModule]:
    """The layers of ``model`` that have experts, in the order of ``model.modules()``."""
    for module in model.modules():
        # isinstance() with the protocol would not do: since Python 3.12 it does not call
        # nn.Module.__getattr__, which finds submodules.
        if isinstance(getattr(module, "experts", None), nn.Module) and callable(
            getattr(module, "use_expert_group", None)
        ):
            yield cast(ExpertParallelModule, module)


def expert_parameter_names(model: nn.Module) -> set[str]:
    """Names, as in ``model.named_parameters()``, of the experts' parameters."""
    return _names_of(model, (module.experts for module in expert_modules(model)))


def moe_parameter_names(model: nn.Module) -> set[str]:
    """Names, as in ``model.named_parameters()``, of all parameters of layers that have experts."""
    return _names_of(model, (cast(nn.Module, module) for module in expert_modules(model)))


def _names_of(model: nn.Module, modules: Iterable[nn.Module]) -> set[str]:
    ids = {id(parameter) for module in modules for parameter in module.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


def apply_expert_parallel(
    model: nn.Module,
    ep_mesh: DeviceMesh,
    node_meshes: tuple[DeviceMesh, DeviceMesh] | None = None,
) -> nn.Module:
    """Shard every layer's experts over ``ep_mesh``, and let the layers dispatch tokens over it.

    Experts' parameters become DTensors sharded along the expert dim, with the global shape
    [E, ...]. No values are sent: as with fully_shard, all ranks must have built the same values
    (from one seed, or on the meta device).

    An expert's gradient is the sum over the tokens of all ranks of the mesh. Gradients of all other
    parameters are each rank's own; :func:`parallel.apply_fsdp`, or an all-reduce of the caller's,
    must sum them.

    Args:
        model: a module with layers as :class:`ExpertParallelModule`.
        ep_mesh: the ranks that share the experts.
        node_meshes: ``ParallelDims.ep_node_meshes``, for the hierarchical dispatcher.

    Raises ValueError where a layer's number of experts is not a multiple of the ranks.
    """
    if not isinstance(ep_mesh, DeviceMesh):
        raise TypeError(f"ep_mesh ({type(ep_mesh).__name__}) must be a mesh, as dims.ep_mesh")
    node_groups = [] if node_meshes is None else [mesh.get_group() for mesh in node_meshes]
    ranks = ep_mesh.size()
    if ranks == 1:
        return model
    for module in expert_modules(model):
        for owner in module.experts.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                if parameter.shape[0] % ranks:
                    raise ValueError(
                        f"num_experts ({parameter.shape[0]}) must be a multiple of the ranks of "
                        f"ep_mesh ({ranks})"
                    )
                cut = distribute_tensor(parameter, ep_mesh, [Shard(0)], src_data_rank=None)
                owner.register_parameter(
                    name, nn.Parameter(cut, requires_grad=parameter.requires_grad)
                )
        module.use_expert_group(ep_mesh.get_group(), *node_groups)
    return model
