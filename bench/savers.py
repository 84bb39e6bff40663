"""The subjects of bench/checkpoint.py: everyone saves the same tensors and reads them back.

A subject's ``save`` returns when all is durable: where it does not sync its files itself, that is
done for it, within its time. Its ``load`` ends with the numbers in the tensors that the job has
already; those that only hand out new ones, or mapped files, are copied from. Each takes what is the
faster of its ways on a CPU. One that is not installed, or cannot do it on so many ranks, is left
out, and one line says so.
"""

from __future__ import annotations

import atexit
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import count
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

import ckpt
from bench.state import KINDS, State
from ckpt.local_array import ArraySpec, LocalArray
from parallel.layout import FSDP_DENSE_DIM, Topology, dense_splits, expert_splits

CHUNK_BYTES = 4 << 20
"""Of those who write chunks: as Convoy's."""


class LeftOut(Exception):  # noqa: N818 - an outcome, not a fault
    """Why a subject does not run here."""


class Subject(Protocol):
    """One way to save and load a state."""

    def save(self, folder: Path) -> None:
        """All ranks at once, into a folder that is there and empty."""

    def load(self, folder: Path) -> None:
        """Into the state's own tensors."""


@runtime_checkable
class Background(Subject, Protocol):
    """One that saves while training goes on."""

    def begin(self, folder: Path) -> Callable[[], object]:
        """Returns when training may go on; what is returned waits until all is durable."""


def sync(path: Path) -> None:
    """Make a file, or a folder's entries, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Everything below a folder, for a subject that leaves that to the system."""
    for where, _, files in os.walk(folder):
        for name in files:
            sync(Path(where, name))
        sync(Path(where))


class Convoy:
    """ckpt.save and ckpt.load: a stacked array for each kind of parameter."""

    def __init__(self, state: State) -> None:
        self.state, self.numbers = state, count(1)
        self.topology = Topology(dp_shard=state.world, ep=state.world)
        self.arrays = list(self._arrays())
        self._word = torch.zeros(1)

    def _arrays(self) -> Iterator[LocalArray]:
        sizes = self.state.sizes
        if sizes is None:
            yield from self._mixed()
            return
        for kind in KINDS:
            for name, shape in sizes.layer().items():
                splits = expert_splits(3) if len(shape) == 3 else dense_splits(len(shape))
                spec = ArraySpec(f"{kind}/layers/{name}", (sizes.layers, *shape), torch.float32,
                                 ((), *splits))  # fmt: skip
                pieces = [
                    self.state.tensors[f"{kind}/layers/{i}/{name}"] for i in range(sizes.layers)
                ]
                boxes = spec.layout(self.topology).boxes(self.state.rank)
                yield LocalArray(spec, boxes, pieces, stacked=True)
            for name, shape in sizes.rest().items():
                spec = ArraySpec(f"{kind}/{name}", shape, torch.float32, dense_splits(len(shape)))
                boxes = spec.layout(self.topology).boxes(self.state.rank)
                yield LocalArray(spec, boxes, [self.state.tensors[f"{kind}/{name}"]])

    def _mixed(self) -> Iterator[LocalArray]:
        shapes = self.state.shapes
        layers = 1 + max(int(name.split("/")[1]) for name in shapes)
        for name in (name.split("/")[2] for name in shapes if name.startswith("layers/0/")):
            shape = (layers, *shapes[f"layers/0/{name}"])
            splits = ((), *dense_splits(len(shape) - 1))
            spec = ArraySpec(f"layers/{name}", shape, torch.float32, splits)
            pieces = [self.state.tensors[f"layers/{i}/{name}"] for i in range(layers)]
            boxes = spec.layout(self.topology).boxes(self.state.rank)
            yield LocalArray(spec, boxes, pieces, stacked=True)

    def _agree(self, ok: bool) -> bool:
        self._word.fill_(not ok)
        dist.all_reduce(self._word)
        return not self._word.item()

    def save(self, folder: Path) -> None:
        """As in Subject."""
        step = next(self.numbers)  # in step on all ranks, and new each time
        info = ckpt.SaveInfo(f"save-{step}", step, self.topology, {}, {}, "0" * 8)
        ckpt.save(folder, info, self.arrays, self.state.rank, self._agree)

    def load(self, folder: Path) -> None:
        """As in Subject."""
        ckpt.load(folder, ckpt.read_manifest(folder), self.arrays)


