"""From any source to any target: bit by bit, in the memory that is given, and on after a kill."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.format.names import renamed
from ckpt.interop.dcp_reader import DcpSource
from ckpt.interop.dcp_writer import DcpTarget
from ckpt.interop.safetensors_reader import SafetensorsSource
from ckpt.interop.safetensors_writer import SafetensorsTarget
from ckpt.rewrite import engine as rewriting
from ckpt.rewrite.checkpoint_target import CheckpointTarget
from ckpt.rewrite.edits import Converted, Selected
from ckpt.rewrite.engine import LEAST_MEMORY, rewrite
from ckpt.rewrite.reshard import write_checkpoint
from ckpt.rewrite.slabs import Slabs, row_major_boxes
from ckpt.rewrite.source import CheckpointSource, SourceArray
from ckpt.rewrite.target import UnfinishedError
from parallel.layout import Topology
from tests.support.checkpoints import bits, full_values, local_array, pieces, save_with_threads
from tests.support.sources import MemorySource, assert_same, big, topologies, trees, whole

ROOT = Path(__file__).parents[2]
MEMORY = 64 << 20
QUICK = [phase for phase in Phase if phase is not Phase.shrink]  # each example takes long


def read(root) -> CheckpointSource:
    manifest = ckpt.read_manifest(root)
    assert ckpt.verify(root, manifest) == manifest.total_bytes
    return CheckpointSource(root, manifest)


def objects(root) -> dict[str, int]:
    return {k: v.checksum for k, v in ckpt.read_manifest(root).objects.items()}


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), phases=QUICK)
@given(trees, topologies, topologies)
def test_any_tree_goes_through_any_layout_and_format_and_comes_back(
    tmp_path_factory, arrays, before, after
):
    root = tmp_path_factory.mktemp("reshard")
    source = MemorySource(arrays)
    write_checkpoint(source, root / "a", before)
    assert_same(read(root / "a"), source, notes=False)
    ckpt.reshard(root / "a", ckpt.read_manifest(root / "a"), root / "b", after)
    rewrite(DcpTarget(read(root / "b"), root / "dcp", after), MEMORY)
    write_checkpoint(DcpSource(root / "dcp"), root / "c", after)
    rewrite(SafetensorsTarget(read(root / "c"), root / "st", after), MEMORY)
    write_checkpoint(SafetensorsSource(root / "st"), root / "d", before)
    assert_same(read(root / "d"), source, notes=False)
    assert objects(root / "a") == objects(root / "d"), "grids and attributes too"
    assert objects(root / "b") == objects(root / "c")
    first, last = ckpt.read_manifest(root / "a"), ckpt.read_manifest(root / "d")
    for field in ("step", "topology", "state", "spec", "spec_hash"):
        assert getattr(first, field) == getattr(last, field)
    by_name = [sorted(each.arrays, key=lambda array: array.name) for each in (first, last)]
    assert by_name[0] == by_name[1]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 9), max_size=4).map(tuple), st.sampled_from([1, 4]),
    st.integers(1, 600),
)  # fmt: skip
def test_boxes_in_row_major_order_are_the_array(shape, itemsize, most):
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    parts = []
    for box in row_major_boxes(shape, itemsize, most):
        part = values[tuple(slice(*extent) for extent in box)]
        assert part.size == 1 or part.size * itemsize <= most
        parts.append(part.reshape(-1))
    joined = np.concatenate(parts) if parts else np.empty(0, int)
    assert np.array_equal(joined, values.reshape(-1))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), max_size=4), st.integers(1, 2000)
)  # fmt: skip
def test_slabs_give_every_chunk_and_read_nothing_twice(dims, slab_bytes):
    shape, chunk = tuple(n for n, _ in dims), tuple(c for _, c in dims)
    values = np.arange(np.prod(shape, dtype=int), dtype=np.int64).reshape(shape)
    read_elements = []

    def read_box(box):
        part = values[tuple(slice(*extent) for extent in box)]
        read_elements.append(part.size)
        return np.asarray(part)

    base = tuple((0, n) for n in shape)
    slabs = Slabs(read_box, base, chunk, 8, slab_bytes)
    grid = [range(0, n, c) for n, c in dims]
    for start in product(*grid):
        box = tuple((s, min(s + c, n)) for s, (n, c) in zip(start, dims, strict=True))
        expected = values[tuple(slice(*extent) for extent in box)]
        assert np.array_equal(slabs(box), expected)
    assert sum(read_elements) == values.size
    assert max(read_elements) * 8 <= max(slab_bytes, np.prod(chunk) * 8)


SCRIPT = """
import json, os, sys, threading, time
from pathlib import Path
from convoy.commands.reshard import main
def peak(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
def watch(peaks, stop):
    while not stop.is_set():
        for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
            try:
                peaks[pid] = peak(pid)
            except (OSError, StopIteration):
                pass  # it has ended
        time.sleep(0.005)
def run(arguments):
    peaks, stop = {}, threading.Event()
    thread = threading.Thread(target=watch, args=(peaks, stop))
    thread.start()
    code = main(arguments)
    stop.set()
    thread.join()
    assert code == 0
    return peak("self"), max(peaks.values(), default=0)
small, arguments = json.loads(sys.argv[1])
before = run(small)  # everything is imported, every process has been started
after = run(arguments)
print(json.dumps([after[0] - before[0], after[1] - before[1]]))
"""


def measured(small: list, arguments: list) -> tuple[int, int]:
    """The growth of the peaks of the process and of its largest child, in bytes."""
    text = json.dumps([list(map(str, small)), list(map(str, arguments))])
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, text], cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    own, child = json.loads(result.stdout.splitlines()[-1])
    return own, child


@pytest.mark.parametrize(
    ("workers", "form"),
    [
        (1, "convoy"),
        pytest.param(2, "convoy", marks=pytest.mark.slow),
        pytest.param(1, "safetensors", marks=pytest.mark.slow),
        pytest.param(2, "dcp", marks=pytest.mark.slow),
    ],
)
def test_memory_stays_within_its_limit_for_a_checkpoint_ten_times_as_large(tmp_path, workers, form):
    limit = workers * LEAST_MEMORY
    spec = ckpt.ArraySpec("model/w", (8, 1031, 11 * workers, 1024), torch.float32,
                          ((), ("fsdp",), (), ()))  # fmt: skip
    values = MemorySource({"model/w": SourceArray(spec.shape, "float32", spec.splits)})
    manifest = write_checkpoint(values, tmp_path / "large", Topology(dp_shard=3))
    del values
    assert manifest.total_bytes > 10 * limit
    write_checkpoint(big(1 << 20), tmp_path / "small", Topology(dp_shard=2))
    tail = ["--layout", "dp_shard=2", "--memory", limit, "--workers", workers, "--format", form]
    own, child = measured(
        [tmp_path / "small", tmp_path / "small-out", *tail],
        [tmp_path / "large", tmp_path / "out", *tail],
    )
    print(f"{workers} workers, {form}: {own >> 20} MiB, a child {child >> 20} MiB of {limit >> 20}")
    assert max(own, child) > 1 << 20, "what was measured is not the work"
    assert own + (workers if workers > 1 else 0) * child <= limit


def many_objects(count: int = 30) -> MemorySource:
    return MemorySource(
        {
            f"model/w{i:03d}": SourceArray((64, 1024), "float32", (("fsdp",), ()))
            for i in range(count)
        }
    )


EAGER = """
import multiprocessing, os, signal, sys
from ckpt.rewrite import CheckpointTarget, engine
from convoy.commands.reshard import main
victim, at, count = sys.argv[1], int(sys.argv[2]), 0
journal, engine._JOURNAL_SECONDS = CheckpointTarget.journal, 0.0
def journal_and_kill(self, receipts):
    global count
    journal(self, receipts)
    count += len(receipts)
    if count == at:
        workers = [process.pid for process in multiprocessing.active_children()]
        print(*workers, flush=True)
        os.kill(workers[0] if victim == "worker" else os.getpid(), signal.SIGKILL)
CheckpointTarget.journal = journal_and_kill
sys.exit(main(sys.argv[3:]))
"""


def run(
    *arguments: object, victim: str = "nobody", at: int = 0
) -> subprocess.CompletedProcess[str]:
    """A reshard that kills a worker, or itself, when it has put ``at`` parts in its journal."""
    return subprocess.run(
        [sys.executable, "-c", EAGER, victim, str(at), *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip


def journaled(root: Path) -> dict[str, dict]:
    found: dict[str, dict] = {}
    for path in root.glob("objects/.pending-*/journal-*"):
        found |= json.loads(path.read_bytes())
    return found


def test_after_a_kill_the_same_command_goes_on_and_writes_nothing_twice(tmp_path):
    write_checkpoint(many_objects(), tmp_path / "a", Topology())
    target = tmp_path / "b"
    command = [tmp_path / "a", target, "--layout", "dp_shard=4", "--workers", "2"]

    first = run(*command, victim="worker", at=3)
    assert first.returncode == 2, first.stderr
    assert "a worker was killed" in first.stderr
    assert len(first.stderr.splitlines()) == 1

    second = run(*command, victim="it", at=20)
    assert second.returncode == -signal.SIGKILL, second.stderr
    workers = second.stdout.split()
    assert len(workers) == 2
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "workers outlive the one who started them"
        time.sleep(0.02)
    assert ckpt.committed_steps(target) == [], "what is not whole is not there"

    (folder,) = (p for p in (target / "objects").iterdir() if not p.name.startswith("."))
    done = journaled(target)
    assert 20 < len(done) < 120, len(done)
    seen = {key: (folder / key).stat() for key in done}
    damaged = sorted(done)[0]
    data = bytearray((folder / damaged).read_bytes())
    data[100] ^= 1
    (folder / damaged).write_bytes(data)

    third = run(*command)
    assert third.returncode == 0, third.stderr
    assert "written and verified" in third.stdout
    for key, before in seen.items():
        after = (folder / key).stat()
        same = (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        assert same == (key != damaged), f"{key}: what is durable and whole is not written again"
    assert_same(read(target), read(tmp_path / "a"), notes=False)
    write_checkpoint(read(tmp_path / "a"), tmp_path / "direct", Topology(dp_shard=4))
    assert objects(target) == objects(tmp_path / "direct")
    assert [p.name for p in (target / "objects").iterdir()] == [folder.name]


@pytest.mark.parametrize("make", [SafetensorsTarget, DcpTarget])
def test_files_are_gone_on_with_too(tmp_path, make, monkeypatch):
    monkeypatch.setattr(rewriting, "_JOURNAL_SECONDS", 0.0)
    monkeypatch.setattr("ckpt.interop.dcp_writer.FILE_BYTES", 1 << 20)
    options = {"file_bytes": 1 << 20} if make is SafetensorsTarget else {}
    source = many_objects(12)

    class Stop(BaseException):
        pass

    class Dying(MemorySource):
        def read_box(self, name, box):
            if name == "model/w009":
                raise Stop
            return super().read_box(name, box)

    folder = tmp_path / "out"
    with pytest.raises(Stop):
        rewrite(make(Dying(source.arrays), folder, Topology(), **options), MEMORY)
    assert not folder.exists()
    (work,) = tmp_path.iterdir()
    before = {p.name: p.stat().st_ino for p in work.iterdir() if "_" in p.name or "-" in p.name}
    whole_files = json.loads(
        "[" + ",".join(line.split(" ", 1)[1] for line in
                       (work / "journal.jsonl").read_text().splitlines() if line) + "]"
    )  # fmt: skip
    assert len(whole_files) == 2
    source.read_bytes.clear()
    rewrite(make(source, folder, Topology(), **options), MEMORY)
    for name, _ in whole_files:
        assert (folder / name).stat().st_ino == before[name]
    assert sum(source.read_bytes) == 4 * source.arrays["model/w000"].nbytes, (
        "the third file's alone"
    )
    assert_same((SafetensorsSource if make is SafetensorsTarget else DcpSource)(folder), source)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("make", [SafetensorsTarget, DcpTarget])
def test_after_a_kill_before_the_folder_got_its_name_the_same_command_makes_it(
    tmp_path, make, monkeypatch
):
    class Stop(BaseException):
        pass

    def stop(hidden: Path, target: Path) -> None:
        raise Stop

    source, folder = many_objects(3), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("ckpt.rewrite.folder_target.publish_folder", stop)
        with pytest.raises(Stop):
            rewrite(make(source, folder, Topology()), MEMORY)
    assert rewrite(make(source, folder, Topology()), MEMORY)
    assert not rewrite(make(source, folder, Topology()), MEMORY), "its own work, and whole"


def test_two_cannot_write_the_same_at_once(tmp_path):
    source = big(1 << 20)
    for make in (
        lambda: CheckpointTarget(source, tmp_path / "a", Topology()),
        lambda: SafetensorsTarget(source, tmp_path / "b", Topology()),
    ):
        first = make()
        first.begin()
        with pytest.raises(ckpt.CheckpointError, match="is being written by another process"):
            rewrite(make(), MEMORY)
        first.end()
        rewrite(make(), MEMORY)


def test_a_full_disk_keeps_what_is_durable_and_a_bad_source_keeps_nothing(tmp_path, monkeypatch):
    source = many_objects(10)

    class Full(ckpt.LocalStore):
        def write(self, key, parts):
            if "w007/c" in key:
                raise OSError(28, "No space left on device", key)
            super().write(key, parts)

    store = Full(tmp_path / "a")
    with pytest.raises(UnfinishedError, match=r"No space left on device; once it can be, the same"):
        rewrite(CheckpointTarget(source, store, Topology()), MEMORY)
    assert len(journaled(tmp_path / "a")) == 7
    source.read_bytes.clear()
    rewrite(CheckpointTarget(source, tmp_path / "a", Topology()), MEMORY)
    assert sum(source.read_bytes) == 3 * source.arrays["model/w000"].nbytes
    assert_same(read(tmp_path / "a"), source, notes=False)

    class Bad(MemorySource):
        def read_box(self, name, box):
            if name == "model/w007":
                raise ckpt.CheckpointError("this source is damaged")
            return super().read_box(name, box)

    with pytest.raises(ckpt.CheckpointError, match="this source is damaged"):
        rewrite(CheckpointTarget(Bad(source.arrays), tmp_path / "b", Topology()), MEMORY)
    assert list((tmp_path / "b/objects").iterdir()) == []
    with pytest.raises(ckpt.CheckpointError, match="this source is damaged"):
        rewrite(SafetensorsTarget(Bad(source.arrays), tmp_path / "c", Topology()), MEMORY)
    assert not list(tmp_path.glob("*c*"))


@pytest.mark.parametrize("make", [CheckpointTarget, SafetensorsTarget, DcpTarget])
def test_too_little_room_is_told_before_the_first_part(tmp_path, monkeypatch, make):
    source, written = many_objects(4), []
    usage = shutil.disk_usage(tmp_path)
    little = usage._replace(free=sum(array.nbytes for array in source.arrays.values()) - 1)
    write = make.write
    monkeypatch.setattr(
        make, "write", lambda self, *args: written.append(args) or write(self, *args)
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda path: little)
    with pytest.raises(UnfinishedError, match=r"out must have room for .* GB; it has .* GB"):
        rewrite(make(source, tmp_path / "out", Topology()), MEMORY)
    assert not written
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    rewrite(make(source, tmp_path / "out", Topology()), MEMORY)
    assert len(written) >= 1


def test_too_little_memory_is_refused(tmp_path):
    target = CheckpointTarget(big(1 << 20), tmp_path / "a", Topology())
    with pytest.raises(ckpt.CheckpointError, match=r"memory .63 MiB. must be at least 64 MiB"):
        rewrite(target, (64 << 20) - 1, workers=2)
    assert not (tmp_path / "a").exists()


def test_a_reshard_whose_manifest_was_moved_away_is_made_again(tmp_path):
    """Its objects are there, without a mark: they have the name of the new one."""
    source = many_objects(3)
    target, topology = tmp_path / "target", Topology(dp_shard=2)
    first = write_checkpoint(source, target, topology)
    manifest = target / "manifests" / f"step-{first.step:08d}.json"
    manifest.rename(tmp_path / "away.json")
    again = write_checkpoint(source, target, topology)
    assert again.save_id == first.save_id
    assert ckpt.committed_steps(target) == [first.step]
    assert ckpt.verify(target, again) == first.total_bytes
    assert_same(source, read(target))


def test_other_options_are_another_save(tmp_path):
    source = many_objects(2)
    names = {name: name for name in source.arrays}
    ids = {
        CheckpointTarget(made, tmp_path / "a", topology).info.save_id
        for made, topology in [
            (source, Topology()),
            (source, Topology(dp_shard=2)),
            (Selected(source, {"model/w000": "model/w001"}), Topology()),
            (Selected(source, names), Topology()),
            (Converted(source, names, "bfloat16"), Topology()),
            (Converted(source, names, "float16"), Topology()),
        ]
    }
    assert len(ids) == 6


def test_another_version_of_the_format_is_another_save(tmp_path, monkeypatch):
    # What an older Convoy had begun has objects by other names.
    def save_id() -> str:
        return CheckpointTarget(many_objects(2), tmp_path / "a", Topology()).info.save_id

    now = save_id()
    assert now == save_id()
    monkeypatch.setattr(ckpt.Manifest.model_fields["format_version"], "default", 3)
    assert now != save_id()


def test_a_load_takes_renamed_arrays_and_keeps_missing_ones_only_when_told(tmp_path):
    old = [ckpt.ArraySpec(name, (5, 4), torch.float32, (("fsdp",), ())) for name in ("a/x", "a/y")]
    manifest = save_with_threads(tmp_path, 1, Topology(), old)
    new = [ckpt.ArraySpec(name, (5, 4), torch.float32, (("fsdp",), ())) for name in ("b/x", "c")]
    topology = Topology(dp_shard=2)

    def fresh():
        return [local_array(spec, topology, 1, torch.ones(5, 4)) for spec in new]

    def load(arrays, *rules, **more):
        return ckpt.load(tmp_path, manifest, arrays, *rules, **more)

    for rules, match in [
        ((), "has no array b/x"),
        (({"a/": "b/"},), "the model has no array b/y"),
        (({"a/x": "b/x"},), "has no array c"),
        (({"a/z": "b/x"}, "keep"), "rename a/z=b/x: there is no such array"),
        (({"a/x": "b/x"}, "keep"), r'array a/y must be among .*extra="ignore" to leave'),
        (({}, "keep"), r"array a/x and 1 more must be among the arrays to load"),
    ]:
        arrays = fresh()
        with pytest.raises(ckpt.CheckpointError, match=match):
            load(arrays, *rules)
        assert all((pieces(array) == 1).all() for array in arrays)
    arrays = fresh()
    assert load(arrays, {"a/x": "b/x"}, "keep", extra="ignore") == ["c"]
    expected = local_array(old[0], topology, 1, full_values(old[0]))
    assert torch.equal(bits(pieces(arrays[0])), bits(pieces(expected)))
    assert (pieces(arrays[1]) == 1).all()
    arrays = fresh()
    assert load(arrays, {"a/x": "b/x", "a/y": "c"}) == []
    assert renamed(["a/x"], {}) == {"a/x": "a/x"}
    assert whole(SourceArray((2, 3), "float32")) == ((0, 2), (0, 3))
