"""The MoE layer: route, dispatch, experts, combine.

Legend: B batch, S sequence, T = B·S tokens, D d_model, E experts, K top_k.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe.config import MoEConfig
from moe.dispatch import AllToAllDispatcher, Dispatcher, LocalDispatcher
from moe.experts import GroupedExperts
from router import RouterOutput, TopKRouter


class MoEAux(NamedTuple):
    """What a layer reports besides its output. All of it is about the tokens of this call."""

    load_balance_loss: Tensor
    """Scalar float32, not yet weighted."""
    sequence_balance_loss: Tensor
    """Scalar float32, not yet weighted; 0 where its weight is 0."""
    z_loss: Tensor
    """Scalar float32, not yet weighted."""
    loss: Tensor
    """The three by their weights: add this to the loss."""
    entropy: Tensor
    """Scalar float32 without a gradient: mean entropy of the tokens' probabilities, in nats."""
    tokens_per_expert_E: Tensor
    """[E] int64 over all experts, wherever they live, as chosen, before capacity; sums to T·K."""
    num_dropped: Tensor
    """Scalar int64: assignments that no expert had room for."""
    num_rerouted: Tensor
    """Scalar int64: assignments that took another expert than the chosen one, for want of room."""


class MoEOutput(NamedTuple):
    """A NamedTuple, so that FSDP and pipelining find the tensors in it."""

    hidden: Tensor
    """Shaped as the input."""
    aux: MoEAux


class SwiGLU(nn.Module):
    """w_down(silu(w_gate x) * w_up x): a dense feed-forward layer, and the shared experts."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w_gate = nn.Linear(d_model, d_ff, bias=False)
        self.w_up = nn.Linear(d_model, d_ff, bias=False)
        self.w_down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        out: Tensor = self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))
        return out


class MoELayer(nn.Module):
    """A mixture-of-experts feed-forward layer for any PyTorch model.

    Plain, it runs in one process. ``parallel.apply_expert_parallel`` spreads its experts over
    ranks from outside; results are the same. Nothing is left behind by a forward: the auxiliary
    losses are in the output, so activation recomputation cannot count them twice.

    Example::

        layer = MoELayer(MoEConfig(d_model=64, d_ff=128, num_experts=8, top_k=2))
        hidden, aux = layer(torch.randn(4, 16, 64))
        (hidden.square().mean() + aux.loss).backward()
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = TopKRouter(config.d_model, config)
        self.experts = GroupedExperts(
            config.num_experts, config.d_model, config.d_ff, config.backend
        )
        self.shared_experts = (
            SwiGLU(config.d_model, config.num_shared_experts * config.d_ff)
            if config.num_shared_experts
            else None
        )
        self.dispatcher: Dispatcher = LocalDispatcher()

    def use_expert_group(self, group: dist.ProcessGroup) -> None:
        """Exchange tokens over ``group``; ``parallel.apply_expert_parallel`` calls this."""
        self.dispatcher = AllToAllDispatcher(group)

    def forward(self, x: Tensor, expert_indices_TK: Tensor | None = None) -> MoEOutput:
        """[..., D] -> the same shape and dtype, and what the router did.

        The dim before the last is the sequence, for the sequence-wise loss; a [T, D] input is one.
        ``expert_indices_TK`` replays recorded choices, see :meth:`router.TopKRouter.forward`.

        Under expert parallelism every rank of the group must call, with any number of tokens,
        none included. Raises ValueError where the last dim is not d_model.
        """
        if not x.ndim or x.shape[-1] != self.config.d_model or not x.is_floating_point():
            raise ValueError(
                f"the input's last dim ({x.shape[-1] if x.ndim else 'none'}) must be moe.d_model "
                f"({self.config.d_model}) and its dtype ({x.dtype}) a floating one"
            )
        x_TD = x.reshape(x.numel() // x.shape[-1], x.shape[-1])

        routed = self.router(x_TD, x.shape[-2] if x.ndim > 1 else 1, expert_indices_TK)
        dispatched = self.dispatcher.dispatch(x_TD, routed)
        y_RD = self.experts(dispatched.x_RD, dispatched.weights_R, dispatched.rows_per_expert_E)
        y_TD = self.dispatcher.combine(y_RD, dispatched)

        if self.shared_experts is not None:
            shared = self.shared_experts
            y_TD = y_TD + shared(x_TD.to(shared.w_gate.weight.dtype))
        return MoEOutput(y_TD.to(x.dtype).view(x.shape), self._aux(routed))

    def _aux(self, routed: RouterOutput) -> MoEAux:
        c = self.config
        return MoEAux(
            load_balance_loss=routed.load_balance_loss,
            sequence_balance_loss=routed.sequence_balance_loss,
            z_loss=routed.z_loss,
            loss=c.load_balance_weight * routed.load_balance_loss
            + c.sequence_balance_weight * routed.sequence_balance_loss
            + c.z_loss_weight * routed.z_loss,
            entropy=routed.entropy,
            tokens_per_expert_E=routed.tokens_per_expert_E,
            num_dropped=routed.tokens_per_expert_E.sum() - routed.rows_per_expert_E.sum(),
            num_rerouted=routed.num_rerouted,
        )
