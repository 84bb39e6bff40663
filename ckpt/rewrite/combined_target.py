"""A folder whose subfolders are of different formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt.rewrite.folder_target import Checked, FolderTarget
from ckpt.rewrite.source import Source
from ckpt.rewrite.target import Part, Receipt
from parallel.layout import Topology


class CombinedTarget(FolderTarget):
    """A :class:`ckpt.rewrite.Target` of several: they become visible together.

    Args:
        source: named in errors, and by its identity.
        folder: where; it must not exist.
        members: by the subfolder, ``""`` for the folder itself; what each writes.
        beside: as in FolderTarget.
    """

    def __init__(
        self,
        source: Source,
        folder: Path,
        members: Mapping[str, FolderTarget],
        beside: Mapping[str, bytes],
    ) -> None:
        options = " ".join(f"{name}:{member.made}" for name, member in members.items())
        super().__init__(source, folder, Topology(), options, beside)
        self.members = dict(members)
        for name, member in members.items():
            member.work = self.work / name

    def _of(self, key: str) -> tuple[FolderTarget, str]:
        for name, member in sorted(self.members.items(), reverse=True):
            if not name or key.startswith(f"{name}/"):
                return member, key.removeprefix(f"{name}/") if name else key
        raise KeyError(key)

    def parts(self) -> Sequence[Part]:
        """See :class:`ckpt.rewrite.Target`."""
        return [
            Part(f"{name}/{piece.key}" if name else piece.key, piece.nbytes)
            for name, member in self.members.items()
            for piece in member.parts()
        ]

    def fill(self, file: Checked, key: str, slab_bytes: int) -> dict[str, Any]:
        """See :class:`ckpt.rewrite.FolderTarget`."""
        member, inner = self._of(key)
        return member.fill(file, inner, slab_bytes)

    def finish(self, receipts: dict[str, Receipt]) -> None:
        """See :class:`ckpt.rewrite.FolderTarget`."""
        for member in self.members.values():
            own = [(self._of(key), receipt) for key, receipt in receipts.items()]
            member.finish({inner: receipt for (of, inner), receipt in own if of is member})
            for name, data in member.beside.items():
                member.put(name, data)
