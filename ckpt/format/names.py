"""Names of arrays: valid names, and rules for renaming."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from ckpt.errors import CheckpointError
from ckpt.format.array import groups_of

Missing = Literal["refuse", "keep"]
"""What to do about an array that a checkpoint lacks: raise an error, or keep the array's values."""

Extra = Literal["refuse", "ignore"]
"""What to do about an array of a checkpoint that nobody asks for: raise an error, or leave it out.
"""


def renamed(names: Iterable[str], rename: Mapping[str, str]) -> dict[str, str]:
    """The old name of every array by its new name.

    ``rename`` maps old names to new names. A rule whose names both end in ``/`` renames every array
    whose name begins with the old one. A rule for the exact name is preferred, then the rule with
    the longest prefix.

    Raises CheckpointError for a rule that matches no array, and where two arrays get the same name.
    """
    for old, new in rename.items():
        if old.endswith("/") != new.endswith("/") or not old.strip("/") or not new.strip("/"):
            raise CheckpointError(
                f"rename {old}={new} must be two names, or two prefixes that end in /"
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
    """Raises CheckpointError for a name that no array may have; names become folders."""
    every = set(names)
    for name in sorted(every):
        parts = name.split("/")
        if "\\" in name or "\0" in name or any(not _is_part(part) for part in parts):
            raise CheckpointError(
                f"array name {name!r} must be parts of 1 to 200 bytes joined by /, none of them "
                f"., .., zarr.json or one that begins with __: rename it"
            )
        for above in groups_of(name):
            if above in every:
                raise CheckpointError(
                    f"array {above} cannot have array {name} inside it: rename one"
                )


def _is_part(part: str) -> bool:
    reserved = part in ("", ".", "..", "zarr.json") or part.startswith("__")
    return not reserved and part.isprintable() and len(part.encode()) <= 200
