"""Expert parallelism: each rank holds a block of every MoE layer's experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


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

    def use_exact_sums(self, sums: Any) -> None:
        """Compute by micro-batch, and add the experts' gradients to ``sums``
        (:class:`parallel.exact.unit_sums.UnitSums`)."""
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


def _are_sharded(module: ExpertParallelModule, ep_mesh: DeviceMesh) -> bool:
    """Whether the experts are sharded for this mesh, and only the groups are to be set again."""
    if isinstance(module, FSDPModule) or any(
        isinstance(m, FSDPModule) for m in module.experts.modules()
    ):
        raise ValueError("apply_expert_parallel must be called before apply_fsdp or fully_shard")
    meshes = {p.device_mesh for p in module.experts.parameters() if isinstance(p, DTensor)}
    if not meshes:
        return False
    if not getattr(module, "lost_expert_group", False):
        raise ValueError("apply_expert_parallel must be called once: the experts are sharded")
    ranks = [mesh.mesh.tolist() for mesh in meshes]
    if any(each != ep_mesh.mesh.tolist() for each in ranks):
        raise ValueError(
            f"ep_mesh (ranks {ep_mesh.mesh.tolist()}) must have the ranks over which the unpickled "
            f"experts are sharded ({ranks[0]})"
        )
    return True


def _check_divides(module: ExpertParallelModule, ranks: int) -> None:
    experts = {name: p.shape[0] for name, p in module.experts.named_parameters()}
    if len(set(experts.values())) > 1:
        raise ValueError(
            f"experts ({type(module.experts).__name__}) must have the expert as the first dim of "
            f"each parameter, not {' and '.join(f'{n} [{s}, ...]' for n, s in experts.items())}: "
            f"adapters of peft do not, use moe.add_lora"
        )
    for parameter in module.experts.parameters():
        if parameter.shape[0] % ranks:
            raise ValueError(
                f"num_experts ({parameter.shape[0]}) must be a multiple of the ranks of ep_mesh "
                f"({ranks})"
            )


def apply_expert_parallel(
    model: nn.Module,
    ep_mesh: DeviceMesh,
    node_meshes: tuple[DeviceMesh, DeviceMesh] | None = None,
    *,
    allow_no_experts: bool = False,
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
        allow_no_experts: whether a model without such layers is left as it is, as a pipeline stage
            of dense layers may be.

    A layer that was unpickled after this function keeps its shards of the experts, and gets the
    groups that a pickle leaves out.

    Raises ValueError, before any layer is changed, where no layer has experts, where a layer's
    number of experts is not a multiple of the ranks, where the experts are sharded already, and
    after :func:`parallel.apply_fsdp`.
    """
    if not isinstance(ep_mesh, DeviceMesh):
        raise TypeError(f"ep_mesh ({type(ep_mesh).__name__}) must be a mesh, as dims.ep_mesh")
    node_groups = [] if node_meshes is None else [mesh.get_group() for mesh in node_meshes]
    ranks, modules = ep_mesh.size(), list(expert_modules(model))
    if not modules and not allow_no_experts:
        raise ValueError(
            f"{type(model).__name__} must have layers with experts, such as MoELayer; "
            f"allow_no_experts=True leaves a model without them as it is"
        )
    if ranks == 1:
        return model
    sharded = [_are_sharded(module, ep_mesh) for module in modules]
    for module, done in zip(modules, sharded, strict=True):
        if not done:
            _check_divides(module, ranks)
    for module, done in zip(modules, sharded, strict=True):
        if done:
            module.use_expert_group(ep_mesh.get_group(), *node_groups)
            continue
        for owner in module.experts.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                cut = distribute_tensor(parameter, ep_mesh, [Shard(0)], src_data_rank=None)
                owner.register_parameter(
                    name, nn.Parameter(cut, requires_grad=parameter.requires_grad)
                )
        module.use_expert_group(ep_mesh.get_group(), *node_groups)
    return model
