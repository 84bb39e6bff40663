"""Any state dict as a checkpoint, in one process."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ckpt
from ckpt.format import PlacedTensor, plan_packs
from ckpt.format.dtypes import STORAGE_DTYPES
from ckpt.state_dict import packing
from parallel.placements import MeshLayout, RankMesh
from tests.support.checkpoints import bits, objects_folder


@pytest.fixture(autouse=True)
def pack_little(monkeypatch):
    """Tensors of a mebibyte have arrays of their own, so that small states have both kinds."""
    monkeypatch.setattr("ckpt.format.pack_plan.PACK_BYTES", 1 << 20)


def model(width: int = 600) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, 3), nn.BatchNorm1d(3)
    )


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(2):
        net(torch.randn(4, 600)).square().sum().backward()
        optimizer.step()
    return net, optimizer


def full_state() -> dict:
    net, optimizer = trained()
    return {
        "model": net.state_dict(),
        "optim": optimizer.state_dict(),
        "epoch": 3,
        "rng": torch.get_rng_state(),
    }


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(bits(a), bits(b))
    if type(a) is not type(b) and not (isinstance(a, dict) and isinstance(b, dict)):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a * b))


def zeros(value: object) -> object:
    """The same tree with other values: what a program has before it loads."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: zeros(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(zeros, value))
    return 0


def test_a_training_state_comes_back_into_its_own_tensors(root):
    state = full_state()
    ckpt.save_state_dict(root, state, step=100)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=5.0)  # which has no moments yet
    fresh = {"model": net.state_dict(), "optim": optimizer.state_dict(), "epoch": 0,
             "rng": torch.get_rng_state()}  # fmt: skip
    assert ckpt.load_state_dict(root, fresh) == 100
    assert same(fresh, state)
    assert same(net.state_dict(), state["model"]), "filled in place"
    optimizer.load_state_dict(fresh["optim"])
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_every_kind_of_value_comes_back(root):
    state = {
        "numbers": [0, -7, 2**80, 0.1, math.inf, -math.inf, math.nan, True, False],
        "text": {"a": "", "b": "ü\n", "c": b"", "d": bytes(range(256))},
        "none": None,
        3: {"4": torch.arange(3), 5: (1, (torch.ones(2), "x"), [])},
        "empty": {},
        "dtypes": {name: (torch.arange(7) % 2).to(getattr(torch, name)) for name in STORAGE_DTYPES},
        "shapes": [torch.tensor(2.5), torch.zeros(0), torch.zeros(3, 0, 2), torch.ones(1, 1, 1)],
        "views": [torch.arange(24.0).view(4, 6).t(), torch.arange(9)[::2], torch.ones(1).expand(5)],
        "large": torch.randn(512, 1024).t(),
        "parameter": nn.Parameter(torch.randn(3)),
        "a/b": {"..": torch.ones(2), "%2F": torch.ones(3), "": torch.ones(1), "__x": torch.ones(4)},
        "packed": {"float32-0": torch.ones(5)},
    }
    ckpt.save_state_dict(root, state, step=0)
    whole: dict = {}
    assert ckpt.load_state_dict(root, whole) == 0
    assert same(whole, state)
    filled = zeros(state)
    assert ckpt.load_state_dict(root, filled) == 0  # type: ignore[arg-type]
    assert same(filled, state)


def test_any_reader_finds_a_tensor_by_its_name(root):
    state = full_state()
    ckpt.save_state_dict(root, state, step=1)
    opened = ckpt.open(root)
    assert "packed/float32-0" not in opened
    for name, tensor in state["model"].items():
        assert np.array_equal(opened[f"model/{name}"][...], tensor.numpy()), name
    moment = state["optim"]["state"][0]["exp_avg"]
    assert np.array_equal(opened["optim/state/0/exp_avg"][5, 3:9], moment.numpy()[5, 3:9])
    assert np.array_equal(
        opened["model/2.weight"].float32[1:, ::2], state["model"]["2.weight"][1:, ::2]
    )

    group = zarr.open_group(objects_folder(root, opened.manifest.save_id), mode="r", zarr_format=3)
    assert np.array_equal(group["model/0.weight"][...], state["model"]["0.weight"].numpy())
    pack = group["packed/float32-0"]
    place = pack.attrs["tensors"]["model/1.weight"]
    row = pack[0, place["start"] : place["start"] + math.prod(place["shape"])]
    assert np.array_equal(row.reshape(place["shape"]), state["model"]["1.weight"].numpy())


