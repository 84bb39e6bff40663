"""The MoE blocks of ``transformers`` models, replaced by MoE layers with the same parameters.

Legend: T tokens, D d_model, F d_ff, E experts.

The library ``transformers`` is not imported: blocks are known by the full names of their classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from moe.adoption.attention_masks import LastMask, token_mask, unwatch_attention, watch_attention
from moe.adoption.experts_implementation import no_longer_warn, warn_when_set
from moe.adoption.families import ACTIVATIONS, FAMILIES, SUPPORTED, Fields
from moe.config import MoEConfig
from moe.experts import ExpertWeights, GroupedExperts
from moe.layer import MoEAux, MoELayer
from parallel.dtensor import local_shard
from router import RouterConfig, TopKRouter

Model = TypeVar("Model", bound=nn.Module)


class FusedExperts(GroupedExperts):
    """Experts whose parameters are laid out as in ``transformers``.

    ``gate_up_proj`` is [E, 2 F, D], the gates' rows first, and ``down_proj`` is [E, D, F]. The
    experts compute with transposed views; nothing is copied in the forward.
    """

    def make_parameters(self, E: int, D: int, F: int, bias: bool) -> None:
        """Register the parameters, without values."""
        assert not bias
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * F, D))
        self.down_proj = nn.Parameter(torch.empty(E, D, F))

    def reset_parameters(self) -> None:
        """Normal, with standard deviation fan_in ** -0.5."""
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, std=weight.shape[2] ** -0.5)

    def local_weights(self) -> ExpertWeights:
        """Views of this rank's parameters, as the backends take them."""
        fused_EGD = local_shard(self.gate_up_proj)
        # One unbind, and not two slices: its backward writes the fused gradient once.
        gate_EFD, up_EFD = fused_EGD.unflatten(1, (2, -1)).unbind(1)
        down_EDF = local_shard(self.down_proj)
        return ExpertWeights(gate_EFD.mT, up_EFD.mT, down_EDF.mT)

    def stored_gate_up(self) -> Tensor:
        """This rank's ``gate_up_proj``."""
        return local_shard(self.gate_up_proj)

    def extra_repr(self) -> str:
        """The fields that ``print`` shows."""
        E, D, F = self.down_proj.shape
        return f"num_experts={E}, d_model={D}, d_ff={F}, {self.activation}, backend={self.backend}"


class _ScoreCorrectionBias:
    """Gives a router's bias the name that it has in ``transformers``."""

    @property
    def expert_bias(self: Any) -> Tensor:
        return cast(Tensor, self.e_score_correction_bias)

    @expert_bias.setter
    def expert_bias(self: Any, bias: Tensor) -> None:
        self.e_score_correction_bias = bias


def _router_of(gate: Any, config: RouterConfig) -> TopKRouter:
    """A router with the parameters, the names and the hooks of a gate of ``transformers``."""
    with torch.device("meta"):
        router = TopKRouter(gate.weight.shape[1], config)
    router.weight = gate.weight
    bases: tuple[type, ...] = (TopKRouter, type(gate))
    if config.expert_bias:
        del router.expert_bias
        # The storage without the class nn.Buffer, which a module registers under any name.
        router.register_buffer("e_score_correction_bias", gate.e_score_correction_bias.detach())
        bases = (_ScoreCorrectionBias, *bases)
    # transformers records router logits by hooks on modules of the gate's class. The class of this
    # one module therefore becomes a subclass of both, as FSDP does with the modules that it shards.
    router.__class__ = type(type(gate).__name__, bases, {})
    _share_hooks(gate, router)
    return router


_HOOKS = tuple(name for name in vars(nn.Module()) if "_hook" in name)


def _share_hooks(old: nn.Module, new: nn.Module) -> None:
    """Give a module the hooks of the one that it replaces; handles that remove them stay valid."""
    for name in _HOOKS:
        setattr(new, name, getattr(old, name))


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, name) for name in _HOOKS)


