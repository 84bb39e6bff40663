"""The MoE blocks of ``transformers`` models, replaced by MoE layers with the same parameters.

Legend: T tokens, D d_model.

The library ``transformers`` is not imported: blocks are known by the full names of their classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from moe.adoption.attention_masks import LastMask, token_mask, unwatch_attention, watch_attention
from moe.adoption.experts import AdoptedExperts, parameter
from moe.adoption.experts_implementation import no_longer_warn, warn_when_set
from moe.adoption.families import SUPPORTED
from moe.adoption.kinds import Kind, value
from moe.adoption.listening import listening_layers
from moe.adoption.reading import config_of, is_moe_block
from moe.adoption.routers import inner, plain, router_of, share_hooks
from moe.config import MoEConfig
from moe.layer import MoEAux, MoELayer
from router import TopKRouter, keep_wide

Model = TypeVar("Model", bound=nn.Module)


class TransformersMoE(MoELayer):
    """An MoE layer in the place of a block of a ``transformers`` model; made by :func:`adopt`.

    The names of parameters and buffers, and their shapes, are those of the block that it replaces:
    a state dict of the model is one that ``transformers`` loads.
    """

    def __init__(self, block: Any, kind: Kind, config: MoEConfig) -> None:
        with torch.device("meta"):
            super().__init__(config)
        self.kind = kind
        experts = AdoptedExperts(config, kind.experts, block.experts)
        gate = block.get_submodule(kind.gate)
        self._modules = dict(block._modules)  # optimizers know parameters by their order
        self._modules |= {"experts": experts, kind.gate: router_of(gate, self, kind, config)}
        self._parameters = dict(block._parameters)
        self._buffers = plain(block._buffers)
        vars(self).setdefault("shared_gate", None)
        if "shared_experts" not in self._modules:
            vars(self)["shared_experts"] = None
        # For restore(), without the experts: this layer's become other tensors when they are
        # sharded, and the first ones must not be kept.
        for path in kind.experts.names:
            owner, name = inner(block.experts, path)
            owner._parameters[name] = None
        self._block = [block]
        share_hooks(block, self)
        self._narrow_gate = self.router.weight.dtype == self._dtype
        self._listeners: list[list[MoEAux]] = []
        self._last_mask: LastMask = []
        self.train(block.training)

    @property
    def router(self) -> TopKRouter:  # type: ignore[override]
        """The router. Its name in the model is that of the gate that it replaces."""
        return cast(TopKRouter, self._modules[self.kind.gate])

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.experts.parameters()).dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keep the router's biases in float32 where they are the layer's own, see
        :class:`router.TopKRouter`."""
        if recurse:
            for child in self.children():
                child._apply(fn)
        super()._apply(keep_wide(fn), recurse=False)
        return self

    def forward(self, x: Tensor, input_ids: Tensor | None = None) -> Any:  # type: ignore[override]
        """[..., D] -> what the block that this layer replaces gives; see :func:`collect_aux`.

        ``input_ids`` are those of the tokens, for a router with a table of tokens.
        """
        attention_mask = self._last_mask.pop() if self._last_mask else None
        replayed = self._replayed(input_ids) if self.kind.table else None
        hidden, aux = super().forward(x, replayed, token_mask=token_mask(attention_mask, x))
        for listener in self._listeners:
            listener.append(aux)
        if self.kind.after:
            hidden = self._modules[self.kind.after](hidden)  # type: ignore[misc]
        return (hidden, None) if self.kind.pair else hidden

    def _replayed(self, input_ids: Tensor | None) -> Tensor | None:
        """[T, K]: the experts that a table has for the tokens; None for a router without one."""
        table = self.router._buffers.get(self.kind.table)
        if table is None:
            return None
        if input_ids is None:
            raise ValueError(f"input_ids (None) must be given for a router with {self.kind.table}")
        return table[input_ids.reshape(-1)].long()

    def _shared(self, x_TD: Tensor) -> Tensor | None:
        kind, modules = self.kind, self._modules
        shared = modules.get(kind.shared)
        if shared is None:
            return None
        y_TD: Tensor = shared(x_TD)
        if kind.shared_gate:
            y_TD = modules[kind.shared_gate](x_TD).sigmoid() * y_TD  # type: ignore[misc]
        return y_TD / 2 if self._halved else y_TD

    @property
    def _halved(self) -> bool:
        kind = self.kind
        return bool(kind.halved) and value(self._block[0], kind.halved) == "average"

    def block(self) -> nn.Module:
        """The block of ``transformers``, with this layer's parameters."""
        block, router = self._block[0], self.router
        if self._narrow_gate and router.weight.dtype != self._dtype:
            # A cast of the model left the router in float32: transformers computes in one dtype.
            for tensor in (router.weight, router.bias):
                if tensor is not None:
                    tensor.data = tensor.data.to(self._dtype)
                    tensor.grad = None if tensor.grad is None else tensor.grad.to(self._dtype)
        gate = block._modules[self.kind.gate]
        for new, old in ((self, block), (router, gate)):
            for name in old._parameters:
                old._parameters[name] = new._parameters[name]
            for name in old._buffers:
                old._buffers[name] = new._buffers[name]
            for name in old._modules.keys() - {"experts", self.kind.gate}:
                old._modules[name] = new._modules[name]
        for path in self.kind.experts.names:
            owner, name = inner(block.experts, path)
            owner._parameters[name] = parameter(self.experts, path)
        return cast(nn.Module, block).train(self.training)


