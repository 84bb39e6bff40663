"""Context parallelism: a sequence's tokens spread over ranks.

Legend: B batch, S tokens of a sequence that are here, W those of the whole sequence, H heads, G
key-value heads, C size of a head, V of a value's.

Keys and values are gathered and queries stay, as in Llama 3 (arXiv 2407.21783, section 3.3.2): with
grouped or latent keys little travels, and any attention kernel will do. A sequence is cut into
2 · ranks pieces, and rank r has pieces r and 2 · ranks - 1 - r, so that under a causal mask all
have the same work. PyTorch's own context parallelism has no kernel for CPUs, and takes the place of
attention in every model of the process; this is a few lines, and of the modules that are asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel.collectives import start_gather_rows
from parallel.document_mask import Documents, attend_within


class Context(Protocol):
    """How much of each sequence is here, and how attention sees the rest."""

    def positions(self, length: int, device: torch.device) -> Tensor:
        """[S] int64: where in the sequence the ``length`` tokens that are here belong."""
        ...

    def gather(self, x_BSX: Tensor) -> Tensor:
        """[B, S, ...] -> [B, W, ...] in the order of the sequence."""
        ...

    def attend(
        self,
        q_BHSC: Tensor,
        k_BGWC: Tensor,
        v_BGWV: Tensor,
        scale: float,
        documents: Documents | None = None,
    ) -> Tensor:
        """Causal attention of the queries here to all keys, or those of their documents, which are
        the whole sequence's: [B, H, S, V]."""
        ...


class WholeSequence:
    """All of it is here."""

    def positions(self, length: int, device: torch.device) -> Tensor:
        """See :class:`Context`."""
        return torch.arange(length, device=device)

    def gather(self, x_BSX: Tensor) -> Tensor:
        """See :class:`Context`."""
        return x_BSX

    def attend(
        self,
        q_BHSC: Tensor,
        k_BGWC: Tensor,
        v_BGWV: Tensor,
        scale: float,
        documents: Documents | None = None,
    ) -> Tensor:
        """See :class:`Context`."""
        if documents is not None:
            return attend_within(q_BHSC, k_BGWC, v_BGWV, scale, documents)
        gqa = q_BHSC.shape[1] != k_BGWC.shape[1]
        return F.scaled_dot_product_attention(
            q_BHSC, k_BGWC, v_BGWV, is_causal=True, scale=scale, enable_gqa=gqa
        )


class SpreadSequence:
    """Two pieces of it are here, one of the first half and one of the second."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        from torch.nn.attention.bias import causal_lower_right  # it brings all of torch's compiler

        self.group = group
        # A shape that attention's kernels know; it is a tensor to torch, and under the dispatch of
        # selective recomputation none of its kind can be made: so once, with sizes to be set.
        self._causal = causal_lower_right(1, 1)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """See :class:`Context`."""
        piece = length // 2
        within = torch.arange(piece, device=device)
        return torch.cat([number * piece + within for number in self._pieces()])

    def gather(self, x_BSX: Tensor) -> Tensor:
        """See :class:`Context`."""
        pieces = start_gather_rows(x_BSX.transpose(0, 1), self.group, "cp").wait()
        pieces = pieces.unflatten(0, (self.group.size(), 2, x_BSX.shape[1] // 2))
        first, second = pieces[:, 0], pieces[:, 1].flip(0)
        return torch.cat((first, second)).flatten(0, 1).transpose(0, 1)

    def attend(
        self,
        q_BHSC: Tensor,
        k_BGWC: Tensor,
        v_BGWV: Tensor,
        scale: float,
        documents: Documents | None = None,
    ) -> Tensor:
        """See :class:`Context`."""
        piece = q_BHSC.shape[2] // 2
        gqa = q_BHSC.shape[1] != k_BGWC.shape[1]
        parts = []
        for number, q in zip(self._pieces(), q_BHSC.split(piece, 2), strict=True):
            if documents is not None:
                first = number * piece
                parts.append(attend_within(q, k_BGWC, v_BGWV, scale, documents, first))
                continue
            seen = (number + 1) * piece
            self._causal.seq_len_q, self._causal.seq_len_kv = piece, seen
            parts.append(
                F.scaled_dot_product_attention(
                    q, k_BGWC[:, :, :seen], v_BGWV[:, :, :seen],
                    attn_mask=self._causal, scale=scale, enable_gqa=gqa,
                )
            )  # fmt: skip
        return torch.cat(parts, 2)

    def _pieces(self) -> tuple[int, int]:
        rank, ranks = self.group.rank(), self.group.size()
        return rank, 2 * ranks - 1 - rank


def apply_context_parallel(
    model: nn.Module, cp_mesh: DeviceMesh, token_mesh: DeviceMesh | None = None
) -> nn.Module:
    """Let the modules of ``model`` that look along a sequence know that each rank has a part of it.

    Attention has ``use_sequence_group(group)`` and gathers keys over ``cp_mesh``. Routers have
    ``use_token_group(group)``: their losses count the tokens of a micro-batch or of a sequence,
    which is spread over ``token_mesh``, with tensor-parallel ranks in it. Feed the model each
    rank's part, see :func:`sequence_part`. Gradients of all parameters are each rank's own.
    """
    for name, mesh in (("use_sequence_group", cp_mesh), ("use_token_group", token_mesh or cp_mesh)):
        for module in model.modules():
            use: Any = getattr(module, name, None)
            if callable(use) and mesh.size() > 1:
                use(mesh.get_group())
    return model


def sequence_part(x_BW: Tensor, cp_mesh: DeviceMesh) -> Tensor:
    """[B, W, ...] -> [B, W / ranks, ...]: what is this rank's; W is a multiple of 2 · ranks."""
    ranks = cp_mesh.size()
    if ranks == 1:
        return x_BW
    assert x_BW.shape[1] % (2 * ranks) == 0, (x_BW.shape, ranks)
    context = SpreadSequence(cp_mesh.get_group())
    return x_BW.index_select(1, context.positions(x_BW.shape[1] // ranks, x_BW.device))


@contextmanager
def whole_sequences(model: nn.Module) -> Iterator[None]:
    """For a while let every rank work on whole sequences of any length; without a gradient."""
    spread = [m for m in model.modules() if isinstance(getattr(m, "context", None), SpreadSequence)]
    before = [module.context for module in spread]
    for module in spread:
        module.context = WholeSequence()  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, context in zip(spread, before, strict=True):
            module.context = context
