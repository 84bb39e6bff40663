"""The parameters of MegaBlocks' dropless layer, in and out of an MoE layer.

``dMoE`` of megablocks 0.10 keeps the matrices of all experts below each other: ``w1`` (the gate's,
where there is one), ``v1`` (up; without a gate ``w1`` is up and there is no ``v1``) and ``w2``
(down), each [E F, D], and its router's weight, [E, D]. MegaBlocks itself is not imported.

Legend: E experts of this rank, D d_model, F d_ff.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe.layer import MoELayer
from parallel.dtensor import local_shard

_ROUTER, _EXPERTS = "router.layer.weight", "experts.mlp."


def megablocks_state_dict(layer: MoELayer, prefix: str = "") -> dict[str, Tensor]:
    """The parameters of a layer as the state dict of MegaBlocks' dMoE, in new tensors.

    Under expert parallelism on both sides those of this rank.

    Args:
        layer: without biases, shared experts, an expert bias and limits, which dMoE has not.
        prefix: what stands before each name, such as ``"blocks.0.ffn."``.

    Raises ValueError for a layer that dMoE has no parameters for.
    """
    _check(layer)
    state = {_ROUTER: local_shard(layer.router.weight).detach().clone()}
    for name, weight_EFD in _matrices(layer).items():
        stacked_EFD = weight_EFD.clone(memory_format=torch.contiguous_format)
        state[_EXPERTS + name] = stacked_EFD.flatten(0, 1)
    return {prefix + name: tensor for name, tensor in state.items()}


def load_megablocks_state_dict(
    layer: MoELayer, state: Mapping[str, Tensor], prefix: str = ""
) -> None:
    """Give a layer the parameters of MegaBlocks' dMoE; names without ``prefix`` are passed over.

    Under expert parallelism on both sides ``state`` is that of this rank.

    Raises ValueError, and changes nothing, for a layer that dMoE has no parameters for, and where
    names or shapes are not this layer's.
    """
    _check(layer)
    targets = {_ROUTER: local_shard(layer.router.weight).detach()}
    targets |= {_EXPERTS + name: weight for name, weight in _matrices(layer).items()}
    given = {name.removeprefix(prefix) for name in state if name.startswith(prefix)}
    if given != targets.keys():
        missing, extra = sorted(targets.keys() - given), sorted(given - targets.keys())
        raise ValueError(
            f"the state dict must have {', '.join(targets)} after {prefix!r}: missing are "
            f"{', '.join(missing) or 'none'}, and too many are {', '.join(extra) or 'none'}"
        )
    for name, target in targets.items():
        wanted = [target.shape[:-1].numel(), target.shape[-1]]
        shape = list(state[prefix + name].shape)
        if shape != wanted:
            raise ValueError(f"{prefix}{name} ({shape}) must be {wanted} for this layer")
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(state[prefix + name].view(target.shape))


def _matrices(layer: MoELayer) -> dict[str, Tensor]:
    """Views of the experts' parameters as [E, F, D], by the names that dMoE has for them."""
    w = layer.experts.local_weights().map(torch.Tensor.detach)
    if w.w_gate is None:
        return {"w1": w.w_up.mT, "w2": w.w_down}
    return {"w1": w.w_gate.mT, "v1": w.w_up.mT, "w2": w.w_down}


def _check(layer: MoELayer) -> None:
    c = layer.config
    for field, value, must in (
        ("ffn_bias", c.ffn_bias, False),
        ("num_shared_experts", c.num_shared_experts, 0),
        ("expert_bias", c.expert_bias, False),
        ("score_func", c.score_func, "softmax"),
        ("router_bias", c.router_bias, False),
        ("activation_limit", c.activation_limit, 0.0),
        ("weights_on_input", c.weights_on_input, False),
    ):
        if value != must:
            raise ValueError(f"moe.{field} ({value}) must be {must}: MegaBlocks' dMoE has no other")