class TransformersMoE(MoELayer):
    """An MoE layer in the place of a block of a ``transformers`` model; made by :func:`adopt`.

    The names of parameters and buffers, and their shapes, are those of the block that it replaces:
    a state dict of the model is one that ``transformers`` loads.
    """

    EXPERTS = FusedExperts

    def __init__(self, block: Any, config: MoEConfig) -> None:
        with torch.device("meta"):
            super().__init__(config)
        del self.router
        self.gate = _router_of(block.gate, config)
        for name in _FUSED:
            setattr(self.experts, name, getattr(block.experts, name))
        self.shared_experts = getattr(block, "shared_experts", None)
        for name in dict(block.named_children()):  # optimizers know parameters by their order
            self._modules[name] = self._modules.pop(name)
        # For restore(), without the experts: this layer's become other tensors when they are
        # sharded, and the first ones must not be kept.
        for name in _FUSED:
            setattr(block.experts, name, None)
        self._block = [block]
        _share_hooks(block, self)
        self._narrow_gate = block.gate.weight.dtype == self.experts.down_proj.dtype
        self._listeners: list[list[MoEAux]] = []
        self._last_mask: LastMask = []
        self.train(block.training)

    @property
    def router(self) -> TopKRouter:  # type: ignore[override]
        """The router. Its name in the model is ``gate``."""
        return self.gate

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """[..., D] -> [..., D], as the block that this layer replaces; see :func:`collect_aux`."""
        attention_mask = self._last_mask.pop() if self._last_mask else None
        hidden, aux = super().forward(x, token_mask=token_mask(attention_mask, x))
        for listener in self._listeners:
            listener.append(aux)
        return hidden

    def _shared(self, x_TD: Tensor) -> Tensor | None:
        return None if self.shared_experts is None else self.shared_experts(x_TD)

    def block(self) -> nn.Module:
        """The block of ``transformers``, with this layer's parameters."""
        block, weight = self._block[0], self.gate.weight
        if self._narrow_gate and weight.dtype != self.experts.down_proj.dtype:
            # A cast of the model left the router in float32: transformers computes in one dtype.
            dtype = cast(Tensor, self.experts.down_proj).dtype
            weight.data = weight.data.to(dtype)
            weight.grad = None if weight.grad is None else weight.grad.to(dtype)
        block.gate.weight = weight
        if self.gate.expert_bias is not None:
            block.gate.e_score_correction_bias = self.gate.expert_bias
        for name in _FUSED:
            setattr(block.experts, name, getattr(self.experts, name))
        return cast(nn.Module, block).train(self.training)


_FUSED = ("gate_up_proj", "down_proj")


