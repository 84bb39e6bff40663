"""Checkpoints in node-local tiers: a node's memory, a neighbour's memory, a node's own disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import ckpt
from ckpt import CheckpointError, Location, Manifest, Tier
from parallel import Topology
from pretrain.errors import InputError
from pretrain.observe import Events, Restored
from pretrain.runtime import Runtime
from pretrain.state import Progress, run_id_of

Loaded = tuple[Progress, Manifest]


class NodeTiers:
    """The node-local tiers of a run, as this rank reaches them.

    A tier that cannot be reached, and a checkpoint there that cannot be read, are published as
    notices. (A damaged checkpoint in the shared folder is an error instead.) Checkpoints of another
    run are not taken.

    Args:
        tiers: the node-local tiers, the fastest first.
        run_id: see :func:`pretrain.checkpoint.run_id.run_id`.
        topology: of this start; the checkpoints in nodes' tiers must have the same.
        runtime: this rank.
        events: where notices are published.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        run_id: str,
        *,
        topology: Topology,
        runtime: Runtime,
        events: Events,
    ) -> None:
        self.tiers, self.run_id, self.topology = tiers, run_id, topology
        self.runtime, self.events = runtime, events
        self.committed_here = [tier for tier in tiers if tier.committer == runtime.rank]
        """The tiers whose commits this rank writes."""

    def restore(
        self,
        load: Callable[[Manifest, Location], Progress],
        shared_step: int,
        *,
        root: Location,
        began: float,
    ) -> Loaded | None:
        """Load the newest checkpoint that every rank finds in its node's tiers, unless the shared
        folder has a newer one; None where that is so, or where there is none. Every rank must call.

        Where a checkpoint cannot be read on every rank, the next older one is tried.

        Args:
            load: fills the job from a manifest in a tier.
            shared_step: the newest step in the shared folder, or -1.
            root: the shared folder.
            began: when the restore began, in seconds of :func:`time.perf_counter`.

        Raises CheckpointError where no checkpoint can be read on every rank, and the shared folder
        has none.
        """
        for tier in self.committed_here:
            self._try(tier, ckpt.lifecycle.remove_uncommitted)
        self.runtime.agree(True)
        reachable = [
            (tier, manifest)
            for tier in self.tiers
            for manifest in ckpt.lifecycle.reachable(
                tier.location, self.topology, self.runtime.rank, self._is_of_run
            )
        ]
        own = {(manifest.step, ckpt.lifecycle.fingerprint(manifest)) for _, manifest in reachable}
        common = set.intersection(*map(set, self.runtime.gather_pairs(sorted(own))))
        candidates = sorted((key for key in common if key[0] >= shared_step), reverse=True)
        for step, fingerprint in candidates:
            copies = [
                (tier, manifest)
                for tier, manifest in reachable
                if (manifest.step, ckpt.lifecycle.fingerprint(manifest)) == (step, fingerprint)
            ]
            loaded = self._load_first(load, copies)
            if self.runtime.agree(loaded is not None) and loaded is not None:
                progress, manifest, tier = loaded
                seconds = time.perf_counter() - began
                self.events.publish(Restored(step=step, tier=tier.name, seconds=seconds))
                return progress, manifest
        if candidates and shared_step < 0:
            # Some ranks have loaded parts: fresh weights would not undo their moments and counters.
            raise CheckpointError(
                "no checkpoint in the node-local tiers can be read on every rank, and there is "
                f"none in {root}; remove the tiers' folders to start over"
            )
        return None

    def forget_others(self, after: int) -> None:
        """Remove from this node's tiers the checkpoints of other runs, and of steps beyond
        ``after``.

        To be called once the run is certain to resume after ``after``.
        """

        def forget(location: str) -> None:
            steps = ckpt.lifecycle.prune(location, after, self._is_of_run)
            if steps:
                text = f"steps {steps} in {location} are removed: the run resumes elsewhere"
                self.events.note(text, step=after)

        for tier in self.committed_here:
            self._try(tier, forget)

    def _load_first(
        self,
        load: Callable[[Manifest, Location], Progress],
        copies: Sequence[tuple[Tier, Manifest]],
    ) -> tuple[Progress, Manifest, Tier] | None:
        """Load the first copy of a checkpoint that this rank can read."""
        for tier, manifest in copies:
            try:
                return load(manifest, tier.location), manifest, tier
            except (CheckpointError, InputError) as error:
                text = f"not from tier {tier.name}: {error}"
                self.events.note(text, step=manifest.step, problem=True)
        return None

    def _is_of_run(self, manifest: Manifest) -> bool:
        return run_id_of(manifest) == self.run_id

    def _try(self, tier: Tier, act: Callable[[str], object]) -> None:
        try:
            act(tier.location)
        except (CheckpointError, OSError) as error:
            self.events.note(f"tier {tier.name} cannot be used: {error}", problem=True)
