"""Whether ranks that hold one parameter hold equal values of it, before FSDP shards it.

Legend: P parameters, R ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel.comm import all_gather_rows
from parallel.dtensor import local_shard
from parallel.expert_parallel import expert_parameter_names, moe_parameter_names
from parallel.layout import name_ranks
from parallel.mesh import ParallelDims

_SAMPLES = 16
"""Values of a parameter that are compared, the first and the last among them. Ranks with other
seeds differ in each."""


def check_equal_weights(model: nn.Module, dims: ParallelDims, all_over_tp: bool = False) -> None:
    """Refuse weights that differ between the ranks that are about to share them.

    With ``all_over_tp`` tensor-parallel ranks share every parameter, as in exact runs.

    A few values of each parameter are compared. Parameters on the meta device have no values, and
    are passed over. Every rank of ``dims`` within a pipeline stage must call.

    Raises ValueError, which names the first parameter whose values differ and the ranks, on every
    one of these ranks.
    """
    experts = expert_parameter_names(model)
    names = [name for name, _ in model.named_parameters()]
    over_tp: set[str] = set()
    if dims.topology.tp > 1:
        over_tp = {*names} - experts if all_over_tp else moe_parameter_names(model) - experts
    checksums = dict(zip(names, _checksums(model.parameters()), strict=True))
    for mesh, mine in (
        (dims.replicate_mesh, names),
        (dims.efsdp_mesh, [name for name in names if name in experts]),
        (dims.fsdp_tp_mesh, [name for name in names if name in over_tp]),
        (dims.fsdp_mesh, [name for name in names if name not in experts | over_tp]),
    ):
        if mesh.size() > 1 and mine:
            _compare(mesh, mine, [checksums[name] for name in mine])


def _checksums(parameters: Iterable[nn.Parameter]) -> list[int]:
    """Of each parameter's local values, at least 1; 0 where a parameter has no values yet."""
    taken: list[Tensor] = []
    for parameter in parameters:
        local = local_shard(parameter.detach())
        if local.is_meta:
            local = torch.empty(0)
        flat = local.reshape(-1)
        last, count = len(flat) - 1, min(_SAMPLES, len(flat))
        places = [i * last // max(1, count - 1) for i in range(count)]
        few = flat[torch.tensor(places, dtype=torch.int64, device=flat.device)]
        taken.append(few.view(torch.uint8))
    if not taken:
        return []
    # One copy to the host, not one for each parameter.
    device = max((t.device for t in taken), key=lambda device: device.type == "cuda")
    data = bytes(torch.cat([t.to(device) for t in taken]).tolist())
    sums, start = [], 0
    for each in taken:
        part = data[start : start + len(each)]
        sums.append(zlib.crc32(part) + 1 if part else 0)
        start += len(each)
    return sums


def _compare(mesh: DeviceMesh, names: list[str], checksums: list[int]) -> None:
    row_P = torch.tensor(checksums, dtype=torch.int64, device=mesh.device_type)
    rows_RP = all_gather_rows(row_P, mesh.get_group(), "dp").cpu()
    # A rank without values takes no part.
    differs_P = ((rows_RP != rows_RP.max(0).values) & (rows_RP != 0)).any(0)
    if not differs_P.any():
        return
    name = names[int(differs_P.nonzero()[0])]
    ranks = mesh.mesh.flatten().tolist()
    raise ValueError(
        f"parameter {name} must have equal initial values on {name_ranks(ranks, most=8)}: call "
        f"torch.manual_seed with one seed on every rank before the model is built, or build it on "
        f"the meta device"
    )
