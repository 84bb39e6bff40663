"""The MoE layer: route, dispatch, experts, combine.

Legend: T tokens, S rows of this rank's experts, D d_model, E experts, K top_k, M bins of margins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import _register_namedtuple

from moe.config import MoEConfig, check_exact
from moe.copies import Copies, Lending
from moe.dispatch import Dispatcher, DispatchSetup, LocalDispatcher, dispatcher_of
from moe.experts import ACTIVATIONS, GroupedExperts, fork, single_assignments
from moe.float8 import round_rows
from moe.rows import RowMap, sum_rows, take_rows
from moe.stopwatch import Stopwatch
from moe.transforms import in_vmap
from parallel.dtensor import whole_parameters
from parallel.exact import UnitSums
from router import LostGroup, RouterOutput, TopKRouter, routed_tokens, token_rows_of


class MoEAux(NamedTuple):
    """Losses and statistics of one call of a layer, over the tokens of that call."""

    load_balance_loss: Tensor
    """Scalar float32, without its coefficient."""
    sequence_balance_loss: Tensor
    """Scalar float32, without its coefficient; 0 where the coefficient is 0."""
    z_loss: Tensor
    """Scalar float32, without its coefficient."""
    aux_loss: Tensor
    """Scalar float32, for the model's loss: the sum of the three losses with their coefficients, or
    what another ``balancing`` has."""
    entropy: Tensor
    """Scalar float32 without a gradient: mean entropy of the tokens' probabilities, in nats."""
    tokens_per_expert_E: Tensor
    """[E] int64: the assignments of all experts of all ranks as chosen, before capacity. The sum is
    T·K, except under expert choice and in a replay with dropped assignments."""
    topk_indices_TK: Tensor
    """[T, K] int64: the record of the routing, to be replayed as ``replay_indices_TK``."""
    num_dropped: Tensor
    """Scalar int64: dropped assignments."""
    num_rerouted: Tensor
    """Scalar int64: assignments that were rerouted from a full expert to another one."""
    num_copied: Tensor
    """Scalar int64: assignments of this call's tokens that copies of experts compute."""
    num_nonfinite_tokens: Tensor
    """Scalar int64: tokens with a NaN or an infinity among their logits; their outputs are NaN."""
    expert_counts_E: Tensor
    """[E] int64: the ``prior_expert_counts_E`` of the step's next call."""
    margins_EM: Tensor | None
    """[E, M] int64: what ``router.update_bias`` takes in the place of ``tokens_per_expert_E``,
    where the balancing rule needs margins, as ``quantile``; None elsewhere, and in evaluation."""
    stopwatch: Stopwatch | None
    """The assignments that this rank's experts computed in the forward, and the time in seconds;
    None in a compiled or exported layer, which reads no clock."""

    @property
    def load_imbalance(self) -> Tensor:
        """Scalar: the largest load of an expert over the mean load; 0 for no tokens."""
        return self._imbalance(self.tokens_per_expert_E)

    @property
    def num_dead_experts(self) -> Tensor:
        """Scalar int64: the experts that no token of this call chose."""
        return (self.tokens_per_expert_E == 0).sum()

    def rank_imbalance(self, ranks: int) -> Tensor:
        """Scalar: the largest load of a rank over the mean load, for ``ranks`` with equal blocks of
        experts and this call's tokens. Raises ValueError where they do not divide the experts."""
        if ranks < 1 or len(self.tokens_per_expert_E) % ranks:
            raise ValueError(
                f"ranks ({ranks}) must divide num_experts ({len(self.tokens_per_expert_E)})"
            )
        return self._imbalance(self.tokens_per_expert_E.view(ranks, -1).sum(1))

    @staticmethod
    def _imbalance(loads: Tensor) -> Tensor:
        return loads.max() * len(loads) / loads.sum().clamp(min=1)


class MoEOutput(NamedTuple):
    """The output of a layer. FSDP and pipelining find tensors in a NamedTuple."""

    hidden: Tensor
    """Of the shape and dtype of the input."""
    aux: MoEAux


# By these names torch.export.save writes the two types, and torch.export.load finds them.
_register_namedtuple(MoEAux, serialized_type_name="moe.MoEAux")
_register_namedtuple(MoEOutput, serialized_type_name="moe.MoEOutput")


