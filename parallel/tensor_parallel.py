"""Tensor parallelism: matrices cut over ranks, and between them a part of the sequence on each.

Legend: B batch, S tokens of a sequence that are here, W those on all ranks together, D d_model, F
some wider size, V vocab.

A product by columns and the one by rows after it are cut so that nothing travels between them
(Shoeybi et al., arXiv 1909.08053, section 3); before the first every rank gathers the sequence, and
after the second it gets the sums of its part (Korthikanti et al., arXiv 2205.05198, section 4.2.2).

Parameters become DTensors, which FSDP composes with and which show logical shapes. But it is not
DTensor that computes here, nor PyTorch's styles, which are made of it: its views never come to an
end on a tensor without elements (torch 2.13), and a micro-batch without sequences is ordinary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from parallel.collectives import start_gather_rows, start_scatter_sums
from parallel.delayed_weight_grad import linear

TensorParallel = Literal["gathered", "columns", "rows", "shared", "norm", "embedding", "logits"]
"""How a module is laid out over ranks:

- ``gathered``: no parameters of its own are cut; its input [B, S, D] is gathered to [B, W, D], and
  what else it is given is the same on all ranks.
- ``columns``: a linear layer [B, W, D] -> [B, W, F / ranks].
- ``rows``: one after that, [B, W, F / ranks] -> [B, S, D].
- ``shared``: a linear layer before one by columns, [B, W, D] -> [B, W, F], that every rank computes
  whole and passes on to its own heads.
- ``norm``: an RMSNorm with the whole weight on every rank, of whatever is there.
- ``embedding``: [B, W] token ids -> [B, S, D], the vocabulary cut.
- ``logits``: [B, S, D] -> a DTensor [B, W, V] cut along V.
"""


def apply_tensor_parallel(
    model: nn.Module, tp_mesh: DeviceMesh, plan: Mapping[str, TensorParallel]
) -> nn.Module:
    """Cut the modules of ``plan``, by name, over ``tp_mesh``; before :func:`apply_fsdp`.

    No values move: every rank must have built the same ones, or none yet. Gradients of cut
    parameters are whole; those of norms are parts of a sum, which FSDP adds up before it shards
    them; those of all parameters that the plan leaves out are each rank's own.
    """
    if tp_mesh.size() == 1:
        return model
    group = tp_mesh.get_group()
    for name, how in plan.items():
        module = model.get_submodule(name)
        if how == "gathered":
            module.forward = _gathered(module.forward, group)
            continue
        placement = _PLACEMENT.get(how, Shard(0))
        weight = distribute_tensor(
            module.get_parameter("weight"), tp_mesh, [placement], src_data_rank=None
        )
        module.register_parameter("weight", nn.Parameter(weight))
        module.forward = _FORWARD[how](module, tp_mesh)
    return model


def gather_sequence(x_BSD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, S, D] of each rank -> [B, W, D] on all; the gradient of a token is all ranks' sum."""
    return start_gather_rows(x_BSD.transpose(0, 1), group, "tp").wait().transpose(0, 1)


def scatter_sequence(x_BWD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, W, D] -> [B, S, D]: this rank's part of the sum over ranks. W is a multiple of them."""
    assert x_BWD.shape[1] % group.size() == 0, (x_BWD.shape, group.size())
    return start_scatter_sums(x_BWD.transpose(0, 1), group, "tp").wait().transpose(0, 1)


def _gathered(forward: Callable[..., Tensor], group: dist.ProcessGroup) -> Callable[..., Tensor]:
    return lambda x_BSD, *others: forward(gather_sequence(x_BSD, group), *others)


# Weights are looked up in every call: FSDP puts the gathered ones in the module for its forward.


def _weight(module: nn.Module) -> Tensor:
    assert isinstance(module.weight, DTensor)
    return module.weight.to_local()


def _columns(module: nn.Module, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    return lambda x_BWD: linear(x_BWD, module)


def _rows(module: nn.Module, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    group = mesh.get_group()
    return lambda x_BWF: scatter_sequence(linear(x_BWF, module), group)


def _whole_weight(module: nn.Module) -> Tensor:
    """Of which each rank's tokens or heads give a part of the gradient."""
    assert isinstance(module.weight, DTensor)
    return module.weight.to_local(grad_placements=[Partial()])


def _norm(module: nn.Module, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    assert isinstance(module, nn.RMSNorm)
    return lambda x: F.rms_norm(x, module.normalized_shape, _whole_weight(module), module.eps)


def _shared(module: nn.Module, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    return lambda x_BWD: F.linear(x_BWD, _whole_weight(module))


def _embedding(module: nn.Module, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    group = mesh.get_group()

    def forward(tokens_BW: Tensor) -> Tensor:
        weight = _weight(module)
        rows = tokens_BW - len(weight) * group.rank()
        elsewhere = (rows < 0) | (rows >= len(weight))
        found = F.embedding(rows.masked_fill(elsewhere, 0), weight)
        return scatter_sequence(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), group)

    return forward


def _logits(module: nn.Module, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    group = mesh.get_group()

    def forward(x_BSD: Tensor) -> Tensor:
        local = linear(gather_sequence(x_BSD, group), module)
        whole: Tensor = DTensor.from_local(local, mesh, [Shard(2)], run_check=False)
        return whole

    return forward


_PLACEMENT = {"rows": Shard(1), "norm": Replicate(), "shared": Replicate()}
_FORWARD = {
    "columns": _columns,
    "rows": _rows,
    "shared": _shared,
    "norm": _norm,
    "embedding": _embedding,
    "logits": _logits,
}
