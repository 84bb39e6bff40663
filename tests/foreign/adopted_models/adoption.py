"""Every model of a family passes through ``moe.adopt`` before a test of transformers has it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel

import moe
from moe import MoELayer
from tests.foreign.touching import CALLED, MADE, touch

_inside = 0
"""How many constructors of models are running: the outermost one adopts."""


def adopt_all(classes: Iterable[type[PreTrainedModel]]) -> None:
    """Have models of these classes adopted as soon as they are built, or loaded."""
    for kind in classes:
        kind.__init__ = _adopting(kind.__init__)


def listen() -> None:
    """Have loaded models adopted, and calls of the layers told to the recorder."""
    load = PreTrainedModel.from_pretrained.__func__

    @functools.wraps(load)
    def from_pretrained(cls: type[PreTrainedModel], *arguments: Any, **options: Any) -> Any:
        loaded = _not_inside(load, cls, *arguments, **options)
        # With output_loading_info there are two values.
        _adopt(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    forward = MoELayer.forward

    @functools.wraps(forward)
    def counted(self: MoELayer, *arguments: Any, **options: Any) -> Any:
        touch(CALLED)
        return forward(self, *arguments, **options)

    MoELayer.forward = counted


def _adopting(init: Any) -> Any:
    @functools.wraps(init)
    def build(self: PreTrainedModel, *arguments: Any, **options: Any) -> None:
        _not_inside(init, self, *arguments, **options)
        if not _inside:
            _adopt(self)

    return build


def _not_inside(function: Any, *arguments: Any, **options: Any) -> Any:
    global _inside
    _inside += 1
    try:
        return function(*arguments, **options)
    finally:
        _inside -= 1


def _adopt(model: PreTrainedModel) -> None:
    moe.adopt(model)
    assert any(isinstance(module, MoELayer) for module in model.modules()), type(model).__name__
    touch(MADE)
