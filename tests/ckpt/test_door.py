"""The names that a user of the library meets first."""

from __future__ import annotations

import pydoc

import ckpt

ROOMS = (
    "background", "errors", "format", "interop", "lifecycle", "read", "rewrite", "state_dict",
    "store", "write",
)  # fmt: skip


def test_the_door_is_narrow_and_dir_and_help_show_its_names():
    names = [name for name in ckpt.__all__ if name not in ROOMS]
    assert len(names) <= 30
    assert set(ckpt.__all__) <= set(dir(ckpt))
    shown = pydoc.plain(pydoc.render_doc(ckpt))
    assert [name for name in names if name not in shown] == []
    for name in names:
        if name != "Location":
            assert getattr(ckpt, name).__doc__, name


def test_rooms_are_reached_from_the_door():
    for room in ROOMS:
        assert getattr(ckpt, room).__name__ == f"ckpt.{room}"
