"""Names of arrays: which can be, and rules by which they change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from ckpt.errors import CheckpointError

Missing = Literal["refuse", "keep"]
"""What becomes of an array that a checkpoint lacks: an error, or it keeps its values."""


def renamed(names: Iterable[str], rename: Mapping[str, str]) -> dict[str, str]:
    """The old name of every array by its new one, under rules that leave nothing to chance.

    ``rename`` has new names by old ones; where both end in ``/`` they are beginnings of names. An
    exact name goes before a beginning, and a longer beginning before a shorter one.

    Raises CheckpointError for a rule that no array follows, and where two arrays get one name.
    """
    for old, new in rename.items():
        if old.endswith("/") != new.endswith("/") or not old.strip("/") or not new.strip("/"):
            raise CheckpointError(
                f"rename {old}={new} must be a name and a name, or two beginnings that end in /"
            )
    prefixes = sorted((old for old in rename if old.endswith("/")), key=len, reverse=True)
    result: dict[str, str] = {}
    used = set()
    for name in names:
        rule = name if name in rename else next((p for p in prefixes if name.startswith(p)), None)
        new = name if rule is None else rename[rule] + name[len(rule) :]
        used.add(rule)
        if new in result:
            raise CheckpointError(f"rename gives {result[new]} and {name} one name, {new}")
        result[new] = name
    unused = sorted(set(rename) - used)
    if unused:
        raise CheckpointError(f"rename {unused[0]}={rename[unused[0]]}: there is no such array")
    return result


def check_names(names: Iterable[str]) -> None:
    """Refuse names that cannot be those of a checkpoint's arrays: they become folders.

    Raises CheckpointError, naming one.
    """
    every = set(names)
    for name in sorted(every):
        parts = name.split("/")
        if "\\" in name or "\0" in name or any(not _is_part(part) for part in parts):
            raise CheckpointError(
                f"array name {name!r} must be parts of 1 to 200 bytes joined by /, none of them "
                f"., .., zarr.json or one that begins with __: rename it"
            )
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            if above in every:
                raise CheckpointError(f"array {above} cannot have {name} in it: rename one")


def _is_part(part: str) -> bool:
    reserved = part in ("", ".", "..", "zarr.json") or part.startswith("__")
    return not reserved and part.isprintable() and len(part.encode()) <= 200
