"""What works on files, on a disk that is full from some operation on; run by tests/runs.

``python -m tests.support.full_disk ROOM SCENARIO EVERY FIRST FAILURES`` has the preloaded library
of :mod:`tests.support.faulty_libc`. The scenario runs in a fork of this process for each operation
at which the disk becomes full. After each fork, what must be so is checked. The last line that is
printed is JSON: the number of operations, of runs, and of runs that met the full disk.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import faulty_libc

FAILED = 3
"""Exit code of a fork whose work ended with one line about the full disk."""
BROKEN = 4
"""Exit code of a fork whose work ended otherwise."""
WORDS = ("No space left on device", "full disk")


@dataclass(frozen=True)
class Scenario:
    """Work on files below a folder, and what must be so afterwards."""

    make: Callable[[Path], None]
    """Before the disk is full."""
    act: Callable[[Path], None]
    """The work; ends by an error of one line where the disk is full."""
    check: Callable[[Path, bool], None]
    """Given whether the work was done; the disk has room again."""


def one_line(act: Callable[[], None]) -> int:
    """The exit code of work that may meet a full disk; says what was wrong with its end."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            act()
    except Exception as error:
        text = str(error)
        if "\n" not in text and any(word in text for word in WORDS):
            return FAILED
        traceback.print_exc()
        return BROKEN
    return 0


