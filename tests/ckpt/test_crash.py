"""A crash at every operation of a save, a retention pass and a clean-up, in every way that POSIX
allows: whatever was reported as saved is there, and whatever is listed is whole."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.background.staged import Previous, StagedPart, write_staged
from ckpt.format.shard_layout import ObjectLayout
from ckpt.format.shard_writer import aligned
from ckpt.interop.safetensors_reader import SafetensorsSource
from ckpt.interop.safetensors_writer import SafetensorsTarget
from ckpt.rewrite import CheckpointSource, CheckpointTarget, SourceArray, rewrite, write_checkpoint
from ckpt.write.commit import begin, commit, read_receipts, write_receipt
from ckpt.write.objects import sync, write_metadata
from parallel.layout import Topology
from tests.support.checkpoints import (
    SMALL_SPECS,
    assert_nothing_left_over,
    assert_whole,
    ended,
    full_values,
    info,
    local_array,
    memory_folder,
    save_with_threads,
)
from tests.support.crash import (
    Disk,
    Killed,
    Operation,
    RecordedFiles,
    State,
    UnsyncedFiles,
    lay_out,
)
from tests.support.sources import MemorySource, assert_same
from tests.support.traced import note, operations, trace

ONE, TWO, FOUR = Topology(), Topology(dp_shard=2, ep=2), Topology(dp_replicate=2, dp_shard=2, ep=2)


class Run:
    """A run's folder below ``base``, and a log of all that happens to it."""

    def __init__(self, base: Path, dies_at: int | None = None) -> None:
        base.mkdir(exist_ok=True)
        self.base, self.files = base, RecordedFiles(dies_at)
        self.store = ckpt.LocalStore(base / "checkpoints", self.files)

    def save(self, step: int, topology: Topology, save_id: str | None = None) -> None:
        save_with_threads(self.store, step, topology, SMALL_SPECS, step, save_id)
        self.files.note("saved", step)

    def retain(self, keep: int) -> None:
        for step in ckpt.committed_steps(self.store)[:-keep]:
            self.files.note("unwanted", step)
        ckpt.retain(self.store, keep)

    def dies_within(self, operations: int, what: Callable[[], None]) -> None:
        """``what``, by a process that dies before that many operations more."""
        self.files.dies_at = len(self.files.log) + operations
        with pytest.raises(Killed):
            what()
        self.files.dies_at = None


def save_one(run: Run) -> None:
    run.save(1, ONE)


def save_over_another(run: Run) -> None:
    run.save(1, TWO)
    run.save(2, FOUR)


def save_and_retain(run: Run) -> None:
    run.save(1, ONE)
    run.save(2, TWO)
    run.retain(1)
    run.save(3, ONE)
    run.retain(1)


def save_staged(run: Run, step: int, previous: Previous | None) -> Previous:
    """Save as a writer process does: objects unchanged since the save before are linked."""
    about, parts = info(step, ONE), []
    records = [spec.record(ONE) for spec in SMALL_SPECS]
    for spec, record in zip(SMALL_SPECS, records, strict=True):
        layout = ObjectLayout(record, (0,) * len(spec.shape))
        buffer = aligned(layout.padded_bytes)
        array = local_array(spec, ONE, 0, full_values(spec, step))
        for at, (_, box) in enumerate(layout.chunks):
            start = at * layout.chunk_stride
            layout.fill(box, buffer[start : start + layout.chunk_stride], array.read_into)
        parts.append(StagedPart(layout, buffer))
    begin(run.store, about, 0)
    receipt = write_metadata(run.store, about, records)
    written = write_staged(run.store, about, parts, previous)
    assert (written.bytes_linked > 0) == (previous is not None)
    receipt |= written.receipt
    sync(run.store, about, receipt)
    write_receipt(run.store, about, 0, receipt)
    commit(run.store, about, records, read_receipts(run.store, about))
    run.files.note("saved", step)
    return Previous(about.save_id, written.receipt)


def save_staged_and_retain(run: Run) -> None:
    previous = None
    for step in (1, 2, 3):
        previous = save_staged(run, step, previous)
        run.retain(1)


def clean_up_after_a_kill(run: Run) -> None:
    run.save(1, ONE)
    run.dies_within(40, lambda: run.save(2, ONE))
    ckpt.lifecycle.remove_uncommitted(run.store)
    run.save(2, ONE, "again")
    run.retain(1)


SCENARIOS = [
    save_one,
    save_over_another,
    save_and_retain,
    save_staged_and_retain,
    clean_up_after_a_kill,
]


def assert_survived(base: Path, saved: set[int], unwanted: set[int]) -> None:
    """What a run that starts on what is left must find, and be able to do."""
    store = ckpt.LocalStore(base / "checkpoints", UnsyncedFiles())
    steps = ckpt.committed_steps(store)
    assert saved - unwanted <= set(steps), f"reported as saved {saved}, and there are {steps}"
    for step in steps:
        assert_whole(store, step)

    ckpt.lifecycle.remove_uncommitted(store)
    assert ckpt.committed_steps(store) == steps
    assert_nothing_left_over(store)
    again = max(steps, default=0) + 1
    save_with_threads(store, again, TWO, SMALL_SPECS, again)
    for step in [*steps, again]:
        assert_whole(store, step)


