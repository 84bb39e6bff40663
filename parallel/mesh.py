"""Process meshes: the dense axes and the expert axes, folded over the same ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.layout import Topology, count_ranks


@dataclass(frozen=True)
class ParallelDims:
    """The meshes of one topology over the default process group.

    A mesh is a collective to make, so every rank asks for the same ones in the same order; all
    are made by :meth:`build`, none on first use.
    """

    topology: Topology
    replicate_mesh: DeviceMesh
    """[dp_replicate]: the ranks that have copies of what is here."""
    fsdp_mesh: DeviceMesh
    """[fsdp]: the ranks that dense parameters are cut over."""
    efsdp_mesh: DeviceMesh
    """[efsdp]: the same for experts."""
    ep_mesh: DeviceMesh
    """[ep]: the ranks that exchange tokens."""
    fsdp_tp_mesh: DeviceMesh
    """[fsdp_tp]: the same for what tp does not cut."""
    tp_mesh: DeviceMesh
    """[tp]: the ranks that share each product."""
    token_mesh: DeviceMesh
    """[cp_tp]: the ranks that have parts of the same micro-batches."""
    pp_mesh: DeviceMesh
    """[pp]: the ranks that have the stages of the same micro-batches."""
    stage_mesh: DeviceMesh
    """[stage]: the ranks at this one's place along pp, which have the same layers."""
    cp_mesh: DeviceMesh
    """[cp]: the ranks that have parts of the same sequences."""
    ep_node_meshes: tuple[DeviceMesh, DeviceMesh] | None = None
    """Of them, those at this rank's place in each node, and those of its node; None unless the ep
    axis holds several whole nodes of more than one rank."""

    @staticmethod
    def build(
        topology: Topology, device_type: str, ranks_per_node: int | None = None
    ) -> ParallelDims:
        """Make the meshes. The default process group must exist and have the topology's world.

        Args:
            topology: the degrees.
            device_type: ``cpu`` or ``cuda``.
            ranks_per_node: consecutive ranks that share a machine; None takes all as one.

        Raises ValueError where the world has another size.
        """
        world = dist.get_world_size()
        if topology.world != world:
            raise ValueError(
                f"topology ({topology.describe()} = {count_ranks(topology.world)}) "
                f"must have the world size ({world})"
            )
        t = topology
        # Both foldings must come from one root: DTensors of unrelated meshes cannot be composed,
        # and fully_shard over efsdp takes parameters that are already DTensors over ep.
        # _unflatten is torch's private name for that; it is used in this module alone.
        root = init_device_mesh(device_type, (world,), mesh_dim_names=("world",))
        dense = root._unflatten(
            0, (t.pp, t.dp_replicate, t.fsdp, t.tp), ("pp", "dp_replicate", "fsdp", "tp")
        )
        expert = root._unflatten(
            0, (t.pp, t.dp_replicate, t.efsdp, t.ep), ("pp", "dp_replicate", "efsdp", "ep")
        )
        data = root._unflatten(
            0,
            (t.pp, t.dp_replicate, t.dp_shard, t.cp, t.tp),
            ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
        )
        spread = root._unflatten(
            0, (t.pp, t.dp_replicate, t.fsdp_tp), ("pp", "dp_replicate", "fsdp_tp")
        )
        tokens = root._unflatten(
            0,
            (t.pp, t.dp_replicate, t.dp_shard, t.cp * t.tp),
            ("pp", "dp_replicate", "dp_shard", "cp_tp"),
        )
        stages = root._unflatten(0, (t.pp, world // t.pp), ("pp", "stage"))
        node_meshes = None
        per_node = ranks_per_node or world
        if 1 < per_node < t.ep and t.ep % per_node == 0:
            by_node = root._unflatten(
                0,
                (t.pp, t.dp_replicate, t.efsdp, t.ep // per_node, per_node),
                ("pp", "dp_replicate", "efsdp", "ep_across", "ep_within"),
            )
            node_meshes = by_node["ep_across"], by_node["ep_within"]
        return ParallelDims(
            topology=topology,
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
        """This rank's place among those that take different sequences."""
        inner = self.topology.cp * self.topology.tp
        return dist.get_rank() % (self.topology.world // self.topology.pp) // inner

    @property
    def dp_size(self) -> int:
        """How many ranks take different sequences: dp_replicate x dp_shard."""
        return self.topology.dp_replicate * self.topology.dp_shard