def in_fork(scenario: Scenario, folder: Path, at: int, failures: int) -> tuple[int, int]:
    """Run the work in a fork; its exit code, and the operations that it made."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        code = BROKEN
        try:
            faulty_libc.arm(folder, at, failures)
            code = one_line(lambda: scenario.act(folder))
            os.write(writes, str(faulty_libc.count()).encode())
        finally:
            os._exit(code)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        count = pipe.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), int(count or 0)


def run(scenario: Scenario, room: Path, every: int, first: int, failures: int) -> dict[str, int]:
    """Make the disk full at every ``every``-th operation; returns what was counted."""
    folder = room / "calm"
    scenario.make(folder)
    code, operations = in_fork(scenario, folder, -1, 0)
    assert code == 0, f"the work fails on a disk with room: {code}"
    scenario.check(folder, True)
    runs = met = 0
    for at in range(first % every, operations, every):
        folder = room / "full"
        shutil.rmtree(folder, ignore_errors=True)
        scenario.make(folder)
        code, _ = in_fork(scenario, folder, at, failures)
        assert code in (0, FAILED), f"full at operation {at} of {operations}: exit code {code}"
        try:
            scenario.check(folder, code == 0)
        except Exception as error:
            raise AssertionError(f"full at operation {at} of {operations}: {error}") from error
        runs += 1
        met += code == FAILED
    return {"operations": operations, "runs": runs, "met": met}


# ------------------------------------------------------------------------------------------------
# The scenarios. What they need is imported once, and before anything is forked.


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*")) if path.is_file()
    }  # fmt: skip


def preparation() -> Scenario:
    """``convoy prepare``: documents, tokenizer, shards and manifest."""
    from corpus.config import DataConfig
    from corpus.manifest import read_manifest
    from corpus.prepare.prepare import prepare_corpus
    from pretrain.data.verify import verify_corpus
    from tests.support.jobs import write_corpus

    def config(folder: Path) -> Any:
        return DataConfig(
            source=str(folder / "text"), path=str(folder / "disk" / "corpus"), seq_len=32,
            shard_tokens=4000,
        )  # fmt: skip

    def make(folder: Path) -> None:
        write_corpus(folder / "text", 6)
        (folder / "disk").mkdir()

    def act(folder: Path) -> None:
        prepare_corpus(config(folder), 300, lambda _: None)

    calm: dict[str, bytes] = {}

    def check(folder: Path, done: bool) -> None:
        target = folder / "disk" / "corpus"
        assert target.exists() or not done, "it is done, and not there"
        if target.exists():
            verify_corpus(target, read_manifest(target))
        prepare_corpus(config(folder), 300, lambda _: None)
        found = _files(target)
        found.pop("manifest.json")  # has the paths of the source
        calm.update(calm or found)
        assert found == calm, "the second start makes other files"
        assert [path.name for path in (folder / "disk").iterdir() if path.is_dir()] == ["corpus"]

    return Scenario(make, act, check)


def _checkpoint(folder: Path, step: int) -> None:
    from tests.support.checkpoints import save_with_threads
    from tests.support.damage import SPECS, TOPOLOGY

    save_with_threads(folder / "source", step, TOPOLOGY, SPECS, step)


def reshard() -> Scenario:
    """``convoy reshard layout``: a checkpoint in another layout, in another folder."""
    import ckpt
    from parallel.layout import Topology
    from tests.support.checkpoints import assert_nothing_left_over, assert_whole
    from tests.support.damage import SPECS

    def make(folder: Path) -> None:
        _checkpoint(folder, 5)
        (folder / "disk").mkdir()

    def act(folder: Path) -> None:
        source = folder / "source"
        target = folder / "disk" / "target"
        ckpt.reshard(source, ckpt.read_manifest(source), target, Topology(dp_shard=4, ep=4))

    def check(folder: Path, done: bool) -> None:
        target = folder / "disk" / "target"
        steps = ckpt.committed_steps(ckpt.LocalStore(target))
        assert steps == [5] or (not done and steps == [])
        if not steps:
            act(folder)
        assert_whole(target, 5, SPECS)
        ckpt.lifecycle.remove_uncommitted(target)
        assert_nothing_left_over(target)

    return Scenario(make, act, check)


def conversion() -> Scenario:
    """``convoy convert``: a folder of safetensors."""
    from ckpt.interop.safetensors_reader import SafetensorsSource
    from ckpt.interop.safetensors_writer import SafetensorsTarget
    from ckpt.rewrite import SourceArray, rewrite
    from parallel.layout import Topology
    from tests.support.sources import MemorySource, assert_same

    source = MemorySource({f"model/w{i}": SourceArray((40, 40), "float32") for i in range(3)})

    def make(folder: Path) -> None:
        (folder / "disk").mkdir(parents=True)

    def act(folder: Path) -> None:
        where = folder / "disk" / "new" / "folder"
        rewrite(SafetensorsTarget(source, where, Topology(), file_bytes=8000), 64 << 20)

    def check(folder: Path, done: bool) -> None:
        where = folder / "disk" / "new" / "folder"
        assert where.exists() or not done
        if where.exists():
            assert_same(SafetensorsSource(where), source, notes=False)
        act(folder)
        assert_same(SafetensorsSource(where), source, notes=False)

    return Scenario(make, act, check)


def save_and_prune() -> Scenario:
    """A save over another, its commit, and a retention pass; with an object that is written past
    the page cache."""
    import torch

    import ckpt
    from parallel.layout import Topology
    from tests.support.checkpoints import (
        assert_nothing_left_over,
        assert_whole,
        full_values,
        info,
        local_array,
    )
    from tests.support.damage import SPECS

    specs = [*SPECS, ckpt.ArraySpec("model/large", (64, 64), torch.float32, (("fsdp",), ()))]

    def save(folder: Path, step: int) -> None:
        arrays = [local_array(s, Topology(), 0, full_values(s, step)) for s in specs]
        ckpt.save(folder / "disk" / "root", info(step, Topology()), arrays, 0, lambda ok: ok)

    def make(folder: Path) -> None:
        (folder / "disk" / "root").mkdir(parents=True)
        save(folder, 1)

    def act(folder: Path) -> None:
        save(folder, 2)
        ckpt.retain(folder / "disk" / "root", 1)

    def check(folder: Path, done: bool) -> None:
        root = folder / "disk" / "root"
        steps = ckpt.committed_steps(root)
        assert steps in ([2], [1, 2]) or (not done and steps == [1]), steps
        for step in steps:
            assert_whole(root, step, specs)
        ckpt.lifecycle.remove_uncommitted(root)
        save(folder, 3)
        ckpt.retain(root, 1)
        assert ckpt.committed_steps(root) == [3]
        assert_whole(root, 3, specs)
        assert_nothing_left_over(root)

    return Scenario(make, act, check)


SCENARIOS = {
    "preparation": preparation,
    "reshard": reshard,
    "conversion": conversion,
    "save and prune": save_and_prune,
}


if __name__ == "__main__":
    where, name, every, first, failures = sys.argv[1:]
    made = SCENARIOS[name]()
    print(json.dumps(run(made, Path(where), int(every), int(first), int(failures))))