def crash_everywhere(
    log: list[Operation],
    base: Path,
    seeds: int,
    each: bool,
    every: int = 1,
    since: int = 0,
    survived: Callable[[Path, set[int], set[int]], None] = assert_survived,
    room: Path | None = None,
) -> int:
    """Crash after every ``every``-th operation; returns how many different trees were met."""
    disk, room = Disk(base), room or base.with_name(f"{base.name} after a crash")
    promised: dict[str, set[int]] = {"saved": set(), "unwanted": set()}
    met: set[int] = set()
    for at, op in enumerate(log):
        if op.kind in promised:
            promised[op.kind].add(op.file)
        else:
            disk.apply(op)
        if at < since or (at % every and op.kind != "saved"):
            continue
        for state in disk.crashes(seeds, each, seed=at):
            key = hash((frozenset(state.items()), *map(frozenset, promised.values())))
            if key in met:
                continue
            met.add(key)
            lay_out(state, room)
            try:
                survived(room, **promised)
            except (AssertionError, ckpt.CheckpointError) as error:
                raise AssertionError(f"{error}\n{story(log, at, state)}") from error
            finally:
                shutil.rmtree(room)
    return len(met)


def story(log: list[Operation], at: int, state: State) -> str:
    last = [f"  {o.kind} {o.path or o.file} {o.other or ''}" for o in log[max(0, at - 12) : at + 1]]
    left = [f"  {name}{'/' if data is None else ''}" for name, data in state.items()]
    return "\n".join([f"crash after operation {at}:", *last, "left:", *left])


@pytest.fixture
def base() -> Iterator[Path]:
    with memory_folder() as room:  # for thousands of trees
        yield Path(room) / "disk"


def recorded(scenario: Callable[[Run], None], base: Path) -> list[Operation]:
    run = Run(base)
    scenario(run)
    return run.files.log


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_after_a_crash_anywhere_the_newest_checkpoint_is_whole(scenario, base):
    log = recorded(scenario, base)
    assert crash_everywhere(log, base, seeds=1, each=False, every=5) > len(log) / 12


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_after_every_crash_anywhere_the_newest_checkpoint_is_whole(scenario, base):
    log = recorded(scenario, base)
    assert crash_everywhere(log, base, seeds=12, each=True) > len(log)


def without(kind: str) -> Callable[[list[Operation]], list[Operation]]:
    return lambda log: [op for op in log if op.kind != kind]


def without_root(log: list[Operation]) -> list[Operation]:
    """Folders synced, but for the one that the new folders are in."""
    return [op for op in log if op.kind != "sync_folder" or op.path.name != "checkpoints"]


def manifest_first(log: list[Operation]) -> list[Operation]:
    """The manifest is published before the objects, and all is durable in the end."""
    of_objects = {op.file for op in log if op.kind == "create" and "objects" in op.path.parts}
    later = [
        op
        for op in log
        if op.kind not in ("saved", "unwanted")
        and ((op.path and "objects" in op.path.parts) or (not op.path and op.file in of_objects))
    ]
    return [*(op for op in log if op not in later and op.kind != "saved"), *later]


def objects_first(log: list[Operation]) -> list[Operation]:
    """A retention pass that removes a manifest after its objects."""
    begun = next(at for at, op in enumerate(log) if op.kind == "unwanted")
    manifest = [op for op in log[begun:] if op.path and op.path.parent.name == "manifests"]
    return [*log[:begun], *(op for op in log[begun:] if op not in manifest), *manifest]


def one_save(run: Run) -> None:
    run.save(1, ONE)


def one_retention(run: Run) -> None:
    run.save(1, ONE)
    run.save(2, ONE)
    run.retain(1)


