"""The peers of the layer's bench: each one's own layer, with Convoy's weights copied into it.

A peer takes a Convoy layer and is the same layer as another project computes it: the same sizes, a
softmax over all experts, the chosen weights made to sum to one, SwiGLU experts without biases. A
peer that is not installed, or not for the device, is left out, and one line says so. `check` holds
outputs and gradients of those that are left to Convoy's: what is timed is the same work.

Legend: T tokens, D d_model, F d_ff, E experts, K top_k.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from moe import MoELayer, megablocks_state_dict


class Peer(NamedTuple):
    """One layer, ready to be timed."""

    module: nn.Module
    router_weight_ED: Tensor
    call: Callable[[Tensor], Tensor]
    """[T, D] -> [T, D]; what the module wants of its input's shape, or of its surroundings."""


class LeftOut(Exception):  # noqa: N818 - an outcome, not a fault
    """Why a peer does not run here."""


def convoy(layer: MoELayer) -> Peer:
    """Convoy's own layer, called as its peers are."""
    return Peer(layer, layer.router.weight, lambda x_TD: layer(x_TD).hidden)


def transformers(layer: MoELayer, how: str) -> Peer:
    """transformers' Qwen3-MoE block; ``how`` is ``eager`` or ``grouped_mm``."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    c = layer.config
    config = Qwen3MoeConfig(
        hidden_size=c.d_model, moe_intermediate_size=c.d_ff, num_experts=c.num_experts,
        num_experts_per_tok=c.top_k, norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = how
    block: Any = Qwen3MoeSparseMoeBlock(config).to(_like(layer))
    gate_EFD, up_EFD, down_EDF = _transposed(layer)
    with torch.no_grad():
        block.gate.weight.copy_(layer.router.weight)
        block.experts.gate_up_proj.copy_(torch.cat((gate_EFD, up_EFD), 1))
        block.experts.down_proj.copy_(down_EDF)
    return Peer(block, block.gate.weight, lambda x_TD: block(x_TD.unsqueeze(0)).squeeze(0))


def torchtitan(layer: MoELayer) -> Peer:
    """torchtitan's MoE with grouped products, its experts in the input's dtype.

    It casts inputs and weights of the experts to bfloat16, whatever the model's dtype. On a CPU
    without bfloat16 products that measures the lack of them: there the casts are taken out.
    """
    from torchtitan.models.common.config_utils import (
        make_moe_config,
        make_routed_experts_config,
        make_router_config,
    )

    c = layer.config
    moe: Any = make_moe_config(
        num_experts=c.num_experts,
        router=make_router_config(
            dim=c.d_model, num_experts=c.num_experts, top_k=c.top_k, score_func="softmax",
            route_norm=True, gate_param_init={},
        ),
        routed_experts=make_routed_experts_config(
            dim=c.d_model, hidden_dim=c.d_ff, num_experts=c.num_experts, top_k=c.top_k,
            param_init={}, comm_backend="standard",
        ),
        load_balance_coeff=None,
    ).build()  # fmt: skip
    moe = moe.to(_like(layer))
    experts = moe.routed_experts.inner_experts
    if _like(layer).dtype != torch.bfloat16:
        experts.forward = types.MethodType(_torchtitan_experts_as_they_come, experts)
    gate_EFD, up_EFD, down_EDF = _transposed(layer)
    with torch.no_grad():
        moe.router.gate.weight.copy_(layer.router.weight)
        experts.w1_EFD.copy_(gate_EFD)
        experts.w3_EFD.copy_(up_EFD)
        experts.w2_EDF.copy_(down_EDF)

    def call(x_TD: Tensor) -> Tensor:
        with _quiet():  # about autocast to float32, which a CPU doesn't have, nor needs here
            hidden: Tensor = moe(x_TD.unsqueeze(0))
        return hidden.squeeze(0)

    return Peer(moe, moe.router.gate.weight, call)


def _torchtitan_experts_as_they_come(experts: Any, x_RD: Tensor, rows_per_expert_E: Tensor) -> Any:
    """torchtitan's GroupedExperts.forward, without parallelism and without ``.bfloat16()``."""
    product = partial(
        experts._grouped_mm, offs=torch.cumsum(rows_per_expert_E, 0, dtype=torch.int32)
    )
    h_RF = F.silu(product(A=x_RD, B_t=experts.w1_EFD.transpose(-2, -1)))
    h_RF = h_RF * product(A=x_RD, B_t=experts.w3_EFD.transpose(-2, -1))
    return product(A=h_RF, B_t=experts.w2_EDF.transpose(-2, -1))