def test_many_small_tensors_make_few_files(root):
    state = {f"layer.{i}": torch.randn(100 + i) for i in range(300)}
    ckpt.save_state_dict(root, state, step=1)
    files = [path for path in root.rglob("*") if path.is_file()]
    assert len(files) == 5, "two groups, the pack's zarr.json, its object, and the manifest"
    ckpt.verify(root, ckpt.read_manifest(root))


def test_packs_have_an_end(root, monkeypatch):
    monkeypatch.setattr("ckpt.format.pack_plan._ROW_BYTES", 1000)
    monkeypatch.setattr("ckpt.state_dict.load._WAVE_BYTES", 3000)
    state = {f"layer.{i}": torch.randn(7 * i) for i in range(60)}
    ckpt.save_state_dict(root, state, step=1)
    assert sum(a.name.startswith("packed/") for a in ckpt.read_manifest(root).arrays) > 30
    filled = zeros(state)
    ckpt.load_state_dict(root, filled)  # type: ignore[arg-type]
    assert same(filled, state)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ([1], "state is a list: it must be a dict"),
        (
            {"a": {"f": print}},
            r"state\['a'\]\['f'\] is a builtins.builtin_function_or_method: only",
        ),
        ({"a": [1, {2, 3}]}, r"state\['a'\]\[1\] is a builtins.set: only tensors"),
        ({"a": np.ones(2)}, r"state\['a'\] is a numpy.ndarray: only"),
        ({"a": torch.float32}, r"state\['a'\] is a torch.dtype: only"),
        ({"a": {1.5: 0}}, r"state\['a'\] has the key 1.5: keys are str or int"),
        ({1: torch.ones(1), "1": torch.ones(1)}, "have one name, 1: rename a key"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, r"state\['a'\] has dtype complex64: one of"),
        ({"a": torch.ones(2, 2).to_sparse()}, r"state\['a'\] is a sparse_coo: only dense"),
        ({"a": torch.ones(2, device="meta")}, "is on the meta device: it has no numbers"),
        ({"a": "\ud800"}, "is not valid Unicode"),
        ({"a" * 201: torch.ones(2)}, "a key has more than 200 bytes"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(state, says, root):
    with pytest.raises(ckpt.CheckpointError, match=says):
        ckpt.save_state_dict(root, state, step=1)
    assert not root.exists()


@pytest.mark.parametrize("step", [-1, 1.0, True, "1"])
def test_a_step_is_a_whole_number(step, root):
    with pytest.raises(ckpt.CheckpointError, match="must be a whole number of at least 0"):
        ckpt.save_state_dict(root, {}, step=step)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"a": torch.zeros(3), "b": 0}, r"\['a'\] has shape \(3,\), and \(2,\) in the checkpoint"),
        ({"a": torch.zeros(2, dtype=torch.float64), "b": 0}, "has dtype float64, and float32"),
        ({"a": 5, "b": 0}, r"state\['a'\] is a int, and a tensor in the checkpoint"),
        ({"a": torch.zeros(2), "b": torch.zeros(1)}, r"state\['b'\] is a Tensor, and 7 in the"),
        ({"a": torch.zeros(2), "b": {"x": 1}}, r"state\['b'\] is a dict, and 7 in the"),
        ({"a": torch.zeros(2)}, r"the state lacks state\['b'\]; ignore="),
        ({"a": torch.zeros(2), "b": 0, "c": 1}, r"the checkpoint lacks state\['c'\]"),
    ],
)
def test_a_state_that_does_not_fit_is_left_as_it_is(state, says, root):
    ckpt.save_state_dict(root, {"a": torch.ones(2), "b": 7}, step=1)
    before = {
        key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in state.items()
    }
    with pytest.raises(ckpt.CheckpointError, match=says):
        ckpt.load_state_dict(root, state)
    assert same(state, before)


def test_without_strict_what_both_have_is_loaded(root):
    ckpt.save_state_dict(root, {"a": torch.ones(2), "b": 7, "l": [1, 2]}, step=1)
    state = {"a": torch.zeros(2), "c": 5, "l": [0, 0]}
    ckpt.load_state_dict(root, state, strict=False)
    assert same(state, {"a": torch.ones(2), "c": 5, "l": [1, 2]})


