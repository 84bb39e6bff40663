"""What other formats' readers say of one flipped bit: the second table of damage.py."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import zarr
from torch.distributed.checkpoint.api import CheckpointException

from tests.support.checkpoints import memory_folder

VALUES = torch.arange(1, 4097, dtype=torch.float32).reshape(64, 64)
FLIPS = 200


def _dcp(folder: Path) -> Callable[[], torch.Tensor]:
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": VALUES}, checkpoint_id=folder / "dcp", no_dist=True)

    def read() -> torch.Tensor:
        state = {"w": torch.zeros_like(VALUES)}
        dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True)
        return state["w"]

    return read


def _safetensors(folder: Path) -> Callable[[], torch.Tensor]:
    from safetensors.torch import load_file, save_file

    save_file({"w": VALUES}, folder / "w.safetensors")
    return lambda: load_file(folder / "w.safetensors")["w"]


def _torch_save(folder: Path) -> Callable[[], torch.Tensor]:
    torch.save({"w": VALUES}, folder / "w.pt")
    return lambda: torch.load(folder / "w.pt", weights_only=True)["w"]


def _zarr(folder: Path) -> Callable[[], torch.Tensor]:
    array = zarr.create_array(
        folder / "w", shape=VALUES.shape, chunks=(8, 64), shards=(32, 64), dtype="float32",
        compressors=None,
    )  # fmt: skip
    array[...] = VALUES.numpy()
    return lambda: torch.from_numpy(np.asarray(zarr.open_array(folder / "w", mode="r")[...]))


PEERS = {
    "torch.distributed.checkpoint": ("torch", _dcp),
    "torch.save, weights_only": ("torch", _torch_save),
    "safetensors": ("safetensors", _safetensors),
    "zarr-python, sharded, no crc32c codec": ("zarr", _zarr),
}


def flip(make: Callable[[Path], Callable[[], torch.Tensor]]) -> tuple[int, int, int]:
    """Of bits flipped evenly over the largest file: how many reads are refused, come out right, and
    come out wrong without a word."""
    refused = right = wrong = 0
    with memory_folder() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = make(Path(name))
        assert torch.equal(read(), VALUES)
        path = max(
            (p for p in Path(name).rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
        )
        data = path.read_bytes()
        for at in range(0, len(data), len(data) // FLIPS):
            path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            try:
                same = torch.equal(read(), VALUES)
            except (Exception, CheckpointException):  # the latter is none
                refused += 1
            else:
                right, wrong = right + same, wrong + (not same)
    return refused, right, wrong


def peers() -> str:
    """The second table."""
    lines = [
        "One bit flipped, at places spread evenly over the file with the numbers, elsewhere:",
        "",
        "| format | version | refused | right numbers | wrong numbers, silently |",
        "|---|---|---|---|---|",
    ]
    for name, (package, make) in PEERS.items():
        counts = flip(make)
        shares = " | ".join(f"{count / sum(counts):.0%}" for count in counts)
        lines.append(f"| {name} | {package} {version(package)} | {shares} |")
    return "\n".join(lines)