def titan_experts_in_float32(model: nn.Module) -> None:
    """Take the casts to bfloat16 out of every MoE layer of a torchtitan model."""
    for module in model.modules():
        if type(module).__name__ == "GroupedExperts":
            module.forward = types.MethodType(_torchtitan_experts_as_they_come, module)


def megatron(layer: MoELayer, dispatcher: str) -> Peer:
    """megatron-core's MoELayer, SequentialMLP; ``dispatcher`` is ``allgather`` or ``alltoall``.

    Its activation is not fused: that compiles, for seconds, and is no faster on a CPU.
    """
    if _like(layer).is_cuda:
        raise LeftOut("on a CUDA device its experts are Transformer Engine's, which is not here")
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe import moe_layer
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    c = layer.config
    groups = ProcessGroupCollection()
    for name in ("tp", "ep", "cp", "tp_ep", "tp_cp", "tp_dp_cp", "expt_tp", "expt_dp"):
        setattr(groups, name, dist.group.WORLD)
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    with cuda_stand_ins():
        moe: Any = moe_layer.MoELayer(
            TransformerConfig(
                num_layers=1, num_attention_heads=1, hidden_size=c.d_model,
                ffn_hidden_size=c.d_ff, moe_ffn_hidden_size=c.d_ff, num_moe_experts=c.num_experts,
                moe_router_topk=c.top_k, moe_router_load_balancing_type="none",
                moe_token_dispatcher_type=dispatcher, gated_linear_unit=True,
                activation_func=F.silu, add_bias_linear=False, bias_activation_fusion=False,
                gradient_accumulation_fusion=False, use_cpu_initialization=True,
                perform_initialization=False, params_dtype=_like(layer).dtype,
            ),
            moe_layer.MoESubmodules(experts=partial(SequentialMLP, submodules=linears)),
            layer_number=1,
            pg_collection=groups,
        )  # fmt: skip
    gate_EFD, up_EFD, down_EDF = _transposed(layer)
    with torch.no_grad():
        moe.router.weight.copy_(layer.router.weight)
        for e, expert in enumerate(moe.experts.local_experts):
            expert.linear_fc1.weight.copy_(torch.cat((gate_EFD[e], up_EFD[e])))
            expert.linear_fc2.weight.copy_(down_EDF[e])

    def call(x_TD: Tensor) -> Tensor:
        with cuda_stand_ins():
            hidden: Tensor = moe(x_TD.unsqueeze(1))[0]
        return hidden.squeeze(1)

    return Peer(moe, moe.router.weight, call)


class _NoStream:
    """What a CUDA stream and its events come to where all work is done when a call returns."""

    def wait_stream(self, stream: _NoStream) -> None: ...

    def record_event(self) -> _NoStream:
        return self

    def synchronize(self) -> None: ...


@contextmanager
def cuda_stand_ins() -> Iterator[None]:
    """Four names of torch.cuda that megatron-core calls, for a machine without a CUDA device.

    Its router moves its weight to ``current_device()``; its all-to-all dispatcher copies counts to
    the host on a side stream. Only inside: torch.cuda is itself again outside.
    """
    if torch.cuda.is_available():
        yield
        return
    stream = _NoStream()
    with mock.patch.multiple(
        torch.cuda,
        current_device=lambda: "cpu",
        current_stream=lambda: stream,
        Stream=lambda: stream,
        stream=nullcontext,
    ):
        yield


def megablocks(layer: MoELayer) -> Peer:
    """megablocks' dMoE with grouped products, on a CUDA device."""
    if not layer.router.weight.is_cuda:
        raise LeftOut("it needs a CUDA device")
    if _like(layer).dtype != torch.bfloat16:
        raise LeftOut("its grouped product takes bfloat16 alone")
    return dmoe(layer)


