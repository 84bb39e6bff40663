"""The tiers of a run's checkpoints, and the start of the writer process."""

from __future__ import annotations

import os
import tempfile
from ipaddress import IPv4Address
from pathlib import Path

from ckpt import AsyncCheckpointer, Tier
from ckpt.store import address_towards
from pretrain.checkpoint.run_id import place_name
from pretrain.errors import InputError
from pretrain.runtime import Runtime
from pretrain.spec import JobSpec


def tiers_of(spec: JobSpec, runtime: Runtime) -> list[Tier]:
    """Where this rank's checkpoints go, the fastest first."""
    config, tiers = spec.checkpoint.tiers, []
    node, ranks = _node_of(runtime)
    if config.memory:
        folder = f"convoy-{place_name(spec)}-node{node}"
        tiers.append(
            Tier(
                name="memory",
                location=str(Path(config.memory_path) / folder),
                ranks=ranks,
                keep=_kept(spec),
                volatile=True,
            )
        )
    if config.local_path is not None:
        folder = f"{config.local_path}/{spec.name}-{place_name(spec)}-node{node}"
        keep = spec.checkpoint.retention.keep
        tiers.append(Tier(name="local", location=folder, ranks=ranks, keep=keep))
    shared = str(spec.checkpoint_path)
    return [*tiers, Tier(name="shared", location=shared, keep=spec.checkpoint.retention)]


def _kept(spec: JobSpec) -> int:
    """The checkpoints that stay in a node's memory, and in its peer's.

    Two with a peer: a node commits to its own memory before its neighbour's copy is complete. With
    one, the loss of a node between the two would leave no step that both nodes have.
    """
    return 2 if spec.checkpoint.tiers.replicate_to_peer else 1


def _node_of(runtime: Runtime) -> tuple[int, tuple[int, ...]]:
    """This rank's node, and the ranks on it."""
    size = runtime.ranks_per_node
    node = runtime.rank // size
    return node, tuple(range(node * size, min((node + 1) * size, runtime.world)))


def start_saver(spec: JobSpec, runtime: Runtime, key: str) -> AsyncCheckpointer:
    """Start this rank's writer process, after the end of those that an earlier start has left.

    ``key`` is the launch secret, see :func:`launch_secret`.
    """
    node, ranks = _node_of(runtime)
    serves = None
    if spec.checkpoint.tiers.replicate_to_peer:
        if runtime.world <= runtime.ranks_per_node:
            raise InputError(
                "checkpoint.tiers.replicate_to_peer (true) must be false on one node: there is no "
                "other node"
            )
        if runtime.rank == ranks[0]:
            name = f"convoy-{place_name(spec)}-node{node}-peers"
            serves = str(Path(spec.checkpoint.tiers.memory_path) / name)
    memory = Path("/dev/shm")
    folder = memory if memory.is_dir() else Path(tempfile.gettempdir())
    lock = folder / f"convoy-{place_name(spec)}-{runtime.rank}.lock"
    return AsyncCheckpointer(
        tiers_of(spec, runtime),
        runtime.rank,
        lock,
        compression=spec.checkpoint.compression,
        serves=serves,
        key=key,
    )


def join_peers(
    spec: JobSpec, runtime: Runtime, saver: AsyncCheckpointer, *, port: int, key: str
) -> None:
    """Add the next node's memory to the tiers, where the spec says so; every rank must call.

    ``port`` is what this rank's writer process serves, or 0.
    """
    if not spec.checkpoint.tiers.replicate_to_peer:
        return
    size = runtime.ranks_per_node
    served = runtime.gather_pairs([(int(_address(runtime)), port)])
    (node, ranks), nodes = _node_of(runtime), -(-runtime.world // size)
    ((address, port),) = served[(node + 1) % nodes * size]
    location = f"peer://{key}@{IPv4Address(address)}:{port}/node{node}"
    peer = Tier(name="peer", location=location, ranks=ranks, keep=_kept(spec))
    runtime.together(lambda: saver.add(peer))


def _address(runtime: Runtime) -> IPv4Address:
    """The address by which other nodes reach this one; every rank must call."""
    own = IPv4Address(address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1")))
    found = [IPv4Address(pairs[0][0]) for pairs in runtime.gather_pairs([(int(own), 0)])]
    others = [address for address in found if not address.is_loopback]
    # On the node of MASTER_ADDR its name may be the loopback's: then look towards another node.
    return IPv4Address(address_towards(str(others[0]))) if own.is_loopback and others else own
