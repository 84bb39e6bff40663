"""What each rank holds of a state's tensors, and the agreement of all ranks on it."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from crc32c import crc32c
from torch import Tensor

from ckpt.errors import CheckpointError
from ckpt.format import STORAGE_DTYPES, Node, Path, PlacedTensor, where
from ckpt.state_dict.tree import flatten, merged
from parallel.placements import MeshLayout, Placement, RankMesh

_CHECKED_BYTES = 1 << 20
"""The size up to which plain tensors of several ranks are compared, by checksum."""


@dataclass(frozen=True)
class Held:
    """What a rank says of one tensor. A plain tensor has no mesh."""

    shape: tuple[int, ...]
    dtype: str
    mesh: RankMesh | None
    placements: tuple[Placement, ...]
    crc32c: int | None = None
    """The CRC32C of a small plain tensor in host memory."""


class Ranks:
    """The ranks that save or load together: a process group, or one process without a group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self._meshes: dict[Any, RankMesh] = {}
        if group is None and not (dist.is_available() and dist.is_initialized()):
            self.rank, self.members = 0, [0]
            return
        self.rank = dist.get_rank(group)
        self.members = dist.get_process_group_ranks(group or dist.group.WORLD)
        if self.rank < 0:
            raise CheckpointError("this rank is no member of process_group: it must not call")

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.members)

    def mesh(self, device_mesh: Any) -> RankMesh:
        """A DeviceMesh with the ranks' numbers in this group; made once for all its tensors, as
        PyTorch lays the ranks out anew whenever it is asked. Raises ValueError where the group
        lacks some of the ranks."""
        mesh = self._meshes.get(device_mesh)
        if mesh is None:
            grid, numbers = device_mesh.mesh, {m: rank for rank, m in enumerate(self.members)}
            every = grid.reshape(-1).tolist()
            if not set(every) <= numbers.keys():
                raise ValueError(f"on ranks {every}: all of them must be in process_group")
            mesh = RankMesh(tuple(grid.shape), tuple(numbers[rank] for rank in every))
            self._meshes[device_mesh] = mesh
        return mesh

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on each of them."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, self.group)
        return values

    def share(self, value: Any, rank: int) -> Any:
        """The value of ``rank``, on each rank."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, self.members[rank], self.group)
        return box[0]

    def agree(self, ok: bool) -> bool:
        """Whether all ranks passed True."""
        return all(self.gather(ok))

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A block that every rank runs. An error of any rank, of any kind, is raised on all of
        them, once all have come to the end of the block: the others wait for this one there."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        said = None if failure is None else str(failure) or type(failure).__name__
        for rank, other in enumerate(self.gather(said)):
            if other is None:
                continue
            if failure is not None:
                raise failure
            raise CheckpointError(f"{what}: rank {rank}: {other}")


@dataclass(frozen=True)
class Local:
    """This rank's part of a state: its JSON, its tensors by name, and what it says of them."""

    tree: Node
    tensors: dict[str, Tensor]
    held: dict[str, Held]


def local(state: Any, ranks: Ranks) -> Local:
    """Read a state. Raises CheckpointError, naming the value, for anything that is not stored."""
    if not isinstance(state, dict):
        raise CheckpointError(f"state is a {type(state).__name__}: it must be a dict")
    tree, named = flatten(state)
    _refuse_lost_shards(named.values())
    descriptions = {
        name: describe(path, tensor, ranks, check=True) for name, (path, tensor) in named.items()
    }
    # numpy cannot look at a tensor with the negative bit, such as the imaginary part of a conjugate
    tensors = {
        name: tensor if is_dtensor(tensor) else tensor.resolve_neg()
        for name, (_, tensor) in named.items()
    }
    return Local(tree, tensors, descriptions)