def dmoe(layer: MoELayer, **more: Any) -> Peer:
    """:func:`megablocks` on any device; ``more`` are fields of megablocks' ``Arguments``."""
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import dMoE

    c, dtype = layer.config, _like(layer).dtype
    fields: dict[str, Any] = {
        "hidden_size": c.d_model, "ffn_hidden_size": c.d_ff, "bias": False, "return_bias": False,
        "activation_fn": F.silu, "moe_num_experts": c.num_experts, "moe_top_k": c.top_k,
        "moe_normalize_expert_weights": 1, "moe_loss_weight": 0, "mlp_type": "glu",
        "mlp_impl": "grouped", "fp16": dtype == torch.float16, "bf16": dtype == torch.bfloat16,
        "device": layer.router.weight.device,
    }  # fmt: skip
    moe: Any = dMoE(Arguments(**fields | more))
    moe.load_state_dict(megablocks_state_dict(layer))
    return Peer(moe, moe.router.layer.weight, lambda x_TD: moe(x_TD.unsqueeze(1)).squeeze(1))


@contextmanager
def _quiet() -> Iterator[None]:
    """Peers say at length what parts for accelerators they do without."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _like(layer: MoELayer) -> Tensor:
    """A weight with the device and the dtype of the layer. The router's stays in float32."""
    return layer.experts.w_up


def _transposed(layer: MoELayer) -> tuple[Tensor, Tensor, Tensor]:
    """Convoy's [E, D, F], [E, D, F] and [E, F, D] as most peers lay them out: outputs first."""
    experts = layer.experts
    assert experts.w_gate is not None
    return experts.w_gate.mT, experts.w_up.mT, experts.w_down.mT


PEERS: dict[str, Callable[[MoELayer], Peer]] = {
    "transformers eager": partial(transformers, how="eager"),
    "transformers grouped_mm": partial(transformers, how="grouped_mm"),
    "torchtitan": torchtitan,
    "megatron allgather": partial(megatron, dispatcher="allgather"),
    "megatron alltoall": partial(megatron, dispatcher="alltoall"),
    "megablocks": megablocks,
}


def installed_peers(layer: MoELayer) -> dict[str, Peer]:
    """Those that run here, by name, with the weights of ``layer``."""
    c = layer.config
    asked = (c.score_func, c.norm_topk_prob, c.num_shared_experts, c.capacity.policy)
    assert asked == ("softmax", True, 0, "dropless"), "not what the peers compute"
    peers = {}
    for name, make in PEERS.items():
        try:
            with _quiet():
                peers[name] = make(layer)
        except (ImportError, LeftOut) as reason:
            _say(f"{name} is left out: {reason}")
    return peers


@cache
def _say(line: str) -> None:
    """Once, however many cases there are."""
    print(line, flush=True)


class Results(NamedTuple):
    """What must be the same, whoever computes it."""

    hidden_TD: Tensor
    x_grad_TD: Tensor
    router_grad_ED: Tensor
    grad_norm: Tensor
    """Scalar, over all parameters."""


TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def results(peer: Peer, x_TD: Tensor, grad_TD: Tensor) -> Results:
    """One forward and backward; the parameters' gradients are cleared again.

    Raises RuntimeError where a parameter has no gradient.
    """
    x_TD = x_TD.detach().requires_grad_()
    hidden_TD = peer.call(x_TD)
    hidden_TD.backward(grad_TD)
    router_grad_ED, squares = peer.router_weight_ED.grad, []
    for name, parameter in peer.module.named_parameters():
        if parameter.grad is None:
            raise RuntimeError(f"{name} has no gradient: not the same work")
        squares.append(parameter.grad.double().square().sum())
        parameter.grad = None
    assert x_TD.grad is not None
    assert router_grad_ED is not None
    norm = torch.stack(squares).sum().sqrt()
    return Results(hidden_TD.detach(), x_TD.grad, router_grad_ED, norm)


def check(name: str, got: Results, wanted: Results) -> None:
    """Raises RuntimeError where a peer's numbers are not Convoy's, by norms of differences."""
    tolerance = TOLERANCES[wanted.hidden_TD.dtype]
    for field, a, b in zip(Results._fields, got, wanted, strict=True):
        # A saturated router's gradient is what cancellation leaves over: near nothing beside the
        # whole gradient, it is held to a hundredth of that.
        floor = 0.01 * wanted.grad_norm if field == "router_grad_ED" else wanted.grad_norm * 0
        scale = torch.maximum(b.double().norm(), floor)
        error = ((a.double() - b.double()).norm() / scale).item()
        if not error < tolerance:
            raise RuntimeError(
                f"{name} does not compute what Convoy does: {field} differs by {error:.1e} of its "
                f"norm, more than {tolerance:.0e}"
            )
