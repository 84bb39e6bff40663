"""Tensor parallelism with sequence parallelism: sharded matrices, and activations sharded between.

Legend: B batch, S tokens of a sequence on this rank, W tokens of a sequence on all ranks, D
d_model, F hidden size, V vocab.

A column-parallel linear layer and the row-parallel one after it need no collective between them
(Shoeybi et al., arXiv 1909.08053, section 3). Before the first, every rank gathers the sequence;
after the second, a reduce-scatter gives each rank the sums of its tokens (Korthikanti et al., arXiv
2205.05198, section 4.2.2).

Parameters become DTensors, so that FSDP can shard them further and global shapes stay visible. The
computation is on local tensors, neither by DTensor nor by PyTorch's ParallelStyle, which uses
DTensor: a view of a DTensor without elements does not terminate (torch 2.13), and a micro-batch
without sequences is ordinary here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from parallel.apply.delayed_weight_grad import linear, linear_product
from parallel.comm import start_gather_rows, start_scatter_sums

TensorParallelStyle = Literal[
    "gathered", "columns", "rows", "shared", "norm", "embedding", "logits"
]
"""How tensor parallelism changes a module:

- ``gathered``: no own parameters are sharded; the input [B, S, D] is gathered to [B, W, D], and
  further arguments must be equal on all ranks.
- ``columns``: a linear layer [B, W, D] -> [B, W, F / ranks]; its bias is sharded as its outputs.
- ``rows``: a linear layer after ``columns``, [B, W, F / ranks] -> [B, S, D]; its bias is whole on
  every rank.
- ``shared``: a linear layer before ``columns``, [B, W, D] -> [B, W, F], replicated on every rank.
- ``norm``: an RMSNorm of local activations, its weight replicated on every rank.
- ``embedding``: [B, W] token ids -> [B, S, D], the vocabulary sharded.
- ``logits``: [B, S, D] -> a DTensor [B, W, V] sharded along V.
"""


def apply_tensor_parallel(
    model: nn.Module, tp_mesh: DeviceMesh, plan: Mapping[str, TensorParallelStyle]
) -> nn.Module:
    """Shard the modules that ``plan`` names over ``tp_mesh``; before :func:`parallel.apply_fsdp`.

    No values are sent: all ranks must have built equal values, or be on the meta device. A sharded
    parameter's gradient needs no sum over tp. Gradients of replicated parameters, which are
    ``norm`` and ``shared`` weights and ``rows`` biases, are partial sums, which FSDP sums before
    sharding. Gradients of parameters outside the plan are each rank's own.

    Raises ValueError for a weight that is sharded already.
    """
    if tp_mesh.size() == 1:
        return model
    ranks = _TensorParallelRanks(tp_mesh)
    for name, how in plan.items():
        module = model.get_submodule(name)
        if how == "gathered":
            module.forward = partial(_gathered, module.forward, ranks)
            continue
        if isinstance(module.get_parameter("weight"), DTensor):
            raise ValueError(
                f"apply_tensor_parallel must be called once, and before apply_fsdp: {name}.weight "
                f"is sharded"
            )
        for parameter, _ in list(module.named_parameters(recurse=False)):
            placement = _PLACEMENT.get(how, Shard(0))
            if parameter == "bias" and how == "rows":
                placement = Replicate()
            _distribute(module, parameter, tp_mesh, placement)
        lora = getattr(module, "lora", None)
        if isinstance(lora, nn.Module):
            # y = x W^T + (x a^T) b^T: a has the columns of W, and b has its rows.
            _distribute(lora, "a", tp_mesh, Shard(1) if how == "rows" else Replicate())
            _distribute(lora, "b", tp_mesh, Shard(0) if how == "columns" else Replicate())
        module.forward = partial(_FORWARD[how], module, ranks)
    return model


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    old = module.get_parameter(name)
    cut = distribute_tensor(old, mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(cut, requires_grad=old.requires_grad))


def gather_sequence(x_BSD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, S, D] of each rank -> [B, W, D] on all; a token's gradient is the sum over ranks."""
    return start_gather_rows(x_BSD.transpose(0, 1), group, "tp").wait().transpose(0, 1)


