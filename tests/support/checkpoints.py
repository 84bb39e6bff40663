"""Small trees of arrays for checkpoint tests, and ranks played by threads where that is enough."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ckpt import (
    ArraySpec,
    AsyncCheckpointer,
    LocalArray,
    Location,
    Manifest,
    SaveInfo,
    committed_steps,
    load,
    open_store,
    read_manifest,
    save,
    verify,
)
from ckpt.format import manifest_key, objects_key
from parallel.layout import Topology

SPECS = [
    ArraySpec("model/embed/weight", (13, 6), torch.float32, (("fsdp",), ())),
    ArraySpec("model/layers/norm/weight", (3, 6), torch.float32, ((), ("fsdp",)), {"layers": [0]}),
    ArraySpec("model/layers/moe/experts/w_gate", (2, 4, 6, 5), torch.bfloat16,
              ((), ("ep",), ("efsdp",), ())),
    ArraySpec("rng/torch", (2, 40), torch.uint8, (("world",), ())),
]  # fmt: skip


def objects_folder(root: Path, save_id: str) -> Path:
    return root / objects_key(save_id)


def manifest_file(root: Path, step: int) -> Path:
    return root / manifest_key(step)


def memory_folder() -> tempfile.TemporaryDirectory:
    """A folder that no disk slows down, where there is one."""
    memory = "/dev/shm"
    return tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None)


SMALL_SPECS = [
    ArraySpec("model/w", (7, 3), torch.float32, (("fsdp",), ())),
    ArraySpec("model/frozen", (4,), torch.float32, ((),)),
    ArraySpec("model/layers/e", (1, 4, 2, 2), torch.bfloat16, ((), ("ep",), ("efsdp",), ())),
]
"""As few operations as a save can do that has everything."""


def full_values(spec: ArraySpec, seed: int = 0) -> torch.Tensor:
    """Random bits, NaNs among them: a copy must not care. What is frozen is so at any seed."""
    seed = 0 if "frozen" in spec.name else seed
    generator = torch.Generator().manual_seed(seed * 1000 + sum(map(ord, spec.name)))
    if spec.dtype == torch.bool:
        return torch.randint(0, 2, spec.shape, generator=generator).bool()
    size = spec.dtype.itemsize
    raw = torch.randint(0, 256, (*spec.shape, size), generator=generator, dtype=torch.uint8)
    return raw.view(spec.dtype).squeeze(-1).clone()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().unsqueeze(-1).view(torch.uint8)


def local_array(spec: ArraySpec, topology: Topology, rank: int, values=None) -> LocalArray:
    """``rank``'s slice of ``values``, or room for it; stacked arrays as a tensor for each layer."""
    boxes = spec.layout(topology).boxes(rank)
    if values is None:
        values = torch.zeros(spec.shape, dtype=spec.dtype)
    local = [values[tuple(slice(*extent) for extent in box)].clone() for box in boxes]
    stacked = "layers/" in spec.name
    if stacked:
        local = [piece for part in local for piece in part.unbind(0)]
    return LocalArray(spec, boxes, local, stacked)


def pieces(array: LocalArray) -> torch.Tensor:
    return torch.stack(array.pieces) if array.stacked else array.pieces[0]


def info(step: int, topology: Topology, save_id: str | None = None, **more: Any) -> SaveInfo:
    values = {"spec": {"model": {"d_model": 6}}, "spec_hash": "0" * 64, **more}
    return SaveInfo(
        save_id=save_id or f"{step:08d}-test",
        step=step,
        topology=topology,
        state={"cursor": step * 8},
        **values,
    )


def save_with_threads(
    root: Location, step: int, topology: Topology, specs=SPECS, seed: int = 0, save_id=None, **more
) -> Manifest:
    about = info(step, topology, save_id, **more)
    writers = list(about.writers)
    barrier = threading.Barrier(len(writers))
    words = {}

    def run(rank: int) -> Manifest | None:
        def agree(ok: bool) -> bool:
            words[rank] = ok
            barrier.wait(60)
            result = all(words.values())
            barrier.wait(60)
            return result

        arrays = [local_array(s, topology, rank, full_values(s, seed)) for s in specs]
        return save(root, about, arrays, rank, agree)

    with ThreadPoolExecutor(len(writers)) as pool:
        futures = [pool.submit(run, rank) for rank in writers]
    # The rank that failed knows why; the others only that one did.
    errors = [e for f in futures if (e := f.exception()) is not None]
    for error in sorted(errors, key=lambda e: "another rank" in str(e)):
        raise error
    manifest = futures[0].result()
    assert manifest is not None
    return manifest


TWO = Topology(dp_shard=2, ep=2)


def save_small(root: Location, step: int, topology: Topology = TWO, **more: Any) -> Manifest:
    """Save the small arrays, with numbers that the step decides."""
    return save_with_threads(root, step, topology, SMALL_SPECS, step, **more)


def assert_whole(
    root: Location, step: int, specs: list[ArraySpec] = SMALL_SPECS, seed: int | None = None
) -> None:
    """A listed step verifies, and loads on one rank as it was saved with its own seed."""
    manifest = read_manifest(root, step)
    verify(root, manifest)
    arrays = [local_array(spec, Topology(), 0) for spec in specs]
    load(root, manifest, arrays)
    for array in arrays:
        expected = full_values(array.spec, step if seed is None else seed)
        assert torch.equal(bits(pieces(array)), bits(expected)), (array.spec.name, step)


def assert_nothing_left_over(root: Location) -> None:
    """A folder has what its manifests list, and nothing else."""
    store, steps = open_store(root), committed_steps(root)
    kept = {read_manifest(store, step).save_id for step in steps}
    found = set(store.names("objects"))
    assert found == kept, f"nobody will ever remove {found - kept}"
    assert len(store.names("manifests")) == len(steps), store.names("manifests")


@contextlib.contextmanager
def ended(saver: AsyncCheckpointer) -> Iterator[AsyncCheckpointer]:
    """A checkpointer whose writer process does not outlive the test, however that ends."""
    try:
        yield saver
    except BaseException:
        saver._process.kill()  # it may be waiting for what will never come
        raise
    finally:
        saver.close()


def eventually(true: Callable[[], object], what: str) -> None:
    """Wait until it is so; a machine that is busy may take long."""
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
