"""DeepSpeed itself goes on from its universal checkpoint after a way through other formats.

DeepSpeed is installed beside the other peers, without their list, because its build needs torch:

    DS_BUILD_OPS=0 .venv/bin/python -m pip install --no-deps --no-build-isolation \\
        --target build/peers deepspeed==0.19.8 hjson py-cpuinfo ninja einops msgpack
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from convoy.convert.formats import move, open_foreign
from tests.support.peers import run_script

pytestmark = [pytest.mark.slow, pytest.mark.peers, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    run_script("zero", "deepspeed", folder)
    return folder


@pytest.mark.parametrize("way", [["torchtitan", "megatron"], ["automodel"], ["convoy"]])
def test_deepspeed_goes_on_after_a_way_through_others(way, trained, tmp_path):
    last = trained / "universal"
    for to in way:
        move(last, tmp_path / to, to, num_heads=4)
        last = tmp_path / to
    move(last, tmp_path / "universal", "deepspeed", num_heads=4)
    run_script("zero", "deepspeed", tmp_path, tmp_path)
    found = torch.load(tmp_path / "resumed.pt")["continued"]
    expected = torch.load(trained / "expected.pt")["continued"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)


def test_its_weights_are_those_that_transformers_saves(trained):
    """Which DeepSpeed has rounded to bfloat16: gate and up, and experts, in the right order."""
    ours, theirs = open_foreign(trained / "universal"), open_foreign(trained / "hf")
    weights = {name for name in ours.arrays if name.startswith("model/")}
    assert weights == set(theirs.arrays)
    for name in weights:
        box = tuple((0, size) for size in ours.arrays[name].shape)
        full = torch.from_numpy(ours.read_box(name, box).copy())
        rounded = torch.from_numpy(theirs.read_box(name, box).copy().view("i2"))
        assert torch.equal(full.bfloat16(), rounded.view(torch.bfloat16)), name
