"""State dicts of several ranks: DTensors of any mesh and placements, onto any other ranks."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import ckpt
from ckpt.format import pack_plan
from tests.support.ranks import run_ranks, start_ranks

SHAPES = {
    "even": (8, 12),
    "uneven": (7, 5),
    "fewer rows than ranks": (3, 2),
    "one row": (1, 6),
    "scalar": (),
    "empty": (0, 3),
    "large": (1024, 1200),
    "large uneven": (1201, 1000),
}


def whole(name: str, shape: tuple[int, ...]) -> Tensor:
    """What a tensor is, on any rank."""
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32)
    return numbers.view(shape) + 1000.0 * sorted(SHAPES).index(name)


def placements_on(mesh: DeviceMesh, shape: tuple[int, ...]) -> list[list[Any]]:
    """Placements that cut in every way that a mesh of 1 or 2 dims can."""
    cuts: list[Any] = [Replicate()]
    if shape:
        cuts += [Shard(dim) for dim in range(len(shape))]
    if mesh.ndim == 1:
        return [[one] for one in cuts]
    pairs = [[a, b] for a in cuts for b in cuts]
    if shape and shape[0] > 1:
        pairs += [[_StridedShard(0, split_factor=mesh.size(1)), Shard(0)],
                  [Shard(0), _StridedShard(0, split_factor=2)],
                  [Replicate(), _StridedShard(0, split_factor=3)]]  # fmt: skip
    return pairs


def grid(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2) if world == 4 else (world,))


def tensors(world: int, turn: int, filled: bool) -> dict[str, Any]:
    """A state of DTensors; ``turn`` chooses the placements."""
    mesh, state = grid(world), {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        every = placements_on(mesh, shape)
        full = whole(name, shape)
        cut = distribute_tensor(
            full if filled else torch.full_like(full, -1.0),
            mesh,
            every[(turn + i) % len(every)],
            src_data_rank=None,
        )
        state[name] = cut
    state["plain"] = torch.arange(5.0) if filled else torch.zeros(5)
    state["step"] = 7 if filled else 0
    return state


def local_of(tensor: DTensor, full: Tensor) -> Tensor:
    """What torch itself makes of a full tensor for this rank."""
    mesh, placements = tensor.device_mesh, tensor.placements
    return distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()


def check(state: dict[str, Any]) -> None:
    for name, shape in SHAPES.items():
        expected = local_of(state[name], whole(name, shape))
        assert torch.equal(state[name].to_local(), expected), (name, state[name].placements)
    assert torch.equal(state["plain"], torch.arange(5.0))
    assert state["step"] == 7


def save_all(rank: int, root: Path, world: int, turns: list[int]) -> None:
    for turn in turns:
        # In some turns all tensors are packed, and in others the large ones are not.
        pack_plan.PACK_BYTES = (4 << 20) if turn % 3 == 0 else (1 << 18)
        ckpt.save_state_dict(root / str(turn), tensors(world, turn, filled=True), step=turn)


def load_all(rank: int, root: Path, world: int, turns: list[int]) -> None:
    for turn in turns:
        state = tensors(world, 3 * turn + 1, filled=False)
        assert ckpt.load_state_dict(root / str(turn), state) == turn
        check(state)


@pytest.mark.parametrize("world", [2, 4])
def test_what_some_ranks_save_any_ranks_load(world, root):
    turns = list(range(6 if world == 4 else 3))
    run_ranks(save_all, world, root, world, turns)
    for turn in turns:
        manifest = ckpt.read_manifest(root / str(turn))
        ckpt.verify(root / str(turn), manifest)
        opened = ckpt.open(root / str(turn))
        for name, shape in SHAPES.items():
            assert (opened[name][...] == whole(name, shape).numpy()).all(), name
    for other in {1, 2, 4} - {world} | {world}:
        run_ranks(load_all, other, root, other, turns)
    # One process, without a process group, into plain tensors.
    plain: dict[str, Any] = {}
    ckpt.load_state_dict(root / "0", plain)
    assert all(torch.equal(plain[name], whole(name, shape)) for name, shape in SHAPES.items())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(520, 1050), nn.Linear(1050, 520)
        self.norm = nn.LayerNorm(520)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


def built(world: int, tp: int, device: str = "cpu") -> nn.Module:
    """A model under tensor parallelism within, and FSDP2 around."""
    torch.manual_seed(1)
    with torch.device(device):
        model = nn.Sequential(Block(), Block())
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("fsdp", "tp"))
    for block in model:
        if tp > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 520)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments, "epoch": 0}


def save_model(rank: int, root: Path, world: int, tp: int) -> list[float]:
    model = built(world, tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 2)
    pack_plan.PACK_BYTES = 1 << 19
    ckpt.save_state_dict(root, training_state(model, optimizer) | {"epoch": 2}, step=2)
    return train(model, optimizer, 2)


def load_model(rank: int, root: Path, world: int, tp: int, device: str) -> list[float]:
    model = built(world, tp, device)
    if device == "meta":
        weights = {"model": model.state_dict()}
        ckpt.load_state_dict(root, weights, strict=False)
        model.load_state_dict(weights["model"], assign=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    state = training_state(model, optimizer)
    assert ckpt.load_state_dict(root, state) == 2
    assert state["epoch"] == 2
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    return train(model, optimizer, 2)


@pytest.mark.parametrize(("world", "tp"), [(2, 1), (4, 2)])
def test_a_model_under_fsdp_and_tp_trains_on_from_other_ranks(world, tp, root):
    expected = run_ranks(save_model, world, root, world, tp)[0]
    others = [(1, 1, "cpu"), (4, 1, "meta")] if world == 2 else [(2, 2, "cpu")]
    for ranks, tensor_parallel, device in [*others, (world, tp, "cpu")]:
        found = run_ranks(load_model, ranks, root, ranks, tensor_parallel, device)[0]
        assert found == pytest.approx(expected, rel=1e-5), (ranks, tensor_parallel, device)


def moments_that_do_not_exist(rank: int, root: Path, world: int) -> None:
    model = built(world, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    weights, _ = get_state_dict(model, optimizer, options=None)
    state: dict[str, Any] = {"model": weights, "optim": {}, "epoch": None}
    ckpt.load_state_dict(root, state)
    moment = state["optim"]["state"]["0.up.weight"]["exp_avg"]
    assert isinstance(moment, DTensor)
    assert moment.placements == weights["0.up.weight"].placements
    assert moment.full_tensor().abs().max() > 0
    lost: dict[str, Any] = {}
    with pytest.raises(ckpt.CheckpointError, match="has no tensor that says how to cut it"):
        ckpt.load_state_dict(root, lost)


def test_moments_are_made_like_their_parameters(root):
    run_ranks(save_model, 2, root, 2, 1)
    run_ranks(moments_that_do_not_exist, 2, root, 2)


def on_one_rank(rank: int, root: Path) -> None:
    """Names as of ``optimizer.state_dict()``, which do not say whose a moment is."""
    model = built(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fresh = {"optim": optimizer.state_dict(), "model": model.state_dict()}
    train(model, optimizer, 1)
    ckpt.save_state_dict(root, {"optim": optimizer.state_dict(), "model": {}}, step=1)
    fresh["model"] = {}
    ckpt.load_state_dict(root, fresh)  # without DTensors these are whole, plain tensors
    ckpt.save_state_dict(
        root, {"optim": optimizer.state_dict(), "model": model.state_dict()}, step=2
    )
    fresh = {"optim": {"state": {}, "param_groups": []}, "model": model.state_dict()}
    with pytest.raises(ckpt.CheckpointError, match="has no tensor that says how to cut it"):
        ckpt.load_state_dict(root, fresh)


def test_moments_of_one_rank_under_fsdp_are_no_plain_tensors(root):
    run_ranks(on_one_rank, 1, root)


def moments_that_are_shards(rank: int, root: Path) -> tuple[str, str]:
    """Plain moments of the parameters' shards, as a loader that knows no DTensors makes them."""
    model = built(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    state, sound = training_state(model, optimizer), training_state(model, optimizer)
    state["optim"]["state"] = {
        # Equal on both ranks: no checksum tells them apart.
        key: {
            name: torch.zeros_like(value.to_local()) if isinstance(value, DTensor) else value
            for name, value in moments.items()
        }
        for key, moments in state["optim"]["state"].items()
    }
    try:
        ckpt.save_state_dict(root, state, step=1)
    except ckpt.CheckpointError as error:
        saved = str(error)
    ckpt.save_state_dict(root, sound, step=2)
    try:
        ckpt.load_state_dict(root, state)
    except ckpt.CheckpointError as error:
        return saved, str(error)
    raise AssertionError("nothing was refused")


def test_plain_moments_of_sharded_parameters_are_refused(root):
    for saved, loaded in run_ranks(moments_that_are_shards, 2, root):
        assert "['exp_avg'] is a plain tensor of the shape" in saved
        assert "must be a DTensor, as the optimizer of the sharded parameter makes it" in saved
        assert "has shape" in loaded
        assert "in the checkpoint" in loaded
        assert "\n" not in saved + loaded


def odd_strides(rank: int, root: Path) -> None:
    state = {
        "one": torch.arange(2.0)[::2],
        "some": torch.arange(12.0)[1::3],
        "turned": torch.arange(6.0).view(2, 3).t(),
        "negative": (torch.ones(3) * 1j).conj().imag,
    }
    ckpt.save_state_dict(root, state, step=1)
    found = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in state.items()}
    ckpt.load_state_dict(root, found)
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("world", [1, 2])
def test_tensors_of_odd_strides(world, root):
    run_ranks(odd_strides, world, root)


