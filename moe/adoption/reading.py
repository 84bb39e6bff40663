"""The config of an MoE layer from a block of ``transformers`` and its family's declaration.

Legend: E experts, D d_model, F d_ff.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from moe.adoption.experts import parameter, shapes_of, sizes_of
from moe.adoption.families import BY_BLOCK, SUPPORTED
from moe.adoption.kinds import Family, Kind, value
from moe.adoption.routers import has_hooks, inner
from moe.config import MoEConfig
from moe.layer import MoELayer

Fields = dict[str, Any]

_GATED = {
    "SiLUActivation": "swiglu", "SiLU": "swiglu", "silu": "swiglu", "GELUActivation": "geglu",
}  # fmt: skip
_UNGATED = {"ReLUSquaredActivation": "relu2", "GELUActivation": "gelu"}
_LOSSES = {"aux_loss_coeff", "seq_aux_loss_coeff", "z_loss_coeff"}
# Fields whose defaults are the blocks': another value would compute something else.
_BLOCKS = {
    "score_func", "softmax_after_topk", "norm_topk_prob", "route_scale", "routing", "n_groups",
    "topk_groups", "topk_per_group", "expert_bias", "router_bias", "ffn_bias", "activation",
    "activation_limit", "weights_on_input", "num_shared_experts", "shared_expert_gate",
}  # fmt: skip


def is_moe_block(module: nn.Module) -> bool:
    """Whether a module is a family's block, or has experts and a router as their blocks have."""
    if isinstance(module, MoELayer):
        return False
    children = module._modules
    if "experts" in children and any("gate" in n or "router" in n for n in children):
        return True
    # Decoder layers are the blocks of some families, and not all of these have experts.
    return full_name(module) in BY_BLOCK and not full_name(module).endswith("Layer")


