"""What copies of experts would gain, and what helps a layout that the hottest rank cannot hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from convoy.plan.hardware import Chip, Cluster
from convoy.plan.memory import memory
from convoy.plan.step_time import step_time
from convoy.plan.work import Work

COPIES = (0, 1, 2, 4)
"""The values of ``moe.copies`` that are tried."""
_CAPACITY_FACTOR = 1.25


@dataclass(frozen=True)
class Gain:
    """A layout with one value of ``moe.copies``."""

    copies: int
    hottest: float
    """Rows of the rank with the most as a multiple of the mean, in the mean over calls."""
    hottest_call: float
    """The same in the call with the most."""
    seconds: float
    """Of a step."""
    memory: float
    """Bytes of the rank with the most."""


def gains_of(work: Work, cluster: Cluster, copies: Sequence[int] = COPIES) -> list[Gain]:
    """A layout with each of these values of ``moe.copies``. ``work`` must have loads.

    With copies a call is not cut into chunks, and nothing hides its all-to-alls.
    """
    gains = []
    for number in copies:
        tried = work.with_(copies=number)
        if number:
            tried = tried.with_(program=replace(work.program, hides_dispatch=0.0))
        gains.append(
            Gain(
                copies=number,
                hottest=tried.busiest,
                hottest_call=tried.busiest_in_layer,
                seconds=step_time(tried, cluster).total,
                memory=memory(tried, cluster.chip).total,
            )
        )
    return gains


def hot_rank(work: Work, described: str, cluster: Cluster) -> str:
    """Why a layout does not fit, and what would, in one line: where even loads would fit. Else an
    empty text.

    Args:
        work: a layout that is above the memory.
        described: the layout for people.
        cluster: whose memory counts.
    """
    group, chip = work.group_loads, cluster.chip
    if group is None or work.loads is None:
        return ""
    used, even = memory(work, chip).total, memory(work.with_(loads=None, imbalance=1.0), chip).total
    if even > chip.memory_bytes:
        return ""
    fitting = _remedies(work, chip)
    help_ = " or ".join(fitting)
    help_ = f"{help_} would fit" if fitting else "neither copies nor a capacity would fit"
    return (
        f"{described} needs {used / 2**30:.1f} GiB of {chip.memory_bytes / 2**30:.1f} GiB on a GPU "
        f"of {cluster.name} whose experts are the hottest: they get up to {group.hottest_call:.2f} "
        f"times the mean rows by --loads {work.loads.source}, and with equal rows all ranks would "
        f"need {even / 2**30:.1f} GiB; {help_}"
    )


def _remedies(work: Work, chip: Chip) -> list[str]:
    """Changes of one field each with which the hottest rank of a layout fits the memory."""
    t, tried = work.topology, []
    more = [n for n in COPIES if n > work.copies and not work.copies_refused]
    tried += [(f"moe.copies = {n}", work.with_(copies=n)) for n in more[:3]]
    if work.micro_batch_size > 1:
        half = work.micro_batch_size // 2
        tried.append((f"batch.micro_batch_size = {half}", work.with_(micro_batch_size=half)))
    wide = 2 * t.ep
    if work.shape.num_experts % wide == 0 and t.dp_shard * t.cp * t.tp % wide == 0:
        larger = work.with_(topology=replace(t, ep=wide))
        tried.append((f"parallel.ep = {wide}", larger))
    if not work.capacity_factor:
        bounded = work.with_(capacity_factor=_CAPACITY_FACTOR)
        tried.append((f'moe.capacity.policy = "fixed" with factor {_CAPACITY_FACTOR}', bounded))
    fitting = [name for name, other in tried if memory(other, chip).total <= chip.memory_bytes]
    copies = [name for name in fitting if name.startswith("moe.copies")]
    return copies[:1] + [name for name in fitting if name not in copies]
