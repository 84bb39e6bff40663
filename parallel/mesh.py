"""Device meshes of the dense axes and of the expert axes, over the same ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.crossing import installed_crossing, run_rank
from parallel.layout import Topology, count_ranks


@dataclass(frozen=True)
class ParallelDims:
    """The meshes of one topology over the default process group.

    Making a mesh is a collective: all ranks must make equal meshes in equal order. So
    :meth:`build` makes all meshes, and none is made on first use.
    """

    topology: Topology
    replicate_mesh: DeviceMesh
    """[dp_replicate]: the ranks that hold replicas of this rank's shards. Where replicas come and
    leave this rank alone: see :attr:`replicate_group`."""
    fsdp_mesh: DeviceMesh
    """[fsdp]: the ranks that dense parameters are sharded over."""
    efsdp_mesh: DeviceMesh
    """[efsdp]: the ranks that each expert is sharded over."""
    ep_mesh: DeviceMesh
    """[ep]: the ranks that share the experts, and dispatch tokens to each other."""
    fsdp_tp_mesh: DeviceMesh
    """[fsdp_tp]: the ranks that dense parameters outside tensor parallelism are sharded over."""
    tp_mesh: DeviceMesh
    """[tp]: the ranks that share each GEMM."""
    token_mesh: DeviceMesh
    """[cp_tp]: the ranks that have parts of the same micro-batch."""
    pp_mesh: DeviceMesh
    """[pp]: the ranks that have the stages of one pipeline."""
    stage_mesh: DeviceMesh
    """[stage]: the ranks at this rank's place along pp, all with equal layers."""
    cp_mesh: DeviceMesh
    """[cp]: the ranks that have parts of the same sequence."""
    ep_node_meshes: tuple[DeviceMesh, DeviceMesh] | None = None
    """Two meshes of ``ep_mesh``'s ranks: the ranks at this rank's place in each node, and the
    ranks of this rank's node. None unless the ep axis has several full nodes of more than one
    rank."""

    @staticmethod
    def build(
        topology: Topology, device_type: str, ranks_per_node: int | None = None
    ) -> ParallelDims:
        """Make the meshes; every rank of the default process group must call.

        A collective of each group fails after the time-out of the default process group.

        Args:
            topology: the degrees; their product must be the world size.
            device_type: ``cpu`` or ``cuda``.
            ranks_per_node: consecutive ranks that share a machine; None for one machine.

        Raises ValueError where the topology is of another world size, or where there is no process
        group.
        """
        if not dist.is_initialized():
            raise ValueError(
                "ParallelDims.build needs a process group: call "
                "torch.distributed.init_process_group() first, in processes that torchrun has "
                "started"
            )
        world = dist.get_world_size()
        full = topology
        if installed_crossing() is not None:
            topology = replace(topology, dp_replicate=1)  # the default group has one replica
        if topology.world != world:
            raise ValueError(
                f"topology ({topology.describe()} = {count_ranks(topology.world)}) "
                f"must have the world size ({world})"
            )
        t = topology
        # All meshes must come from one root: fully_shard over efsdp takes parameters that are
        # DTensors over ep already, and refuses meshes without a common root. DeviceMesh has no
        # public name for _unflatten; tests/parallel/test_private_torch.py guards the private one.
        root = init_device_mesh(device_type, (world,), mesh_dim_names=("world",))
        replica = {"pp": t.pp, "dp_replicate": t.dp_replicate}
        dense = _split(root, replica | {"fsdp": t.fsdp, "tp": t.tp})
        expert = _split(root, replica | {"efsdp": t.efsdp, "ep": t.ep})
        data = _split(root, replica | {"dp_shard": t.dp_shard, "cp": t.cp, "tp": t.tp})
        spread = _split(root, replica | {"fsdp_tp": t.fsdp_tp})
        tokens = _split(root, replica | {"dp_shard": t.dp_shard, "cp_tp": t.cp * t.tp})
        stages = _split(root, {"pp": t.pp, "stage": world // t.pp})
        node_meshes = None
        per_node = ranks_per_node or world
        if 1 < per_node < t.ep and t.ep % per_node == 0:
            nodes = {"efsdp": t.efsdp, "ep_across": t.ep // per_node, "ep_within": per_node}
            by_node = _split(root, replica | nodes)
            node_meshes = by_node["ep_across"], by_node["ep_within"]
        return ParallelDims(
            topology=full,
            replicate_mesh=dense["dp_replicate"],
            fsdp_mesh=dense["fsdp"],
            efsdp_mesh=expert["efsdp"],
            ep_mesh=expert["ep"],
            fsdp_tp_mesh=spread["fsdp_tp"],
            tp_mesh=dense["tp"],
            token_mesh=tokens["cp_tp"],
            pp_mesh=dense["pp"],
            stage_mesh=stages["stage"],
            cp_mesh=data["cp"],
            ep_node_meshes=node_meshes,
        )

    @cached_property
    def dp_rank(self) -> int:
        """This rank's index among the ranks that get different sequences."""
        return self.topology.dp_rank(run_rank())

    @property
    def replicate_group(self) -> dist.ProcessGroup:
        """The ranks of ``replicate_mesh``; of the present epoch, where replicas come and leave."""
        crossing = installed_crossing()
        if crossing is None or crossing.column is None:
            return self.replicate_mesh.get_group()
        return crossing.column

    @property
    def reads_first(self) -> bool:
        """Whether this rank is the first of those that read the same samples."""
        meshes = (self.pp_mesh, self.cp_mesh, self.tp_mesh)
        return all(mesh.get_local_rank() == 0 for mesh in meshes)

    @property
    def dp_size(self) -> int:
        """The number of ranks that get different sequences: dp_replicate x dp_shard."""
        return self.topology.dp_replicate * self.topology.dp_shard


def _split(root: DeviceMesh, sizes: dict[str, int]) -> DeviceMesh:
    """The mesh of all ranks as axes of these sizes, with the time-out of the default group.

    Without options torch gives each new group a time-out of its own, 30 minutes on gloo. A time-out
    that is set later does not hold for gloo's sends and receives. An axis of all ranks has no
    options: it takes the default group itself.
    """
    world = root.size()
    options = {
        name: made
        for name, size in sizes.items()
        if size < world and (made := _group_options(root.device_type)) is not None
    }
    return root._unflatten(0, tuple(sizes.values()), tuple(sizes), options)


def _group_options(device_type: str) -> Any:
    """New options with the default group's time-out; None for a backend without a time-out."""
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(torch.device(device_type))
    if backend.name() not in ("gloo", "nccl"):
        return None
    kind: Any = type(backend.options)
    options = kind()
    options._timeout = backend.options._timeout
    return options