class ConvoyAsync(Convoy):
    """ckpt.AsyncCheckpointer: copied to memory that a process of its own writes from."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._savers: dict[Path, ckpt.AsyncCheckpointer] = {}

    def _saver(self, folder: Path) -> ckpt.AsyncCheckpointer:
        if folder not in self._savers:
            tier = ckpt.Tier(name="shared", location=str(folder))
            lock = folder.with_name(f".{folder.name}-{self.state.rank}")
            saver = ckpt.AsyncCheckpointer([tier], self.state.rank, lock)
            atexit.register(saver.close)
            saver.ready()
            saver.prepare(self.topology, self.arrays)
            self._savers[folder] = saver
        return self._savers[folder]

    def begin(self, folder: Path) -> Callable[[], object]:
        """Returns when training may go on; what is returned waits until all is durable."""
        saver, step = self._saver(folder), next(self.numbers)
        info = ckpt.SaveInfo(f"save-{step}", step, self.topology, {}, {}, "0" * 8)
        saver.save(info, self.arrays)

        def wait() -> None:
            for event in saver.wait():
                if event.what == "failed":
                    raise RuntimeError(event.error)
            # Every rank's writer process has written; that of the first rank also commits.
            dist.barrier()

        return wait

    def save(self, folder: Path) -> None:
        """As in Subject."""
        self.begin(folder)()


class ConvoyStateDict:
    """ckpt.save_state_dict and ckpt.load_state_dict: DTensors on several ranks."""

    def __init__(self, state: State) -> None:
        self.tensors: dict[str, Any] = state.tensors if state.world == 1 else as_dtensors(state)
        self.numbers = count(1)

    def save(self, folder: Path) -> None:
        """As in Subject."""
        ckpt.save_state_dict(folder, {"model": self.tensors}, step=next(self.numbers))

    def load(self, folder: Path) -> None:
        """As in Subject."""
        ckpt.load_state_dict(folder, {"model": self.tensors})


class ConvoyStateDictAsync(ConvoyStateDict):
    """ckpt.AsyncSaver."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._savers: dict[Path, ckpt.AsyncSaver] = {}

    def begin(self, folder: Path) -> Callable[[], object]:
        """Returns when training may go on; what is returned waits until all is durable."""
        if folder not in self._savers:
            self._savers[folder] = ckpt.AsyncSaver(folder)
            atexit.register(self._savers[folder]._end)
        saver = self._savers[folder]
        saver.save({"model": self.tensors}, step=next(self.numbers))
        return saver.wait

    def save(self, folder: Path) -> None:
        """As in Subject."""
        self.begin(folder)()


def as_dtensors(state: State) -> dict[str, Any]:
    """The tensors, each cut along its first dim."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (state.world,))
    return {
        name: DTensor.from_local(tensor, mesh, [Shard(FSDP_DENSE_DIM)], run_check=False)
        for name, tensor in state.tensors.items()
    }


class TorchSave:
    """torch.save of each rank's tensors; mapped into memory and copied on the way back."""

    def __init__(self, state: State) -> None:
        self.state = state

    def save(self, folder: Path) -> None:
        """As in Subject."""
        path = folder / f"rank-{self.state.rank}.pt"
        torch.save(self.state.tensors, path)
        sync(path)
        sync(folder)

    def load(self, folder: Path) -> None:
        """As in Subject."""
        path = folder / f"rank-{self.state.rank}.pt"
        self.state.fill_from(torch.load(path, mmap=True, weights_only=True).__getitem__)


class Safetensors:
    """One file a rank."""

    def __init__(self, state: State) -> None:
        from safetensors import safe_open
        from safetensors.torch import save_file

        self.state, self.open, self.save_file = state, safe_open, save_file

    def save(self, folder: Path) -> None:
        """As in Subject."""
        path = folder / f"rank-{self.state.rank}.safetensors"
        self.save_file(self.state.tensors, path)
        sync(path)
        sync(folder)

    def load(self, folder: Path) -> None:
        """As in Subject."""
        with self.open(folder / f"rank-{self.state.rank}.safetensors", "pt") as file:
            self.state.fill_from(file.get_tensor)


