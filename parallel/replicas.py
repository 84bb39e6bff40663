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

from parallel.apply import local_shard
from parallel.collectives import all_gather
from parallel.watch import Kind, watched

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
        self._pending: list[tuple[list[str], Tensor]] = []

    def reduce(self, scale: float = 1.0) -> None:
        """Sum; every rank of the group must call, with gradients for the same parameters.

        Gradients come and go multiplied by ``scale``, a power of two; what is owed is not, and so
        outlives a change of it.
        """
        self._pending = []
        for names, grads in self._buckets():
            flat_N = torch.cat([grad.flatten() for grad in grads]).float()
            if scale != 1:
                flat_N /= scale
            if self.how == "bfloat16":
                total_N = self._rounded(flat_N)
            else:
                flat_N += torch.cat([self.residuals[name].flatten() for name in names])
                total_N, sent_N = self._signs(flat_N)
                self._pending.append((names, flat_N.sub_(sent_N)))
            if scale != 1:
                total_N *= scale
            parts = total_N.split([grad.numel() for grad in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view_as(grad))

    def commit(self) -> None:
        """Keep what the last :meth:`reduce` still owes: its sums became part of the model."""
        for names, rest_N in self._pending:
            owed = [self.residuals[name] for name in names]
            for residual, part in zip(owed, rest_N.split([r.numel() for r in owed]), strict=True):
                residual.copy_(part.view_as(residual))
        self._pending = []

    def _buckets(self) -> Iterator[tuple[list[str], list[Tensor]]]:
        names: list[str] = []
        grads: list[Tensor] = []
        size = 0
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None or not local_shard(parameter).numel():
                continue
            grad = local_shard(parameter.grad)
            if names and size + grad.numel() > _BUCKET:
                yield names, grads
                names, grads, size = [], [], 0
            names.append(name)
            grads.append(grad)
            size += grad.numel()
        if names:
            yield names, grads

    def _rounded(self, flat_N: Tensor) -> Tensor:
        n = self.group.size()
        mine = _padded(flat_N.bfloat16(), n)
        theirs = torch.empty_like(mine)
        watched(
            Kind("all_to_all", "dp"),
            mine,
            self.group,
            lambda: dist.all_to_all_single(theirs, mine, group=self.group, async_op=True),
        ).wait()
        part = theirs.view(n, -1).float().sum(0).bfloat16()
        all_gather(theirs, part, self.group, "dp").wait()
        return theirs[: len(flat_N)].float()

    def _signs(self, flat_N: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of what all ranks sent, and what this one did, [N] float32 each."""
        n, N = self.group.size(), len(flat_N)
        blocks = -(-N // _BLOCK)
        padded = _padded(flat_N, _BLOCK).view(blocks, _BLOCK)
        # The mean of those that there are: the last block may be short.
        count = torch.full((blocks,), float(_BLOCK), device=flat_N.device)
        count[-1] = N - (blocks - 1) * _BLOCK
        scale = padded.abs().sum(1) / count
        message = torch.cat([_packed(padded >= 0), scale.view(torch.uint8)])
        messages = message.new_empty(n * len(message))
        all_gather(messages, message, self.group, "dp").wait()
        signs = [_unpacked(m[: -4 * blocks]).view(blocks, _BLOCK) for m in messages.chunk(n)]
        scales = [m[-4 * blocks :].clone().view(torch.float32) for m in messages.chunk(n)]
        sent = [
            (sign * s.unsqueeze(1)).flatten()[:N] for sign, s in zip(signs, scales, strict=True)
        ]
        mine = sent[self.group.rank()]
        # In the order of the ranks, so that all have the same bits.
        return torch.stack(sent).sum(0), mine


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