def full_name(module: nn.Module) -> str:
    """Of a module's class."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}"


def family_of(where: str, block: nn.Module) -> tuple[Family, Kind]:
    """The family of a block, with its declaration. Raises ValueError where it has none."""
    family = BY_BLOCK.get(full_name(block))
    if family is None:
        raise ValueError(f"{where} cannot be adopted; {SUPPORTED}")
    if family.kind is None:
        raise ValueError(f"{where} cannot be adopted: {family.why_not}")
    return family, family.kind


def config_of(name: str, block: Any, model: nn.Module, options: Fields) -> tuple[Kind, MoEConfig]:
    """The declaration and the config of a model's block. Raises ValueError, with the block's name,
    where it has none."""
    where = f"{name} ({type(block).__name__})"
    _, kind = family_of(where, block)
    _check_parameters(where, block, kind)
    try:
        fields = _fields(block, kind, model)
        taken = sorted(options.keys() & (fields.keys() - _LOSSES) | options.keys() & _BLOCKS)
        if taken:
            raise ValueError(f"{taken[0]} is the block's and must be left out")
        return kind, MoEConfig(**fields | options)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _fields(block: Any, kind: Kind, model: nn.Module) -> Fields:
    """The fields of MoEConfig that a block determines, and the coefficients of its losses."""
    for must in kind.must:
        has = value(block, must.path)
        if has not in must.values:
            raise ValueError(f"{must.label} ({has}) must be {must.values[0]}: {must.why}")
    E, D, F = sizes_of(kind.experts, block.experts)
    fields: Fields = {
        "num_experts": E, "d_model": D, "d_ff": F, "top_k": value(block, kind.top_k),
        "router_bias": bool(kind.logit_bias), "ffn_bias": bool(kind.experts.biases),
        "weights_on_input": kind.on_input,
    }  # fmt: skip
    shared = getattr(block, kind.shared, None) if kind.shared else None
    width = 0 if shared is None else max(p.shape[0] for p in shared.parameters() if p.ndim == 2)
    if shared is not None and width % F == 0:
        fields["num_shared_experts"] = width // F
    fields |= _scores(block, kind) | _activation(block, kind)
    return fields | _losses(block, model, bool(fields["expert_bias"]))


def _scores(block: Any, kind: Kind) -> Fields:
    gate = block.get_submodule(kind.gate)
    score, top_k = value(block, kind.score), value(block, kind.top_k)
    after = kind.after_topk and score == "softmax"
    normalize = bool(value(block, kind.normalize)) and not after
    has_table = bool(kind.table) and getattr(gate, kind.table, None) is not None
    biased = bool(kind.correction) and value(block, f".{kind.correction}") is not None
    if normalize and top_k == 1 and not biased:
        # The normalized weight of a single expert is 1: a softmax over the one chosen logit.
        score, after, normalize = "softmax", True, False
    scale = value(block, kind.scale)
    scale = 1.0 if scale is None else float(scale)
    if kind.halved and value(block, kind.halved) == "average":
        scale /= 2
    n_groups, topk_groups = (1, 1)
    if kind.groups is not None and value(block, ".gate.topk_method") != "greedy":
        n_groups, topk_groups = (value(block, path) or 1 for path in kind.groups)
    return {
        "score_func": score, "softmax_after_topk": after, "norm_topk_prob": normalize,
        "route_scale": scale, "n_groups": n_groups, "topk_groups": topk_groups,
        "topk_per_group": kind.per_group, "expert_bias": biased and not has_table,
    }  # fmt: skip


def _activation(block: Any, kind: Kind) -> Fields:
    limit = value(block, kind.limit) if kind.limit else None
    fields = {"activation_limit": 0.0 if limit is None else float(limit)}
    if kind.activation:
        return fields | {"activation": kind.activation}
    gated = kind.experts.fused or len(kind.experts.gate_up) == 2
    known = _GATED if gated else _UNGATED
    experts = block.experts
    act = getattr(experts, "act_fn", None)
    if act is None and len(experts._modules) == 1:
        act = getattr(next(iter(experts.children())), "activation_fn", None)
    # An activation function within the experts' own forward is SiLU.
    name = "SiLU" if act is None else getattr(act, "__name__", type(act).__name__)
    if name not in known:
        raise ValueError(f"hidden_act ({name}) must be {'silu' if gated else 'relu2'} or gelu")
    return fields | {"activation": known[name]}


def _losses(block: Any, model: nn.Module, biased: bool) -> Fields:
    configs = [getattr(module, "config", None) for module in (block.experts, block, model)]
    configs += [getattr(configs[-1], "text_config", None)]
    for config in configs:
        coeff = getattr(config, "router_aux_loss_coef", None)
        if coeff is not None:
            return {"aux_loss_coeff": float(coeff)}
    # Where the library has no auxiliary loss, and the choice has a bias, the coefficients are those
    # of DeepSeek-V3 (arXiv 2412.19437, section 4.2).
    return {"aux_loss_coeff": 0.0, "seq_aux_loss_coeff": 0.0001} if biased else {}


def _check_parameters(where: str, block: Any, kind: Kind) -> None:
    experts, gate = block.experts, block.get_submodule(kind.gate)
    layout = kind.experts
    tensors = {name: parameter(experts, name) for name in layout.names}
    owner, name = inner(gate, kind.weight)
    tensors[kind.weight] = owner._parameters.get(name)
    for name, tensor in tensors.items():
        plain = type(tensor) is nn.Parameter and tensor.is_floating_point()
        if not plain or getattr(experts, "_is_expert_parallel", False):
            raise ValueError(
                f"{where}: {name} ({type(tensor).__name__}) must be a plain floating-point "
                f"parameter: adopt the model before it is sharded, and load it without quantization"
            )
    inside = [*experts.modules(), *(module for module in gate.modules() if module is not gate)]
    if any(map(has_hooks, inside)):
        raise ValueError(
            f"{where}: the experts or parts of the router have hooks, which an adopted layer would "
            f"not call or with other arguments: remove them, or register them on the block"
        )
    for name, shape in shapes_of(layout, *sizes_of(layout, experts)).items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(
                f"{where}: {name} ({list(tensors[name].shape)}) must be {list(shape)}, with "
                f"{layout.down} ({list(tensors[layout.down].shape)})"
            )
    others = {name for name, _ in experts.named_parameters()} - set(layout.names)
    if others:
        raise ValueError(
            f"{where}: the experts must have no parameters but those of their family, "
            f"not {', '.join(sorted(others))}"
        )
    table = getattr(gate, kind.table, None) if kind.table else None
    if table is not None and (table.sort(-1).values.diff(dim=-1) == 0).any():
        raise ValueError(f"{where}: {kind.table} must have different experts in each row")
