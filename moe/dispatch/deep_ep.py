"""The dispatcher ``deep_ep``: DeepEP's kernels send rows to experts, on CUDA.

DeepEP 2 sends a row to a rank once, with the numbers of its experts there, and sums what the ranks
send back, as the other dispatchers do. DeepEP compiles its kernels for the machine and needs a
newer NCCL than torch's wheels bring, so it is not an extra of this project:
https://github.com/deepseek-ai/DeepEP says how to install it. Only this file imports DeepEP, at the
first exchange.

Legend: T tokens, D d_model, K top_k, S rows on this rank, P pieces of 128 of D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe.config import DISPATCHERS
from moe.dispatch.dispatchers import DispatchedRows, Dispatcher, DispatchSetup, check_num_tokens
from moe.dispatch.transfer import Tokens
from moe.rows import rows_of
from router import RouterOutput


def why_no_deep_ep(dtype: torch.dtype, device_type: str) -> str:
    """Why DeepEP cannot exchange rows, with an alternative; empty where DeepEP can."""
    if device_type != "cuda" or dtype != torch.bfloat16:
        return f"must have bfloat16 on cuda, not {dtype} on {device_type}; use all_to_all"
    if find_spec("deep_ep") is None:
        return "needs the package deep_ep, version 2 or later; install DeepEP, or use all_to_all"
    return ""


@cache
def _buffer(group: dist.ProcessGroup, max_tokens_per_call: int, d_model: int, top_k: int) -> Any:
    """DeepEP's memory for one group, of all layers of equal sizes; kept until the process ends.

    The memory is for rows of bfloat16: gradients travel so, whatever the rows are.

    Raises ValueError where the package is older than version 2.
    """
    import deep_ep

    if not hasattr(deep_ep, "ElasticBuffer"):
        raise ValueError(
            f"moe.dispatcher (deep_ep) must have DeepEP 2 or later: {deep_ep.__version__} has no "
            f"ElasticBuffer; use all_to_all"
        )
    return deep_ep.ElasticBuffer(
        group,
        num_max_tokens_per_rank=max_tokens_per_call,
        hidden=d_model,
        num_topk=top_k,
        # Rows arrive in the order of their ranks and tokens, so that sums have one order.
        deterministic=True,
        # The destructor waits for other ranks, which may be gone.
        explicitly_destroy=True,
    )


class _Dispatch(torch.autograd.Function):
    """Rows and weights to the ranks of their experts; the gradient is a combine."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor, send: Callable[..., Any]
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        ctx.buffer, rows, indices_SK, weights_SK, ctx.handle = send(x_TD, indices_TK, weights_TK)
        ctx.mark_non_differentiable(indices_SK)
        return rows, indices_SK, weights_SK, ctx.handle

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, Tensor, None]:
        grad_rows, _, grad_weights, _ = grads
        grad_x_TD, grad_weights_TK, _ = ctx.buffer.combine(
            grad_rows.contiguous(), handle=ctx.handle, topk_weights=grad_weights.contiguous()
        )
        return grad_x_TD, None, grad_weights_TK, None


class _Combine(torch.autograd.Function):
    """Sums of experts back to their tokens; the gradient is a dispatch."""

    @staticmethod
    def forward(ctx: Any, y_SD: Tensor, buffer: Any, handle: Any) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        y_TD: Tensor = buffer.combine(y_SD.contiguous(), handle=handle)[0]
        return y_TD

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        # With a handle DeepEP must be told the number of processors: the number that it would find
        # depends on the number of experts, which it reads from the handle afterwards.
        rows = ctx.buffer.dispatch(
            grads[0].contiguous(), handle=ctx.handle, num_sms=ctx.handle.num_sms, do_cpu_sync=False
        )
        return rows[0], None, None


class DeepEPDispatcher(Dispatcher):
    """DeepEP's exchange over a group, within a node by NVLink and between nodes by RDMA.

    The experts wait for the rows: the exchange does not overlap with shared experts. DeepEP's
    memory is for the most tokens of one call on any rank.
    """

    traits = DISPATCHERS["deep_ep"]

    def __init__(self, setup: DispatchSetup) -> None:
        super().__init__(setup)
        self.max_tokens_per_call, self.wire = setup.config.max_tokens_per_call, setup.wire

    @classmethod
    def unavailable(cls, dtype: torch.dtype, device_type: str) -> str:
        """See :class:`moe.dispatch.dispatchers.Dispatcher`."""
        return why_no_deep_ep(dtype, device_type)

    def dispatch(self, x_TD: Tensor, routed: RouterOutput) -> Iterator[DispatchedRows]:
        """See :class:`moe.dispatch.dispatchers.Dispatcher`.

        Raises ValueError for another dtype than bfloat16, for more tokens than
        ``max_tokens_per_call``, and where DeepEP is missing or older than version 2.
        """
        if why := why_no_deep_ep(x_TD.dtype, "cuda"):  # a stand-in of DeepEP may be on a CPU
            raise ValueError(f"moe.dispatcher (deep_ep) {why}")
        check_num_tokens(x_TD, self.max_tokens_per_call)
        E, num_tokens = len(routed.rows_per_expert_E), len(x_TD)
        tokens = Tokens(x_TD, routed.expert_indices_TK, routed.expert_weights_TK)
        # DeepEP does not say that a rank may send nothing.
        x_TD, indices_TK, weights_TK, _ = tokens.at_least_one(E)
        no_expert_TK = indices_TK >= E
        x_SD, indices_SK, weights_SK, handle = _Dispatch.apply(
            x_TD, indices_TK.masked_fill(no_expert_TK, -1), weights_TK.float(), self._sender(E)
        )
        block = range(E // self.group.size())
        assignments = sum(handle.num_recv_tokens_per_expert_list)
        weights_SK = weights_SK.to(weights_TK.dtype)
        rows = rows_of(x_SD, indices_SK.long(), weights_SK, block, assignments)
        return iter([DispatchedRows(rows, (handle, num_tokens, indices_TK.shape[1]))])

    def _sender(self, num_experts: int) -> Callable[..., Any]:
        def send(x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> tuple[Any, ...]:
            import deep_ep

            buffer = self._buffer_for(x_TD.shape[1], indices_TK.shape[1])
            wire, sent = self.wire, x_TD.contiguous()
            rows, indices_SK, weights_SK, handle, _ = buffer.dispatch(
                sent if wire is None else wire.split(wire.pack(sent), sent.shape[1]),
                topk_idx=indices_TK.to(deep_ep.topk_idx_t).contiguous(),
                topk_weights=weights_TK.contiguous(),
                num_experts=num_experts,
                num_max_tokens_per_rank=self.max_tokens_per_call,
            )
            if wire is not None:
                rows = wire.join(*rows).to(x_TD.dtype)
            return buffer, rows, indices_SK, weights_SK, handle

        return send

    def _buffer_for(self, d_model: int, top_k: int) -> Any:
        return _buffer(self.group, self.max_tokens_per_call, d_model, top_k)

    def combine(self, y_SD: Tensor, dispatched: DispatchedRows) -> Callable[[], Tensor]:
        """See :class:`moe.dispatch.dispatchers.Dispatcher`."""
        handle, num_tokens, top_k = dispatched.handle
        y_TD: Tensor = _Combine.apply(y_SD, self._buffer_for(y_SD.shape[1], top_k), handle)
        return lambda: y_TD[:num_tokens]
