"""What is done to every file of a checkpoint, who notices, and what they say.

``python -m tests.support.damage`` prints the tables of docs/checkpoint-format.md, and
``--write`` puts the tables there.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import ckpt
from ckpt.format.shard_layout import ObjectLayout
from ckpt.write.commit import commit
from ckpt.write.objects import write_metadata, write_objects
from parallel.layout import Topology, cells
from tests.support.checkpoints import (
    bits,
    full_values,
    info,
    local_array,
    manifest_file,
    memory_folder,
    objects_folder,
    pieces,
)

TOPOLOGY = Topology(dp_shard=2, ep=2)
SPECS = [
    ckpt.ArraySpec("model/w", (6, 5), torch.float32, (("fsdp",), ())),
    ckpt.ArraySpec("model/layers/e", (2, 4, 2, 3), torch.bfloat16, ((), ("ep",), ("efsdp",), ())),
    ckpt.ArraySpec("step", (), torch.int64, ()),
]
STEP = 5
DOC = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"
BEGIN, END = "<!-- damage: python -m tests.support.damage --write -->", "<!-- end of damage -->"


def make(root: Path, compression: str) -> ckpt.Manifest:
    """Two checkpoints, of which the newer is the one that is damaged; objects of several chunks."""
    for step in (STEP - 1, STEP):
        store, about = ckpt.open_store(root), info(step, TOPOLOGY, compression=compression)
        records, todo = [], []
        for spec in SPECS:
            record = spec.record(TOPOLOGY, about.compression)
            # The last dim is cut: more chunks than a small array would have.
            chunk = (*record.chunk_shape[:-1], 1) if spec.shape else ()
            records.append(record.model_copy(update={"chunk_shape": chunk}))
            array = local_array(spec, Topology(), 0, full_values(spec, step))
            whole = tuple((0, size) for size in spec.shape)
            for coordinates in cells(whole, record.shard_shape):
                todo.append((ObjectLayout(records[-1], coordinates), array.read_into))
        objects = write_metadata(store, about, records) | write_objects(store, about, todo)
        manifest = commit(store, about, records, objects)
    return manifest


@dataclass(frozen=True)
class Subject:
    """A checkpoint that is whole, and what is in its files."""

    root: Path
    manifest: ckpt.Manifest

    @property
    def folder(self) -> Path:
        return objects_folder(self.root, self.manifest.save_id)

    def path(self, key: str) -> Path:
        return manifest_file(self.root, STEP) if key == MANIFEST else self.folder / key

    def kind(self, key: str) -> str:
        return key if key == MANIFEST else "zarr.json" if key.endswith("zarr.json") else "object"

    def layout(self, key: str) -> ObjectLayout:
        name, _, rest = key.rpartition("/c")
        return ObjectLayout(self.manifest.array(name), tuple(map(int, rest.split(".")[1:])))

    def regions(self, key: str) -> dict[str, list[int]]:
        """The bytes of an object by what they are: chunks, their checksums, index, padding."""
        layout, data = self.layout(key), self.path(key).read_bytes()
        index = np.frombuffer(data[-layout.index_bytes : -4], "<u8").reshape(-1, 2).tolist()
        found: dict[str, list[int]] = {"a chunk's data": [], "a chunk's CRC32C": []}
        for number, _ in layout.chunks:
            start, size = index[number]
            found["a chunk's data"] += range(start, start + size - 4)
            found["a chunk's CRC32C"] += range(start + size - 4, start + size)
        inner = len(data) - layout.index_bytes
        found["the index"] = list(range(inner, len(data)))
        known = set().union(*map(set, found.values()))
        found["padding between chunks"] = sorted(set(range(len(data))) - known)
        return found


MANIFEST = "manifest"


Changes = dict[str, bytes | None]
"""New contents of files, None to delete one."""
Damage = Callable[[Subject, str, int], Iterator[Changes]]


def flips(region: str) -> Damage:
    """One bit after the other, a different one of each byte; at most so many of a file."""

    def one(subject: Subject, key: str, most: int) -> Iterator[Changes]:
        data = subject.path(key).read_bytes()
        places = subject.regions(key)[region] if region else range(len(data))
        # Of a manifest more of them: much of it is words, which only its checksum knows.
        limit = most if region else 8 * most
        for at in places[:: max(1, len(places) // limit)]:
            yield {key: data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]}

    return one


def truncated(subject: Subject, key: str, most: int) -> Iterator[Changes]:
    data = subject.path(key).read_bytes()
    yield from ({key: part} for part in (data[:-1], data[: len(data) // 2], b""))


def extended(subject: Subject, key: str, most: int) -> Iterator[Changes]:
    data = subject.path(key).read_bytes()
    yield from ({key: more} for more in (data + b"\0", data + data))


def deleted(subject: Subject, key: str, most: int) -> Iterator[Changes]:
    yield {key: None}


def another(subject: Subject, key: str, most: int) -> Iterator[Changes]:
    """A copy of every other file of its kind."""
    data = subject.path(key).read_bytes()
    for other in subject.manifest.objects:
        found = subject.path(other).read_bytes()
        if subject.kind(other) == subject.kind(key) and found != data:
            yield {key: found}


def swapped(subject: Subject, key: str, most: int) -> Iterator[Changes]:
    """With every other file of its kind and length."""
    data = subject.path(key).read_bytes()
    for change in another(subject, key, most):
        (found,) = change.values()
        others = [k for k in subject.manifest.objects if subject.path(k).read_bytes() == found]
        if found is not None and len(found) == len(data):
            yield {key: found, others[0]: data}


def earlier(subject: Subject, key: str, most: int) -> Iterator[Changes]:
    """The file of the same name of the checkpoint before."""
    before = ckpt.read_manifest(subject.root, STEP - 1)
    folder = objects_folder(subject.root, before.save_id)
    path = manifest_file(subject.root, STEP - 1) if key == MANIFEST else folder / key
    if path.read_bytes() != subject.path(key).read_bytes():
        yield {key: path.read_bytes()}


DAMAGES: list[tuple[str, str, Damage]] = [
    ("object", "one bit of a chunk's data flipped", flips("a chunk's data")),
    ("object", "one bit of a chunk's CRC32C flipped", flips("a chunk's CRC32C")),
    ("object", "one bit of the index flipped", flips("the index")),
    ("object", "one bit of the padding between chunks flipped", flips("padding between chunks")),
    ("object", "truncated", truncated),
    ("object", "extended", extended),
    ("object", "deleted", deleted),
    ("object", "replaced by a copy of another", another),
    ("object", "swapped with another as long", swapped),
    ("object", "replaced by its like of the checkpoint before", earlier),
    ("zarr.json", "one bit flipped", flips("")),
    ("zarr.json", "truncated", truncated),
    ("zarr.json", "extended", extended),
    ("zarr.json", "deleted", deleted),
    ("zarr.json", "replaced by a copy of another", another),
    ("manifest", "one bit flipped", flips("")),
    ("manifest", "truncated", truncated),
    ("manifest", "extended", extended),
    ("manifest", "deleted", deleted),
    ("manifest", "replaced by that of the checkpoint before", earlier),
]


def by_load(subject: Subject, key: str) -> None:
    manifest = ckpt.read_manifest(subject.root, STEP)
    arrays = [local_array(spec, Topology(), 0) for spec in SPECS]
    ckpt.load(subject.root, manifest, arrays)
    for array in arrays:
        expected = full_values(array.spec, STEP)
        assert torch.equal(bits(pieces(array)), bits(expected)), f"{key}: wrong numbers"


def by_verify(subject: Subject, key: str) -> None:
    ckpt.verify(subject.root, ckpt.read_manifest(subject.root, STEP))


def by_part(subject: Subject, key: str) -> None:
    """Each chunk of the damaged object, alone."""
    manifest = ckpt.read_manifest(subject.root, STEP)
    if subject.kind(key) != "object":
        return
    layout = subject.layout(key)
    spec = next(spec for spec in SPECS if spec.name == layout.record.name)
    expected = full_values(spec, STEP)
    refused = None
    for _, box in layout.chunks:
        try:
            found = ckpt.read.read_box(subject.root, manifest, layout.record, box)
        except ckpt.CheckpointError as error:
            refused = error
            continue
        part = expected[tuple(slice(*extent) for extent in box)]
        assert np.array_equal(found.reshape(-1).view(np.uint8), bits(part).numpy().reshape(-1)), key
    if refused is not None:
        raise refused


def by_zarr(subject: Subject, key: str) -> None:
    """zarr-python's own reader, behind ``ckpt.read.open_group``."""
    group = ckpt.read.open_group(subject.root, STEP)
    for spec in SPECS:
        found = np.asarray(group[spec.name][...])
        expected = bits(full_values(spec, STEP)).numpy().tobytes()
        if found.tobytes() != expected:
            raise WrongNumbersError(key)


