"""What holds in a checkpoint's life, damage, and readers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import strategies as st

import ckpt
from ckpt.format import committed_steps, manifest_key, objects_key
from tests.fuzz.checkpoint_acts import REFUSALS, TOPOLOGIES, load_as, with_fault
from tests.fuzz.checkpoint_site import INDEX, SITE, Saved, Site, name_of, pick_of
from tests.fuzz.machine import World, action, check_refusal
from tests.fuzz.stores import one_thread
from tests.support.checkpoints import SMALL_SPECS, bits, full_values, memory_folder


def has_steps(world: CheckpointWorld) -> bool:
    """Whether the run has a checkpoint."""
    return bool(world.sites[0].steps)


def has_any(world: CheckpointWorld) -> bool:
    """Whether a site has a checkpoint."""
    return any(site.steps for site in world.sites)


def is_hurt(world: CheckpointWorld) -> bool:
    """Whether something is damaged."""
    return any(site.damaged or site.broken for site in world.sites)


class CheckpointWorld(World):
    """Two sites: the run's own, and another one for reshards."""

    remote: ClassVar[bool] = False

    def __init__(self) -> None:
        self._memory = memory_folder()
        top = Path(self._memory.name)
        self.sites = [Site(top / "run", self.remote), Site(top / "other", self.remote)]
        self.newest = 0
        self.saves = 0
        self.checks = 0
        self.readers: list[tuple[Site, Saved, ckpt.OpenCheckpoint]] = []
        self._threads = one_thread()
        self._threads.__enter__()

    def close(self) -> None:
        self._threads.__exit__(None, None, None)
        shutil.rmtree(self._memory.name, ignore_errors=True)
        self._memory.cleanup()

    def run(
        self,
        site: Site,
        act: Callable[[ckpt.Store], Any],
        after: dict[int, Saved],
        fault: str,
        moment: int,
    ) -> str:
        """Act on a site with a fault, and settle what came of it."""
        site.open()

        def read(_: str) -> None:
            self.read_everything(site, after)

        outcome = with_fault(lambda hook, lost: act(site.open(hook, lost)), fault, moment, read)
        site.settle(outcome, after)
        return outcome

    def read_everything(self, site: Site, after: dict[int, Saved]) -> None:
        """A reader beside an action that stands still: what is listed is whole."""
        store = site.open()
        for step in committed_steps(store):
            known = [saved for saved in (site.steps.get(step), after.get(step)) if saved]
            assert known, f"step {step} is listed, and nobody has saved it"
            if step in site.broken:
                continue
            manifest = ckpt.read_manifest(store, step)
            assert manifest.save_id in [saved.save_id for saved in known]
            if manifest.save_id not in site.damaged:
                ckpt.verify(store, manifest)
                load_as(store, manifest, TOPOLOGIES[0], manifest.state["seed"])
        for _, saved, reader in self.readers:
            self.read_open(saved, reader)

    # --------------------------------------------------------------------------------------------
    # Damage.

    @action(when=has_any, site=SITE, index=INDEX, number=st.integers(0, 20),
            byte=st.integers(0, 5000), kind=st.sampled_from(["flip", "cut", "gone", "longer"]),
            )  # fmt: skip
    def damage(self, site: int, index: int, number: int, byte: int, kind: str) -> None:
        """One object changes on the disk."""
        where = self.sites[site]
        steps = [step for step in sorted(where.steps) if step not in where.broken]
        if not steps:
            return
        saved = where.steps[steps[index % len(steps)]]
        keys = sorted(ckpt.read_manifest(where.open(), steps[index % len(steps)]).objects)
        key = keys[number % len(keys)]
        if key in where.damaged.get(saved.save_id, {}):
            return
        path = where.file(f"{objects_key(saved.save_id)}/{key}")
        data = path.read_bytes()
        path.unlink()  # another name of the file keeps its bytes
        spot = byte % len(data)
        changed = {
            "flip": data[:spot] + bytes([data[spot] ^ 0x10]) + data[spot + 1 :],
            "cut": data[: len(data) // 2],
            "longer": data + b"\0",
        }
        if kind in changed:
            path.write_bytes(changed[kind])
        where.damaged.setdefault(saved.save_id, {})[key] = data

    @action(when=is_hurt, site=SITE)
    def mend(self, site: int) -> None:
        """A person puts back what was damaged."""
        where = self.sites[site]
        for name, objects in where.damaged.items():
            for key, data in objects.items():
                path = where.file(f"{objects_key(name)}/{key}")
                path.unlink(missing_ok=True)
                path.write_bytes(data)
        for step, data in where.broken.items():
            where.file(manifest_key(step)).write_bytes(data)
        where.damaged, where.broken = {}, {}

    @action(when=has_any, site=SITE, index=INDEX, byte=st.integers(0, 5000))
    def damage_manifest(self, site: int, index: int, byte: int) -> None:
        """One byte of a manifest changes."""
        where = self.sites[site]
        if not where.steps:
            return
        step = pick_of(where.steps, index)
        if step in where.broken:
            return
        path = where.file(manifest_key(step))
        data = path.read_bytes()
        path.unlink()
        spot = byte % len(data)
        path.write_bytes(data[:spot] + bytes([data[spot] ^ 0x10]) + data[spot + 1 :])
        where.broken[step] = data
        where.tidy = False

    # --------------------------------------------------------------------------------------------
    # Readers.

    @action(when=has_any, site=SITE, index=INDEX)
    def open_reader(self, site: int, index: int) -> None:
        """Somebody opens a checkpoint, and reads later."""
        where = self.sites[site]
        if not where.steps:
            return
        step = pick_of(where.steps, index)
        if step not in where.broken:
            reader = ckpt.open(where.open(), step)
            self.readers = [*self.readers[-2:], (where, where.steps[step], reader)]

    def read_open(self, saved: Saved, reader: ckpt.OpenCheckpoint) -> bool:
        """Right bits, or an error of one line; whether all bits were there."""
        try:
            arrays = {name: reader[name][...] for name in reader}
        except ckpt.CheckpointError as error:
            check_refusal(error, True)
            return False
        for spec in SMALL_SPECS:
            values = full_values(spec, saved.seed)
            assert arrays[spec.name].tobytes() == bits(values).numpy().tobytes(), spec.name
        return True

    def check(self) -> None:
        """See the head of the file."""
        self.checks += 1
        for site in self.sites:
            self._check_site(site)
        for site, saved, reader in self.readers:
            whole = self.read_open(saved, reader)
            stays = saved in site.steps.values() and saved.save_id not in site.damaged
            assert whole or not stays, "a reader of a checkpoint that stays gets its bits"

    def _check_site(self, site: Site) -> None:
        store = site.open()
        assert committed_steps(store) == sorted(site.steps)
        for number, (step, saved) in enumerate(sorted(site.steps.items())):
            try:
                manifest = ckpt.read_manifest(store, step)
            except ckpt.CheckpointError as error:
                check_refusal(error, step in site.broken)
                continue
            assert step not in site.broken, f"the manifest of step {step} is damaged, and is read"
            assert manifest.save_id == saved.save_id
            look, hurt = site.look_of(manifest), site.damaged.get(saved.save_id, {})
            if site.verified.get(saved.save_id) == look and (self.checks + number) % 5:
                continue
            site.verified[saved.save_id] = look
            lines = ckpt.find_damage(store, manifest)
            folder = objects_key(saved.save_id)
            named = {key for key in hurt if any(store.where(f"{folder}/{key}") in x for x in lines)}
            assert (named, len(lines)) == (set(hurt), len(hurt)), (lines, list(hurt))
            topology = TOPOLOGIES[(self.checks + step) % len(TOPOLOGIES)]
            try:
                load_as(store, manifest, topology, saved.seed)
            except REFUSALS as error:
                check_refusal(error, hurt)
        self._check_left_over(site, store)

    def _check_left_over(self, site: Site, store: ckpt.Store) -> None:
        kept = {s.save_id for s in site.steps.values()} | {s.save_id for _, _, s in site.away}
        names = set(store.names("objects"))
        assert kept <= names, f"objects of {kept - names} are gone"
        if site.tidy:
            assert names - site.orphans == kept - site.orphans, f"left over: {names - kept}"
            assert store.names("manifests") == [name_of(step) for step in sorted(site.steps)]
