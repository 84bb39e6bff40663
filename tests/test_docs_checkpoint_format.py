"""docs/checkpoint-format.md is enough to write a reader from: the one that it shows is run."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from parallel.layout import Topology
from tests.support.checkpoints import SPECS, full_values, save_with_threads

PAGE = Path(__file__).parent.parent / "docs" / "checkpoint-format.md"


@pytest.fixture(scope="module")
def read():
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert "ckpt" not in block
    names: dict = {}
    exec(compile(block, str(PAGE), "exec"), names)
    return names["read"]


@pytest.mark.parametrize("layout", [Topology(), Topology(dp_shard=4, ep=2)])
def test_the_reader_on_the_page_reads_what_was_saved(tmp_path, read, layout):
    save_with_threads(tmp_path, 3, layout)
    for spec in SPECS:
        values = full_values(spec)
        stored = values.view(torch.uint16) if values.dtype == torch.bfloat16 else values
        expected = stored.numpy()
        whole = tuple((0, size) for size in spec.shape)
        part = tuple((size // 3, size - size // 4) for size in spec.shape)
        for box in (whole, part):
            inside = tuple(slice(*extent) for extent in box)
            found = read(tmp_path, 3, spec.name, box)
            assert found.tobytes() == expected[inside].tobytes(), (spec.name, box)
            assert found.dtype == expected.dtype


def test_the_reader_on_the_page_refuses_what_was_damaged(tmp_path, read):
    manifest = save_with_threads(tmp_path, 3, Topology())
    spec = SPECS[0]
    path = tmp_path / "objects" / manifest.save_id / spec.name / "c.0.0"
    good = path.read_bytes()
    whole = tuple((0, size) for size in spec.shape)
    for at in (5, len(good) // 2, len(good) - 2):
        data = bytearray(good)
        data[at] ^= 1
        path.write_bytes(bytes(data))
        with pytest.raises(AssertionError, match=r"damaged|index|another"):
            read(tmp_path, 3, spec.name, whole)
    path.write_bytes(good[:-1])
    with pytest.raises(AssertionError, match="truncated"):
        read(tmp_path, 3, spec.name, whole)
    path.write_bytes(good)
    assert np.array_equal(read(tmp_path, 3, spec.name, whole), full_values(spec).numpy(), True)