class WrongNumbersError(Exception):
    """A reader that took damage for numbers."""


READERS: dict[str, Callable[[Subject, str], None]] = {
    "load": by_load,
    "verify": by_verify,
    "read_box": by_part,
    "zarr": by_zarr,
}


@dataclass
class Outcome:
    """Of one kind of damage, to every file of one kind and in every way, for one reader."""

    tried: int = 0
    caught: int = 0
    wrong: int = 0
    message: str = ""

    @property
    def word(self) -> str:
        if self.wrong:
            return "refused, or **wrong numbers**" if self.caught else "**wrong numbers**"
        if self.caught not in (0, self.tried):
            return "refused, or right numbers"
        return "refused" if self.caught else "right numbers" if self.tried else "-"


def examine(
    subject: Subject, kind: str, damage: Damage, readers: list[str], most: int
) -> dict[str, Outcome]:
    """Do one damage to each file of a kind in turn, and have it read; each refusal must name it."""
    outcomes = {name: Outcome() for name in readers}
    for key in [MANIFEST, *subject.manifest.objects]:
        for changes in list(damage(subject, key, most)) if subject.kind(key) == kind else []:
            originals = {k: subject.path(k).read_bytes() for k in changes}
            try:
                for k, data in changes.items():
                    subject.path(k).unlink() if data is None else subject.path(k).write_bytes(data)
                for name in readers:
                    _read(subject, list(changes), READERS[name], outcomes[name])
            finally:
                for k, data in originals.items():
                    subject.path(k).write_bytes(data)
    return outcomes