def adopt(model: Model, **options: Any) -> Model:
    """Replace the MoE blocks of a ``transformers`` model by MoE layers with the same parameters.

    Supported: Mixtral, OLMoE, Qwen3-MoE and DeepSeek-V3 of transformers 5. The layers hold the very
    parameters of the blocks, under the names that these have: nothing is copied, an optimizer that
    was made before remains valid, ``model.state_dict()`` has the keys and shapes that it had, and
    ``save_pretrained`` writes what ``transformers`` loads, before and after training.
    ``model(**batch)`` and ``model.generate`` work as before, hooks of blocks and gates stay, and
    logits are equal to 1e-5 in float32. In lower precision routers of Mixtral, OLMoE and Qwen3-MoE
    differ: Convoy computes them in float32.

    ``parallel.apply_expert_parallel(model, mesh)`` spreads the experts over ranks.
    :func:`restore` puts the blocks back. ``model.set_experts_implementation`` of ``transformers``
    has no effect on adopted layers, and warns: ``backend`` says how they compute.

    **Padding.** Where the model is called with an ``attention_mask``, its padding chooses no
    expert, takes no capacity, and is in no loss and no statistic; the layers' output for padding is
    0. The masks of flex attention are not read: padding is then routed as in ``transformers``.

    **Auxiliary losses.** ``output_router_logits=True`` works as before: the model adds
    ``router_aux_loss_coef`` times its own loss, which counts the tokens of this rank and this call.
    Convoy's losses are not added to ``outputs.loss``. :func:`collect_aux` gives the
    ``MoEOutput.aux`` of every layer; use its losses or those of ``transformers``, not both.

    Args:
        model: the model, or any module that has such blocks. It is changed in place.
        options: fields of :class:`moe.MoEConfig` that the blocks do not determine, such as
            ``backend``, ``dispatcher``, ``capacity`` or ``aux_loss_coeff``. ``aux_loss_coeff`` is
            the config's ``router_aux_loss_coef`` unless given, and for DeepSeek-V3 the losses are
            those of the paper: 0, and a ``seq_aux_loss_coeff`` of 0.0001.

    Returns:
        The model.

    Raises ValueError, and changes nothing, for a model without MoE blocks, for blocks of other
    classes, for parameters that are sharded or quantized, and for options that do not fit.

    Example::

        model = moe.adopt(AutoModelForCausalLM.from_pretrained(folder))
    """
    found: list[tuple[str, nn.Module, MoEConfig]] = []
    for name, module in model.named_modules():
        if _is_moe_block(module):
            if not name:
                raise ValueError(
                    f"{type(model).__name__} is itself a block: give the model that has it"
                )
            found.append((name, module, _config_of(name, module, model, options)))
    if not found:
        if _adopted(model):
            raise ValueError(f"{type(model).__name__} is adopted already: moe.restore undoes that")
        raise ValueError(f"{type(model).__name__} must have MoE blocks to be adopted; {SUPPORTED}")
    for name, block, config in found:
        layer = TransformersMoE(block, config)
        parent = _put(model, name, layer)
        watch_attention(parent, layer, layer._last_mask)
    warn_when_set(model)
    return model


def restore(model: Model) -> Model:
    """Undo :func:`adopt`: put the blocks of ``transformers`` back, with the present parameters.

    Saving does not need it. The parameters are those of the layers, not copies. Where the model was
    cast since, as with ``model.bfloat16()``, routers' weights are cast too: adopted layers keep
    them in float32.

    Raises ValueError, and changes nothing, for a model without adopted layers, and for parameters
    that are sharded over ranks. A sharded model is saved with
    ``torch.distributed.checkpoint.state_dict.get_model_state_dict`` and
    ``save_pretrained(folder, state_dict=...)``.
    """
    layers = _adopted_layers(model)
    for name, layer in layers:
        if any(hasattr(parameter, "to_local") for parameter in layer.parameters()):
            raise ValueError(
                f"{name} must not be sharded to be restored: gather the model with "
                f"torch.distributed.checkpoint.state_dict.get_model_state_dict, and give what it "
                f"returns to save_pretrained(folder, state_dict=...)"
            )
    for name, layer in layers:
        unwatch_attention(_put(model, name, layer.block()))
    no_longer_warn(model)
    return model


@contextmanager
def collect_aux(model: nn.Module) -> Iterator[list[MoEAux]]:
    """Collect the ``MoEOutput.aux`` of every adopted layer, in the order of their calls.

    With activation checkpointing, use ``use_reentrant=False`` and call ``backward`` after the
    ``with`` statement: a layer that is computed again within it is collected again.

    Example::

        with moe.collect_aux(model) as auxes:
            loss = model(**batch).loss
        (loss + sum(aux.aux_loss for aux in auxes)).backward()
    """
    collected: list[MoEAux] = []
    layers = [layer for _, layer in _adopted_layers(model)]
    for layer in layers:
        layer._listeners.append(collected)
    try:
        yield collected
    finally:
        for layer in layers:
            layer._listeners = [each for each in layer._listeners if each is not collected]


