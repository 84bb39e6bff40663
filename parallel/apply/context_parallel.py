"""Context parallelism: each rank computes on a part of every sequence's tokens.

Legend: B batch, S tokens of a sequence on this rank, W tokens of the full sequence, H heads, G
key-value heads, C size of a head's key, V size of a head's value.

Keys and values are gathered, queries are not, as in Llama 3 (arXiv 2407.21783, section 3.3.2):
grouped or latent keys are small, and any attention kernel can be used. A sequence is split into
2 · ranks pieces. Rank r has pieces r and 2 · ranks - 1 - r, so that all ranks have equal work under
a causal mask. PyTorch's own context parallelism is not used: PyTorch has no CPU kernel for it, and
replaces the attention function of the whole process; this module changes only the modules of the
model that is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel.apply.document_mask import AttentionCall, attend_within
from parallel.comm import start_gather_rows


class SequenceContext(Protocol):
    """The part of each sequence that this rank has, and attention to the full sequence."""

    def positions(self, length: int, device: torch.device) -> Tensor:
        """[S] int64: positions in the full sequence of this rank's ``length`` tokens."""
        ...

    def gather(self, *tensors_BSX: Tensor) -> tuple[Tensor, ...]:
        """[B, S, ...] of every rank -> [B, W, ...] in the order of the full sequence, for each
        tensor."""
        ...

    def attend(self, call: AttentionCall) -> Tensor:
        """Causal attention of this rank's queries to the full sequence's keys: [B, H, S, V].

        With documents, a query sees the keys of its own document only.
        """
        ...


class FullSequence:
    """This rank has every token of the sequences."""

    def positions(self, length: int, device: torch.device) -> Tensor:
        """As in :class:`SequenceContext`."""
        return torch.arange(length, device=device)

    def gather(self, *tensors_BSX: Tensor) -> tuple[Tensor, ...]:
        """As in :class:`SequenceContext`."""
        return tensors_BSX

    def attend(self, call: AttentionCall) -> Tensor:
        """As in :class:`SequenceContext`."""
        return call.computed() if call.documents is None else attend_within(call)


class ShardedSequence:
    """This rank has two pieces of each sequence, one of each half."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Imported here: the import loads torch's compiler.
        from torch.nn.attention.bias import causal_lower_right

        self.group = group
        # A mask that attention's kernels know by its shape. The mask is a tensor subclass, which
        # cannot be made inside selective recomputation: so it is made here, and attend() sets its
        # sizes.
        self._causal = causal_lower_right(1, 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedSequence:
        # A process group is a handle of this process, which copies of a module share.
        return type(self)(self.group)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """As in :class:`SequenceContext`."""
        piece = length // 2
        within = torch.arange(piece, device=device)
        return torch.cat([number * piece + within for number in self._pieces()])

    def gather(self, *tensors_BSX: Tensor) -> tuple[Tensor, ...]:
        """As in :class:`SequenceContext`."""
        return tuple(self._gather(x_BSX) for x_BSX in tensors_BSX)

    def _gather(self, x_BSX: Tensor) -> Tensor:
        pieces = start_gather_rows(x_BSX.transpose(0, 1), self.group, "cp").wait()
        pieces = pieces.unflatten(0, (self.group.size(), 2, x_BSX.shape[1] // 2))
        first, second = pieces[:, 0], pieces[:, 1].flip(0)
        return torch.cat((first, second)).flatten(0, 1).transpose(0, 1)

    def attend(self, call: AttentionCall) -> Tensor:
        """As in :class:`SequenceContext`."""
        piece = call.q_BHSC.shape[2] // 2
        parts = []
        for number, q in zip(self._pieces(), call.q_BHSC.split(piece, 2), strict=True):
            own = call._replace(q_BHSC=q, first=number * piece)
            if call.documents is not None:
                parts.append(attend_within(own))
                continue
            seen = (number + 1) * piece
            self._causal.seq_len_q, self._causal.seq_len_kv = piece, seen
            k, v = call.k_BGWC[:, :, :seen], call.v_BGWV[:, :, :seen]
            parts.append(own._replace(k_BGWC=k, v_BGWV=v).computed(self._causal))
        return torch.cat(parts, 2)

    def _pieces(self) -> tuple[int, int]:
        rank, ranks = self.group.rank(), self.group.size()
        return rank, 2 * ranks - 1 - rank


def apply_context_parallel(
    model: nn.Module, cp_mesh: DeviceMesh, token_mesh: DeviceMesh | None = None
) -> nn.Module:
    """Prepare ``model`` for inputs that are each rank's part of every sequence.

    Modules with ``use_sequence_group(group)``, as attention, get the group of ``cp_mesh`` and
    gather keys and values over it. Modules with ``use_token_group(group)``, as routers, get the
    group of ``token_mesh``, or of ``cp_mesh`` where None: routers' losses count the tokens of a
    micro-batch or a sequence, which tensor-parallel ranks share as well. The model's input is
    :func:`local_sequence`. Gradients of all parameters are each rank's own and must be summed.
    """
    for name, mesh in (("use_sequence_group", cp_mesh), ("use_token_group", token_mesh or cp_mesh)):
        for module in model.modules():
            use: Any = getattr(module, name, None)
            if callable(use) and mesh.size() > 1:
                use(mesh.get_group())
    return model


def local_sequence(x_BW: Tensor, cp_mesh: DeviceMesh) -> Tensor:
    """[B, W, ...] -> [B, W / ranks, ...]: this rank's tokens; W is a multiple of 2 · ranks."""
    ranks = cp_mesh.size()
    if ranks == 1:
        return x_BW
    assert x_BW.shape[1] % (2 * ranks) == 0, (x_BW.shape, ranks)
    context = ShardedSequence(cp_mesh.get_group())
    return x_BW.index_select(1, context.positions(x_BW.shape[1] // ranks, x_BW.device))


@contextmanager
def sequence_contexts(model: nn.Module, make: Callable[[], SequenceContext]) -> Iterator[None]:
    """Inside the ``with`` block each module with ``use_sequence_group`` has a new context, and
    those with ``use_micro_batch`` share none."""
    modules: list[Any] = [m for m in model.modules() if hasattr(m, "use_sequence_group")]
    routers: list[Any] = [m for m in model.modules() if hasattr(m, "use_micro_batch")]
    before, shared = [m.context for m in modules], [router.micro_batch for router in routers]
    for module in modules:
        module.context = make()
    for router in routers:
        router.use_micro_batch(None)
    try:
        yield
    finally:
        for module, context in zip(modules, before, strict=True):
            module.context = context
        for router, micro_batch in zip(routers, shared, strict=True):
            router.use_micro_batch(micro_batch)
