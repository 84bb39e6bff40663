"""Writing a checkpoint from any source, object by object."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path

from ckpt.errors import CheckpointError
from ckpt.format import (
    TREE,
    Array,
    ArrayRecord,
    Encoder,
    Manifest,
    ObjectLayout,
    ObjectRecord,
    PackedTensor,
    check_names,
    committed_steps,
    metadata_objects,
    objects_key,
    pending_key,
    read_manifest,
    storage_grid,
)
from ckpt.read import read_nowhere
from ckpt.rewrite.journal import Locked, unwritable
from ckpt.rewrite.packed import Packed
from ckpt.rewrite.slabs import Slabs
from ckpt.rewrite.source import Source, SourceArray
from ckpt.rewrite.target import Part, Progress, Receipt
from ckpt.store import LocalStore, Location, open_store
from ckpt.write import SaveInfo, begin, commit, discard
from parallel.layout import Box, Topology, cells, whole_box
from parallel.placements import MeshLayout


def record_under(name: str, array: SourceArray, topology: Topology) -> ArrayRecord:
    """The record of an array that is cut for ``topology``, along the dims that the saving layout
    cut. A save under ``topology`` may cut other dims (stages, tensor parallelism); any layout loads
    either."""
    layout = array.layout(topology)
    shard, chunk = storage_grid(layout, array.dtype.itemsize)
    return ArrayRecord(
        name=name,
        shape=array.shape,
        logical_dtype=array.logical_dtype,
        splits=((),) * len(array.shape) if isinstance(layout, MeshLayout) else layout.splits,
        shard_shape=shard,
        chunk_shape=chunk,
        compression=array.compression,
        separator=".",
        mesh=array.mesh,
        placements=array.placements,
        attributes=dict(array.attributes),
    )


class CheckpointTarget(Locked):
    """A :class:`ckpt.rewrite.Target`: a checkpoint for ``topology``; each object is a part.

    The save id follows from the source, the topology and the format's version: after a kill the
    same call finds what was written. The journal is in the save's pending folder.

    The small tensors of a state dict share packs, as in any save of one.

    Raises CheckpointError for names that cannot be those of a checkpoint's arrays, and for a state
    dict that names other tensors than the source has.
    """

    def __init__(self, source: Source, root: Location, topology: Topology) -> None:
        check_names(source.arrays)
        packed: tuple[PackedTensor, ...] = ()
        if TREE in source.info.state:
            source = Packed(source)
            packed = source.packed
        self.source, self.store = source, open_store(root)
        self.records = [
            record_under(name, array, topology) for name, array in source.arrays.items()
        ]
        told = source.info
        version = Manifest.model_fields["format_version"].default
        made = hashlib.sha256(f"{told.identity} {topology} {version}".encode()).hexdigest()[:12]
        self.info = SaveInfo(
            save_id=f"{told.step:08d}-reshard-{made}",
            step=told.step,
            topology=topology,
            state=dict(told.state),
            spec=dict(told.spec),
            spec_hash=told.spec_hash,
            parent=told.save_id,
            packed=packed,
        )
        self.manifest: Manifest | None = None
        """The manifest, once the target is committed; by an earlier call too."""
        self._resumed = False

    def __getstate__(self) -> dict[str, object]:
        state = super().__getstate__()
        state.pop("_layouts", None)
        return state

    @cached_property
    def _layouts(self) -> dict[str, ObjectLayout]:
        return {
            layout.key: layout
            for record in self.records
            for cell in cells(whole_box(record.shape), record.shard_shape)
            for layout in [ObjectLayout(record, cell)]
        }

    def _key(self, key: str) -> str:
        return f"{objects_key(self.info.save_id)}/{key}"

    def begin(self) -> dict[str, Receipt] | None:
        """See :class:`ckpt.rewrite.Target`; whether the objects of an earlier call are damaged is
        for the caller to verify."""
        store, pending = self.store, pending_key(self.info.save_id)
        try:
            if self.info.step in committed_steps(store):
                self.manifest = self._committed()
                store.remove_all(pending)  # a kill after the commit leaves the marks
                return None
            try:
                begin(store, self.info, 0)
            except FileExistsError:
                self._resumed = True
            # Without a mark, objects are those of a manifest that somebody has moved away.
            self._resumed |= bool(store.names(objects_key(self.info.save_id)))
            if isinstance(store, LocalStore):
                self.lock(Path(store.where(f"{pending}/lock")), Path(store.where()))
            found: dict[str, Receipt] = {}
            for name in store.names(pending):
                if name.startswith("journal-"):
                    found |= json.loads(store.read(f"{pending}/{name}"))
        except OSError as error:
            raise unwritable(self.store.where(), error) from None
        return found

    def _committed(self) -> Manifest:
        """The manifest of this rewrite. Raises CheckpointError where the step is another save."""
        found = read_manifest(self.store, self.info.step)
        if found.save_id != self.info.save_id:
            raise CheckpointError(
                f"{self.store.where()} already has another checkpoint of step {self.info.step}, "
                f"{found.save_id}: choose another folder"
            )
        return found

    def parts(self) -> Sequence[Part]:
        """See :class:`ckpt.rewrite.Target`."""
        return [Part(key, layout.buffer_bytes) for key, layout in self._layouts.items()]

    def room(self) -> tuple[str, int | None]:
        """See :class:`ckpt.rewrite.Target`."""
        compressed = any(record.compression != "none" for record in self.records)
        return self.store.where(), None if compressed else self.store.free_bytes()

    def check(self, key: str, receipt: Receipt) -> bool:
        """See :class:`ckpt.rewrite.Target`."""
        expected = ObjectRecord(**receipt)
        try:
            read_nowhere(self.store, self.info.save_id, self._layouts[key], expected)
        except (CheckpointError, OSError):
            return False
        return True

    def write(self, key: str, slab_bytes: int, progress: Progress) -> Receipt:
        """See :class:`ckpt.rewrite.Target`; :meth:`journal` makes the object's name durable."""
        layout = self._layouts[key]
        record = layout.record
        slabs = Slabs(
            partial(self.source.read_box, record.name),
            layout.box,
            record.chunk_shape,
            record.dtype.itemsize,
            slab_bytes,
        )

        def read(box: Box, out: Array) -> None:
            out[...] = slabs(box)

        def counted(parts: Iterable[memoryview | bytes]) -> Iterator[memoryview | bytes]:
            left = len(layout.chunks)
            for part in parts:
                yield part
                if left:
                    progress(layout.chunk_stride)
                left = max(0, left - 1)

        if self._resumed:
            self.store.remove(self._key(key))  # half of it, or one that is not in the journal
        encoder = Encoder(layout)
        self.store.write(self._key(key), counted(encoder.parts(encoder.fill(read))))
        return encoder.record._asdict()

    def journal(self, receipts: dict[str, Receipt]) -> None:
        """See :class:`ckpt.rewrite.Target`."""
        pending = pending_key(self.info.save_id)
        try:
            self.store.sync(self._key(key) for key in receipts)
            count = sum(name.startswith("journal-") for name in self.store.names(pending))
            self.store.publish(f"{pending}/journal-{count:06d}", json.dumps(receipts).encode())
        except OSError as error:
            raise unwritable(self.store.where(), error) from None

    def commit(self, receipts: dict[str, Receipt]) -> None:
        """See :class:`ckpt.rewrite.Target`."""
        objects = {key: ObjectRecord(**value) for key, value in receipts.items()}
        try:
            for key, data in metadata_objects(self.records).items():
                if self._resumed:
                    self.store.remove(self._key(key))
                self.store.write(self._key(key), [data])
                objects[key] = ObjectRecord.of(data)
            self.store.sync(self._key(key) for key in objects)
            self.manifest = commit(self.store, self.info, self.records, objects)
        except OSError as error:
            raise unwritable(self.store.where(), error) from None

    def discard(self) -> None:
        """See :class:`ckpt.rewrite.Target`."""
        discard(self.store, self.info)
