"""A roll-back moves manifests away, and what they list stays until a person removes it."""

from __future__ import annotations

import pytest

import ckpt
from ckpt.format import manifest_key, pending_key
from ckpt.lifecycle import remove_uncommitted
from pretrain.checkpoint import roll_back
from tests.support.checkpoints import assert_whole, memory_folder, save_small


@pytest.mark.parametrize("mark", ["", "rank-0.begun", "removed"])
def test_objects_stay_although_a_kill_has_left_a_mark_of_the_save(mark):
    """Without a manifest, a mark says that the next start is to remove the objects."""
    with memory_folder() as folder:
        store = ckpt.open_store(folder)
        save_small(store, 1)
        saved = save_small(store, 2)
        if mark:
            store.write(f"{pending_key(saved.save_id)}/{mark}", [b""])
        roll_back(store, 1, lambda text: None)
        assert remove_uncommitted(store) == []
        assert ckpt.committed_steps(store) == [1]
        (name,) = store.names("away")
        key = f"away/{name}/step-00000002.json"
        store.publish(manifest_key(2), store.read(key))
        store.remove(key)
        assert_whole(store, 2)
