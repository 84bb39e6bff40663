"""Which modules of a model get adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from moe.adapters.matrices import LORA_LINEARS
from moe.experts import GroupedExperts
from moe.layer import MoELayer
from router import TopKRouter

KINDS = ("experts", "router", "attention", "dense")
_HEADS = {"head", "lm_head", "embed_out", "output_projection", "score", "classifier"}


class Target(NamedTuple):
    """A module that can have adapters."""

    name: str
    """In the model."""
    kind: str
    """One of :data:`KINDS`."""
    module: nn.Module


def targets_of(model: nn.Module) -> list[Target]:
    """The modules of a model that can have adapters, in the order of ``named_modules``."""
    targets, heads = [], _heads(model)
    names = dict(model.named_modules())
    for name, module in names.items():
        if isinstance(module, GroupedExperts):
            targets.append(Target(name, "experts", module))
        elif isinstance(module, TopKRouter):
            targets.append(Target(name, "router", module))
        elif type(module) in LORA_LINEARS and id(module) not in heads:
            kind = "attention" if _in_attention(name, names) else "dense"
            targets.append(Target(name, kind, module))
    return targets


def chosen(
    targets: Sequence[Target], on: Sequence[str], allow_no_target: bool = False
) -> list[Target]:
    """The targets whose kind or name ``on`` has. A word that is no kind is a pattern of names.

    Raises ValueError for a word that fits no target, with what there is, unless that is allowed.
    """
    for word in on:
        if not allow_no_target and not any(_fits(target, word) for target in targets):
            kinds = [kind for kind in KINDS if any(t.kind == kind for t in targets)]
            raise ValueError(
                f"on ({word}) must be {' or '.join(kinds) or 'a kind of layer'} that the model "
                f"has, or a pattern of module names such as *.q_proj; linear layers here: "
                f"{_named([t.name for t in targets if t.kind in ('attention', 'dense')])}"
                + (
                    "; moe.adopt gives a model of transformers experts and routers that can have "
                    "adapters"
                    if word in ("experts", "router")
                    else ""
                )
            )
    return [target for target in targets if any(_fits(target, word) for word in on)]


def fits_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name fits one of some patterns, as ``*.router.weight``."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def moe_layers(model: nn.Module) -> Iterator[tuple[str, MoELayer]]:
    """The MoE layers of a model, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, MoELayer):
            yield name, module


def _fits(target: Target, word: str) -> bool:
    return target.kind == word if word in KINDS else fnmatchcase(target.name, word)


def _named(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more


def _in_attention(name: str, names: dict[str, nn.Module]) -> bool:
    """Whether a module that a layer is in has attention in the name of its class."""
    parent = name.rpartition(".")[0]
    while parent:
        if "attention" in type(names[parent]).__name__.lower():
            return True
        parent = parent.rpartition(".")[0]
    return False


def _heads(model: nn.Module) -> set[int]:
    """Output heads, by id: a base model's vocabulary is not for adapters of hidden layers."""
    heads = {
        id(module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in _HEADS
    }  # fmt: skip
    output: Any = getattr(model, "get_output_embeddings", None)
    return heads | ({id(output())} if callable(output) else set())
