"""The names that a user of the library meets first."""

from __future__ import annotations

import pydoc

import ckpt


def test_the_door_is_narrow_and_dir_and_help_show_its_names():
    assert len(ckpt.__all__) <= 30
    assert set(ckpt.__all__) <= set(dir(ckpt))
    shown = pydoc.plain(pydoc.render_doc(ckpt))
    assert [name for name in ckpt.__all__ if name not in shown] == []
    for name in ckpt.__all__:
        if name != "Location":
            assert getattr(ckpt, name).__doc__, name


def test_rooms_are_reached_from_the_door():
    rooms = sorted(set(dir(ckpt)) - set(ckpt.__all__))
    assert rooms == [
        "background",
        "format",
        "lifecycle",
        "read",
        "rewrite",
        "state_dict",
        "store",
        "write",
    ]
    for room in rooms:
        assert getattr(ckpt, room).__name__ == f"ckpt.{room}"
