"""Adapters in the format of the library ``peft``, for models of ``transformers``.

``peft`` keeps the adapter of a linear layer as ``lora_A.weight`` [L, D] and ``lora_B.weight``
[F, L]. The adapters of a parameter with an expert dim are two matrices as well, with the experts
side by side: ``lora_A.weight`` [E·L, D], experts outermost, and ``lora_B.weight`` [F, L·E], experts
innermost (``ParamWrapper`` in ``peft/tuners/lora/layer.py`` of peft 0.21). Models of
``transformers`` hold an expert's gate and up as one parameter: their two adapters become one of
rank 2 L, as ``peft`` makes it of its own older ones.

Legend: E experts, D d_model, F d_ff, L rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe.adapters.lora import adapters_of, load_lora_state_dict, lora_state_dict
from moe.adapters.matrices import Adapter, MatrixAdapter
from moe.adapters.targets import moe_layers
from moe.experts import GroupedExperts
from router import TopKRouter

_PREFIX = "base_model.model."
_TAKEN_FOR_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Names of linear layers that peft takes for experts of older models of transformers, and renames:
dense layers of these names are stored as adapters of the parameter ``weight``."""


class PeftAdapter(NamedTuple):
    """What the two files of an adapter of ``peft`` hold."""

    tensors: dict[str, Tensor]
    """Of ``adapter_model.safetensors``, on the host."""
    config: dict[str, Any]
    """Of ``adapter_config.json``."""


def peft_adapter(model: nn.Module) -> PeftAdapter:
    """The adapters of an adopted or a dense model of ``transformers``, as ``peft`` stores them.

    ``peft.PeftModel.from_pretrained(base, folder)`` loads them onto the base model of
    ``transformers``, with these two files in the folder. Of a sharded model all ranks must call,
    and each gets all tensors.

    Raises ValueError for a model without adapters, for adapters of several ranks or scales, for
    parameters that are trained whole, and for experts that ``transformers`` has no parameters for:
    those that :func:`moe.adopt` did not make.

    Example::

        adapter = moe.peft_adapter(model)
        safetensors.torch.save_file(adapter.tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(adapter.config))
    """
    state = lora_state_dict(model, full=True)
    adapters = list(adapters_of(model))
    whole_names = [
        name for name, p in model.named_parameters() if p.requires_grad and ".lora." not in name
    ]
    if whole_names:
        raise ValueError(
            f"{whole_names[0]} is trained whole ({len(whole_names)} such parameters), which this "
            f"format has no place for: use moe.lora_state_dict, or merge_lora and save_pretrained"
        )
    kinds = {(adapter.rank, adapter.alpha) for *_, adapter in adapters}
    if len(kinds) > 1:
        raise ValueError(f"adapters must have one rank and one alpha, not {sorted(kinds)}")
    ((rank, alpha),) = kinds
    has_moe = next(moe_layers(model), None) is not None
    tensors: dict[str, Tensor] = {}
    modules: list[str] = []
    parameters: list[str] = []
    for name, module, adapter in adapters:
        own = {short: state[f"{name}.lora.{short}"] for short, _ in adapter.named_parameters()}
        if isinstance(module, GroupedExperts):
            _check_layout(name, module)
            parameters += [f"{name}.gate_up_proj", f"{name}.down_proj"]
        elif isinstance(module, TopKRouter) or (
            has_moe and name.rpartition(".")[2] in _TAKEN_FOR_EXPERTS
        ):
            parameters.append(f"{name}.weight")
        else:
            modules.append(name)
        for key, value in _stored(adapter, own):
            # safetensors takes contiguous tensors that share no memory.
            tensors[f"{_PREFIX}{name}.{key}"] = value.cpu().contiguous().clone()
    fused = r".*\.gate_up_proj"
    has_experts = any(isinstance(module, GroupedExperts) for _, module, _ in adapters)
    return PeftAdapter(tensors, {
        "peft_type": "LORA", "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none",
        "target_modules": modules, "target_parameters": parameters, "fan_in_fan_out": False,
        "rank_pattern": {fused: 2 * rank} if has_experts else {},
        "alpha_pattern": {fused: 2 * alpha} if has_experts else {},
        "use_rslora": False, "use_dora": False, "inference_mode": True, "init_lora_weights": True,
        "base_model_name_or_path": getattr(getattr(model, "config", None), "_name_or_path", None),
    })  # fmt: skip


