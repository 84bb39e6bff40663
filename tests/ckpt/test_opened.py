"""The lazy reader: indexed as numpy's arrays are, every byte verified, and without torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt
from parallel.layout import Topology
from tests.support.checkpoints import full_values, objects_folder, save_with_threads

ROOT = Path(__file__).parents[2]
INDEXES = st.one_of(
    st.integers(-7, 7),
    st.slices(6),
    st.just(Ellipsis),
    st.builds(slice, st.none(), st.none(), st.integers(-3, 3).filter(bool)),
)
OPEN_SPEC = ckpt.ArraySpec("model/layers/x", (3, 5, 6), torch.bfloat16, ((), ("fsdp",), ()))


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    root = tmp_path_factory.mktemp("open")
    specs = [OPEN_SPEC, ckpt.ArraySpec("scalar", (), torch.float64, ()),
             ckpt.ArraySpec("none", (0, 4), torch.int64, ((), ()))]  # fmt: skip
    save_with_threads(root, 4, Topology(dp_shard=3), specs)
    return root


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(index=st.one_of(INDEXES, st.lists(INDEXES, max_size=4).map(tuple)))
def test_an_opened_array_is_indexed_as_numpys(opened, index):
    array = ckpt.open(opened)["model/layers/x"]
    expected = full_values(OPEN_SPEC).view(torch.uint16).numpy()
    try:
        wanted = expected[index]
    except IndexError:
        with pytest.raises(IndexError):
            array[index]
        return
    assert np.array_equal(array[index], wanted)
    assert array[index].shape == wanted.shape
    floats = torch.from_numpy(np.array(wanted)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(array.float32[index], floats, equal_nan=True)


def test_an_opened_checkpoint_is_a_table(opened):
    found = ckpt.open(opened, 4)
    assert sorted(found) == ["model/layers/x", "none", "scalar"]
    array = found["model/layers/x"]
    assert (array.shape, array.ndim, len(array)) == ((3, 5, 6), 3, 3)
    assert (array.logical_dtype, array.dtype) == ("bfloat16", np.uint16)
    assert np.asarray(array).shape == (3, 5, 6)
    assert (
        found["scalar"][()] == full_values(ckpt.ArraySpec("scalar", (), torch.float64, ())).item()
    )
    assert found["none"][...].shape == (0, 4)
    assert found.manifest.step == 4
    with pytest.raises(KeyError, match="nothing"):
        found["nothing"]
    for wrong in (True, [0, 1], 1.5, None, np.array([1])[None]):
        with pytest.raises(TypeError, match="made of ints and slices"):
            array[wrong]
    with pytest.raises(TypeError, match="is a scalar"):
        len(found["scalar"])
    assert array[np.int64(2), 1].shape == (6,)


def test_what_is_read_is_verified_and_nothing_else_is_read(opened, tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(opened, root)
    folder = objects_folder(root, ckpt.read_manifest(root).save_id)
    victim = folder / "model/layers/x/c.0.1.0"
    data = bytearray(victim.read_bytes())
    data[8] ^= 4
    victim.write_bytes(data)
    array = ckpt.open(root)["model/layers/x"]
    assert array[:, :2].shape == (3, 2, 6)
    with pytest.raises(ckpt.CheckpointError, match=r"c\.0\.1\.0 is damaged"):
        array[:, :3]
    victim.unlink()
    with pytest.raises(ckpt.CheckpointError, match=r"c\.0\.1\.0 is missing"):
        array[0, 2]


def test_neither_torch_nor_a_model_is_needed_to_read(opened):
    source = (
        "import sys, ckpt\n"
        "from ckpt.rewrite import CheckpointSource\n"
        "from ckpt.interop import DcpSource, SafetensorsTarget\n"
        "import convoy.commands.reshard\n"
        "from convoy.commands import inspect\n"
        "assert inspect.main(['diff', sys.argv[1], sys.argv[1]]) == 0\n"
        "assert inspect.main(['history', sys.argv[1]]) == 0\n"
        "from ckpt.read import open_checkpoint\n"
        "print(open_checkpoint(sys.argv[1])['model/layers/x'].float32[1, 2].shape)\n"
        "bad = {'torch', 'zarr', 'pretrain.model', 'moe', 'router'} & set(sys.modules)\n"
        "assert not bad, bad\n"
        "print(ckpt.open(sys.argv[1])['model/layers/x'][1, 2].shape)\n"
        "bad = {'torch', 'pretrain.model', 'moe', 'router'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", source, str(opened)], cwd=ROOT, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[-2:] == ["(6,)"] * 2
    assert "3 of 3 arrays are identical, bit by bit" in lines
