"""Digests of an exact run's gradients and parameters, which are those of any layout.

With ``train.exact`` every layout has the same bits, and so has a digest over all of them: the log
of a run can be compared with that of another run, or of a replay, tensor by tensor. Replicas must
have equal digests at every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from parallel import all_gather_rows, local_shard
from pretrain.job import Job
from pretrain.observe import Digested


def parts_of(name: str) -> tuple[str, str]:
    """The layer and the kind of a parameter, by its name: ``layers.3.attention.wq.weight`` is
    ``attention.wq.weight`` of layer ``3``, a layer of multi-token prediction is ``mtp.0``; outside
    of layers both are the name."""
    parts = name.split(".")
    if parts[0] == "mtp":
        return f"mtp.{parts[2]}", ".".join(parts[3:])
    return (parts[1], ".".join(parts[2:])) if parts[0] == "layers" else (name, name)


class StepDigests:
    """Digests of each step; without ``train.exact`` nothing happens.

    A tensor's digest is added to the number of its layer and to that of its kind: few numbers name
    the tensor that differs.

    Args:
        job: the run. Every rank must call every method.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.exact = job, job.parallel_model.exact
        names = [name for name, _ in job.parallel_model.meta_model.named_parameters()]
        pairs = [parts_of(name) for name in names]
        self.layers = list(dict.fromkeys(layer for layer, _ in pairs))
        self.kinds = list(dict.fromkeys(kind for _, kind in pairs))
        self._places = {
            name: (self.layers.index(layer), self.kinds.index(kind))
            for name, (layer, kind) in zip(names, pairs, strict=True)
        }
        self._gradients: Tensor | None = None
        self._rows: list[list[int]] = []

    def see_gradients(self) -> None:
        """Take the digests of the summed gradients, before they are scaled."""
        if self.exact is not None:
            named = self.job.model.named_parameters()
            self._gradients = self._table((n, p.grad) for n, p in named if p.grad is not None)

    def see_parameters(self) -> None:
        """Take the digests of the parameters after the update, and exchange all."""
        if self._gradients is not None:
            table = self._table(self.job.model.named_parameters())
            row = torch.cat([self._gradients, table])
            self._rows = all_gather_rows(row).cpu().tolist()
            self._gradients = None

    def publish(self, step: int) -> list[list[int]]:
        """Publish the digests of a committed step; gives those of every rank's slices."""
        rows, self._rows = self._rows, []
        if rows:
            self.job.events.publish(self._event(step, rows))
        return rows

    def _table(self, tensors: Iterable[tuple[str, Tensor]]) -> Tensor:
        """int64 [layers + kinds]: the sums over this rank's slices, modulo 2^64."""
        assert self.exact is not None
        device, rank = self.job.runtime.device, self.job.runtime.rank
        table = torch.zeros(len(self.layers) + len(self.kinds), dtype=torch.int64, device=device)
        places, digests = [], []
        for name, tensor in tensors:
            digests.append(self.exact.digest(local_shard(tensor), self.job.layouts[name].box(rank)))
            places.append(self._places[name])
        if digests:
            values, (at, of) = torch.stack(digests), torch.tensor(places, device=device).unbind(1)
            # Odd factors: equal changes of two tensors of a layer must not cancel.
            table.index_add_(0, at, values * (2 * of + 1))
            table.index_add_(0, len(self.layers) + of, values * (2 * at + 1))
        return table

    def _event(self, step: int, rows: Sequence[Sequence[int]]) -> Digested:
        place = self.job.topology.place
        replica_0 = [row for rank, row in enumerate(rows) if place(rank).dp_replicate == 0]
        sums = [f"{sum(column) % (1 << 64):016x}" for column in zip(*replica_0, strict=True)]
        L, both = len(self.layers), len(self.layers) + len(self.kinds)
        gradients, parameters = sums[:both], sums[both:]
        return Digested(
            step=step,
            gradient_layers=dict(zip(self.layers, gradients[:L], strict=True)),
            gradient_tensors=dict(zip(self.kinds, gradients[L:], strict=True)),
            parameter_layers=dict(zip(self.layers, parameters[:L], strict=True)),
            parameter_tensors=dict(zip(self.kinds, parameters[L:], strict=True)),
        )