def _stored(adapter: Adapter, own: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one module's adapters, by the ends of their names."""
    if isinstance(adapter, MatrixAdapter):
        yield "lora_A.weight", own["a"]
        yield "lora_B.weight", own["b"]
        return
    # The wrapper of the parameter that the module has first is the inner one.
    a_EDL = torch.cat((own["gate_a"], own["up_a"]), 2)
    zeros_EFL = torch.zeros_like(own["gate_b"])
    gate_EFL = torch.cat((own["gate_b"], zeros_EFL), 2)
    up_EFL = torch.cat((zeros_EFL, own["up_b"]), 2)
    yield from _side_by_side("base_layer.", a_EDL, torch.cat((gate_EFL, up_EFL), 1))
    yield from _side_by_side("", own["down_a"], own["down_b"])


def _side_by_side(prefix: str, a_EDL: Tensor, b_EFL: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield f"{prefix}lora_A.weight", a_EDL.mT.flatten(0, 1)
    yield f"{prefix}lora_B.weight", b_EFL.permute(1, 2, 0).flatten(1)


def _check_layout(name: str, experts: GroupedExperts) -> None:
    """Refuse experts whose parameters are not ``gate_up_proj`` [E, 2 F, D], the gates' rows first,
    and ``down_proj`` [E, D, F]."""
    parameters = {short: p for short, p in experts.named_parameters() if "lora." not in short}
    shapes = {short: tuple(p.shape) for short, p in parameters.items()}
    adapter: Any = experts.lora
    sizes = {short: tuple(p.shape) for short, p in adapter.named_parameters()}
    E, D, _ = sizes["up_a"]
    F = sizes["up_b"][1]
    views = experts.stored_gate_up() is not None
    if not views or shapes != {"gate_up_proj": (E, 2 * F, D), "down_proj": (E, D, F)}:
        raise ValueError(
            f"{name} ({', '.join(parameters)}) must have gate_up_proj [E, 2 F, D] and down_proj "
            f"[E, D, F], as models of transformers that moe.adopt has adopted: peft cannot adapt "
            f"others; use moe.lora_state_dict"
        )


def load_peft_adapter(
    model: nn.Module, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> None:
    """Load what ``peft`` has stored into a model with adapters, in place; the inverse of
    :func:`peft_adapter`.

    The model has adapters of :func:`moe.add_lora` on what the file has adapters of, with its rank
    ``r``. The file's scale is kept: where the model's alpha is another one, B is multiplied by the
    quotient. The one A that ``peft`` trains for an expert's gate and up is loaded as the A of both.

    Args:
        model: an adopted or a dense model of ``transformers``, sharded or not.
        tensors: of ``adapter_model.safetensors``.
        config: of ``adapter_config.json``.

    Raises ValueError, and changes nothing, for modules that one has adapters of and the other has
    not, for other ranks, and for kinds of adapters that are not plain LoRA.
    """
    for field in ("use_dora", "use_rslora", "modules_to_save", "lora_bias"):
        if config.get(field):
            raise ValueError(f"{field} ({config[field]}) must be off: only plain LoRA is loaded")
    left = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    state: dict[str, Tensor] = {}
    for name, module, adapter in adapters_of(model):
        if isinstance(module, GroupedExperts):
            _check_layout(name, module)
            loaded = {
                **_fused(left, name, adapter, _scale_of(config, f"{name}.gate_up_proj")),
                **_down(left, name, adapter, _scale_of(config, f"{name}.down_proj")),
            }
        else:
            a, b = _pair(left, name)
            loaded = {"a": a, "b": b * (_scale_of(config, name) / adapter.scale)}
        state |= {f"{name}.lora.{short}": tensor for short, tensor in loaded.items()}
    if left:
        raise ValueError(
            f"{min(left)} ({len(left)} such tensors) has no adapter in the model: call "
            f"moe.add_lora with on=(...) that names its module"
        )
    own = lora_state_dict(model)
    load_lora_state_dict(model, {n: t for n, t in own.items() if n not in state} | state)


def _pair(left: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    keys = [f"{name}.lora_{which}.weight" for which in "AB"]
    for key in keys:
        if key not in left:
            raise ValueError(
                f"{key} must be in the file: the model has an adapter there that peft has not"
            )
    a, b = (left.pop(key).float() for key in keys)
    return a, b


def _scale_of(config: Mapping[str, Any], name: str) -> float:
    """alpha / r of one module or parameter; patterns are regular expressions, as in peft."""

    def of(patterns: Any, otherwise: float) -> float:
        for pattern, number in (patterns or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                return float(number)
        return otherwise

    rank = of(config.get("rank_pattern"), config["r"])
    return of(config.get("alpha_pattern"), config["lora_alpha"]) / rank


def _apart(a: Tensor, b: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """[E, D, L] and [E, F, L] of the matrices with the experts side by side."""
    a_EDL = a.reshape(num_experts, -1, a.shape[1]).mT
    b_EFL = b.reshape(len(b), -1, num_experts).permute(2, 0, 1)
    return a_EDL, b_EFL


def _down(left: dict[str, Tensor], name: str, adapter: Adapter, scale: float) -> dict[str, Tensor]:
    a_EFL, b_EDL = _apart(*_pair(left, name), adapter.get_parameter("down_a").shape[0])
    return {"down_a": a_EFL, "down_b": b_EDL * (scale / adapter.scale)}


def _fused(left: dict[str, Tensor], name: str, adapter: Adapter, scale: float) -> dict[str, Tensor]:
    E, rank = adapter.get_parameter("down_a").shape[0], adapter.rank
    a_EDL, b_EGL = _apart(*_pair(left, f"{name}.base_layer"), E)
    gate_EFL, up_EFL = (b_EGL * (scale / adapter.scale)).chunk(2, 1)
    gate_a = up_a = a_EDL
    # Twice the rank, where the one half is the gate's and the other is up's: see peft_adapter.
    if a_EDL.shape[2] == 2 * rank and not (gate_EFL[..., rank:].any() or up_EFL[..., :rank].any()):
        gate_a, up_a = a_EDL[..., :rank], a_EDL[..., rank:]
        gate_EFL, up_EFL = gate_EFL[..., :rank], up_EFL[..., rank:]
    return {"gate_a": gate_a, "gate_b": gate_EFL, "up_a": up_a, "up_b": up_EFL}
