"""zarr's contract of a store, and its state machines, over the stores of checkpoints."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from zarr.core.buffer import Buffer, cpu
from zarr.testing.stateful import ZarrHierarchyStateMachine, ZarrStoreStateMachine
from zarr.testing.store import StoreTests

from ckpt.store import PeerServer
from tests.foreign.zarr_stores.store import CheckpointStore
from tests.support import s3

_NUMBERS = itertools.count()


class _Store(StoreTests[CheckpointStore, cpu.Buffer]):
    store_cls, buffer_cls = CheckpointStore, cpu.Buffer
    location: str

    @pytest.fixture
    def store_kwargs(self, location: str) -> dict[str, Any]:
        return {"location": location}

    def test_store_repr(self, store: CheckpointStore) -> None:
        assert repr(store) == f"CheckpointStore({store.location!r})"

    def test_store_supports_writes(self, store: CheckpointStore) -> None:
        assert store.supports_writes

    def test_store_supports_listing(self, store: CheckpointStore) -> None:
        assert store.supports_listing


class _Files(_Store):
    """Its objects are files below ``files``."""

    @pytest.fixture
    def files(self, tmp_path: Path) -> Path:
        self.top = tmp_path / "run" / "store"
        self.top.mkdir(parents=True)
        return self.top

    async def set(self, store: CheckpointStore, key: str, value: Buffer) -> None:
        path = self.top / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value.to_bytes())

    async def get(self, store: CheckpointStore, key: str) -> Buffer:
        return cpu.Buffer.from_bytes((self.top / key).read_bytes())


class TestFolder(_Files):
    @pytest.fixture
    def location(self, files: Path) -> str:
        return str(files)


class TestPeer(_Files):
    """The memory of another node, through its server."""

    @pytest.fixture
    def location(self, files: Path) -> Iterator[str]:
        with _served(files) as location:
            yield location


class TestS3(_Store):
    @pytest.fixture
    def location(self, server: s3.Server) -> str:
        self.prefix = f"store{next(_NUMBERS)}"
        self.client = _client(server)
        return f"s3://{s3.BUCKET}/{self.prefix}"

    async def set(self, store: CheckpointStore, key: str, value: Buffer) -> None:
        body = value.to_bytes()
        self.client.put_object(Bucket=s3.BUCKET, Key=f"{self.prefix}/{key}", Body=body)

    async def get(self, store: CheckpointStore, key: str) -> Buffer:
        answer = self.client.get_object(Bucket=s3.BUCKET, Key=f"{self.prefix}/{key}")
        return cpu.Buffer.from_bytes(answer["Body"].read())


@pytest.mark.parametrize("machine", [ZarrStoreStateMachine, ZarrHierarchyStateMachine])
class TestStateMachine:
    def test_folder(self, machine: Any, tmp_path: Path) -> None:
        _run(machine, CheckpointStore(str(tmp_path / "store")))

    def test_peer(self, machine: Any, tmp_path: Path) -> None:
        files = tmp_path / "run" / "store"
        files.mkdir(parents=True)
        with _served(files) as location:
            _run(machine, CheckpointStore(location))

    def test_s3(self, machine: Any, server: s3.Server) -> None:
        _run(machine, CheckpointStore(f"s3://{s3.BUCKET}/{machine.__name__}"))


@pytest.fixture(scope="session")
def server() -> Iterator[s3.Server]:
    running = s3.Server()
    try:
        with s3.use(running.port):
            yield running
    finally:
        running.kill()


def _client(server: s3.Server) -> Any:
    return boto3.client(
        "s3", endpoint_url=f"http://127.0.0.1:{server.port}", region_name="us-east-1",
        aws_access_key_id="key", aws_secret_access_key="secret",
    )  # fmt: skip


@contextlib.contextmanager
def _served(files: Path) -> Iterator[str]:
    server = PeerServer(files.parent, "key")
    try:
        yield f"peer://key@127.0.0.1:{server.port}/{files.name}"
    finally:
        server.close()


def _run(machine: Any, store: CheckpointStore) -> None:
    options = settings(
        max_examples=6, stateful_step_count=20, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate],
    )  # fmt: skip
    run_state_machine_as_test(lambda: machine(store), settings=options)