def scatter_sequence(x_BWD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, W, D] -> [B, S, D]: this rank's tokens of the sum over ranks, which divide W."""
    assert x_BWD.shape[1] % group.size() == 0, (x_BWD.shape, group.size())
    return start_scatter_sums(x_BWD.transpose(0, 1), group, "tp").wait().transpose(0, 1)


class _TensorParallelRanks:
    """The ranks of tensor parallelism. Deep copies of a module share them: a process group is a
    handle of this process."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.group = mesh, mesh.get_group()

    def __deepcopy__(self, memo: dict[int, Any]) -> _TensorParallelRanks:
        return self


# Each function below becomes a module's forward, as a partial with the module and the ranks, and
# not as a closure: a deep copy of a module must compute with the copy's weights, and copy.deepcopy
# looks into partials alone. Weights are read in every call: FSDP puts gathered weights into the
# module for its forward.


def _gathered(
    forward: Callable[..., Tensor], ranks: _TensorParallelRanks, x_BSD: Tensor, *others: Any
) -> Tensor:
    return forward(gather_sequence(x_BSD, ranks.group), *others)


def _columns(module: nn.Module, ranks: _TensorParallelRanks, x_BWD: Tensor) -> Tensor:
    return linear(x_BWD, module)


def _rows(module: nn.Module, ranks: _TensorParallelRanks, x_BWF: Tensor) -> Tensor:
    y_BSD = scatter_sequence(linear_product(x_BWF, module), ranks.group)
    bias: Tensor | None = getattr(module, "bias", None)
    return y_BSD if bias is None else y_BSD + _replicated(bias).to(y_BSD.dtype)


def _replicated(parameter: object) -> Tensor:
    """A replicated parameter; each rank's tokens or heads give a partial sum of the gradient."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local(grad_placements=[Partial()])


def _norm(module: nn.Module, ranks: _TensorParallelRanks, x: Tensor) -> Tensor:
    return norm_function(module)(x, _replicated(module.weight))


def norm_function(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The function of an input and of a weight that an ``nn.RMSNorm`` computes: its ``normalize``,
    where the module has one."""
    assert isinstance(module, nn.RMSNorm)
    plain = partial(_rms_norm, module.normalized_shape, module.eps)
    normalize: Callable[[Tensor, Tensor], Tensor] = getattr(module, "normalize", plain)
    return normalize


def _rms_norm(shape: Sequence[int], eps: float | None, x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, shape, weight, eps)


def _shared(module: nn.Module, ranks: _TensorParallelRanks, x_BWD: Tensor) -> Tensor:
    product: Callable[..., Tensor] = getattr(module, "product", F.linear)
    return product(x_BWD, _replicated(module.weight))


def _embedding(module: nn.Module, ranks: _TensorParallelRanks, tokens_BW: Tensor) -> Tensor:
    assert isinstance(module.weight, DTensor)
    weight = module.weight.to_local()
    rows = tokens_BW - len(weight) * ranks.group.rank()
    elsewhere = (rows < 0) | (rows >= len(weight))
    embedded = F.embedding(rows.masked_fill(elsewhere, 0), weight)
    return scatter_sequence(embedded.masked_fill(elsewhere.unsqueeze(-1), 0.0), ranks.group)


def _logits(module: nn.Module, ranks: _TensorParallelRanks, x_BSD: Tensor) -> Tensor:
    local = linear(gather_sequence(x_BSD, ranks.group), module)
    sharded: Tensor = DTensor.from_local(local, ranks.mesh, [Shard(2)], run_check=False)
    return sharded


_PLACEMENT = {"rows": Shard(1), "norm": Replicate(), "shared": Replicate()}
_FORWARD: dict[str, Callable[..., Tensor]] = {
    "columns": _columns,
    "rows": _rows,
    "shared": _shared,
    "norm": _norm,
    "embedding": _embedding,
    "logits": _logits,
}