def _adopted(model: nn.Module) -> list[tuple[str, TransformersMoE]]:
    """The adopted layers of a model, with their names."""
    return [(n, m) for n, m in model.named_modules() if isinstance(m, TransformersMoE)]


def _adopted_layers(model: nn.Module) -> list[tuple[str, TransformersMoE]]:
    """The adopted layers of a model, with their names. Raises ValueError where there is none."""
    layers = _adopted(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} must have adopted layers: call moe.adopt first")
    return layers


def _is_moe_block(module: nn.Module) -> bool:
    """Whether a module has experts and a router, as the blocks of all MoE families have."""
    children = dict(module.named_children())
    return (
        "experts" in children
        and not isinstance(module, MoELayer)
        and any("gate" in name or "router" in name for name in children)
    )


def _config_of(name: str, block: Any, model: nn.Module, options: Fields) -> MoEConfig:
    """The config of a block. Raises ValueError, with the name of the block, where it has none."""
    kind = type(block)
    where = f"{name} ({kind.__name__})"
    full_name = f"{kind.__module__}.{kind.__qualname__}"
    family = next((each for each in FAMILIES if each.block == full_name), None)
    if family is None:
        raise ValueError(f"{where} cannot be adopted; {SUPPORTED}")
    _check_parameters(where, block)
    experts = block.experts
    act = experts.config.hidden_act
    if act not in ACTIVATIONS:
        raise ValueError(f"{where}: hidden_act ({act}) must be {' or '.join(ACTIVATIONS)}")
    E, D, F = experts.down_proj.shape
    sizes = {"num_experts": E, "d_model": D, "d_ff": F, "top_k": block.gate.top_k}
    shared = getattr(block, "shared_experts", None)
    if shared is not None:
        sizes["num_shared_experts"] = shared.intermediate_size // F
    coeff = getattr(experts.config, "router_aux_loss_coef", None)
    defaults = {} if coeff is None else {"aux_loss_coeff": float(coeff)}
    try:
        fields = sizes | {"activation": ACTIVATIONS[act]} | defaults | family.read(block)
        taken = sorted(options.keys() & (fields.keys() - _LOSSES) | options.keys() & _BLOCKS)
        if taken:
            raise ValueError(f"{taken[0]} is the block's and must be left out")
        return MoEConfig(**fields | options)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


_LOSSES = {"aux_loss_coeff", "seq_aux_loss_coeff", "z_loss_coeff"}
# Fields whose defaults are the blocks': another value would compute something else.
_BLOCKS = {
    "score_func", "softmax_after_topk", "norm_topk_prob", "route_scale", "routing", "n_groups",
    "topk_groups", "topk_per_group", "expert_bias", "ffn_bias", "activation",
    "num_shared_experts", "shared_expert_gate",
}  # fmt: skip


def _check_parameters(where: str, block: Any) -> None:
    experts = block.experts
    for name in (*_FUSED, "weight"):
        owner = block.gate if name == "weight" else experts
        tensor = getattr(owner, name, None)
        plain = type(tensor) is nn.Parameter and tensor.is_floating_point()
        if not plain or getattr(experts, "_is_expert_parallel", False):
            raise ValueError(
                f"{where}: {name} ({type(tensor).__name__}) must be a plain floating-point "
                f"parameter: adopt the model before it is sharded, and load it without quantization"
            )
    if any(map(_has_hooks, experts.modules())):
        raise ValueError(
            f"{where}: the experts have hooks, which an adopted layer would call with other "
            f"arguments: remove them, or register them on the block"
        )
    E, D, F = experts.down_proj.shape
    if experts.gate_up_proj.shape != (E, 2 * F, D):
        raise ValueError(
            f"{where}: gate_up_proj ({list(experts.gate_up_proj.shape)}) must be [E, 2 F, D], "
            f"with down_proj ({list(experts.down_proj.shape)}) [E, D, F]"
        )


def _put(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Put a module in the place ``name``, and return the module that has it."""
    parent_name, _, last = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    setattr(parent, last, module)
    return parent
