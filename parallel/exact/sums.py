"""Gradients of a model, summed over micro-batches and ranks with equal bits on any layout.

A unit is a micro-batch. Each unit's gradient is rounded to fixed point before it is added to
anything (:mod:`parallel.exact.arithmetic`); the sums of integers over units, and over ranks, are
then exact.
There are three ways from a unit to the sum. Parameters that FSDP shards go through its
reduce-scatter, in a buffer of 64-bit numbers. Parameters that one rank holds whole have a hook.
Experts, which see rows of several units in one call, add each unit's gradient themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from parallel.comm import all_gather_rows, num_shards
from parallel.dtensor import local_shard
from parallel.exact.arithmetic import (
    UnitLimit,
    add_unit,
    from_fixed,
    from_parts,
    row_square_sums,
    square_parts,
    to_fixed_,
)
from parallel.exact.tensor_digest import placed_digest
from parallel.exact.unit_sums import UnitSums
from parallel.expert_parallel import expert_modules, expert_parameter_names
from parallel.layout import FSDP_EXPERT_DIM, Box
from parallel.mesh import ParallelDims

_CLASSES = 4  # numbers of replicas that parameters of one rank may have


class FixedPointBuffer:
    """The gradients of one FSDP module in its reduce-scatter.

    Args:
        limit: gets to see every gradient.
        ranks: over which the module is sharded.
        experts: the sums of the module's gradients, where it has experts.
    """

    def __init__(self, limit: UnitLimit, ranks: int, experts: UnitSums | None) -> None:
        self.limit, self.ranks, self.experts = limit, ranks, experts

    def fixed(self, grads_N: Tensor) -> Tensor:
        """A unit's gradients, as FSDP has laid them out in a float64 buffer, in fixed point; int64
        in the same memory."""
        if self.experts is None:
            return to_fixed_(grads_N, self.limit)
        fixed_N = grads_N.view(torch.int64)
        totals = self.experts.take()
        if totals is None:
            return fixed_N.zero_()
        # As FSDP does it: rank r gets block r, with its slice of each parameter.
        start, blocks = 0, fixed_N.view(self.ranks, -1)
        for total in totals:
            size = total.numel() // self.ranks
            parts = total.chunk(self.ranks, FSDP_EXPERT_DIM) if self.ranks > 1 else [total]
            for block, part in zip(blocks, parts, strict=True):
                block[start : start + size].view(part.shape).copy_(part)
            start += size
        assert start == blocks.shape[1], "FSDP has laid out other parameters"
        return fixed_N


class ExactSums:
    """The exact sums of one rank's part of a model.

    Before the backwards of a step comes :meth:`begin`, and after them :meth:`finish`.

    Args:
        units: the most micro-batches of one step, over all ranks.
    """

    def __init__(self, units: int) -> None:
        self.limit = UnitLimit(units)
        self._unsharded: list[nn.Module] = []
        self._experts: list[UnitSums] = []
        self._totals: dict[nn.Parameter, Tensor] = {}

    def use_experts(self, model: nn.Module, is_by_fsdp: Callable[[nn.Module], bool]) -> None:
        """Let the experts of a model add each unit's gradients to sums of their own."""
        for module in expert_modules(model):
            sums = UnitSums(module.experts, self.limit, is_by_fsdp(module.experts))
            self._experts.append(sums)
            module.use_exact_sums(sums)

    def use_unsharded(self, model: nn.Module) -> None:
        """Sum the gradients of a model without FSDP, its experts' apart."""
        self._unsharded.append(model)

    def buffer_of(self, module: nn.Module, ranks: int) -> FixedPointBuffer:
        """For the reduce-scatter of an FSDP module over ``ranks``."""
        experts = next((sums for sums in self._experts if sums.experts is module), None)
        return FixedPointBuffer(self.limit, ranks, experts)

    def begin(self) -> None:
        """Begin a step: whatever an abandoned step has left is forgotten."""
        self.limit.take()
        for sums in self._experts:
            sums.take()
        for total in self._totals.values():
            total.zero_()
        if not self._totals:
            # Not before: parameters from the meta device are replaced when they get memory.
            for model in self._unsharded:
                experts = expert_parameter_names(model)
                for name, parameter in model.named_parameters():
                    if name not in experts and parameter.requires_grad:
                        self._watch(parameter)

    def _watch(self, parameter: nn.Parameter) -> None:
        total = torch.zeros(parameter.shape, dtype=torch.int64, device=parameter.device)
        self._totals[parameter] = total
        parameter.register_post_accumulate_grad_hook(partial(_take_grad, total, self.limit))

    def finish(self) -> None:
        """Give the parameters that FSDP does not sum their gradients, in float32."""
        for parameter, total in self._totals.items():
            parameter.grad = torch.empty_like(parameter)
            from_fixed(total, parameter.grad)
        for sums in self._experts:
            if not sums.by_fsdp:
                self._finish_experts(sums)

    @staticmethod
    def _finish_experts(sums: UnitSums) -> None:
        parameters = [p for p in sums.experts.parameters() if p.requires_grad]
        totals = sums.take()
        for i, parameter in enumerate(parameters):
            parameter.grad = torch.zeros_like(parameter)
            if totals is not None:
                from_fixed(totals[i], local_shard(parameter.grad))

    @staticmethod
    def digest(tensor: Tensor, box: Box) -> Tensor:
        """The digest of a slice of an array; see
        :func:`parallel.exact.tensor_digest.placed_digest`."""
        return placed_digest(tensor, box)

    def square_sum(self, model: nn.Module, dims: ParallelDims | None) -> Tensor:
        """The squared global norm of the gradients, a float64 scalar on the host, of equal bits on
        every rank and layout; every rank must call.

        NaN where a unit's gradient was not finite or over the limit of exact sums.
        """
        ranks = 1 if dims is None else dims.topology.world // dims.topology.pp
        experts = expert_parameter_names(model)
        squares: dict[int, list[Tensor]] = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                grad = local_shard(parameter.grad)
                # FSDP cuts the last dim of experts' biases: their numbers are rows.
                by_number = name in experts and grad.ndim == 2
                replicas = ranks // num_shards(parameter)
                rows = row_square_sums(grad.flatten() if by_number else grad)
                squares.setdefault(replicas, []).append(rows)
        device = next(model.parameters()).device
        table = torch.zeros(_CLASSES, 5, dtype=torch.float64, device=device)
        assert len(squares) <= _CLASSES
        for row, (replicas, sums) in zip(table, squares.items(), strict=False):
            row[0].fill_(replicas)
            row[1:] = square_parts(torch.cat(sums))
        if not self.limit.take():
            table[0] = torch.nan
        rows = table if dims is None else all_gather_rows(table.flatten()).view(-1, 5)
        rows = rows.cpu()
        parts = torch.zeros(4, dtype=torch.float64)
        for replicas in {*rows[:, 0].tolist()} - {0}:
            # The parts of n replicas are n times the same, and the quotient is exact.
            parts += rows[:, 1:].where(rows[:, :1] == replicas, 0).sum(0) / replicas
        return from_parts(parts) if rows.isfinite().all() else parts.new_tensor(torch.nan)


def _take_grad(total: Tensor, limit: UnitLimit, parameter: Tensor) -> None:
    grad, parameter.grad = parameter.grad, None
    assert grad is not None
    add_unit(total, grad, limit)