def adopt(model: Model, **options: Any) -> Model:
    """Replace the MoE blocks of a ``transformers`` model by MoE layers with the same parameters.

    The families of transformers 5.23 that are supported, and why others are not, are listed in
    ``moe.adoption.families.TABLE``. The layers hold the very parameters of the blocks, under the
    names that these have: nothing is copied, an optimizer that was made before remains valid,
    ``model.state_dict()`` has the keys and shapes that it had, and ``save_pretrained`` writes what
    ``transformers`` loads, before and after training. ``model(**batch)`` and ``model.generate``
    work as before, hooks of blocks and gates stay, and logits are equal to 1e-5 in float32. In
    lower precision the routers of many families differ: Convoy computes them in float32. A deep
    copy and a pickle of the model work: ``torch.load(file, weights_only=False)``. After a call with
    ``output_router_logits=True`` no model of transformers can be pickled, adopted or not.

    ``parallel.apply_expert_parallel(model, mesh)`` spreads the experts over ranks.
    :func:`restore` puts the blocks back. ``model.set_experts_implementation`` of ``transformers``
    has no effect on adopted layers, and warns: ``backend`` says how they compute.

    **Padding.** Where the model is called with an ``attention_mask``, its padding chooses no
    expert, takes no capacity, and is in no loss and no statistic; the layers' output for padding is
    0. The masks of flex attention are not read, and Nemotron-H does not give the mask to its MoE
    layers: padding is then routed as in ``transformers``.

    **Auxiliary losses.** ``output_router_logits=True`` works as before: the model adds
    ``router_aux_loss_coef`` times its own loss, which counts the tokens of this rank and this call.
    Convoy's losses are not added to ``outputs.loss``. :func:`collect_aux` gives the
    ``MoEOutput.aux`` of every layer; use its losses or those of ``transformers``, not both.

    Args:
        model: the model, or any module that has such blocks. It is changed in place.
        options: fields of :class:`moe.MoEConfig` that the blocks do not determine, such as
            ``backend``, ``dispatcher``, ``capacity`` or ``aux_loss_coeff``. ``aux_loss_coeff`` is
            the config's ``router_aux_loss_coef`` unless given. Where the config has none, and the
            choice has a bias, the losses are those of DeepSeek-V3: 0, and a
            ``seq_aux_loss_coeff`` of 0.0001.

    Returns:
        The model.

    Raises ValueError, and changes nothing, for a model without MoE blocks, for blocks of other
    classes, for parameters that are sharded or quantized, and for options that do not fit.

    Example::

        model = moe.adopt(AutoModelForCausalLM.from_pretrained(folder))
    """
    blocks: list[tuple[str, nn.Module, Kind, MoEConfig]] = []
    for name, module in model.named_modules():
        if is_moe_block(module):
            if not name:
                raise ValueError(
                    f"{type(model).__name__} is itself a block: give the model that has it"
                )
            blocks.append((name, module, *config_of(name, module, model, options)))
    if not blocks:
        if _adopted(model):
            raise ValueError(f"{type(model).__name__} is adopted already: moe.restore undoes that")
        raise ValueError(f"{type(model).__name__} must have MoE blocks to be adopted; {SUPPORTED}")
    for name, block, kind, config in blocks:
        layer = TransformersMoE(block, kind, config)
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
        if any(getattr(module, "is_adapter", False) for module in layer.modules()):
            raise ValueError(f"{name} must have no adapters to be restored: call moe.merge_lora")
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
    """Collect the ``MoEOutput.aux`` of every layer of :func:`adopt`, :func:`moe.replace_mlp` and
    :func:`moe.upcycle`, in the order of their calls.

    With activation checkpointing, use ``use_reentrant=False`` and call ``backward`` after the
    ``with`` statement: a layer that is computed again within it is collected again.

    Example::

        with moe.collect_aux(model) as auxes:
            loss = model(**batch).loss
        (loss + sum(aux.aux_loss for aux in auxes)).backward()
    """
    collected: list[MoEAux] = []
    layers: list[Any] = listening_layers(model)
    for layer in layers:
        layer._listeners.append(collected)
    try:
        yield collected
    finally:
        for layer in layers:
            layer._listeners = [auxes for auxes in layer._listeners if auxes is not collected]


def _adopted(model: nn.Module) -> list[tuple[str, TransformersMoE]]:
    """The adopted layers of a model, with their names."""
    return [(n, m) for n, m in model.named_modules() if isinstance(m, TransformersMoE)]


def _adopted_layers(model: nn.Module) -> list[tuple[str, TransformersMoE]]:
    """The adopted layers of a model, with their names. Raises ValueError where there is none."""
    layers = _adopted(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} must have adopted layers: call moe.adopt first")
    return layers


def _put(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Put a module in the place ``name``, and return the module that has it."""
    parent_name, _, last = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    setattr(parent, last, module)
    return parent