def test_steps_and_folders_without_a_checkpoint_are_named(root):
    with pytest.raises(ckpt.CheckpointError, match="there is no such folder"):
        ckpt.load_state_dict(root, {})
    ckpt.save_state_dict(root, {"a": 1}, step=1)
    ckpt.save_state_dict(root, {"a": 2}, step=2)
    with pytest.raises(ckpt.CheckpointError, match="step 2 already has a checkpoint"):
        ckpt.save_state_dict(root, {"a": 3}, step=2)
    state = {"a": 0}
    assert ckpt.load_state_dict(root, state, step=1) == 1
    assert state == {"a": 1}
    assert ckpt.load_state_dict(root, state) == 2
    assert state == {"a": 2}
    assert ckpt.load_state_dict(str(root / "manifests" / "step-00000001.json"), state) == 1
    with pytest.raises(ckpt.CheckpointError, match=r"no checkpoint of step 3"):
        ckpt.load_state_dict(root, state, step=3)


def test_tensors_on_the_meta_device_are_replaced(root):
    state = full_state()
    ckpt.save_state_dict(root, state, step=1)
    with torch.device("meta"):
        net = model()
    fresh = {"model": net.state_dict()}
    ckpt.load_state_dict(root, fresh, strict=False)
    net.load_state_dict(fresh["model"], assign=True)
    assert same(net.state_dict(), state["model"])


def test_damage_of_any_object_is_an_error(root):
    state = {"small": torch.randn(50), "large": torch.randn(600, 600), "half": torch.ones(9).half()}
    ckpt.save_state_dict(root, state, step=1)
    manifest = ckpt.read_manifest(root)
    folder = objects_folder(root, manifest.save_id)
    for key in manifest.objects:
        if key.endswith("zarr.json"):
            continue
        path = folder / key
        good = path.read_bytes()
        for bad in (good[:-1], bytes([good[0] ^ 1]) + good[1:], None):
            path.unlink()
            if bad is not None:
                path.write_bytes(bad)
            with pytest.raises(ckpt.CheckpointError, match=r"damaged|has .* bytes|is missing"):
                ckpt.load_state_dict(root, zeros(state))  # type: ignore[arg-type]
            path.write_bytes(good)
    filled = zeros(state)
    ckpt.load_state_dict(root, filled)  # type: ignore[arg-type]
    assert same(filled, state)


def test_saves_in_the_background_are_committed_and_retained(root):
    state = full_state()
    with ckpt.AsyncSaver(root, keep=2) as saver:
        for step in (1, 2, 3):
            state["epoch"] = step
            saver.save(state, step=step)
            state["model"]["0.weight"] += 1  # at once: the save has its own copy
        saver.wait()
        assert ckpt.committed_steps(root) == [2, 3]
        ckpt.verify(root, ckpt.read_manifest(root))
        saved: dict = {}
        assert ckpt.load_state_dict(root, saved) == 3
        assert saved["epoch"] == 3
        assert torch.equal(saved["model"]["0.weight"] + 1, state["model"]["0.weight"])
        saver.save(state, step=3)
        with pytest.raises(ckpt.CheckpointError, match="step 3 already has a checkpoint"):
            saver.wait()
        saver.save(state, step=3)
        saver._open_saver().wait()
        with pytest.raises(ckpt.CheckpointError, match="at least 0"):
            saver.save(state, step=-1)
        saver.save(state, step=4)
    assert ckpt.committed_steps(root) == [3, 4]