class Dcp:
    """torch.distributed.checkpoint: DTensors, two writing threads shared by the ranks."""

    def __init__(self, state: State) -> None:
        self.threads = max(1, 2 // state.world)
        self.tensors = as_dtensors(state)

    def writer(self, folder: Path) -> Any:
        """It syncs its files itself."""
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        return FileSystemWriter(folder, thread_count=self.threads)

    def save(self, folder: Path) -> None:
        """As in Subject."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self.tensors, storage_writer=self.writer(folder))
        sync(folder)

    def load(self, folder: Path) -> None:
        """As in Subject."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        load(self.tensors, storage_reader=FileSystemReader(folder))


class DcpAsync(Dcp):
    """Its async save, written by a process of its own from shared memory.

    Its stager's other options, pinned memory and a staging thread, need CUDA.
    """

    def __init__(self, state: State) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(state)
        options = StagingOptions(use_pinned_memory=False, use_shared_memory=True,
                                 use_async_staging=False, use_non_blocking_copy=False)  # fmt: skip
        self.stager = DefaultStager(options)

    def begin(self, folder: Path) -> Callable[[], object]:
        """Returns when training may go on; what is returned waits until all is durable."""
        from torch.distributed.checkpoint.state_dict_saver import (
            AsyncCheckpointerType,
            AsyncSaveResponse,
            async_save,
        )

        response = async_save(
            self.tensors, storage_writer=self.writer(folder), async_stager=self.stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )  # fmt: skip
        if isinstance(response, AsyncSaveResponse):
            response.staging_completion.result()
            return response.upload_completion.result
        return response.result

    def save(self, folder: Path) -> None:
        """As in Subject."""
        with _silent():
            self.begin(folder)()


@contextmanager
def _silent() -> Iterator[None]:
    """A process that is started inside says nothing, ever: DCP's logs every request."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    kept = [os.dup(stream) for stream in (1, 2)]
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    try:
        yield
    finally:
        for stream, was in zip((1, 2), kept, strict=True):
            os.dup2(was, stream)
        for handle in (nowhere, *kept):
            os.close(handle)


class Tensorstore:
    """zarr3 arrays as its C++ writes them: chunks of 4 MiB with CRC32C in a shard for each rank."""

    def __init__(self, state: State) -> None:
        import tensorstore

        self.ts, self.state = tensorstore, state

    def _metadata(self, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
        local = self.state.tensors[name].shape
        inner, size = list(local), self.state.tensors[name].nbytes
        for dim, extent in enumerate(local):
            fitting = (d for d in range(1, extent) if extent % d == 0 and size // d <= CHUNK_BYTES)
            parts = next(fitting, extent)
            inner[dim], size = extent // parts, size // parts
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        sharding = {
            "chunk_shape": inner,
            "codecs": [little, {"name": "crc32c"}],
            "index_codecs": [little, {"name": "crc32c"}],
        }
        return {
            "shape": shape,
            "data_type": "float32",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(local)}},
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        }

    def _open(self, folder: Path, create: bool) -> dict[str, Any]:
        context = self.ts.Context()
        futures = {}
        for name, shape in self.state.shapes.items():
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder / name}/"}}
            if create:
                spec["metadata"] = self._metadata(name, shape)
            futures[name] = self.ts.open(spec, create=create, open=True, context=context)
        return {name: future.result() for name, future in futures.items()}

    def _own(self, name: str, array: Any) -> Any:
        rows = self.state.tensors[name].shape[0]
        return array[self.state.rank * rows : (self.state.rank + 1) * rows]

    def _wait(self, pairs: Iterator[tuple[Any, Any]]) -> None:
        for future in [to.write(origin) for to, origin in pairs]:
            future.result()

    def save(self, folder: Path) -> None:
        """As in Subject."""
        arrays = self._open(folder, create=True)
        tensors = self.state.tensors.items()
        self._wait((self._own(n, arrays[n]), self.ts.array(t.numpy())) for n, t in tensors)
        dist.barrier()
        if self.state.rank == 0:  # it syncs its files, and not all of its folders
            for where, _, _ in os.walk(folder):
                sync(Path(where))

    def load(self, folder: Path) -> None:
        """As in Subject."""
        arrays = self._open(folder, create=False)
        tensors = self.state.tensors.items()
        zero = {n: self._own(n, arrays[n])[self.ts.d[:].translate_to[0]] for n in arrays}
        self._wait((self.ts.array(t.numpy()), zero[n]) for n, t in tensors)


class Orbax:
    """orbax's PyTreeCheckpointer of NumPy arrays, on one rank: more would have to be JAX's."""

    def __init__(self, state: State) -> None:
        if state.world > 1:
            raise LeftOut("on more than one rank it needs a JAX process group of its own")
        os.environ["JAX_PLATFORMS"] = "cpu"
        with redirect_stderr(io.StringIO()):
            import orbax.checkpoint as ocp

        self.state, self.checkpointer = state, ocp.PyTreeCheckpointer()

    def save(self, folder: Path) -> None:
        """As in Subject."""
        tree = {name.replace("/", "."): t.numpy() for name, t in self.state.tensors.items()}
        self.checkpointer.save(folder / "state", tree)
        sync_tree(folder)

    def load(self, folder: Path) -> None:
        """As in Subject."""
        tree = self.checkpointer.restore(folder / "state")
        self.state.fill_from(lambda name: torch.from_numpy(tree[name.replace("/", ".")]))


SUBJECTS: dict[str, Callable[[State], Subject]] = {
    "convoy": Convoy,
    "convoy async": ConvoyAsync,
    "convoy state dict": ConvoyStateDict,
    "convoy state dict async": ConvoyStateDictAsync,
    "torch.save": TorchSave,
    "safetensors": Safetensors,
    "dcp": Dcp,
    "dcp async process": DcpAsync,
    "tensorstore zarr3": Tensorstore,
    "orbax": Orbax,
}


def installed_subjects(state: State) -> dict[str, Subject]:
    """Those that run here, by name."""
    subjects = {}
    for name, make in SUBJECTS.items():
        try:
            with redirect_stdout(io.StringIO()):
                subjects[name] = make(state)
        except (ImportError, LeftOut) as reason:
            if state.rank == 0:
                print(f"{name} is left out: {reason}", flush=True)
    return subjects


def empty(folder: Path) -> None:
    """Make a folder, or make it anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
