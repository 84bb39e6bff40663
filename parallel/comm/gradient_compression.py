"""Compressed sums of gradients over replicas (``dp_replicate``).

FSDP sums gradients within a replica. Links between replicas may be slow: so gradients are summed
over replicas once a step, whatever the number of micro-batches. Without compression
:func:`parallel.apply_fsdp` does that sum during the last backward; here gradients are sent with
fewer bits after the last backward.

Legend: N numbers of a bucket, n replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.comm.collectives import all_gather, exchange_rows
from parallel.dtensor import local_shard

_BUCKET = 1 << 23
"""Numbers of one collective: 32 MiB of float32."""
_BLOCK = 1024
"""Numbers that share one magnitude under ``one_bit``."""


class CompressedSum:
    """Sums gradients over replicas with fewer bits, after the last backward of a step.

    - ``bfloat16``: each rank rounds its gradients to bfloat16, sums one n-th of all ranks' in
      float32, and rounds the sum. Half the bytes of float32.
    - ``one_bit``: each rank sends signs, and one mean magnitude for every 1,024 numbers. The
      rounding error is kept and added to the next step's gradients (error feedback; Seide et al.,
      "1-Bit Stochastic Gradient Descent", Interspeech 2014, section 2.2). Every rank gathers all
      messages: (n - 1) · N / 8 bytes a rank, against 8 · N · (n - 1) / n of a float32 all-reduce.
      That is less for fewer than 64 replicas.

    All replicas get sums of equal bits. A gradient that is not finite gives a sum that is not
    finite.

    Args:
        model: the model, after :func:`parallel.apply_fsdp`; gradients are summed in place.
        group: the ranks that hold replicas of this rank's shards.
        how: the compression.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, how: Literal["bfloat16", "one_bit"]
    ) -> None:
        if how not in ("bfloat16", "one_bit"):
            raise ValueError(f"how ({how}) must be bfloat16 or one_bit")
        self.model, self.group, self.how = model, group, how
        self.residuals: dict[str, Tensor] = {}
        """By parameter name: the rounding error for the next step, float32; one_bit only."""
        if how == "one_bit":
            self.residuals = {
                name: torch.zeros_like(local_shard(p), dtype=torch.float32)
                for name, p in model.named_parameters()
            }
        self._pending: list[list[tuple[Tensor, Tensor]]] = []
        """For each bucket: views of residuals, and their next values."""
        self._lengths: dict[tuple[int, ...], Tensor] = {}

    def reduce(self, scale: float = 1.0) -> None:
        """Sum gradients over the group.

        Every rank of the group must call, with gradients for the same parameters. Gradients before
        and after are multiplied by the loss scale ``scale``, a power of two; residuals are not, and
        stay valid when the loss scale changes.
        """
        self._pending = []
        for grads, errors in self._buckets():
            sizes = [-(-len(grad) // _BLOCK) * _BLOCK for grad in grads]
            flat_N = torch.cat([_padded(grad, _BLOCK) for grad in grads]).float()
            if scale != 1:
                flat_N /= scale
            if self.how == "bfloat16":
                total_N = self._rounded(flat_N)
            else:
                flat_N += torch.cat([_padded(piece, _BLOCK) for piece in errors])
                total_N, sent_N = self._signs(flat_N, [len(grad) for grad in grads])
                rest = flat_N.sub_(sent_N).split(sizes)
                self._pending.append(list(zip(errors, rest, strict=True)))
            if scale != 1:
                total_N *= scale
            for grad, part in zip(grads, total_N.split(sizes), strict=True):
                grad.copy_(part[: len(grad)])

    def commit(self) -> None:
        """Keep the rounding errors of the last :meth:`reduce`, whose sums updated the model."""
        for bucket in self._pending:
            for residual, rest in bucket:
                residual.copy_(rest[: len(residual)])
        self._pending = []

    def _buckets(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Flat views of gradients and of their residuals, in buckets of at most ``_BUCKET``."""
        grads: list[Tensor] = []
        errors: list[Tensor] = []
        space = _BUCKET
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                continue
            flat = local_shard(parameter.grad).view(-1)
            residual = self.residuals[name].view(-1) if self.residuals else flat[:0]
            for start in range(0, len(flat), _BUCKET):
                piece = flat[start : start + _BUCKET]
                if len(piece) > space:
                    yield grads, errors
                    grads, errors, space = [], [], _BUCKET
                grads.append(piece)
                errors.append(residual[start : start + _BUCKET])
                space -= len(piece)
        if grads:
            yield grads, errors

    def _rounded(self, flat_N: Tensor) -> Tensor:
        n = self.group.size()
        mine = _padded(flat_N.bfloat16(), n)
        theirs = torch.empty_like(mine)
        exchange_rows(theirs, mine, self.group, "dp").wait()
        part = theirs.view(n, -1).float().sum(0).bfloat16()
        all_gather(theirs, part, self.group, "dp").wait()
        return theirs[: len(flat_N)].float()

    def _block_lengths(self, lengths: tuple[int, ...], device: torch.device) -> Tensor:
        """float32 [blocks]: how many numbers of each block are no padding."""
        if lengths not in self._lengths:
            counts = [min(_BLOCK, N - start) for N in lengths for start in range(0, N, _BLOCK)]
            table = torch.tensor(counts, dtype=torch.float32)
            table = table.pin_memory() if device.type == "cuda" else table
            self._lengths[lengths] = table.to(device, non_blocking=True)
        return self._lengths[lengths]

    def _signs(self, flat_N: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """The sum over all ranks' messages, and this rank's message as numbers; [N] float32 each.

        ``lengths`` are the gradients' lengths before padding to full blocks: no two parameters
        share a block, and the zeros of the padding do not count in a mean.
        """
        n, blocks = self.group.size(), len(flat_N) // _BLOCK
        counts = self._block_lengths(tuple(lengths), flat_N.device)
        by_block = flat_N.view(blocks, _BLOCK)
        scale = by_block.abs().sum(1) / counts
        message = torch.cat([_packed(by_block >= 0), scale.view(torch.uint8)])
        messages = message.new_empty(n * len(message))
        all_gather(messages, message, self.group, "dp").wait()
        total, mine = torch.zeros_like(by_block), by_block
        # In rank order: floating-point sums then have equal bits on all ranks.
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
    """[8 · k] bool -> [k] uint8."""
    places = 2 ** torch.arange(8, device=bits.device, dtype=torch.uint8)
    return (bits.reshape(-1, 8).to(torch.uint8) * places).sum(1, dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Tensor:
    """[k] uint8 -> [8 · k] float32 signs, 1 and -1; the inverse of :func:`_packed`."""
    places = 2 ** torch.arange(8, device=packed.device, dtype=torch.uint8)
    bits = packed.unsqueeze(1).bitwise_and(places) != 0
    return bits.flatten().float() * 2 - 1
