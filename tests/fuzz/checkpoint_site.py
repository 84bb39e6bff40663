"""A folder or store of checkpoints, with what should be there: the model of a checkpoint's life."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import strategies as st

import ckpt
from ckpt.format import committed_steps, manifest_key, objects_key
from tests.fuzz.checkpoint_acts import TOPOLOGIES, nothing, open_site
from tests.fuzz.stores import SLASH

OF_FAULT = {
    "fault": st.sampled_from(
        ["none", "none", "none", "kill", "kill", "read", "full", "broken", "flaky", "lost"]
    ),
    "moment": st.integers(0, 70),
}
INDEX, LAYOUT = st.integers(0, 7), st.integers(0, len(TOPOLOGIES) - 1)
SITE = st.sampled_from([0, 0, 1])


@dataclass(frozen=True)
class Saved:
    """What the model knows of a checkpoint."""

    save_id: str
    seed: int
    score: int = 0
    """The validation of the manifest's state; 0 for none."""


@dataclass
class Site:
    """A folder or store, and what should be there."""

    root: Path
    remote: bool
    steps: dict[int, Saved] = field(default_factory=dict)
    away: list[tuple[str, int, Saved]] = field(default_factory=list)
    """Manifests that a roll-back moved: the key, the step, and the checkpoint."""
    orphans: set[str] = field(default_factory=set)
    """Save ids whose objects may be there although no readable manifest lists them."""
    damaged: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """By save id, the damaged objects with the bytes that they had."""
    broken: dict[int, bytes] = field(default_factory=dict)
    """By step, damaged manifests with the bytes that they had."""
    verified: dict[str, object] = field(default_factory=dict)
    """By save id, what the objects' files looked like when every byte was checked last."""
    tidy: bool = True
    """Whether nothing may be left over of actions that were broken off."""

    def open(self, hook: Callable[[str], None] = nothing, lost: bool = False) -> ckpt.Store:
        return open_site(self.root, self.remote, hook, lost)

    def file(self, key: str) -> Path:
        return self.root / "keys" / key.replace("/", SLASH) if self.remote else self.root / key

    def listed(self) -> dict[int, Saved]:
        """What is there; of a damaged manifest what the model says."""
        store, known = self.open(), {s.save_id: s for s in self.steps.values()}
        entries = {}
        for step in committed_steps(store):
            if step in self.broken:
                entries[step] = self.steps[step]
                continue
            manifest = ckpt.read_manifest(store, step)
            seed, score = manifest.state["seed"], int(manifest.state.get("validation", 0))
            entries[step] = known.get(manifest.save_id, Saved(manifest.save_id, seed, score))
        return entries

    def look_of(self, manifest: ckpt.Manifest) -> object:
        """What tells whether an object was touched: of each file length, time and inode."""
        folder = objects_key(manifest.save_id)
        look = []
        for key in manifest.objects:
            try:
                state = self.file(f"{folder}/{key}").stat()
            except FileNotFoundError:
                look.append(None)
            else:
                look.append((state.st_size, state.st_mtime_ns, state.st_ino))
        return look

    def settle(self, outcome: str, after: dict[int, Saved]) -> None:
        """Take in what an action did; each step must be as before it or as after it."""
        before, now = self.steps, self.listed()
        for step in before.keys() | after.keys() | now.keys():
            allowed = [after.get(step)]
            if outcome in ("refused", "killed"):
                allowed.append(before.get(step))
            assert now.get(step) in allowed, f"step {step}: {now.get(step)}, not of {allowed}"
        self.steps, self.tidy = now, self.tidy and outcome == "done"
        self.forget_gone()

    def forget_gone(self) -> None:
        there = set(self.open().names("objects"))
        self.damaged = {name: objects for name, objects in self.damaged.items() if name in there}
        self.broken = {step: data for step, data in self.broken.items() if step in self.steps}

    def expected_retention(self, keep: int, every: int, best: int) -> dict[int, Saved]:
        """The steps that stay by the rules."""
        steps = sorted(self.steps)
        if not steps:
            return {}
        newest = steps[-1]
        sizes_differ = any(
            not self.file(f"{objects_key(self.steps[newest].save_id)}/{key}").exists()
            or self.file(f"{objects_key(self.steps[newest].save_id)}/{key}").stat().st_size
            != len(data)
            for key, data in self.damaged.get(self.steps[newest].save_id, {}).items()
        )
        if newest in self.broken or sizes_differ:
            return dict(self.steps)
        scored = [(s.score, -n) for n, s in self.steps.items() if s.score and n not in self.broken]
        top = {-negative for _, negative in sorted(scored)[:best]}
        return {
            step: saved
            for step, saved in self.steps.items()
            if step in steps[-keep:]
            or (every and step % every == 0)
            or step in top
            or step in self.broken
        }


def name_of(step: int) -> str:
    """The name of a step's manifest."""
    return manifest_key(step).rpartition("/")[2]


def away_of(store: ckpt.Store) -> list[str]:
    """The keys of manifests that roll-backs have moved, but for drafts of a broken move."""
    folders = [f"away/{name}" for name in store.names("away")]
    names = [f"{folder}/{name}" for folder in folders for name in store.names(folder)]
    return [name for name in names if name.endswith(".json")]


def pick_of(steps: dict[int, Saved], index: int) -> int:
    """One of the steps; any index stands for one."""
    return sorted(steps)[index % len(steps)]