def _refuse_lost_shards(named: Iterable[tuple[Path, Tensor]]) -> None:
    """Refuse plain tensors that are shards: one rank's would be saved for all.

    A moment is known by its path, which has its parameter's key, and as a shard by its shape.
    """
    pairs = list(named)
    sharded = {path[-1]: (path, tensor) for path, tensor in pairs if is_dtensor(tensor)}
    for path, tensor in pairs:
        for twin_path, twin in (sharded[key] for key in path[:-1] if key in sharded):
            shard = tuple(shard_of(twin).shape)
            if not is_dtensor(tensor) and tuple(tensor.shape) == shard != tuple(twin.shape):
                raise CheckpointError(
                    f"{where(path)} is a plain tensor of the shape {shard} of this rank's shard of "
                    f"{where(twin_path)}: it must be a DTensor, as the optimizer of the sharded "
                    f"parameter makes it"
                )


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; does not import DTensor, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def shard_of(tensor: Tensor) -> Tensor:
    """The local shard, detached; it shares memory with ``tensor``."""
    tensor = tensor.detach()
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def describe(path: Path, tensor: Tensor, ranks: Ranks, check: bool) -> Held:
    """What this rank holds. Raises CheckpointError, naming the tensor, where it cannot be stored.

    With ``check``, small plain tensors get a checksum, to be compared with other ranks'.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in STORAGE_DTYPES:
        raise CheckpointError(
            f"{where(path)} has dtype {dtype}: one of {', '.join(STORAGE_DTYPES)} is needed"
        )
    if is_dtensor(tensor):
        return _describe_dtensor(path, tensor, dtype, ranks)
    plain = type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if not plain or tensor.layout != torch.strided or tensor.is_quantized:
        what = type(tensor).__name__ if not plain else str(tensor.layout).removeprefix("torch.")
        raise CheckpointError(
            f"{where(path)} is a {what}: only dense tensors and DTensors can be saved"
        )
    if not check and tensor.is_neg():
        raise CheckpointError(
            f"{where(path)} is a view with the negative bit, and cannot be filled: clone it"
        )
    if check and tensor.is_meta:
        raise CheckpointError(f"{where(path)} is on the meta device: it has no numbers to save")
    crc = None
    if check and ranks.world > 1 and tensor.is_cpu and tensor.nbytes <= _CHECKED_BYTES:
        # clone(): contiguous() leaves the stride of one element, and view() refuses such a stride.
        flat = tensor.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
        crc = crc32c(flat.reshape(-1).view(torch.uint8).numpy().data)
    return Held(tuple(tensor.shape), dtype, None, (), crc)


def _describe_dtensor(path: Path, tensor: Any, dtype: str, ranks: Ranks) -> Held:
    from torch.distributed.tensor import Partial

    for placement in tensor.placements:
        if isinstance(placement, Partial):
            raise CheckpointError(
                f"{where(path)} has the placement {placement}: its parts are not yet summed; "
                f"redistribute() the tensor first"
            )
    try:
        layout = layout_of(tensor, ranks)
    except ValueError as error:
        raise CheckpointError(f"{where(path)} is {error}") from None
    slot, actual = layout.slot(ranks.rank), tuple(shard_of(tensor).shape)
    expected = (0,) if slot is None else layout.local_shape(slot)
    if actual != expected and not (0 in expected and 0 in actual):
        raise CheckpointError(
            f"{where(path)} has a local shard of shape {actual}: {expected} follows from its shape "
            f"{layout.shape} and its placements {tensor.placements}"
        )
    return Held(layout.shape, dtype, layout.mesh, layout.placements)


def layout_of(tensor: Any, ranks: Ranks) -> MeshLayout:
    """The layout of a DTensor, with the ranks' numbers in ``ranks``. Raises ValueError as
    :meth:`Ranks.mesh`."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.placement_types import _StridedShard

    placements: list[Placement] = []
    for placement in tensor.placements:
        if isinstance(placement, _StridedShard):
            placements.append((placement.dim, int(placement.split_factor)))
        else:
            placements.append(None if isinstance(placement, Replicate) else placement.dim)
    return MeshLayout(tuple(tensor.shape), ranks.mesh(tensor.device_mesh), tuple(placements))


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of a state: its JSON, and each tensor."""

    tree: Node
    tensors: dict[str, PlacedTensor]
    token: str
    """Random, and equal on all ranks."""


def agree(state: Any, ranks: Ranks) -> tuple[Local, Agreed]:
    """What this rank has of a state, and what all ranks have.

    Where all ranks say the same of their tensors, only digests are exchanged. Otherwise (a pipeline
    stage has layers of its own) every kind of description is sent once.

    Raises CheckpointError on every rank where any rank has a value that is not stored, or where two
    ranks differ.
    """
    with ranks.together("the state cannot be saved"):
        mine = local(state, ranks)
    digests = ranks.gather((_digest(mine), secrets.token_hex(4)))
    by_digest: dict[bytes, list[int]] = {}
    for rank, (digest, _) in enumerate(digests):
        by_digest.setdefault(digest, []).append(rank)
    said = [(of, ranks.share((mine.tree, mine.held), of[0])) for of in by_digest.values()]
    tree = merged([(of[0], tree) for of, (tree, _) in said])
    layouts = merge_layouts([(of, held) for of, (_, held) in said])
    return mine, Agreed(tree, layouts, digests[0][1])


def _digest(mine: Local) -> bytes:
    meshes = {tensor.mesh: i for i, tensor in enumerate(mine.held.values())}
    descriptions = [
        (name, tensor.shape, tensor.dtype, meshes[tensor.mesh], tensor.placements, tensor.crc32c)
        for name, tensor in mine.held.items()
    ]
    said = repr((mine.tree, descriptions, list(meshes.items())))
    return hashlib.sha256(said.encode()).digest()


def merge_layouts(said: Sequence[tuple[list[int], Mapping[str, Held]]]) -> dict[str, PlacedTensor]:
    """The dtype and the layout of each tensor.

    Ranks that hold a tensor on meshes of their own (tensor parallelism within replicas) hold
    replicas.

    Args:
        said: what ranks say of their tensors, with the ranks that say it.

    Raises CheckpointError where ranks differ.
    """
    holders: dict[str, list[tuple[list[int], Held]]] = {}
    for ranks, tensors in said:
        for name, tensor in tensors.items():
            holders.setdefault(name, []).append((ranks, tensor))
    return {name: PlacedTensor(of[0][1].dtype, _layout(name, of)) for name, of in holders.items()}


def _layout(name: str, of: list[tuple[list[int], Held]]) -> MeshLayout:
    (first, *_), one = of[0]
    for (rank, *_), other in of:
        for what in ("shape", "dtype", "placements"):
            a, b = getattr(one, what), getattr(other, what)
            if a != b:
                raise CheckpointError(
                    f"tensor {name} has {what} {a} on rank {first} and {b} on rank {rank}: it must "
                    f"be equal on all ranks that have the tensor"
                )
        if one.crc32c != other.crc32c:
            raise CheckpointError(
                f"tensor {name} has other numbers on rank {rank} than on rank {first}: a plain "
                f"tensor must be equal on all ranks; put what each rank has of its own, such as a "
                f"random state, under a key with the rank in it; ignore= of load_state_dict leaves "
                f"such keys out on other ranks"
            )
    holders = sorted(rank for ranks, _ in of for rank in ranks)
    if one.mesh is None:
        return MeshLayout(one.shape, RankMesh((len(holders),), tuple(holders)), (None,))
    meshes = list(dict.fromkeys(held.mesh for _, held in of if held.mesh is not None))
    absent = sorted({rank for mesh in meshes for rank in mesh.ranks} - set(holders))
    if absent:
        raise CheckpointError(
            f"tensor {name} is on a mesh with rank {absent[0]}, and the state of rank {absent[0]} "
            f"has no such tensor: every rank of a DTensor's mesh must save it"
        )
    if len({mesh.shape for mesh in meshes}) > 1:
        raise CheckpointError(f"tensor {name} is on meshes of shapes that differ between ranks")
    if len(meshes) == 1:
        return MeshLayout(one.shape, meshes[0], one.placements)
    ranks = tuple(rank for mesh in meshes for rank in mesh.ranks)
    return MeshLayout(
        one.shape, RankMesh((len(meshes), *meshes[0].shape), ranks), (None, *one.placements)
    )
