"""Files of arrays and of tensors: what was written is read, or the reader is told.

Legend: N rows, D columns.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from bench.museum_peers.frame import Answer, peer_case

NEWEST = "The newest release for this Python behaves so."


@peer_case(
    "zarr-developers/zarr-python#3479",
    went_wrong="create_array with shards and data wrote a part of the data, and no more.",
    wrong=("zarr==3.1.2",),
    fixed=("zarr==3.1.6",),
)
def an_array_of_shards_that_is_made_from_data_has_all_of_it() -> Answer:
    import zarr

    data_ND = np.random.default_rng(1).random((200, 200))
    array = zarr.create_array(
        zarr.storage.MemoryStore(), data=data_ND, chunks=(100, 100), shards=(200, 100),
        fill_value=float("nan"),
    )  # fmt: skip
    missing = int(np.isnan(array[:]).sum())
    return Answer(missing == 0, f"{missing} of {data_ND.size} values missing")


@peer_case(
    "zarr-developers/zarr-python#3682",
    went_wrong="Two writers of one shard each write it all, and one's values are lost.",
    wrong=("zarr==3.1.6",),
    fixed=None,
    no_fix=f"The issue is open. {NEWEST}",
)
def two_writers_of_one_shard_lose_nothing() -> Answer:
    from concurrent.futures import ThreadPoolExecutor

    import zarr

    with tempfile.TemporaryDirectory() as folder:
        array = zarr.create_array(
            Path(folder) / "a.zarr", shape=(16, 64), chunks=(1, 64), shards=(16, 64), dtype="f4"
        )

        def write(row: int) -> None:
            zarr.open_array(Path(folder) / "a.zarr")[row] = 1.0

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(write, range(16)))
        kept = int(np.asarray(array[:, 0]).sum())
    return Answer(kept == 16, f"{kept} of 16 rows kept, no error")


@peer_case(
    "zarr-developers/zarr-python#486",
    went_wrong="A lost chunk is read as the fill value, like a chunk that nobody wrote.",
    wrong=("zarr==3.1.6",),
    fixed=None,
    no_fix=f"The issue is open. {NEWEST}",
)
def a_lost_chunk_is_an_error() -> Answer:
    import zarr

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.zarr"
        zarr.create_array(path, data=np.ones((8, 8), "f4"), chunks=(4, 8))
        (path / "c" / "1" / "0").unlink()
        try:
            read_ND = np.asarray(zarr.open_array(path, mode="r")[:])
        except Exception as error:  # any error tells the reader
            return Answer(True, f"{type(error).__name__}")
    return Answer(False, f"{int((read_ND == 0).sum())} of 64 ones are read as 0, no error")


@peer_case(
    "safetensors/safetensors#220",
    went_wrong="A file with a flipped bit loads, and a weight is another number.",
    wrong=("safetensors==0.8.0",),
    fixed=None,
    no_fix="The request for checksums was closed as stale; 0.8.0 is the newest release.",
)
def a_flipped_bit_is_an_error() -> Answer:
    import torch
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file({"weight": torch.ones(64)}, path)
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 0x40
        path.write_bytes(damaged)
        try:
            last = float(load_file(path)["weight"][-1])
        except Exception as error:  # any error tells the reader
            return Answer(True, f"{type(error).__name__}")
    return Answer(last == 1.0, f"the weight 1.0 is read as {last:.3g}, no error")