def _read(
    subject: Subject, keys: list[str], reader: Callable[[Subject, str], None], outcome: Outcome
) -> None:
    outcome.tried += 1
    try:
        reader(subject, keys[0])
    except ckpt.CheckpointError as error:
        outcome.caught += 1
        message = str(error)
        named = any(f"{subject.path(key)}" in message for key in keys) or (
            # A manifest that is not there has no name: the step has.
            keys == [MANIFEST] and f"no checkpoint of step {STEP} in {subject.root}" in message
        )
        assert named, f"{keys}: {message}"
        assert "\n" not in message
        outcome.message = outcome.message or message
    except WrongNumbersError:
        outcome.wrong += 1
    except Exception:  # zarr-python refuses in its own words
        if reader is not by_zarr:
            raise
        outcome.caught += 1


Outcomes = dict[tuple[str, str], dict[str, Outcome]]


def _plain(message: str) -> str:
    """A message without what differs from run to run."""
    message = re.sub(r"/\S*/(manifests|objects)/", r"\1/", message)
    message = re.sub(r" in /\S+", " in ROOT", message)
    message = re.sub(r"objects/\S+?/", "", message)
    message = re.sub(r"object \S+", "object KEY", message)
    return re.sub(r"(chunk|byte|has|says|step) \d+", r"\1 N", message)


def table(compression: str, most: int) -> tuple[list[str], Outcomes]:
    """Lines of Markdown, and what they tell, by kind of file and damage."""
    lines = [
        "| what | was | `load` | `verify` | `read_box` | zarr-python | message |",
        "|---|---|---|---|---|---|---|",
    ]
    found: Outcomes = {}
    with memory_folder() as folder:
        subject = Subject(Path(folder), make(Path(folder), compression))
        for kind, what, damage in DAMAGES:
            outcomes = examine(subject, kind, damage, list(READERS), most)
            found[kind, what] = outcomes
            words = " | ".join(outcome.word for outcome in outcomes.values())
            message = next((o.message for o in outcomes.values() if o.message), "")
            lines.append(f"| {kind} | {what} | {words} | {_plain(message)} |")
    return lines, found


def section(most: int = 1 << 30) -> tuple[str, list[Outcomes]]:
    """Convoy's own tables, and what they tell; of each kind of flip at most so many of a file."""
    plain, of_plain = table("none", most)
    packed, of_packed = table("zstd", most)
    lines = ["Not compressed:", "", *plain, "", "Compressed with zstd:", "", *packed]
    return "\n".join(lines), [of_plain, of_packed]


def main() -> None:
    """Print the tables, or put them into the page."""
    from tests.support.damage_peers import peers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    text = "\n\n".join([section()[0], peers()])
    if parser.parse_args().write:
        page = DOC.read_text()
        before, _, rest = page.partition(BEGIN)
        _, _, after = rest.partition(END)
        DOC.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
    else:
        sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
