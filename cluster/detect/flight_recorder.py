"""The last collectives of every rank, and the first collective at which ranks disagree.

PyTorch keeps the newest collectives of a process in a ring buffer, its flight recorder. With NCCL,
PyTorch writes the buffer to a file when a collective times out; with gloo, nothing does. So each
rank writes its buffer as ``rank-N.json`` when a collective fails on any rank, and
:func:`first_mismatch` compares the files of all ranks.

The recorder numbers the collectives of a process group on each rank. Ranks of a group must start
equal operations under equal numbers. Where they do not, or where a number is missing on a rank,
the ranks disagree.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel.layout import name_ranks

BUFFER_VARIABLE = "TORCH_FR_BUFFER_SIZE"
"""Environment variable of PyTorch: the collectives that a process keeps."""
_ENTRIES = 2000
_VERSION = 1
_UNEVEN = ("to_all", "toall", "send", "recv", "barrier")
"""Parts of the names of operations whose sizes may differ between ranks."""
_MOST_LINES = 8


def turn_on_flight_recorder() -> None:
    """Let PyTorch record the last 2000 collectives, unless the environment says another number.

    Must be called before the first process group is made.
    """
    os.environ.setdefault(BUFFER_VARIABLE, str(_ENTRIES))


def dump_collectives(folder: Path, rank: int, waits_in_group: str | None = None) -> None:
    """Write this process's collectives to ``folder/rank-N.json``, from any thread.

    Args:
        folder: of the dumps of all ranks; created where it is missing.
        rank: this rank.
        waits_in_group: the name of the process group whose newest collective this rank waits in,
            or has waited in without success. On gloo the recorder does not tell: a collective that
            failed looks as one that has ended.

    Raises OSError where the file cannot be written.
    """
    # Here: those who read dumps need no torch.
    import torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]
    from torch.distributed import distributed_c10d

    groups = {
        group.group_name: dist.get_process_group_ranks(group)
        for group in list(distributed_c10d._world.pg_group_ranks)
        if isinstance(group, dist.ProcessGroup)  # a group that this rank is not in has a number
    }
    trace = json.loads(_dump_fr_trace_json())
    entries = [
        {
            "group": each["process_group"][0],
            "number": each["collective_seq_id"],
            "op": each["profiling_name"].partition(":")[2],
            "sizes": each["input_sizes"],
            "dtypes": each["input_dtypes"],
            "p2p": each["is_p2p"],
            "ended": each["retired"] or each["state"] == "completed",
            "created_ns": each["time_created_ns"],
        }
        for each in trace.get("entries", ())
    ]
    waited_in = [e for e in entries if e["group"] == waits_in_group and not e["p2p"]]
    if waited_in:
        waited_in[-1]["ended"] = False
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank}.json"
    draft = path.with_suffix(".tmp")
    dump = {"version": _VERSION, "rank": rank, "groups": groups, "entries": entries}
    draft.write_text(json.dumps(dump, separators=(",", ":")))
    draft.replace(path)


@dataclass(frozen=True)
class Collective:
    """A collective that a rank has started."""

    group: str
    number: int
    """Of the group, from 1."""
    op: str
    sizes: tuple[tuple[int, ...], ...]
    """Of the tensors that the rank gave."""
    dtypes: tuple[str, ...]
    p2p: bool
    ended: bool
    created_ns: int
    """Unix time of the start."""

    def matches(self, other: Collective) -> bool:
        """Whether the two may be one collective on two ranks."""
        if any(part in self.op.lower() for part in _UNEVEN):
            return self.op == other.op
        return (self.op, self.sizes, self.dtypes) == (other.op, other.sizes, other.dtypes)

    def describe(self) -> str:
        """``all_reduce of Float [7]``."""
        tensors = [
            f"{dtype} {list(size)}" for dtype, size in zip(self.dtypes, self.sizes, strict=False)
        ]
        shown = ", ".join(tensors[:3]) + (", ..." if len(tensors) > 3 else "")
        return f"{self.op} of {shown}" if shown else self.op


@dataclass(frozen=True)
class FlightDump:
    """The last collectives of one rank, oldest first."""

    rank: int
    groups: Mapping[str, tuple[int, ...]]
    """The ranks of each process group."""
    collectives: Sequence[Collective]

    @staticmethod
    def read(path: Path) -> FlightDump:
        """Read a file of :func:`dump_collectives`.

        Raises OSError where there is none, ValueError where the file is no dump.
        """
        try:
            values: dict[str, Any] = json.loads(path.read_text())
            found = [
                Collective(**each | {
                    "sizes": tuple(map(tuple, each["sizes"])), "dtypes": tuple(each["dtypes"]),
                })
                for each in values["entries"]
            ]  # fmt: skip
            groups = {name: tuple(ranks) for name, ranks in values["groups"].items()}
            return FlightDump(int(values["rank"]), groups, found)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is no dump of collectives: {error!r}") from None

    def of_group(self, group: str) -> dict[int, Collective]:
        """The collectives of a group by number, sends and receives left out."""
        return {c.number: c for c in self.collectives if c.group == group and not c.p2p}

    @property
    def waits_in(self) -> Collective | None:
        """The newest collective, where it has not ended."""
        return self.collectives[-1] if self.collectives and not self.collectives[-1].ended else None

    def place(self) -> str:
        """Where the rank is, for people."""
        if not self.collectives:
            return "before its first collective"
        last = self.collectives[-1]
        where = "outside collectives, after" if last.ended else "in"
        return f"{where} {last.describe()}, number {last.number} of group {last.group}"


@dataclass(frozen=True)
class Mismatch:
    """A collective that some ranks of a group have entered, and others not, or differently."""

    group: str
    ranks: tuple[int, ...]
    """Of the group."""
    number: int
    entered: Mapping[int, Collective]
    """By rank; operations and sizes may differ."""
    missing: Mapping[int, str]
    """The other ranks, with where they are."""
    by_other_ops: bool = field(default=False)
    """Whether the collectives of ``entered`` do not match."""

    @property
    def created_ns(self) -> int:
        """Unix time at which the first rank entered."""
        return min(each.created_ns for each in self.entered.values())

    def lines(self) -> list[str]:
        """For people: the collective, then the ranks, those that are few first."""
        places: dict[str, list[int]] = {}
        for rank, each in sorted(self.entered.items()):
            places.setdefault(f"entered {each.describe()}", []).append(rank)
        for rank, where in sorted(self.missing.items()):
            places.setdefault(f"has not entered; {where}", []).append(rank)
        groups = sorted(places.items(), key=lambda item: (len(item[1]), item[1]))
        lines = [
            f"ranks disagree at collective number {self.number} of group {self.group} "
            f"({name_ranks(self.ranks)}):"
        ]
        lines += [f"  {name_ranks(ranks)}: {place}" for place, ranks in groups[:_MOST_LINES]]
        if len(groups) > _MOST_LINES:
            lines.append(f"  and {len(groups) - _MOST_LINES} other places")
        return lines


def read_dumps(folder: Path) -> list[FlightDump]:
    """The dumps of a folder, in rank order.

    Raises OSError or ValueError, see :meth:`FlightDump.read`.
    """
    dumps = [FlightDump.read(path) for path in folder.glob("rank-*.json")]
    return sorted(dumps, key=lambda dump: dump.rank)


def first_mismatch(dumps: Sequence[FlightDump]) -> Mismatch | None:
    """The collective at which ranks disagree; None where all ranks did the same.

    Of several, as where ranks wait for ranks that wait: first a collective that ranks entered with
    other operations or sizes; then the newest collective of a group in which a rank has no dump,
    first of all one in which other ranks wait; then one that a rank has not entered which is itself
    in no collective; then the one that was entered first.
    """
    by_rank = {dump.rank: dump for dump in dumps}
    groups = {(n, ranks) for d in dumps for n, ranks in d.groups.items() if len(ranks) > 1}
    mismatches = [
        mismatch
        for name, ranks in sorted(groups)
        if (mismatch := _mismatch_of(name, ranks, by_rank)) is not None
    ]

    def order(mismatch: Mismatch) -> tuple[int, bool, int]:
        if mismatch.by_other_ops:
            return 0, False, mismatch.created_ns
        if any(rank not in by_rank for rank in mismatch.missing):
            ended = all(each.ended for each in mismatch.entered.values())
            return 1, ended, -mismatch.created_ns
        idle = any(by_rank[rank].waits_in is None for rank in mismatch.missing)
        return 2, not idle, mismatch.created_ns

    return min(mismatches, key=order, default=None)


def _mismatch_of(
    group: str, ranks: tuple[int, ...], by_rank: Mapping[int, FlightDump]
) -> Mismatch | None:
    """The first collective of one group at which its ranks differ."""
    known = {rank: by_rank[rank].of_group(group) for rank in ranks if rank in by_rank}
    there = [collectives for collectives in known.values() if collectives]
    if not there:
        return None
    first = max(min(collectives) for collectives in there)  # older ones have left some buffer
    last = max(max(collectives) for collectives in there)
    gone = [rank for rank in ranks if rank not in known]
    for number in range(first, last + 1):
        entered = {rank: each[number] for rank, each in known.items() if number in each}
        others = [rank for rank in known if rank not in entered]
        one = next(iter(entered.values()))
        differ = not all(one.matches(each) for each in entered.values())
        # A rank without a dump is asked for only where the others came last.
        if differ or (others and not gone) or (gone and number == last):
            missing = {rank: by_rank[rank].place() for rank in others}
            missing |= dict.fromkeys(gone, "no dump: the process has ended or was stopped")
            return Mismatch(group, ranks, number, entered, missing, by_other_ops=differ)
    return None
