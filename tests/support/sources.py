"""Sources in memory for tests of reshard and interop."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from ckpt.format.dtypes import STORAGE_DTYPES
from ckpt.rewrite.source import Source, SourceArray, SourceInfo
from parallel.layout import Topology


class MemorySource:
    """Random bits of given shapes and logical dtypes, NaNs among them."""

    def __init__(self, arrays: dict[str, SourceArray], info: SourceInfo | None = None) -> None:
        self.arrays = arrays
        self.info = info or SourceInfo("memory", 7, Topology(), {"cursor": 3}, {"a": 1}, "f" * 64)
        self.values = {}
        self.read_bytes: list[int] = []
        for i, (name, array) in enumerate(sorted(arrays.items())):
            raw = np.random.default_rng(i).integers(0, 256, array.nbytes, np.uint8)
            if array.logical_dtype == "bool":
                raw %= 2
            self.values[name] = raw.view(array.dtype).reshape(array.shape)

    def read_box(self, name, box):
        values = np.array(self.values[name][tuple(slice(*extent) for extent in box)])
        self.read_bytes.append(values.nbytes)
        return values


def whole(array: SourceArray):
    return tuple((0, size) for size in array.shape)


def assert_same(found: Source, expected: Source, notes: bool = True) -> None:
    assert set(found.arrays) == set(expected.arrays)
    for name, array in expected.arrays.items():
        other = found.arrays[name]
        assert (other.shape, other.logical_dtype) == (array.shape, array.logical_dtype), name
        if notes:
            assert (other.splits, dict(other.attributes)) == (array.splits, dict(array.attributes))
        values = found.read_box(name, whole(array))
        assert values.shape == array.shape
        assert values.tobytes() == expected.read_box(name, whole(array)).tobytes(), name


def random_box(array: SourceArray, seed: int):
    rng = np.random.default_rng(seed)
    return tuple(tuple(sorted(rng.integers(0, size + 1, 2).tolist())) for size in array.shape)


def _array(shape, dtype, splits):
    axes = [("fsdp",), ("tp",)] if splits else []
    return SourceArray(
        shape,
        dtype,
        tuple(axes[i] if i < len(axes) else () for i in range(len(shape))),
        {"layers": list(range(shape[0]))} if shape else {},
    )


trees = st.dictionaries(
    st.sampled_from(["model/a", "model/b/c", "model/layers/ü", "rng/x", "optimizer/m/a", "s"]),
    st.builds(
        _array,
        st.lists(st.integers(0, 9), max_size=4).map(tuple),
        st.sampled_from(sorted(STORAGE_DTYPES)),
        st.booleans(),
    ),
    min_size=1,
)
topologies = st.builds(
    lambda dr, tp, ep, more: Topology(dp_replicate=dr, dp_shard=ep * more, tp=tp, ep=ep),
    *(st.integers(1, 2) for _ in range(4)),
)


def big(nbytes: int, name: str = "model/w") -> MemorySource:
    rows = math.ceil(nbytes / 4096)
    return MemorySource({name: SourceArray((rows, 1024), "float32", (("fsdp",), ()))})
