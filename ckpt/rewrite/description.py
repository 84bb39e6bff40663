"""convoy.json: the description of arrays in a folder of another format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from ckpt.errors import CheckpointError, readable
from ckpt.format import Record
from ckpt.rewrite.source import Source, SourceArray, SourceInfo
from parallel.layout import Topology

DESCRIPTION = "convoy.json"
"""The file beside arrays of another format, with what that format cannot hold."""


class _ArrayNote(Record):
    splits: tuple[tuple[str, ...], ...]
    attributes: dict[str, Any]


class Description(Record):
    """What ``convoy.json`` says of the arrays beside it."""

    format: Literal["convoy-arrays"] = "convoy-arrays"
    format_version: Literal[1] = 1
    step: int
    topology: dict[str, int]
    state: dict[str, Any]
    spec: dict[str, Any]
    spec_hash: str
    arrays: dict[str, _ArrayNote]

    @staticmethod
    def of(source: Source, topology: Topology) -> Description:
        """The description of a source that is written for ``topology``."""
        info = source.info
        return Description(
            step=info.step,
            topology=topology.as_dict(),
            state=dict(info.state),
            spec=dict(info.spec),
            spec_hash=info.spec_hash,
            arrays={
                name: _ArrayNote(splits=array.splits, attributes=dict(array.attributes))
                for name, array in source.arrays.items()
            },
        )

    def encode(self) -> bytes:
        """The file's bytes."""
        return (json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n").encode()


def is_described(folder: Path) -> bool:
    """Whether there is a ``convoy.json``."""
    return (folder / DESCRIPTION).is_file()


def described(
    folder: Path, identity: str, arrays: Mapping[str, SourceArray]
) -> tuple[SourceInfo, dict[str, SourceArray]]:
    """What ``convoy.json`` in ``folder`` adds to arrays of another format, where there is one.

    Raises CheckpointError where ``convoy.json`` cannot be read, or describes other arrays.
    """
    path = folder / DESCRIPTION
    if not is_described(folder):
        return SourceInfo(identity), dict(arrays)
    with readable(path):
        data = path.read_bytes()
    try:
        description = Description.model_validate_json(data)
        topology = Topology(**description.topology)
    except (ValidationError, TypeError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise CheckpointError(f"{path} is not of this format: {first}; move it away") from None
    if set(description.arrays) != set(arrays):
        name = sorted(set(description.arrays) ^ set(arrays))[0]
        raise CheckpointError(f"{path} is of other arrays: {name} is in one of the two alone")
    info = SourceInfo(
        identity,
        description.step,
        topology,
        description.state,
        description.spec,
        description.spec_hash,
    )
    noted = {}
    for name, array in arrays.items():
        note = description.arrays[name]
        if len(note.splits) not in (0, len(array.shape)):
            raise CheckpointError(f"{path}: splits of {name} are not those of {array.shape}")
        noted[name] = replace(array, splits=note.splits, attributes=note.attributes)
        try:
            noted[name].layout(topology)
        except ValueError:
            raise CheckpointError(f"{path}: splits of {name} are no layout's") from None
    return info, noted
