"""The layout of a run on the ranks that a start has: a pure function of the spec and the ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from parallel import ParallelConfig, Topology
from parallel.layout import count_ranks, divisors
from pretrain.errors import InputError
from pretrain.runtime import launched_world
from pretrain.spec import JobSpec


@dataclass(frozen=True)
class ChosenLayout:
    """A layout, and why it was chosen."""

    topology: Topology
    spares: int = 0
    """Ranks that the layout leaves over. The first ``topology.world`` ranks train."""
    reason: str = "as in [parallel]"
    """For people: the degrees that differ from ``[parallel]``."""


def launched_layout(spec: JobSpec) -> ChosenLayout:
    """The layout of this start: of ``[parallel]``, or with ``elastic.enabled`` the chosen one.

    Raises InputError where no layout fits.
    """
    world = launched_world()
    if not spec.elastic.enabled:
        return ChosenLayout(spec.topology(world))
    return choose_layout(spec, world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))


def choose_layout(spec: JobSpec, world: int, ranks_per_node: int) -> ChosenLayout:
    """The layout of ``spec`` on ``world`` ranks; equal on every rank.

    A fixed layout of ``[parallel]`` is taken where it has ``world`` ranks. Otherwise, in this
    order: tp, cp and pp stay nearest to the spec's degrees; as many ranks as possible train; ep and
    dp_replicate stay nearest to the spec's. ``dp_shard`` takes the ranks that are left.

    Three bounds hold. There are at most as many replicas as in the spec: one replica more would
    mean more memory for each rank. A fixed ``dp_shard`` is the most: ranks beyond ``[parallel]``
    are spares. There are at most as many data-parallel ranks as micro-batches in a step.

    Args:
        spec: of the run.
        world: the number of ranks, at least 1.
        ranks_per_node: ranks of a machine; tp stays within a machine unless the spec allows more.

    Raises InputError where no layout fits: no number of ranks up to ``world`` holds the model.
    """
    asked = spec.parallel

    def fits(topology: Topology) -> bool:
        on_a_node = ranks_per_node % topology.tp == 0 or topology.world <= ranks_per_node
        return (on_a_node or asked.tp_across_nodes) and spec.fits(topology)

    exact = _fixed_layout(asked, world)
    if exact is not None and fits(exact):
        return ChosenLayout(exact)
    data_ranks = -(-spec.batch.largest // spec.batch.micro_batch_size)
    if asked.dp_shard != -1:
        data_ranks = min(data_ranks, asked.dp_shard * asked.dp_replicate)
    for tp, cp, pp in _inner_degrees(asked):
        for dp in range(min(world // (tp * cp * pp), data_ranks), 0, -1):
            found = _nearest(asked, dp, tp=tp, cp=cp, pp=pp, fits=fits)
            if found is not None:
                return ChosenLayout(found, world - found.world, _reason(asked, found, world))
    raise InputError(
        f"no layout of at most {count_ranks(world)} works for this model, batch and [parallel]; "
        f"checkpoints stay as they are, and more ranks resume the run"
    )


def _fixed_layout(asked: ParallelConfig, world: int) -> Topology | None:
    """The layout of ``[parallel]``, where it is fixed and has ``world`` ranks."""
    if asked.dp_shard == -1:
        return None
    try:
        return asked.topology(world)
    except ValueError:
        return None


def _inner_degrees(asked: ParallelConfig) -> list[tuple[int, int, int]]:
    """(tp, cp, pp), those of the spec first, then the nearest; no degree grows."""

    def distance(degrees: tuple[int, int, int]) -> tuple[float, tuple[int, ...]]:
        tp, cp, pp = degrees
        halvings = math.log2(asked.tp / tp) + math.log2(asked.cp / cp) + math.log2(asked.pp / pp)
        return halvings, tuple(-degree for degree in degrees)

    stages = range(1, asked.pp + 1)  # layers are divided unevenly where they must be
    return sorted(product(divisors(asked.tp), divisors(asked.cp), stages), key=distance)


def _nearest(
    asked: ParallelConfig,
    dp: int,
    *,
    tp: int,
    cp: int,
    pp: int,
    fits: Callable[[Topology], bool],
) -> Topology | None:
    """The layout with ``dp`` data-parallel ranks whose ep and dp_replicate are nearest to the
    spec's; None where none fits."""

    def layouts() -> Iterator[Topology]:
        for dp_replicate in divisors(dp):
            if dp_replicate <= asked.dp_replicate:
                dp_shard = dp // dp_replicate
                for ep in divisors(dp_shard * cp * tp):
                    yield Topology(pp, dp_replicate, dp_shard, cp, tp, ep)

    def distance(topology: Topology) -> tuple[float, int]:
        changed = abs(math.log2(topology.ep / asked.ep))
        changed += math.log2(asked.dp_replicate / topology.dp_replicate)
        return changed, -topology.ep

    return next((one for one in sorted(layouts(), key=distance) if fits(one)), None)


def _reason(asked: ParallelConfig, found: Topology, world: int) -> str:
    parts = [
        f"{axis} {getattr(asked, axis)} -> {getattr(found, axis)}"
        for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        if getattr(asked, axis) not in (-1, getattr(found, axis))
    ]
    if not parts and found.world == world:
        return ChosenLayout.reason
    used = f"{found.world} of {count_ranks(world)} train{'s' if found.world == 1 else ''}"
    return ", ".join([used, *parts])
