"""The optimizer's state as torch.distributed.checkpoint keeps it: by the names of parameters.

``get_optimizer_state_dict(..., flatten_optimizer_state_dict=True)`` gives
``state.PARAMETER.exp_avg``, ``state.PARAMETER.step`` and ``param_groups.PARAMETER.lr``. torchtitan
and NeMo Automodel save that, under a key of their own. Steps are tensors without dims, and settings
are no tensors.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ckpt.errors import CheckpointError
from ckpt.interop import DcpSource
from convoy.convert.formats.links import Link
from convoy.convert.formats.rules import OPTIMIZER, split_slot
from convoy.convert.formats.state import Training, common
from pretrain.errors import InputError

FIXED_SETTINGS: dict[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""What torch.optim.AdamW has besides in each group; of these only AdamW's own matter here."""


class Parameters(NamedTuple):
    """Names of parameters of theirs, and the arrays of ours that each has."""

    paths: dict[str, list[str]]

    @staticmethod
    def of(links: Iterable[Link], pattern: str) -> Parameters:
        """By the links of moments; ``pattern`` finds the parameter in a moment's name."""
        compiled = re.compile(pattern)
        paths: dict[str, dict[str, None]] = {}
        for link in links:
            match = compiled.fullmatch(link.theirs)
            if match is not None and link.ours.startswith(OPTIMIZER):
                paths.setdefault(match[1], {})[split_slot(link.ours)[1]] = None
        return Parameters({name: list(of) for name, of in paths.items()})


def one_update(steps: Mapping[str, int], where: str) -> int | None:
    """The updates that all parameters have seen. Raises InputError where they differ."""
    counts = Counter(steps.values())
    if len(counts) > 1:
        usual = counts.most_common(1)[0][0]
        odd = min(name for name, step in steps.items() if step != usual)
        raise InputError(
            f"{where}: the moments of {odd} have seen {steps[odd]} updates and those of others "
            f"{usual}: one count for all is needed"
        )
    return next(iter(counts), None)


def by_matrices(parameters: Parameters, values: Iterable[float]) -> dict[str, float]:
    """Weight decay by the path of an array, where groups do not name their parameters: of two
    values, the smaller one is that of norms, as is the custom."""
    decays = sorted({float(value) for value in values})
    if not decays:
        return {}
    return {
        path: decays[0] if path.endswith("norm/weight") else decays[-1]
        for paths in parameters.paths.values()
        for path in paths
    }


def read(source: DcpSource, prefix: str, parameters: Parameters, where: str) -> dict[str, Any]:
    """The fields of Training that are the optimizer's."""
    steps: dict[str, int] = {}
    groups: list[dict[str, Any]] = []
    decay: dict[str, float] = {}
    for name, paths in parameters.paths.items():
        step = f"{prefix}.state.{name}.step"
        if step in source.arrays:
            steps[name] = int(number(source, step))
        settings = {}
        for word in ("lr", "initial_lr", "betas", "eps", "weight_decay"):
            value = value_of(source, f"{prefix}.param_groups.{name}.{word}")
            if value is not None:
                settings[word] = value
        groups.append(settings)
        if "weight_decay" in settings:
            decay |= dict.fromkeys(paths, float(settings["weight_decay"]))
    return {
        "updates": one_update(steps, where),
        "optimizer": common(groups),
        "decay": decay,
    }


def number(source: DcpSource, name: str) -> float:
    """The number of an array with one number."""
    array = source.arrays[name]
    values = source.read_box(name, tuple((0, size) for size in array.shape)).reshape(-1)
    if array.logical_dtype == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return float(values[0])


def value_of(source: DcpSource, name: str) -> Any:
    """A value that may be saved as a tensor or as an object; None where it is not there."""
    if name in source.arrays:
        return number(source, name)
    try:
        return source.read_object(name)
    except (KeyError, CheckpointError):
        return None


def settings_of(training: Training, target: str) -> dict[str, Any]:
    """The settings of AdamW. Raises InputError where they are not known."""
    known = training.optimizer
    missing = [word for word in ("lr", "betas", "eps") if word not in known]
    if missing or not training.decay:
        raise InputError(
            f"{target} keeps the optimizer's settings with the moments, and SRC does not say "
            f"{', '.join([*missing, *([] if training.decay else ['weight_decay'])])}: name a spec "
            f"that does (--spec), or leave the moments behind (--leave moments)"
        )
    return {
        **{word: known[word] for word in ("lr", "eps")},
        "betas": tuple(known["betas"]),
        "initial_lr": known.get("initial_lr", known["lr"]),
    }


def write(
    prefix: str, parameters: Parameters, training: Training, target: str
) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """The steps, and the settings, by name."""
    if not parameters.paths:
        return {}, {}
    settings = settings_of(training, target)
    step = np.float32(training.updates if training.updates is not None else training.step)
    steps = {f"{prefix}.state.{name}.step": np.asarray(step) for name in parameters.paths}
    objects: dict[str, Any] = {}
    for name, paths in parameters.paths.items():
        decay = training.decay.get(paths[0], 0.0)
        for word, value in {**FIXED_SETTINGS, **settings, "weight_decay": decay}.items():
            objects[f"{prefix}.param_groups.{name}.{word}"] = value
    return steps, objects