class FeedForward(nn.Module):
    """A dense feed-forward layer, also for the shared experts; see
    :mod:`moe.experts.activation`."""

    def __init__(
        self, d_model: int, d_ff: int, activation: str = "swiglu", bias: bool = False
    ) -> None:
        super().__init__()
        self.activation = activation
        gated = ACTIVATIONS[activation].gated
        self.w_gate = nn.Linear(d_model, d_ff, bias=bias) if gated else None
        self.w_up = nn.Linear(d_model, d_ff, bias=bias)
        self.w_down = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        gate = None if self.w_gate is None else self.w_gate(x)
        out: Tensor = self.w_down(ACTIVATIONS[self.activation].hidden(gate, self.w_up(x)))
        return out


_INPUTS = (torch.float32, torch.bfloat16, torch.float16)
"""Input dtypes of any layer. The experts compute in the layer's dtype, or in autocast's: a wider
input would be rounded without a word."""


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _no_bound(num_tokens: int) -> None:
    """See :class:`moe.dispatch.DispatchSetup`."""


class MoELayer(nn.Module):
    """A mixture-of-experts feed-forward layer for any PyTorch model.

    Without further setup the layer runs in one process. ``parallel.apply_expert_parallel`` spreads
    the experts over ranks, with equal results. A forward leaves no state in the module: auxiliary
    losses are part of the output, and activation recomputation cannot count a loss twice.

    Example::

        layer = MoELayer(MoEConfig(d_model=64, d_ff=128, num_experts=8, top_k=2))
        hidden, aux = layer(torch.randn(4, 16, 64))
        (hidden.square().mean() + aux.aux_loss).backward()
    """

    EXPERTS: ClassVar[type[GroupedExperts]] = GroupedExperts

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        if not isinstance(config, MoEConfig):
            raise TypeError(f"config ({type(config).__name__}) must be a MoEConfig")
        self.config = c = config
        self.router = TopKRouter(c.d_model, c)
        self.experts = self.EXPERTS(c)
        self.shared_experts: FeedForward | None = None
        self.shared_gate: nn.Linear | None = None
        if c.num_shared_experts:
            d_ff = c.num_shared_experts * c.d_ff
            self.shared_experts = FeedForward(c.d_model, d_ff, c.activation_key, c.ffn_bias)
            if c.shared_expert_gate:
                self.shared_gate = nn.Linear(c.d_model, 1, bias=False)
        self.router.capacity.has_copies = c.copies > 0
        self.dispatcher: Dispatcher = LocalDispatcher()
        self.copies: Copies | None = None
        self._call: Callable[..., Any] = _call

    def extra_repr(self) -> str:
        """What ``print`` shows beside the parts of the layer: copies, where there are any."""
        if not self.config.copies:
            return ""
        group = "" if self.copies is not None else ", which begin with an expert group"
        return f"copies={self.config.copies}{group}"

    def reset_parameters(self) -> None:
        """Draw all parameters as the constructor does, and in its order; biases become zeros.

        For a layer from the meta device, after ``to_empty``. With one seed on all ranks a layer
        under expert parallelism or FSDP gets the values of a layer in one process; each rank then
        holds one module's whole parameters for a moment.
        """
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if module is not self and callable(reset):
                with whole_parameters(module):
                    reset()

    @property
    def lost_expert_group(self) -> bool:
        """Whether the layer was unpickled, and must be given its process groups again."""
        return isinstance(getattr(self.dispatcher, "group", None), LostGroup)

    def use_expert_group(
        self,
        group: dist.ProcessGroup,
        across_nodes: dist.ProcessGroup | None = None,
        within_node: dist.ProcessGroup | None = None,
    ) -> None:
        """Exchange tokens over ``group``; ``parallel.apply_expert_parallel`` calls this method.

        Args:
            group: the ranks that share the experts, in equal blocks.
            across_nodes: the ranks of ``group`` at this rank's place in each node.
            within_node: the ranks of ``group`` on this rank's node.

        Raises ValueError where the dispatcher cannot be made, as ``hierarchical`` without both
        groups of nodes.
        """
        from moe.uncompiled import uncompiled

        self.router.use_expert_group(group)
        # The sizes of an exchange are data of the host: no compiler can trace it.
        self._call = uncompiled
        c, most = self.config, self.router.capacity.max_assignments_per_expert
        if c.copies:
            per_node = 0 if within_node is None else within_node.size()
            self.copies = Copies(group, c.copies, per_node)
            most = _no_bound  # places have no capacity of their own
        self.dispatcher = dispatcher_of(DispatchSetup(c, group, across_nodes, within_node, most))

    def use_exact_sums(self, sums: UnitSums) -> None:
        """Compute each micro-batch by itself, and add its experts' gradients to ``sums``;
        ``parallel.apply_fsdp`` calls this method, after :meth:`use_expert_group`.

        A call is one micro-batch. Raises ValueError for options under which results depend on the
        number of ranks.
        """
        check_exact(self.config)
        self.experts.unit_sums = sums
        self.router.exact = True
        if self.copies is not None:
            self.copies.keeps_units = True
        self.dispatcher = self.dispatcher.by_unit()

    def forward(
        self,
        x: Tensor,
        replay_indices_TK: Tensor | None = None,
        prior_expert_counts_E: Tensor | None = None,
        token_mask: Tensor | None = None,
    ) -> MoEOutput:
        """[..., D] -> output of the same shape and dtype, and the router's losses and statistics.

        The dim before the last is the sequence, for the sequence-wise loss; a [T, D] input is one
        sequence.
        ``replay_indices_TK`` are recorded choices, the ``aux.topk_indices_TK`` of an earlier call.
        ``prior_expert_counts_E`` is for the loss over a global batch. See
        :meth:`router.TopKRouter.forward`.
        ``token_mask`` is bool, of the shape of ``x`` without its last dim: true for a token, false
        for padding. Padding chooses no expert, takes no capacity, is sent to no rank, and is in no
        loss and no statistic; its output is 0, and the values of its input do not matter.

        Under expert parallelism every rank of the group must call, with any number of tokens, also
        with 0.

        Raises ValueError for an input of another size or dtype, under ``torch.vmap``, and where
        ``replay_indices_TK`` or ``token_mask`` do not fit.
        """
        self._check_input(x, token_mask)
        x_TD = x.reshape(x.numel() // x.shape[-1], x.shape[-1])
        token_mask_T = None if token_mask is None else token_mask.reshape(-1)
        token_rows = token_rows_of(token_mask_T)
        if token_mask_T is not None and token_rows is None:
            # Padding may be NaN, which the gradients of shared experts would multiply by 0.
            x_TD = x_TD.masked_fill(~token_mask_T.unsqueeze(1), 0)

        if not hasattr(self.experts, "unit_sums"):
            raise ValueError(
                f"experts ({type(self.experts).__name__}) must be the layer's own: peft's "
                f"target_parameters wraps them and makes a dense product for each expert; call "
                f"moe.add_lora(model, on=['experts']) instead"
            )
        seq_len = x.shape[-2] if x.ndim > 1 else 1
        exact = self.experts.unit_sums is not None
        x_for = fork(x_TD, 3) if exact else (x_TD,) * 3
        if self.router.micro_batch is not None and token_rows is None:
            # The shared experts' gradients need to know where a sequence ends.
            x_for = *x_for[:2], x_for[2].view(x.shape)
        routed = self.router(
            x_for[0], seq_len, replay_indices_TK, prior_expert_counts_E, token_mask_T
        )
        if token_rows is None:
            y_TD, stopwatch, copied = self._call(self._compute, *x_for[1:], routed)
        else:
            x_ND = [token_rows.of(x) for x in x_for[1:]] if exact else [token_rows.of(x_TD)] * 2
            tokens = routed_tokens(routed, token_rows)
            y_ND, stopwatch, copied = self._call(self._compute, *x_ND, tokens)
            y_TD = token_rows.back(y_ND, 0)
        on_host = x.device.type == "cpu" and not torch.compiler.is_compiling()
        if not on_host or routed.num_nonfinite_tokens:
            y_TD = y_TD.masked_fill(routed.nonfinite_T.unsqueeze(1), torch.nan)
        if token_mask_T is not None and token_rows is None:
            y_TD = y_TD.masked_fill(~token_mask_T.unsqueeze(1), 0)
        # A reshape that autograd does not record as a view: nothing else refers to y_TD, and FSDP
        # warns of views where only this layer is wrapped.
        hidden = torch.ops.aten._unsafe_view(y_TD.to(x.dtype), x.shape)
        return MoEOutput(hidden, self._aux(routed, stopwatch, copied))

    def _compute(
        self, x_TD: Tensor, shared_x_TD: Tensor, routed: RouterOutput
    ) -> tuple[Tensor, Stopwatch | None, int]:
        """Dispatch, experts, combine: [T, D] -> [T, D]; and the assignments that copies compute.
        ``shared_x_TD`` is ``x_TD`` for the shared experts."""
        to_tokens: RowMap | None = None
        lending: Lending | None = None
        if self.copies is not None:
            routed, lending = self.copies.balanced(routed, self.router.capacity.shares)
        # Two numbers have one sum in float32. In bfloat16 the kernels that add a token's outputs
        # of one rank, and of several ranks, round otherwise.
        most = 2 if x_TD.dtype == torch.float32 else 1
        exact = self.experts.unit_sums is not None and routed.expert_indices_TK.shape[1] > most
        if exact or self.config.weights_on_input:
            routed, to_tokens = single_assignments(routed)
            x_TD = take_rows(x_TD, to_tokens)
        if self.config.weights_on_input:
            x_TD = x_TD * routed.expert_weights_TK.to(x_TD.dtype)
            ones = torch.ones_like(routed.expert_weights_TK)
            routed = routed._replace(expert_weights_TK=ones)
        if self.config.dispatch_dtype == "float8":
            # Also where no row travels: numbers must not depend on the layout.
            x_TD = round_rows(x_TD)
        parts_in_transfer = self.dispatcher.dispatch(x_TD, routed)
        # The shared experts are computed while rows are in transfer.
        shared_TD = self._shared(shared_x_TD)
        stopwatch = None if torch.compiler.is_compiling() else Stopwatch(x_TD.device)
        returning = []
        for dispatched in parts_in_transfer:
            y_SD = self.experts(*dispatched.rows, stopwatch, lending)
            if stopwatch is not None:
                stopwatch.count(dispatched.rows.rows_per_expert_E)
            returning.append(self.dispatcher.combine(y_SD, dispatched))
        parts = [part() for part in returning]
        y_TD = parts[0] if len(parts) == 1 else torch.cat(parts)
        y_TD = y_TD if to_tokens is None else sum_rows(y_TD, to_tokens)
        y_TD = y_TD if shared_TD is None else y_TD + shared_TD
        return y_TD, stopwatch, 0 if lending is None else lending.copied

    def _check_input(self, x: Tensor, token_mask: Tensor | None) -> None:
        own = next(self.experts.parameters()).dtype
        if not x.ndim or x.shape[-1] != self.config.d_model:
            raise ValueError(
                f"the input's last dim ({x.shape[-1] if x.ndim else 'none'}) must be d_model "
                f"({self.config.d_model})"
            )
        if not x.is_floating_point():
            raise ValueError(
                f"the input's dtype ({x.dtype}) must be a floating one: the layer takes hidden "
                f"states, not token ids"
            )
        if x.dtype not in _INPUTS and x.dtype != own:
            raise ValueError(
                f"the input's dtype ({x.dtype}) must be the layer's ({own}), or one of "
                f"{', '.join(map(str, _INPUTS))}; cast the input or the layer, as with x.to({own})"
            )
        mask = token_mask
        if mask is not None and (mask.shape != x.shape[:-1] or mask.dtype != torch.bool):
            raise ValueError(
                f"token_mask ({list(mask.shape)}, {mask.dtype}) must be bool, of the input's shape "
                f"without its last dim ({list(x.shape[:-1])})"
            )
        if in_vmap():
            raise ValueError(
                "MoELayer cannot run under torch.vmap: how many rows an expert computes depends on "
                "all tokens; pass the batch as leading dims of the input, or loop over its elements"
            )

    def _shared(self, x_TD: Tensor) -> Tensor | None:
        if self.shared_experts is None:
            return None
        x_TD = x_TD.to(self.shared_experts.w_up.weight.dtype)
        y_TD: Tensor = self.shared_experts(x_TD)
        y_TD = y_TD if self.shared_gate is None else y_TD * self.shared_gate(x_TD).sigmoid()
        return y_TD.view(-1, y_TD.shape[-1]) if y_TD.ndim > 2 else y_TD

    def _aux(self, routed: RouterOutput, stopwatch: Stopwatch | None, copied: int) -> MoEAux:
        num_dropped = num_copied = torch.zeros_like(routed.num_rerouted)
        if routed.dropped_TK is not None:
            num_dropped = routed.tokens_per_expert_E.sum() - routed.rows_per_expert_E.sum()
        if copied:
            num_copied = num_copied + copied
        return MoEAux(
            load_balance_loss=routed.load_balance_loss,
            sequence_balance_loss=routed.sequence_balance_loss,
            z_loss=routed.z_loss,
            aux_loss=routed.aux_loss,
            entropy=routed.entropy,
            tokens_per_expert_E=routed.tokens_per_expert_E,
            topk_indices_TK=routed.topk_indices_TK,
            num_dropped=num_dropped,
            num_rerouted=routed.num_rerouted,
            num_copied=num_copied,
            num_nonfinite_tokens=routed.num_nonfinite_tokens,
            expert_counts_E=routed.expert_counts_E,
            margins_EM=routed.margins_EM,
            stopwatch=stopwatch,
        )