def stages(rank: int, root: Path) -> None:
    """Two pipeline stages of two ranks each, that have layers of their own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
    stage, here = mesh["pp"].get_local_rank(), mesh["fsdp"]
    full = torch.arange(12.0).view(6, 2) + stage
    state = {
        f"layer.{stage}": distribute_tensor(full, here, [Shard(0)], src_data_rank=None),
        "rng": {str(rank): torch.full((3,), rank)},
        "shared": torch.ones(2),
        "note": {f"stage {stage}": [stage, "x"]},
    }
    ckpt.save_state_dict(root, state, step=1)
    mine = {
        f"layer.{stage}": distribute_tensor(full * 0, here, [Shard(0)], src_data_rank=None),
        "rng": {str(rank): torch.zeros(3, dtype=torch.int64)},
        "shared": torch.zeros(2),
        "note": {f"stage {stage}": [0, ""]},
    }
    ckpt.load_state_dict(root, mine)
    assert torch.equal(mine[f"layer.{stage}"].full_tensor(), full)
    assert mine["rng"][str(rank)].tolist() == [rank] * 3
    assert mine["note"] == {f"stage {stage}": [stage, "x"]}
    lacking = {key: value for key, value in mine.items() if key != "rng"}
    with pytest.raises(ckpt.CheckpointError, match=r"the state lacks state\['rng'\]\['0'\] and 3"):
        ckpt.load_state_dict(root, lacking)


def test_pipeline_stages_have_tensors_of_their_own(root):
    run_ranks(stages, 4, root)
    opened = ckpt.open(root)
    assert sorted(opened) == ["layer.0", "layer.1", *(f"rng/{i}" for i in range(4)), "shared"]
    assert opened["layer.1"][...].tolist() == (torch.arange(12.0).view(6, 2) + 1).tolist()


def within_replicas(rank: int, root: Path) -> None:
    """Tensor parallelism within replicas: each replica has a mesh of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    pack_plan.PACK_BYTES = 1 << 20
    full = torch.arange(2048.0 * 600).view(2048, 600)
    small = torch.arange(6.0)
    state = {
        name: distribute_tensor(one, mesh["tp"], [Shard(0)], src_data_rank=None)
        for name, one in (("a", full), ("b", small))
    }
    ckpt.save_state_dict(root, state, step=1)


