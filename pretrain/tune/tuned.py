"""A decoder of which only some parameters learn."""

from __future__ import annotations

from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from moe import add_lora
from pretrain.tune.config import TuneConfig


def tune(model: nn.Module, config: TuneConfig | None, *, whole_model: bool) -> None:
    """Give a decoder its adapters, and freeze what does not learn; None: all parameters learn.

    Args:
        model: before any layout is applied to it; it may be on the meta device.
        config: what learns.
        whole_model: whether the model has all layers. A stage of a pipeline may have nothing that
            learns.

    Raises ValueError for a pattern or a word that the whole model has nothing for.
    """
    if config is None:
        return
    if whole_model:
        _check_patterns(model, config)
    if config.lora is None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(config.learns(name))
        return
    lora = config.lora
    try:
        add_lora(
            model,
            lora.rank,
            lora.alpha,
            lora.on,
            also_train=config.learn,
            allow_no_target=not whole_model,
        )
    except ValueError as error:
        raise ValueError(f"tune.lora: {error}") from None


def is_adapter(name: str) -> bool:
    """Whether a parameter, or an array of a checkpoint, is of an adapter, by its name."""
    return "/lora/" in name or ".lora." in name


def _check_patterns(model: nn.Module, config: TuneConfig) -> None:
    names = [name for name, _ in model.named_parameters()]
    for pattern in config.learn:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern, names, 3, 0.0)
            raise ValueError(
                f"tune.learn ({pattern}) must be the name of a parameter, or a pattern of names; "
                f"the most alike of {len(names)} names are {', '.join(near)}"
            )
