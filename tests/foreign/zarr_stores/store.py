"""A store of checkpoints as a store of zarr.

Objects of a checkpoint are immutable, and those of zarr are not: ``set`` removes an object before
it writes another one, and nothing here is atomic that ``ckpt.Store`` does not make so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Self

import numpy as np
from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from ckpt import open_store
from tests.foreign.touching import touch


class CheckpointStore(Store):
    """The store at a location of ``ckpt.open_store``."""

    supports_writes = supports_deletes = supports_listing = True

    def __init__(self, location: str, *, read_only: bool = False) -> None:
        super().__init__(read_only=read_only)
        self.location = location
        self.objects = open_store(location)

    def __repr__(self) -> str:
        return f"CheckpointStore({self.location!r})"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckpointStore) and (
            (self.location, self.read_only) == (other.location, other.read_only)
        )

    __hash__ = None

    def __getstate__(self) -> dict[str, object]:
        return {k: v for k, v in vars(self).items() if k != "objects"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self.objects = open_store(self.location)

    def with_read_only(self, read_only: bool = False) -> Self:
        return type(self)(self.location, read_only=read_only)

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        await self._ensure_open()
        data = await asyncio.to_thread(self._read, key, byte_range)
        buffer = (prototype or default_buffer_prototype()).buffer
        return None if data is None else buffer.from_bytes(data)

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        data = self._read(key, byte_range)
        buffer = (prototype or default_buffer_prototype()).buffer
        return None if data is None else buffer.from_bytes(data)

    async def get_partial_values(
        self,
        prototype: BufferPrototype,
        key_ranges: Iterable[tuple[str, ByteRequest | None]],
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def exists(self, key: str) -> bool:
        return await asyncio.to_thread(self._size, key) is not None

    async def getsize(self, key: str) -> int:
        size = await asyncio.to_thread(self._size, key)
        if size is None:
            raise FileNotFoundError(key)
        return size

    async def set(self, key: str, value: Buffer) -> None:
        self._check_writable()
        await self._ensure_open()
        await asyncio.to_thread(self.set_sync, key, value)

    def set_sync(self, key: str, value: Buffer) -> None:
        self._check_writable()
        if not isinstance(value, Buffer):
            raise TypeError(f"value ({type(value).__name__}) must be a Buffer")
        touch()
        self.objects.remove(key)
        self.objects.write(key, [memoryview(value.to_bytes())])
        self.objects.sync([key])

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        self._check_writable()
        await self._ensure_open()
        touch()
        try:
            await asyncio.to_thread(self.objects.publish, key, value.to_bytes())
        except FileExistsError:
            return

    async def delete(self, key: str) -> None:
        self._check_writable()
        await asyncio.to_thread(self.delete_sync, key)

    def delete_sync(self, key: str) -> None:
        self._check_writable()
        touch()
        self.objects.remove(key)

    async def delete_dir(self, prefix: str) -> None:
        self._check_writable()
        await self._ensure_open()
        touch()
        # The object of the very name is none below the folder, and stays.
        await asyncio.to_thread(self.objects.remove_all, prefix.strip("/"))

    async def list(self) -> AsyncIterator[str]:
        for key in await asyncio.to_thread(self._keys):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for key in await asyncio.to_thread(self._keys):
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        touch()
        for name in await asyncio.to_thread(self._below, prefix.strip("/")):
            yield name

    def _below(self, folder: str) -> list[str]:
        """The names below a folder. For zarr a folder ends with its last object, and in a folder of
        a file system it does not."""
        names = self.objects.names(folder)
        keys = [f"{folder}/{name}".lstrip("/") for name in names]
        listing, size = self.objects.listing, self._size
        return [
            name
            for name, key in zip(names, keys, strict=True)
            if size(key) is not None or listing(key)
        ]

    def _keys(self) -> Iterable[str]:
        touch()
        return list(self.objects.listing(""))

    def _size(self, key: str) -> int | None:
        touch()
        try:
            with self.objects.open(key) as reader:
                return reader.size
        except _MISSING:
            return None

    def _read(self, key: str, byte_range: ByteRequest | None) -> bytes | None:
        touch()
        try:
            with self.objects.open(key) as reader:
                start, stop = _span(byte_range, reader.size)
                data = np.empty(stop - start, np.uint8)
                reader.expect([(start, stop)])
                reader.read_into(start, [data])
        except _MISSING:
            return None
        return data.tobytes()


_MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""zarr asks for keys below an object, and for folders."""


def _span(byte_range: ByteRequest | None, size: int) -> tuple[int, int]:
    if byte_range is None:
        return 0, size
    if isinstance(byte_range, RangeByteRequest):
        return min(byte_range.start, size), min(byte_range.end, size)
    if isinstance(byte_range, OffsetByteRequest):
        return min(byte_range.offset, size), size
    if isinstance(byte_range, SuffixByteRequest):
        return max(0, size - byte_range.suffix), size
    raise ValueError(f"Unexpected byte_range, got {byte_range}.")