def test_replicas_on_meshes_of_their_own_share_the_work(root):
    run_ranks(within_replicas, 4, root)
    manifest = ckpt.read_manifest(root)
    ckpt.verify(root, manifest)
    assert ckpt.open(root)["a"][2047, 599] == 2048 * 600 - 1
    assert ckpt.open(root)["b"][...].tolist() == list(range(6))
    record = manifest.array("a")
    assert record.placements == (None, 0)
    assert record.mesh is not None
    assert record.mesh.mesh.shape == (2, 2)


def differing(rank: int, root: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    cut = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    said = []
    for state in (
        {"a": torch.full((2,), float(rank))},
        {"a": torch.ones(2 + rank)},
        {"a": rank},
        {"a": [1] * (1 + rank)},
        {"a": {1, 2}} if rank else {"a": 1},
        {"a": cut} if rank else {},
        {"a": cut} if rank else {"a": torch.ones(4)},
        {"a": partial},
    ):
        with pytest.raises(ckpt.CheckpointError) as error:
            ckpt.save_state_dict(root, state, step=1)
        said.append(str(error.value))
    return said


def test_ranks_that_differ_are_told_on_every_rank(root):
    first, second = run_ranks(differing, 2, root)
    assert not root.exists()
    for one, other in zip(first, second, strict=True):
        assert one == other or "rank 1: " in one
    for line, says in zip(
        second,
        [
            "tensor a has other numbers on rank 1 than on rank 0",
            "tensor a has shape (2,) on rank 0 and (3,) on rank 1",
            "state['a'] is 0 on rank 0 and 1 on rank 1: it must be equal",
            "state['a'] is a list on rank 0 and a list on rank 1",
            "state['a'] is a builtins.set: only",
            "tensor a is on a mesh with rank 0, and the state of rank 0 has no such tensor",
            "tensor a has placements",
            "its parts are not yet summed",
        ],
        strict=True,
    ):
        assert says in line


class Unreadable(dict):
    """Stands for any defect while a state is read."""

    def items(self):
        raise RuntimeError("no items")


def failing(rank: int, root: Path) -> list[str]:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no arrays")

    said, good = [], {"a": torch.ones(3)}

    def refused(call: Any, state: Any, step: int) -> None:
        with pytest.raises(Exception, match=r"no items|no arrays") as error:
            call(state, step=step)
        said.append(f"{type(error.value).__name__}: {error.value}")

    def save(state: Any, step: int) -> None:
        ckpt.save_state_dict(root, state, step=step)

    with ckpt.AsyncSaver(root) as saver:
        for call in (save, saver.save):
            refused(call, Unreadable() if rank else good, 1)
            with pytest.MonkeyPatch.context() as patch:
                if rank:
                    patch.setattr("ckpt.state_dict.save.local_arrays", fail)
                refused(call, good, 2)
        with pytest.MonkeyPatch.context() as patch:
            if rank:
                patch.setattr(saver._saver, "_plan", fail)
            refused(saver.save, good, 3)
        saver.save(good, step=4)
    return said


def test_any_error_of_one_rank_ends_the_save_on_all(root):
    first, second = run_ranks(failing, 2, root)
    assert all(line.startswith("RuntimeError: no ") for line in second)
    assert all(line.startswith("CheckpointError: ") and "rank 1: no " in line for line in first)
    assert ckpt.committed_steps(root) == [4]


def node_of(rank: int) -> tuple[int, ...]:
    return (0, 1) if rank < 2 else (2, 3)


def on_nodes(rank: int, root: Path) -> None:
    """Each node of two ranks keeps a checkpoint of its own in memory, besides the shared one."""
    state = tensors(4, 2, filled=True)
    node = root / f"node-{rank // 2}"
    memory = ckpt.Tier(name="memory", location=str(node), ranks=node_of(rank), keep=1)
    with ckpt.AsyncSaver(root / "shared", tiers=[memory], keep=1) as saver:
        for step in (5, 6):
            saver.save(state, step=step)
        saver.wait()
        dist.barrier()
        assert ckpt.committed_steps(node) == [6]
        ckpt.verify(node, ckpt.read_manifest(node))
        for where in (node, root / "shared"):
            found = tensors(4, 2, filled=False)
            assert ckpt.load_state_dict(where, found) == 6
            check(found)


def test_a_node_loads_from_its_own_memory(root):
    run_ranks(on_nodes, 4, root)


def save_for_ever(rank: int, root: Path) -> None:
    """Save, each time other numbers; leftovers of the launch before are removed first."""
    pack_plan.PACK_BYTES = 1 << 18
    mesh = init_device_mesh("cpu", (2,))
    if rank == 0:
        ckpt.lifecycle.remove_uncommitted(root)
        ckpt.retain(root, 2)
    dist.barrier()
    step = (ckpt.committed_steps(root) or [0])[-1]
    while True:
        step += 1
        full = torch.full((512, 600), float(step))
        small = torch.full((6,), step)
        ckpt.save_state_dict(
            root,
            {
                "large": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None),
                "small": [distribute_tensor(small, mesh, [Shard(0)], src_data_rank=None), step],
            },
            step=step,
        )
        if rank == 0:
            ckpt.retain(root, 2)


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_after_a_kill_the_newest_checkpoint_is_whole(seed, root):
    last = 0
    for launch in range(3):
        processes, _ = start_ranks(save_for_ever, 2, root)
        deadline = time.monotonic() + 60
        while (ckpt.committed_steps(root) or [0])[-1] < last + 2:
            assert time.monotonic() < deadline, "no checkpoint came"
            time.sleep(0.01)
        time.sleep(0.003 * (seed + 3 * launch))
        first = processes[launch % 2 if seed else 0]
        assert first.pid is not None
        first.kill()
        first.join()
        assert first.exitcode == -signal.SIGKILL
        for process in processes:
            process.kill()
            process.join()
        state: dict[str, Any] = {}
        step = ckpt.load_state_dict(root, state)
        assert step > last
        assert (state["large"] == step).all()
        assert (state["small"][0] == step).all()
        assert state["small"][1] == step
        ckpt.verify(root, ckpt.read_manifest(root))
        last = step
    shutil.rmtree(root)
