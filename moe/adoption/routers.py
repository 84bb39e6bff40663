"""Routers with the parameters, the names and the hooks of the gates of ``transformers``.

Legend: T tokens, E experts, D d_model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe.adoption.kinds import Kind
from router import RouterConfig, RouterOutput, TopKRouter

HOOKS = tuple(name for name in vars(nn.Module()) if "_hook" in name)


def share_hooks(old: nn.Module, new: nn.Module) -> None:
    """Give a module the hooks of the one that it replaces; handles that remove them stay valid."""
    for name in HOOKS:
        setattr(new, name, getattr(old, name))


def has_hooks(module: nn.Module) -> bool:
    """Whether anybody registered a hook."""
    return any(getattr(module, name) for name in HOOKS)


def inner(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that has what is at a path within another one, and its name there."""
    where, _, last = path.rpartition(".")
    return module.get_submodule(where), last


class LogitsSecond(RouterOutput):
    """Has the logits at place 1 as well, where ``transformers`` records them in some models."""

    def __getitem__(self, index: Any) -> Any:
        return self.logits_TE if index == 1 else super().__getitem__(index)


class AdoptedRouter(TopKRouter):
    """A router whose parameters have the names of a gate of ``transformers``."""

    _gate_class: type[nn.Module]
    _kind: Kind
    _layer: list[nn.Module]
    """The layer, which has the bias of the choice in some families; not one of our submodules."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[E, D]."""
        owner, name = inner(self, self._kind.weight)
        return owner._parameters[name]  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """[E], of the logits."""
        name = self._kind.logit_bias
        return self._parameters[name] if name else None

    @property
    def expert_bias(self) -> Tensor | None:
        """[E], a view of what the model has."""
        if not self.config.expert_bias:
            return None
        bias: Tensor = self._correction().detach()
        return bias if bias.ndim == 1 else bias.view(-1)

    @expert_bias.setter
    def expert_bias(self, bias: Tensor | None) -> None:
        assert bias is not None
        stored = self._correction()
        stored.data = bias.detach().view_as(stored)

    def _correction(self) -> Tensor:
        owner, name = inner(self._layer[0], self._kind.correction)
        stored: Tensor = getattr(owner, name)
        return stored

    def forward(self, *args: Any, **kwargs: Any) -> RouterOutput:
        """See :meth:`router.TopKRouter.forward`."""
        out = super().forward(*args, **kwargs)
        return out if self._kind.logits_at == 0 else LogitsSecond._make(out)

    def __reduce__(self) -> tuple[Any, ...]:
        # The class of this one module is made where it is adopted, and cannot be imported.
        return _new, (self._gate_class,), self.__getstate__()


_CLASSES: dict[type[nn.Module], type[AdoptedRouter]] = {}


def _class(gate: type[nn.Module]) -> type[AdoptedRouter]:
    """A subclass of our router and of a class of gates.

    ``transformers`` records router logits by hooks on modules of the gate's class. The class of a
    router therefore is a subclass of both, as FSDP does with the modules that it shards.
    """
    if gate not in _CLASSES:
        _CLASSES[gate] = type(gate.__name__, (AdoptedRouter, gate), {"_gate_class": gate})
    return _CLASSES[gate]


def _new(gate: type[nn.Module]) -> AdoptedRouter:
    """A router without a state, for unpickling."""
    made = _class(gate)
    return made.__new__(made)


def router_of(gate: Any, layer: nn.Module, kind: Kind, config: RouterConfig) -> AdoptedRouter:
    """A router with the parameters, the names and the hooks of a gate of ``transformers``."""
    with torch.device("meta"):
        router: Any = TopKRouter(1, config)
    router.__class__ = _class(type(gate))
    router._kind, router._layer = kind, [layer]
    router._modules = dict(gate._modules)
    router._parameters = dict(gate._parameters)
    router._parameters.setdefault("bias", None)
    router._buffers = plain(gate._buffers)
    share_hooks(gate, router)
    made: AdoptedRouter = router
    return made


def plain(buffers: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The buffers without the class nn.Buffer, which a module registers under any name."""
    return {name: None if b is None else b.detach() for name, b in buffers.items()}
