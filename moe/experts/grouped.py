"""The experts of one layer: many small feed-forward networks over one set of rows.

Legend: S rows, R assignments of rows to experts, D d_model, F d_ff, E experts of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from moe.config import MoEConfig
from moe.copies import Lending
from moe.experts.activation import ACTIVATIONS
from moe.experts.by_unit import experts_by_unit
from moe.experts.megablocks_backend import experts_megablocks
from moe.experts.operator import experts_operator
from moe.experts.paths import PATHS, ExpertsFn, choose_backend, experts_float8, experts_grouped_mm
from moe.experts.weights import ExpertWeights
from moe.experts.with_copies import Backends, experts_with_copies
from moe.float8 import Float8Tally
from moe.rows import Rows, SortedRows
from moe.stopwatch import Stopwatch
from moe.transforms import in_func_transform
from parallel.apply import WeightGradStore
from parallel.dtensor import local_shard
from parallel.exact import UnitSums
from router import autocast_dtype, no_autocast


class GroupedExperts(nn.Module):
    """Feed-forward experts of one shape, stacked along their first dim."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.backend, self.gemm = config.backend, config.gemm
        self.activation = config.activation_key
        self.recompute = config.recompute_experts
        self.float8_tally: Float8Tally | None = None
        """With products in float8: what backwards add their counts to."""
        self.weight_grad_store: WeightGradStore | None = None
        self.unit_sums: UnitSums | None = None
        """Under exact sums: where each unit's weight gradients go."""
        self.lora: nn.Module | None = None
        """Adapters: a module that calls a function with its matrices, the last fields of
        :class:`ExpertWeights` by name, before other arguments. The function runs inside of the
        module's call: FSDP may have gathered the matrices for this call alone."""
        self.make_parameters(config.num_experts, config.d_model, config.d_ff, config.ffn_bias)
        self.reset_parameters()

    def make_parameters(self, E: int, D: int, F: int, bias: bool) -> None:
        """Register the parameters, without values; the first dim of each is the expert."""
        gated = ACTIVATIONS[self.activation].gated

        def parameter(present: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape)) if present else None

        self.w_gate = parameter(gated, E, D, F)
        self.w_up = nn.Parameter(torch.empty(E, D, F))
        self.w_down = nn.Parameter(torch.empty(E, F, D))
        self.b_gate = parameter(bias and gated, E, F)
        self.b_up = parameter(bias, E, F)
        self.b_down = parameter(bias, E, D)

    def local_weights(self) -> ExpertWeights:
        """The parameters of this rank's experts; FSDP has gathered them when ``forward`` runs."""
        own = (self.w_gate, self.w_up, self.w_down, self.b_gate, self.b_up, self.b_down)
        gate, up, down, *biases = (None if p is None else local_shard(p) for p in own)
        assert up is not None
        assert down is not None
        return ExpertWeights(gate, up, down, *biases)

    def stored_gate_up(self) -> Tensor | None:
        """[E, 2 F, D] of which the gate and up weights are views; None where they are not."""
        return None

    def extra_repr(self) -> str:
        """The fields that ``print`` shows, with the backend that ``auto`` takes."""
        E, D, F = self.w_up.shape
        text = f"num_experts={E}, d_model={D}, d_ff={F}, {self.activation}, backend={self.backend}"
        if self.gemm == "float8":
            return f"{text}, gemm=float8"
        if self.backend == "auto":
            picked = choose_backend("auto", D, F, self.w_up.dtype, self.w_up.device.type)
            text += f" ({picked} for {self.w_up.dtype} on {self.w_up.device.type})"
        return text

    def reset_parameters(self) -> None:
        """Normal, with standard deviation fan_in ** -0.5; biases are zeros."""
        for weight in (self.w_gate, self.w_up, self.w_down):
            if weight is not None:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        for bias in (self.b_gate, self.b_up, self.b_down):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(
        self,
        x_SD: Tensor,
        source_R: Tensor,
        weights_R: Tensor,
        rows_per_expert_E: Tensor,
        sorted_rows: SortedRows | None = None,
        stopwatch: Stopwatch | None = None,
        lending: Lending | None = None,
    ) -> Tensor:
        """The fields of :class:`moe.rows.Rows` -> [S, D], see :data:`ExpertsFn`. S may be 0.

        ``stopwatch`` runs in this method, after FSDP has gathered the parameters. With ``lending``
        the rows are those of own experts, and then those of copies.
        """
        rows = (x_SD, source_R, weights_R, rows_per_expert_E, sorted_rows, stopwatch, lending)
        if self.lora is None:
            return self._compute({}, *rows)
        if torch.compiler.is_compiling():
            from moe.uncompiled import uncompiled

            return cast(Tensor, uncompiled(self.lora, self._compute, *rows))
        return cast(Tensor, self.lora(self._compute, *rows))

    def _compute(
        self,
        adapters: Mapping[str, Tensor],
        x_SD: Tensor,
        source_R: Tensor,
        weights_R: Tensor,
        rows_per_expert_E: Tensor,
        sorted_rows: SortedRows | None,
        stopwatch: Stopwatch | None,
        lending: Lending | None,
    ) -> Tensor:
        weights = self.local_weights()._replace(**adapters)
        # The dtype of compute is the weights' dtype, which FSDP has cast under mixed precision, or
        # autocast's dtype: autocast does not cast grouped GEMMs by itself.
        device = x_SD.device.type
        dtype = autocast_dtype(device) or weights.w_up.dtype
        _, d_model, d_ff = weights.w_up.shape
        backend = choose_backend(self.backend, d_model, d_ff, dtype, device)
        if adapters and (self.unit_sums is not None or backend == "megablocks"):
            raise ValueError(
                f"adapters of experts must have moe.backend auto, loop, grouped_mm or packed, and "
                f"no train.exact; the backend is {backend}, and exact sums are "
                f"{'off' if self.unit_sums is None else 'on'}"
            )
        with no_autocast(device):
            rows = Rows(
                x_SD.to(dtype), source_R, weights_R.to(dtype), rows_per_expert_E, sorted_rows
            )
            weights = weights.map(lambda p: p.to(dtype))
            watch = nullcontext() if stopwatch is None else stopwatch
            if lending is not None:
                run = self._with_copies(backend, lending.num_copies)
                return experts_with_copies(rows, weights, self.activation, lending, run, watch)
            with watch:
                return self._run(backend, dtype, rows, weights)

    def _run(self, backend: str, dtype: torch.dtype, rows: Rows, weights: ExpertWeights) -> Tensor:
        run: ExpertsFn = PATHS[backend]
        if self.gemm == "float8":
            run = partial(experts_float8, tally=self.float8_tally)
        elif self.unit_sums is not None:
            run = self._by_unit(backend, self.unit_sums)
        elif run is experts_grouped_mm:
            run = partial(experts_grouped_mm, weight_grad_store=self.weight_grad_store)
        elif backend == "megablocks" and (gate_up := self.stored_gate_up()) is not None:
            run = partial(experts_megablocks, gate_up_EGD=gate_up)
        if torch.compiler.is_compiling() and self.gemm == "float8":
            from moe.uncompiled import uncompiled

            return cast(Tensor, uncompiled(run, rows, weights, self.activation))
        if torch.compiler.is_compiling() and not self._is_traced(backend, dtype):
            return experts_operator(
                rows, weights, self.activation, backend, keep=not self.recompute
            )
        return self._recomputed(run)(rows, weights, self.activation)

    @staticmethod
    def _by_unit(backend: str, sums: UnitSums) -> ExpertsFn:
        backend = "packed" if backend == "packed" else "loop"
        return partial(experts_by_unit, backend=backend, sums=sums)

    def _recomputed(self, run: ExpertsFn) -> ExpertsFn:
        """The backend, which keeps only its input for the backward where ``recompute`` says so."""
        # torch.func refuses what checkpoint does; without it the numbers are equal.
        if not (self.recompute and torch.is_grad_enabled()) or in_func_transform():
            return run

        def flat(spec: TreeSpec, *leaves: Any) -> Tensor:
            return run(*tree_unflatten(leaves, spec))

        def recomputed(*arguments: Any) -> Tensor:
            # Of its arguments, a checkpoint leaves tensors to a checkpoint around it, and only
            # those that are not in a tuple. Experts use no random numbers to be restored.
            leaves, spec = tree_flatten(arguments)
            out: Tensor = checkpoint(
                flat, spec, *leaves, use_reentrant=False, preserve_rng_state=False
            )
            return out

        return recomputed

    def _with_copies(self, backend: str, num_copies: int) -> Backends:
        """What computes own experts, and copies: neither delays gradients of weights, and own
        weights are those that get the copies' gradients too."""
        if self.unit_sums is not None:
            sums, of_copies = self.unit_sums, self.unit_sums.for_copies(num_copies)
            return Backends(
                self._by_unit(backend, sums), self._by_unit(backend, of_copies), sums, of_copies
            )
        run: ExpertsFn = PATHS[backend]
        if self.gemm == "float8":
            run = partial(experts_float8, tally=self.float8_tally)
        run = self._recomputed(run)
        return Backends(run, run)

    def _is_traced(self, backend: str, dtype: torch.dtype) -> bool:
        """Whether a compiler sees the single products: torch.compile has grouped_mm in bfloat16."""
        return backend == "grouped_mm" and dtype == torch.bfloat16
