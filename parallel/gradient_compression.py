"""Sums of gradients over the ranks that have copies of a model (``dp_replicate``).

FSDP has summed them over the ranks that share a copy. Between copies links may be slow, so this is
done once a step, whatever the number of micro-batches; as FSDP goes along in the last backward, or
with fewer bits after it.

Legend: N numbers of a bucket, n copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.collectives import all_gather, exchange_rows
from parallel.dtensor import local_shard

GradientCompression = Literal["none", "bfloat16", "one_bit"]

_BUCKET = 1 << 23
"""Numbers that travel together: 32 MiB of float32."""
_BLOCK = 1024
"""Numbers that share one magnitude, where only signs travel."""


class CompressedSum:
    """Sums gradients over copies with fewer bits, after the last backward of a step.

    - ``bfloat16``: each rank rounds what it gives, sums in float32 its part of what all gave, and
      rounds the sum. Half the bytes of float32.
    - ``one_bit``: each rank gives signs, and a mean magnitude for every 1,024 numbers; what that
      gets wrong it adds to its next step's gradients (Seide et al., "1-Bit Stochastic Gradient
      Descent", Interspeech 2014, section 2.2; error feedback). All get all: (n - 1) · N / 8 bytes a
      rank, for 8 · N · (n - 1) / n of a float32 all-reduce, so for fewer than 64 copies.

    The sums are the same bits on every copy. A gradient that is not finite gives sums that are not.

    Args:
        model: after FSDP; its parameters' gradients are summed in place.
        group: the ranks that have the copies of what is here.
        how: one of these.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, how: Literal["bfloat16", "one_bit"]
    ) -> None:
        self.model, self.group, self.how = model, group, how
        self.residuals: dict[str, Tensor] = {}
        """By parameter: what is still owed to the gradients, float32; for one_bit alone."""
        if how == "one_bit":
            self.residuals = {
                name: torch.zeros_like(local_shard(p), dtype=torch.float32)
                for name, p in model.named_parameters()
            }
        self._pending: list[list[tuple[Tensor, Tensor]]] = []
        """Pieces of residuals, and what they are to be."""

    def reduce(self, scale: float = 1.0) -> None:
        """Sum; every rank of the group must call, with gradients for the same parameters.

        Gradients come and go multiplied by ``scale``, a power of two; what is owed is not, and so
        outlives a change of it.
        """
        self._pending = []
        for grads, owed in self._buckets():
            sizes = [-(-len(grad) // _BLOCK) * _BLOCK for grad in grads]
            flat_N = torch.cat([_padded(grad, _BLOCK) for grad in grads]).float()
            if scale != 1:
                flat_N /= scale
            if self.how == "bfloat16":
                total_N = self._rounded(flat_N)
            else:
                flat_N += torch.cat([_padded(piece, _BLOCK) for piece in owed])
                total_N, sent_N = self._signs(flat_N, [len(grad) for grad in grads])
                rest = flat_N.sub_(sent_N).split(sizes)
                self._pending.append(list(zip(owed, rest, strict=True)))
            if scale != 1:
                total_N *= scale
            for grad, part in zip(grads, total_N.split(sizes), strict=True):
                grad.copy_(part[: len(grad)])

    def commit(self) -> None:
        """Keep what the last :meth:`reduce` still owes: its sums became part of the model."""
        for bucket in self._pending:
            for residual, rest in bucket:
                residual.copy_(rest[: len(residual)])
        self._pending = []

    def _buckets(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Views of gradients, flat, and of what is owed to them: no more in all than a bucket."""
        grads: list[Tensor] = []
        owed: list[Tensor] = []
        room = _BUCKET
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                continue
            flat = local_shard(parameter.grad).view(-1)
            residual = self.residuals[name].view(-1) if self.residuals else flat[:0]
            for start in range(0, len(flat), _BUCKET):
                piece = flat[start : start + _BUCKET]
                if len(piece) > room:
                    yield grads, owed
                    grads, owed, room = [], [], _BUCKET
                grads.append(piece)
                owed.append(residual[start : start + _BUCKET])
                room -= len(piece)
        if grads:
            yield grads, owed

    def _rounded(self, flat_N: Tensor) -> Tensor:
        n = self.group.size()
        mine = _padded(flat_N.bfloat16(), n)
        theirs = torch.empty_like(mine)
        exchange_rows(theirs, mine, self.group, "dp").wait()
        part = theirs.view(n, -1).float().sum(0).bfloat16()
        all_gather(theirs, part, self.group, "dp").wait()
        return theirs[: len(flat_N)].float()

    def _signs(self, flat_N: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """The sum of what all ranks sent, and what this one did, [N] float32 each.

        ``lengths`` are those of what was padded to whole blocks: no two parameters share one, and
        zeros that fill one up do not count.
        """
        n, blocks = self.group.size(), len(flat_N) // _BLOCK
        counts = torch.tensor(
            [min(_BLOCK, N - start) for N in lengths for start in range(0, N, _BLOCK)],
            dtype=torch.float32,
        ).to(flat_N.device)
        by_block = flat_N.view(blocks, _BLOCK)
        scale = by_block.abs().sum(1) / counts
        message = torch.cat([_packed(by_block >= 0), scale.view(torch.uint8)])
        messages = message.new_empty(n * len(message))
        all_gather(messages, message, self.group, "dp").wait()
        total, mine = torch.zeros_like(by_block), by_block
        # In the order of the ranks, so that all have the same bits.
        for rank, theirs in enumerate(messages.chunk(n)):
            scales = theirs[-4 * blocks :].clone().view(torch.float32)
            sent = _unpacked(theirs[: -4 * blocks]).view(blocks, _BLOCK) * scales.unsqueeze(1)
            total += sent
            if rank == self.group.rank():
                mine = sent
        return total.flatten(), mine.flatten()


def _padded(x_N: Tensor, multiple: int) -> Tensor:
    missing = -len(x_N) % multiple
    return torch.cat([x_N, x_N.new_zeros(missing)]) if missing else x_N


def _packed(bits: Tensor) -> Tensor:
    """[..., 8 · k] bool -> uint8, eight to a byte."""
    places = 2 ** torch.arange(8, device=bits.device, dtype=torch.uint8)
    return (bits.reshape(-1, 8).to(torch.uint8) * places).sum(1, dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Tensor:
    """The inverse, as float32 signs: 1 and -1."""
    places = 2 ** torch.arange(8, device=packed.device, dtype=torch.uint8)
    bits = packed.unsqueeze(1).bitwise_and(places) != 0
    return bits.flatten().float() * 2 - 1