KILLED = """
import os, signal, sys, torch, ckpt
state = {"large": torch.full((2000, 2000), 7.0), "small": torch.arange(10)}
saver = ckpt.AsyncSaver(sys.argv[1])
saver.save(state, step=9)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_save_that_was_copied_is_committed_after_a_kill(root):
    done = subprocess.run([sys.executable, "-c", KILLED, str(root)], cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL
    from tests.support.checkpoints import eventually

    eventually(lambda: ckpt.committed_steps(root), "the writer process commits")
    state: dict = {}
    assert ckpt.load_state_dict(root, state) == 9
    assert torch.equal(state["large"], torch.full((2000, 2000), 7.0))
    ckpt.verify(root, ckpt.read_manifest(root))


def test_nothing_is_unpickled(root):
    class Evil:
        def __reduce__(self):
            return os.system, ("touch /tmp/never",)

    with pytest.raises(ckpt.CheckpointError, match="Evil: only tensors"):
        ckpt.save_state_dict(root, {"a": Evil()}, step=1)
    ckpt.save_state_dict(root, full_state(), step=1)
    assert b"pickle" not in b"".join(p.read_bytes() for p in root.rglob("*") if p.is_file())


def test_another_checkpoint_is_told_apart(root):
    spec = ckpt.ArraySpec("a", (2,), torch.float32, ((),))
    from tests.support.checkpoints import info

    arrays = [ckpt.LocalArray(spec, [((0, 2),)], [torch.ones(2)])]
    from parallel import Topology

    ckpt.save(root, info(1, Topology()), arrays, 0, lambda ok: ok)
    with pytest.raises(ckpt.CheckpointError, match="was not saved by save_state_dict"):
        ckpt.load_state_dict(root, {"a": torch.zeros(2)})


def test_tensors_with_gaps_and_with_the_negative_bit_are_saved(root):
    torch.manual_seed(0)
    z = torch.randn(5, 7, dtype=torch.complex64)
    state = {
        "negative": z.conj().imag,
        "transposed": torch.randn(6, 4).T,
        "strided": torch.randn(40, dtype=torch.float32)[::4],
        "plain": torch.arange(3.0),
    }
    ckpt.save_state_dict(root, state, step=1)
    found: dict[str, Any] = {}
    ckpt.load_state_dict(root, found)
    assert torch.equal(found["negative"], -z.imag)
    assert same(found, {**state, "negative": -z.imag})
    with pytest.raises(ckpt.CheckpointError, match=r"state\['negative'\] is a view with the neg"):
        ckpt.load_state_dict(root, state)


class LargestNew(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        of = out if isinstance(out, list | tuple) else [out]
        self.largest = max(self.largest, *(one.numel() for one in of))
        return out


def test_a_row_of_a_pack_is_gathered_chunk_by_chunk():
    """A device must never hold a copy of all small tensors: a transposed tensor takes its way."""
    tensors = {f"w{i}": torch.full((40, 50), float(i)).T for i in range(30)}
    mesh = RankMesh((1,), (0,))
    described = {
        name: PlacedTensor("float32", MeshLayout((50, 40), mesh, (None,))) for name in tensors
    }
    with LargestNew() as made:
        (row,) = packing.local_arrays(plan_packs(described), described, tensors, 0)
        out = np.empty((1, 3000), np.float32)
        for start in range(0, 60_000, 3000):
            row.read_into(((0, 1), (start, start + 3000)), out)
            expected = np.repeat(np.arange(30.0), 2000)[start : start + 3000]
            assert (out[0] == expected).all()
    assert made.largest == 3000, "no more than the part that is asked for"


def schedules() -> dict[str, Callable[[torch.optim.Optimizer], Any]]:
    """A learning rate scheduler of every class that torch has, by its name."""
    lr = torch.optim.lr_scheduler
    return {
        "LambdaLR": lambda o: lr.LambdaLR(o, lambda n: 0.9**n),
        "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda n: 0.9),
        "StepLR": lambda o: lr.StepLR(o, 2),
        "MultiStepLR": lambda o: lr.MultiStepLR(o, [3, 5, 5]),
        "ConstantLR": lambda o: lr.ConstantLR(o, 0.5, 5),
        "LinearLR": lambda o: lr.LinearLR(o, 0.1, 1.0, 7),
        "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.9),
        "PolynomialLR": lambda o: lr.PolynomialLR(o, 9, 2.0),
        "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 9),
        "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
        "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
        "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.2, total_steps=20),
        "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=1),
        "SequentialLR": lambda o: lr.SequentialLR(
            o, [lr.LinearLR(o, 0.1, 1.0, 3), lr.MultiStepLR(o, [2, 4])], [3]
        ),
        "ChainedScheduler": lambda o: lr.ChainedScheduler(
            [lr.ConstantLR(o, 0.5, 2), lr.MultiStepLR(o, [3, 5])]
        ),
    }


def scheduled(name: str) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    return optimizer, schedules()[name](optimizer)


def rates(name: str, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step(*[1.0] * (name == "ReduceLROnPlateau"))
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_every_scheduler_of_torch_is_among_those_that_are_saved():
    own = {
        name
        for name, kind in vars(torch.optim.lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.lr_scheduler.LRScheduler)
    }
    assert own - {"LRScheduler", "_LRScheduler", "SWALR"} == set(schedules())


@pytest.mark.parametrize("name", schedules())
def test_a_learning_rate_goes_on_from_a_checkpoint(name, root):
    optimizer, scheduler = scheduled(name)
    rates(name, optimizer, scheduler, 2)
    saved = {"optim": optimizer.state_dict(), "schedule": scheduler.state_dict()}
    ckpt.save_state_dict(root, saved, step=2)
    other, loaded = scheduled(name)
    state = {"optim": other.state_dict(), "schedule": loaded.state_dict()}
    ckpt.load_state_dict(root, state)
    other.load_state_dict(state["optim"])
    loaded.load_state_dict(state["schedule"])
    assert rates(name, other, loaded, 8) == rates(name, optimizer, scheduler, 8)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"keep": 0}, r"^keep \(0\) must be at least 1, a ckpt.Retention, or None for all$"),
        ({"keep": "x"}, r"^keep \('x'\) must be at least 1"),
        ({"keep": True}, r"^keep \(True\) must be at least 1"),
        ({"compression": "gzip"}, r"^compression \('gzip'\) must be one of none, zstd$"),
        ({"root": ckpt.LocalStore(Path("x"))}, r"^root \(LocalStore\) must be a folder or a URL$"),
    ],
)
def test_what_no_saver_can_use_is_refused_at_once(options, says, root):
    with pytest.raises(ValueError, match=says):
        ckpt.AsyncSaver(options.pop("root", root), **options)
    assert not root.exists()


def test_a_compression_that_there_is_not_is_one_line(root):
    with pytest.raises(ValueError, match=r"^compression \('gzip'\) must be one of none, zstd$"):
        ckpt.save_state_dict(root, {"a": 1}, step=1, compression="gzip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="compression"):
        ckpt.AsyncCheckpointer([], 0, root / "lock", compression="gzip")  # type: ignore[arg-type]


HOLDS = """
import sys, ckpt
saver = ckpt.AsyncSaver(sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_second_saver_leaves_the_first_one_alone(root):
    state = {"w": torch.ones(3)}
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(root)],
        cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        with pytest.raises(ckpt.CheckpointError, match=f"process {other.pid} has an AsyncSaver"):
            ckpt.AsyncSaver(root)
    finally:
        other.kill()  # the writer process of a dead trainer is taken over
        other.communicate()
    saver = ckpt.AsyncSaver(root)
    saver.save(state, step=1)
    with pytest.raises(ckpt.CheckpointError, match="this process already has an AsyncSaver"):
        ckpt.AsyncSaver(root)
    saver.save(state, step=2)
    saver.close()
    saver.close()
    for call in (lambda: saver.save(state, step=3), saver.wait):
        with pytest.raises(ckpt.CheckpointError, match=r"^this saver is closed"):
            call()
    assert ckpt.committed_steps(root) == [1, 2]


