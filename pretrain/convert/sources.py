"""Sources for a reshard: which format it is, and what of it is taken under which names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.errors import CheckpointError
from ckpt.format import read_manifest, renamed
from ckpt.interop import DcpSource, SafetensorsSource, is_dcp, is_safetensors
from ckpt.rewrite import (
    CheckpointSource,
    Converted,
    Described,
    Selected,
    Source,
    SourceArray,
    changed,
)
from parallel.layout import Box
from pretrain.errors import InputError

_LAYER = re.compile(r"(.*?)(?:^|/)layers/(\d+)/(.+)")
_NO_WEIGHTS = ("optimizer/", "optim/", "rng/", "residual/")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def open_source(location: str, step: int | None = None) -> Source:
    """A checkpoint, a torch.distributed.checkpoint folder, or safetensors.

    What is not Convoy's is given names and arrays as Convoy has them, see :func:`adopted`, unless
    a reshard wrote it, and described them.

    Raises CheckpointError where there is none of the three, or it cannot be read.
    """
    path = Path(location)
    foreign: DcpSource | SafetensorsSource
    if is_dcp(path):
        foreign = DcpSource(path)
    elif is_safetensors(path):
        foreign = SafetensorsSource(path)
    else:
        return CheckpointSource(location, read_manifest(location, step))
    if step is not None:
        raise InputError(f"--step ({step}) is for checkpoint folders; {path} holds one step alone")
    return foreign if foreign.described else adopted(foreign)


def adopted(source: Source) -> Source:
    """Arrays of ``layers.0.norm.weight`` and so on stacked to ``layers/norm/weight`` [L, ...].

    Dots become slashes. Layers whose arrays differ in shape or dtype stay single. The attribute
    ``layers`` names those that there are, as in a checkpoint.
    """
    names = {name.replace(".", "/"): name for name in source.arrays}
    if len(names) != len(source.arrays):
        raise CheckpointError("two names of arrays differ in . and / alone: rename one")
    stacks: dict[str, dict[int, str]] = {}
    single = dict(names)
    for new, old in names.items():
        match = _LAYER.fullmatch(new)
        if match is not None:
            stacked = "/".join(part for part in (match[1], "layers", match[3]) if part)
            stacks.setdefault(stacked, {})[int(match[2])] = old
            del single[new]
    for stacked, members in list(stacks.items()):
        kinds = {(source.arrays[n].shape, source.arrays[n].logical_dtype) for n in members.values()}
        if len(kinds) > 1 or stacked in single:
            single |= {old.replace(".", "/"): old for old in members.values()}
            del stacks[stacked]
    return Stacked(source, single, {s: dict(sorted(m.items())) for s, m in stacks.items()})


class Stacked:
    """Some arrays of a source as they are, and others as indexes of a stacked array's first dim.

    Args:
        source: what has the arrays.
        single: their names in it, by the new ones.
        stacks: by the new name, the names of its layers' arrays by the layers' numbers.
    """

    def __init__(
        self,
        source: Source,
        single: Mapping[str, str],
        stacks: Mapping[str, Mapping[int, str]],
    ) -> None:
        self.source, self.single = source, dict(single)
        self.stacks = {name: list(members.values()) for name, members in stacks.items()}
        self.info = changed(source.info, (sorted(single.items()), sorted(self.stacks.items())))
        self.arrays = {new: source.arrays[old] for new, old in single.items()}
        for name, members in stacks.items():
            one = source.arrays[next(iter(members.values()))]
            self.arrays[name] = SourceArray(
                (len(members), *one.shape), one.logical_dtype, (), {"layers": list(members)}
            )

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`ckpt.source.Source`."""
        if name in self.single:
            return self.source.read_box(self.single[name], box)
        out = np.empty([stop - start for start, stop in box], self.arrays[name].dtype)
        for i, member in enumerate(self.stacks[name][slice(*box[0])]):
            out[i] = self.source.read_box(member, box[1:])
        return out


def with_names(source: Source, rename: Mapping[str, str]) -> Source:
    """Arrays under other names, see :func:`ckpt.format.renamed`."""
    return Selected(source, renamed(source.arrays, rename)) if rename else source


def weights_only(source: Source) -> Source:
    """Parameters and buffers alone, which ``init.checkpoint`` reads: what begins with ``model/``,
    or, where nothing does, what is not an optimizer's.

    Raises InputError where nothing is left.
    """
    names = _weights(source)
    if not names:
        raise InputError(
            "SRC has no weights: every array of it is an optimizer's or a random state"
        )
    picked = Selected(source, {name: name for name in names})
    state = {"weights_of": source.info.identity}
    return Described(picked, replace(picked.info, state=state))


def _weights(source: Source) -> list[str]:
    of_model = [name for name in source.arrays if name.startswith("model/")]
    return of_model or [name for name in source.arrays if not name.startswith(_NO_WEIGHTS)]


def in_dtype(source: Source, dtype: str) -> Source:
    """Floating weights in another dtype of :data:`DTYPES`. Experts' biases stay in float32: in
    bfloat16 another expert would be chosen."""
    names = [name for name in _weights(source) if not name.endswith("expert_bias")]
    return Converted(source, names, DTYPES[dtype])
