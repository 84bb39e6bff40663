"""A checkpoint of any project, opened: Convoy's arrays, what it says of its training, the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from ckpt.rewrite import Source, SourceArray, SourceInfo, Target, changed
from convoy.convert.formats.links import Link, Linked
from convoy.convert.formats.recognition import recognize, strangers
from convoy.convert.formats.rules import Kind, lay_out
from convoy.convert.formats.state import Training
from parallel.layout import Box, box_shape
from pretrain.errors import InputError


class Opened:
    """A :class:`ckpt.rewrite.Source` of a checkpoint of any format, under Convoy's names.

    Weights and buffers are ``model/...``, moments ``optimizer/NAME/...``. Numbers have the dtype
    that they have on disk. ``info.spec`` has the model where the checkpoint says.
    """

    def __init__(
        self,
        source: Source,
        form: str,
        kind: str,
        training: Training,
        behind: Iterable[str] = (),
        info: SourceInfo | None = None,
    ) -> None:
        self.source, self.arrays = source, source.arrays
        self.info = source.info if info is None else info
        self.form, self.kind, self.training = form, kind, training
        """The format's name, and that of the way in which it names a model."""
        self.behind = sorted(set(behind))
        """What the checkpoint has besides, and no other format can hold."""

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`ckpt.rewrite.Source`."""
        return self.source.read_box(name, box)

    def changed(
        self,
        source: Source | None = None,
        training: Training | None = None,
        info: SourceInfo | None = None,
    ) -> Opened:
        """The same with other arrays, another state of training, or another description."""
        made = self.source if source is None else source
        state = self.training if training is None else training
        said = replace(self.info if info is None else info, identity=made.info.identity)
        return Opened(made, self.form, self.kind, state, self.behind, said)


class Format(Protocol):
    """One project's checkpoints, read and written by one declaration for each kind."""

    @property
    def name(self) -> str:
        """The word for ``--to``."""
        ...

    @property
    def kinds(self) -> Mapping[str, Any]:
        """By name, the ways in which the format names and lays out a model."""
        ...

    def is_one(self, path: Path) -> bool:
        """Whether a folder looks like a checkpoint of this format."""
        ...

    def open(self, path: Path, num_heads: int | None, step: int | None = None) -> Opened:
        """The checkpoint in a folder; ``step`` where a folder has several."""
        ...

    def without_place(self, source: Opened, kind: str, num_heads: int | None) -> list[str]:
        """The arrays of a source for which a kind has no place."""
        ...

    def target(self, source: Opened, kind: str, folder: Path, num_heads: int | None) -> Target:
        """What writes a checkpoint in a folder that does not exist."""
        ...


class Declared:
    """The part of a :class:`Format` that follows from its declarations."""

    kinds: Mapping[str, Kind]

    def without_place(self, source: Opened, kind: str, num_heads: int | None) -> list[str]:
        """See Format."""
        return lay_out(self.kinds[kind], source.arrays, num_heads).unnamed


class Raw(NamedTuple):
    """What a folder of another project has."""

    source: Source
    """Arrays of the model and their moments, under the names that the declaration knows."""
    training: Callable[[list[Link]], Training]
    """From the links of the arrays, moments among them."""
    behind: list[str]


def opened(
    form: str, kinds: Mapping[str, Kind], raw: Raw, where: str, num_heads: int | None
) -> Opened:
    """A folder's arrays as Convoy's, by the first kind that knows all of them.

    Raises InputError, naming the array, where no kind does.
    """
    by_kind = {name: strangers(kind, raw.source.arrays) for name, kind in kinds.items()}
    fitting = [name for name, unknown in by_kind.items() if not unknown]
    if not fitting:
        least = min(by_kind.values(), key=len)
        raise InputError(f"{where}: array {least[0]} is of no model that {form} is known to have")
    errors: list[InputError] = []
    for name in fitting:
        try:
            made = recognize(kinds[name], raw.source.arrays, where, num_heads)
        except InputError as error:
            errors.append(error)
            continue
        training = raw.training(made.layout.links)
        info = replace(changed(raw.source.info, (form, name)), step=training.step)
        ours = Linked(raw.source, made.layout.links, made.ours, "ours", info)
        return Opened(ours, form, name, training, raw.behind)
    raise errors[0]


class Fixed:
    """A source of small arrays in memory."""

    def __init__(self, values: Mapping[str, np.ndarray[Any, Any]], identity: str) -> None:
        self.values = dict(values)
        self.info = SourceInfo(identity)
        self.arrays = {
            name: SourceArray(value.shape, str(value.dtype)) for name, value in values.items()
        }

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`ckpt.rewrite.Source`."""
        values = self.values[name][tuple(slice(*extent) for extent in box)]
        return np.ascontiguousarray(values).reshape(box_shape(box))


class Together:
    """The arrays of several sources, which have none in common; each may get a prefix."""

    def __init__(self, sources: Sequence[tuple[str, Source]], info: SourceInfo) -> None:
        self.sources = [source for _, source in sources]
        self.where: dict[str, tuple[int, str]] = {}
        self.arrays: dict[str, SourceArray] = {}
        for number, (prefix, source) in enumerate(sources):
            for name, array in source.arrays.items():
                assert prefix + name not in self.arrays, name
                self.where[prefix + name] = number, name
                self.arrays[prefix + name] = array
        identity = " ".join(f"{prefix}{of.info.identity}" for prefix, of in sources)
        self.info = replace(info, identity=identity)

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`ckpt.rewrite.Source`."""
        number, inner = self.where[name]
        return self.sources[number].read_box(inner, box)


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """The names that a pattern has in full."""
    compiled = re.compile(pattern)
    return [name for name in names if compiled.fullmatch(name)]