def test_keys_that_may_differ_are_ignored_by_their_names(root):
    rng = torch.arange(4, dtype=torch.uint8)
    saved = {"w": torch.ones(3), "rng/0": rng, "rng/1": rng, "own": {"1": {"a": 1}}}
    ckpt.save_state_dict(root, saved, step=1)
    for state in (
        {"w": torch.zeros(3), "rng/0": torch.zeros_like(rng), "own": {"1": {"a": 0}}},
        {"w": torch.zeros(3), "rng/2": torch.zeros_like(rng), "own": {"2": {}, "1": {"a": 0}}},
        {"w": torch.zeros(3), "rng/0": torch.zeros_like(rng), "own": {"2": {"a": 7}}},
    ):
        with pytest.raises(ckpt.CheckpointError, match=r"ignore=\[...\] names what may differ"):
            ckpt.load_state_dict(root, state)
        ckpt.load_state_dict(root, state, ignore=["rng/*", "own/*/*"])
        assert torch.equal(state["w"], torch.ones(3))
        if "rng/0" in state:
            assert torch.equal(state["rng/0"], rng)
    with pytest.raises(ckpt.CheckpointError, match="the state lacks"):
        ckpt.load_state_dict(root, {"w": torch.zeros(3)}, ignore=["rng/*"])


@pytest.mark.parametrize("step", ["1", 1.0, True])
def test_a_step_to_load_is_a_whole_number(step, root):
    ckpt.save_state_dict(root, {"a": 1}, step=1)
    with pytest.raises(ckpt.CheckpointError, match=r"^step \(.*\) must be a whole number, or None"):
        ckpt.load_state_dict(root, {"a": 0}, step=step)


def test_a_wrong_name_is_told_with_the_nearest(root):
    ckpt.save_state_dict(root, {"model": {"weight": torch.ones(2)}}, step=1)
    opened = ckpt.open(root)
    with pytest.raises(KeyError, match=r"model/wieght is no array of step 1 in .*model/weight"):
        opened["model/wieght"]
    assert opened.get("typo") is None
    assert "typo" not in opened