@pytest.mark.parametrize(
    ("mistake", "scenario"),
    [
        (without("sync"), one_save),
        (without("sync_folder"), one_save),
        (without_root, one_save),
        (manifest_first, one_save),
        pytest.param(objects_first, one_retention, marks=pytest.mark.slow),
    ],
)
def test_the_matrix_sees_a_mistake(mistake, scenario, base):
    log = recorded(scenario, base)
    crash_everywhere(log[: len(log) // 4], base, seeds=0, each=False, every=9)
    with pytest.raises(AssertionError, match="crash after operation"):
        crash_everywhere(mistake(log), base, seeds=2, each=False)


TRACED_SPECS = [
    *SMALL_SPECS,  # and one whose objects are written past the page cache
    ckpt.ArraySpec("model/large", (64, 64), torch.float32, (("fsdp",), ())),
]


def save_in_background(room: Path) -> None:
    """Two ranks with a writer process each, a shared tier and one of each rank's own."""
    base = room / "disk"
    with contextlib.ExitStack() as stack:
        savers = []
        for rank in range(2):
            own, shared = str(base / f"local-{rank}"), str(base / "checkpoints")
            tiers = [
                ckpt.Tier(name="local", location=own, ranks=(rank,), keep=1),
                ckpt.Tier(name="shared", location=shared, keep=1),
            ]
            saver = ckpt.AsyncCheckpointer(tiers, rank, room / f"lock-{rank}")
            savers.append(stack.enter_context(ended(saver)))
        for step in (1, 2, 3):
            for rank, saver in enumerate(savers):
                arrays = [local_array(s, TWO, rank, full_values(s, step)) for s in TRACED_SPECS]
                saver.save(info(step, TWO), arrays)
            events = [event for saver in savers for event in saver.wait()]
            assert {event.what for event in events} == {"committed", "written"}, events
            note(room, "saved", step)


def assert_saved_in_background(base: Path, saved: set[int], unwanted: set[int]) -> None:
    for name in ("checkpoints", "local-0", "local-1"):
        store = ckpt.LocalStore(base / name, UnsyncedFiles())
        steps = ckpt.committed_steps(store)
        assert max(steps, default=0) >= max(saved, default=0), (name, saved, steps)
        for step in steps:
            ckpt.verify(store, ckpt.read_manifest(store, step))
            if name == "checkpoints":
                assert_whole(store, step, TRACED_SPECS)
        ckpt.lifecycle.remove_uncommitted(store)
        assert ckpt.committed_steps(store) == steps
        assert_nothing_left_over(store)


def converted_source() -> MemorySource:
    return MemorySource({f"model/w{i}": SourceArray((40, 40), "float32") for i in range(3)})


def convert_into_new_folders(room: Path) -> None:
    source, base = converted_source(), room / "disk"
    rewrite(CheckpointTarget(source, base / "new" / "checkpoints", TWO), 64 << 20, workers=2)
    note(room, "saved", 1)
    target = SafetensorsTarget(source, base / "other" / "new" / "folder", TWO, file_bytes=8000)
    rewrite(target, 64 << 20)
    note(room, "saved", 2)


def assert_converted(base: Path, saved: set[int], unwanted: set[int]) -> None:
    source, root, folder = converted_source(), base / "new" / "checkpoints", base / "other/new"
    steps = ckpt.committed_steps(ckpt.LocalStore(root))
    assert steps or 1 not in saved
    if steps:
        ckpt.verify(root, ckpt.read_manifest(root))
        assert_same(CheckpointSource(root, ckpt.read_manifest(root)), source, notes=False)
    folder /= "folder"
    assert folder.exists() or 2 not in saved
    if folder.exists():
        assert_same(SafetensorsSource(folder), source, notes=False)
    # The same command goes on with what was left, and knows its own work again.
    for again in (True, False):
        target = SafetensorsTarget(source, folder, TWO, file_bytes=8000)
        assert rewrite(target, 64 << 20) in (again, False)
    write_checkpoint(source, root, TWO)
    ckpt.verify(root, ckpt.read_manifest(root))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("scenario", "survived"),
    [
        (save_in_background, assert_saved_in_background),
        (convert_into_new_folders, assert_converted),
    ],
)
def test_after_a_crash_of_traced_processes_all_that_is_listed_is_whole(
    scenario, survived, tmp_path, base
):
    traced = tmp_path / "disk"
    traced.mkdir()
    log = operations(trace(__name__, scenario.__name__, tmp_path), tmp_path, traced)
    disk = Disk(traced)
    for op in log:
        disk.apply(op)
    # What strace saw is all that happened.
    assert disk.after(lambda _, __, most: most) == {
        str(path.relative_to(traced)): path.read_bytes() if path.is_file() else None
        for path in sorted(traced.rglob("*"))
    }
    met = crash_everywhere(log, traced, seeds=2, each=False, survived=survived, room=base)
    assert met > len(log) / 2
    with pytest.raises((AssertionError, ValueError)):  # a journal of zeros is no JSON
        crash_everywhere(
            without("sync")(log), traced, seeds=2, each=False, survived=survived, room=base
        )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_crash_after_a_kill_anywhere(base):
    # Killed at any operation, cleaned up after, saved again, retained, and then the power goes.
    whole = Run(base)
    whole.save(1, ONE)
    whole.save(2, ONE)
    first = next(at for at, op in enumerate(whole.files.log) if op.kind == "saved")
    for count in range(len(whole.files.log) - first - 2):
        shutil.rmtree(base)
        run = Run(base)
        run.save(1, ONE)
        run.dies_within(count, lambda run=run: run.save(2, ONE))
        killed = len(run.files.log)
        ckpt.lifecycle.remove_uncommitted(run.store)
        if count % 2:
            run.retain(1)
        if ckpt.committed_steps(run.store)[-1] == 1:
            run.save(2, ONE, "again")
        crash_everywhere(run.files.log, base, seeds=1, each=False, every=3, since=killed)
