"""The life of a run's checkpoints, with a dict as the model: step -> what was saved.

There are two sites: the run's own folder or store, and another one for reshards. After each action
every step of the model is listed, verifies, and loads with its own bits on some topology. Damage
is named, and nothing else is. What an action that was broken off has done is all of the action
or nothing of it, step by step.
"""

from __future__ import annotations

from functools import partial

from hypothesis import strategies as st

import ckpt
from ckpt.format import committed_steps, manifest_key
from ckpt.lifecycle import prune, remove_uncommitted
from ckpt.rewrite import CheckpointSource, CheckpointTarget
from pretrain.checkpoint.rolling_back import complete_roll_back, roll_back
from tests.fuzz.checkpoint_acts import REFUSALS, TOPOLOGIES, about, save_by_ranks, save_by_writer
from tests.fuzz.checkpoint_site import (
    INDEX,
    LAYOUT,
    OF_FAULT,
    SITE,
    Saved,
    Site,
    away_of,
    name_of,
    pick_of,
)
from tests.fuzz.checkpoint_world import CheckpointWorld, has_any, has_steps
from tests.fuzz.machine import action, check_refusal
from tests.fuzz.stores import Trigger


class CheckpointLife(CheckpointWorld):
    """Checkpoints in folders."""

    name = "checkpoint-folder"

    def __init__(self) -> None:
        super().__init__()
        for layout in (1, 0):  # so that even short lives have something to lose
            self.save(layout, 0, 1 + layout, writer=False, fault="none", moment=0)

    # --------------------------------------------------------------------------------------------
    # Saves.

    @action(layout=LAYOUT, gap=st.integers(0, 2), score=st.integers(0, 4),
            writer=st.booleans(), **OF_FAULT)  # fmt: skip
    def save(
        self, layout: int, gap: int, score: int, writer: bool, fault: str, moment: int
    ) -> None:
        """A save of a new step, by all ranks or by the writer process of a single rank."""
        site = self.sites[0]
        step = max([self.newest, *site.steps]) + 1 + gap
        self.newest = step
        self.saves += 1
        saved = Saved(f"{step:08d}-launch{self.saves}", self.saves, score)
        topology = TOPOLOGIES[0] if writer else TOPOLOGIES[layout]
        info = about(step, topology, saved.save_id, saved.seed, score)
        how = save_by_writer if writer else save_by_ranks
        self.run(site, lambda store: how(store, info, saved.seed), {**site.steps, step: saved},
                 fault, moment)  # fmt: skip

    @action(when=has_steps, index=INDEX, writer=st.booleans())
    def save_again(self, index: int, writer: bool) -> None:
        """A save of a step that has a checkpoint is refused, and changes nothing."""
        site = self.sites[0]
        if not site.steps:
            return
        step = pick_of(site.steps, index)
        self.saves += 1
        info = about(step, TOPOLOGIES[0], f"{step:08d}-launch{self.saves}", self.saves, 0)
        how = save_by_writer if writer else save_by_ranks
        try:
            how(site.open(), info, self.saves)
        except ckpt.CheckpointError as error:
            check_refusal(error, True, f"step {step} already has a checkpoint")
            site.tidy = site.tidy and not writer and not site.broken
        else:
            raise AssertionError(f"step {step} was saved twice")
        site.settle("done" if site.tidy else "survived", dict(site.steps))

    @action(layout=LAYOUT, moment=st.integers(0, 60), saves=st.booleans(), writer=st.booleans())
    def start_again_during_a_save(
        self, layout: int, moment: int, saves: bool, writer: bool
    ) -> None:
        """A later start of the run cleans up while a save is under way, and may save the step."""
        site = self.sites[0]
        step = self.newest = max([self.newest, *site.steps]) + 1
        self.saves += 2
        first = Saved(f"{step:08d}-launch{self.saves - 1}", self.saves - 1)
        later = Saved(f"{step:08d}-launch{self.saves}", self.saves)
        topology = TOPOLOGIES[0] if writer else TOPOLOGIES[layout]

        def start(_: str) -> None:
            remove_uncommitted(site.open())
            if saves and step not in committed_steps(site.open()):
                info = about(step, TOPOLOGIES[1], later.save_id, later.seed, 0)
                save_by_ranks(site.open(), info, later.seed)

        trigger = Trigger(moment, start)
        store = site.open(trigger)
        info = about(step, topology, first.save_id, first.seed, 0)
        refused = ""
        try:
            (save_by_writer if writer else save_by_ranks)(store, info, first.seed)
        except REFUSALS as error:
            refused = str(error)
            check_refusal(error, trigger.fired)
        now = site.listed().get(step)
        assert now in ((first, later) if saves else (first, None)), now
        assert (now == first) == (not refused), (now, refused)
        after = dict(site.steps) | ({step: now} if now else {})
        site.settle("done" if not trigger.fired else "survived", after)

    # --------------------------------------------------------------------------------------------
    # Removals.

    @action(when=has_any, site=SITE, keep=st.integers(1, 3), every=st.integers(0, 4),
            best=st.integers(0, 2), **OF_FAULT)  # fmt: skip
    def retain(self, site: int, keep: int, every: int, best: int, fault: str, moment: int) -> None:
        """Retention keeps what the rules keep."""
        where = self.sites[site]
        rules = ckpt.Retention(keep=keep, keep_every=every, keep_best=best)
        after = where.expected_retention(keep, every, best)
        self.run(where, lambda store: ckpt.retain(store, rules), after, fault, moment)

    @action(site=SITE, **OF_FAULT)
    def clean_up(self, site: int, fault: str, moment: int) -> None:
        """A start removes what is left over of saves and removals that were broken off."""
        where = self.sites[site]
        outcome = self.run(where, remove_uncommitted, dict(where.steps), fault, moment)
        if outcome == "done" and not where.broken:
            where.tidy = True

    @action(site=SITE, **OF_FAULT)
    def collect(self, site: int, fault: str, moment: int) -> None:
        """A person removes the objects that no manifest lists."""
        where = self.sites[site]

        def act(store: ckpt.Store) -> None:
            ckpt.remove_garbage(store, ckpt.find_garbage(store, unlisted=True))

        gone = [saved.save_id for _, _, saved in where.away]
        if not where.broken:
            where.away, where.orphans = [], where.orphans | set(gone)
        outcome = self.run(where, act, dict(where.steps), fault, moment)
        if outcome == "done" and not where.broken:
            where.tidy, where.orphans = True, set()

    @action(when=lambda world: world.sites[1].steps, index=INDEX, **OF_FAULT)
    def prune(self, index: int, fault: str, moment: int) -> None:
        """A run that resumes at a step forgets the later ones of a node's tier."""
        where = self.sites[1]
        if not where.steps:
            return
        last = pick_of(where.steps, index)
        after = {step: saved for step, saved in where.steps.items() if step <= last}
        lost = {where.steps[step].save_id for step in where.broken if step > last}
        where.orphans |= lost
        self.run(where, lambda store: prune(store, last, lambda m: True), after, fault, moment)

    # --------------------------------------------------------------------------------------------
    # Rolling back.

    @action(when=has_steps, index=INDEX, **OF_FAULT)
    def roll_back(self, index: int, fault: str, moment: int) -> None:
        """Later steps are moved away; the next start completes what was broken off."""
        site = self.sites[0]
        if not site.steps:
            return
        last = pick_of(site.steps, index)
        before = dict(site.steps)
        after = {step: saved for step, saved in before.items() if step <= last}
        broken, known = dict(site.broken), set(away_of(site.open()))
        self.run(site, lambda store: roll_back(store, last, lambda _: None), after, fault, moment)
        store = site.open()
        begun = "rolling-back.json" in store.names("")
        complete_roll_back(store, lambda _: None)
        site.settle("done" if begun and site.tidy else "killed", after if begun else site.steps)
        assert not begun or site.steps == after
        moved = {key.rpartition("/")[2]: key for key in away_of(store) if key not in known}
        for step in sorted(before.keys() - site.steps.keys()):
            if step in broken:
                site.orphans.add(before[step].save_id)
            else:
                site.away.append((moved[name_of(step)], step, before[step]))
        self.newest = max(site.steps)

    @action(when=lambda world: world.sites[0].away, index=INDEX)
    def undo_roll_back(self, index: int) -> None:
        """A person moves a manifest back, and has the checkpoint again."""
        site = self.sites[0]
        if not site.away:
            return
        key, step, saved = site.away[index % len(site.away)]
        if step in site.steps:
            return
        store = site.open()
        store.publish(manifest_key(step), store.read(key))
        store.remove(key)
        site.away.remove((key, step, saved))
        site.settle("done" if site.tidy else "survived", {**site.steps, step: saved})

    # --------------------------------------------------------------------------------------------
    # Reshards.

    @action(when=has_any, index=INDEX, layout=LAYOUT, back=st.booleans(), **OF_FAULT)
    def reshard(self, index: int, layout: int, back: bool, fault: str, moment: int) -> None:
        """A checkpoint is written for another topology into the other site; after a fault the
        same call goes on."""
        source, target = self.sites[back], self.sites[not back]
        if not source.steps:
            return
        step = pick_of(source.steps, index)
        saved = source.steps[step]
        if step in source.broken or saved.save_id in source.damaged:
            return
        manifest = ckpt.read_manifest(source.open(), step)
        act = partial(self._reshard, source, manifest, layout)
        target.open()
        if step in target.steps:
            before = dict(target.steps)
            try:
                made = act(target.open())
            except ckpt.CheckpointError as error:
                check_refusal(error, True)
            else:
                assert made.save_id == before[step].save_id, "another checkpoint was taken for it"
            target.settle("done" if target.tidy else "survived", before)
            return
        expected = Saved(self._id_of(source, manifest, layout), saved.seed, saved.score)
        target.damaged.pop(expected.save_id, None)  # objects that were left are written again
        # The objects of a manifest that was moved away are those of this checkpoint from now on.
        stay = [entry for entry in target.away if entry[2].save_id != expected.save_id]
        if len(stay) < len(target.away):
            target.orphans.add(expected.save_id)
        target.away = stay
        after = {**target.steps, step: expected}
        outcome = self.run(target, act, after, fault, moment)
        if outcome in ("refused", "killed"):
            act(target.open())
            target.settle("survived", after)

    def _reshard(
        self, source: Site, manifest: ckpt.Manifest, layout: int, store: ckpt.Store
    ) -> ckpt.Manifest:
        return ckpt.reshard(source.open(), manifest, store, TOPOLOGIES[layout])

    def _id_of(self, source: Site, manifest: ckpt.Manifest, layout: int) -> str:
        made = CheckpointTarget(
            CheckpointSource(source.open(), manifest), self.sites[1].open(), TOPOLOGIES[layout]
        )
        return made.info.save_id


class CheckpointLifeRemote(CheckpointLife):
    """Checkpoints in an object store: nothing is linked, and requests are repeated."""

    name = "checkpoint-store"
    remote = True
