"""Saves that are partial, torn, stale or corrupt.

These are damaged, interrupted and foreign files: what is read is what was saved, or an error.
"""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr
from safetensors.torch import load_file
from torch import Tensor

import ckpt
from convoy.commands.command_line import main
from tests.museum.cases import Edit, case
from tests.museum.shared_saving import ROWS, save_and_die, save_rows
from tests.support.ranks import run_ranks, start_ranks

_READ_ONE = (
    "    except (CheckpointError, OSError) as error:\n"
    "        raise named(error, store, key) from None"
)


def _save(root: Path, step: int, **state: Tensor) -> Path:
    """Save plain tensors; returns the largest object."""
    ckpt.save_state_dict(root, state, step=step)
    objects = root / "objects" / ckpt.read_manifest(root, step).save_id
    return max(objects.rglob("c.*"), key=lambda path: path.stat().st_size)


def _loaded(root: Path, step: int | None = None) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    ckpt.load_state_dict(root, state, step=step)
    return state


@case(
    "zarr-developers/zarr-python#486",
    "A chunk whose file was lost read as the fill value, without an error, and nobody could tell "
    "such numbers from saved ones.",
    Edit(
        "ckpt/read/box.py",
        _READ_ONE,
        "    except FileNotFoundError:\n"
        "        return math.prod(box_shape(intersect(layout.box, box) or ()))\n" + _READ_ONE,
    ),
)
def test_a_lost_object_is_an_error_and_not_zeros(tmp_path):
    """An object of a checkpoint that is lost is an error that names the file, where zarr's own
    reader gives zeros."""
    victim = _save(tmp_path, 1, w=torch.ones(1 << 20))
    victim.unlink()
    assert not np.any(zarr.open_array(victim.parent, mode="r")[:])
    with pytest.raises(ckpt.CheckpointError, match=r"c\.0 is missing, the manifest lists it"):
        _loaded(tmp_path)
    with pytest.raises(ckpt.CheckpointError, match="is missing, the manifest lists it"):
        ckpt.open(tmp_path)["w"][:4]


@case(
    "pytorch/pytorch#126952",
    "torch.load skipped the checksums that its files have, so that a damaged checkpoint loaded as "
    "if nothing had happened.",
    Edit(
        "ckpt/format/shard_reader.py",
        "if found != int.from_bytes(check.tobytes(), ",
        "if False and found != int.from_bytes(check.tobytes(), ",
    ),
)
def test_a_flipped_bit_is_an_error(tmp_path):
    """One bit that is flipped in the numbers of a checkpoint is an error at the load, wherever in
    the file the bit is."""
    values = torch.randn(1 << 18)
    victim = _save(tmp_path, 1, w=values)
    sound = victim.read_bytes()
    for byte in range(0, values.nbytes, values.nbytes // 7):
        damaged = bytearray(sound)
        damaged[byte] ^= 4
        victim.write_bytes(damaged)
        with pytest.raises(ckpt.CheckpointError, match="is damaged"):
            _loaded(tmp_path)
    victim.write_bytes(sound)
    assert torch.equal(_loaded(tmp_path)["w"], values)


@case(
    "NVIDIA/Megatron-LM#5281",
    "After a lost node a run took its checkpoint from another node's memory, where it was corrupt; "
    "nothing checked the copy, and the run failed and restarted from the copy without an end.",
    Edit(
        "ckpt/format/shard_reader.py",
        'if crc32c(b"".join(checks.values())) != expected.checksum:',
        "if False:",
    ),
)
def test_a_stale_copy_in_memory_is_refused_and_the_shared_one_loads(tmp_path):
    """A copy of a checkpoint in memory in which a file is that of an earlier save is refused, with
    the file's name, although each of its checksums is right; the shared copy loads."""
    shared, memory = tmp_path / "shared", tmp_path / "memory"
    tier = ckpt.Tier(name="memory", location=str(memory))
    values = [torch.full((1 << 18,), float(step)) for step in (1, 2)]
    with ckpt.AsyncSaver(shared, tiers=[tier]) as saver:
        for step, value in enumerate(values, 1):
            saver.save({"w": value}, step=step)
    (old,), (new,) = ((memory / "objects").glob(f"0000000{step}-*/**/c.*") for step in (1, 2))
    new.write_bytes(old.read_bytes())
    with pytest.raises(ckpt.CheckpointError, match="is damaged: it is not the one that"):
        _loaded(memory)
    assert torch.equal(_loaded(shared)["w"], values[1])


@case(
    "Lightning-AI/pytorch-lightning#688",
    "A checkpoint was written under its own name, so that a process that was killed in a save left "
    "half a checkpoint as the newest one.",
    Edit(
        "ckpt/store/local.py",
        '        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")\n',
        "        return self.write(key, [data])\n",
    ),
)
def test_a_process_killed_in_a_save_leaves_the_checkpoint_before(tmp_path):
    """A process that is killed while it writes a checkpoint leaves the checkpoint before as the
    newest one, and that one loads."""
    _save(tmp_path, 1, w=torch.ones(9))
    (process,), _ = start_ranks(save_and_die, 1, tmp_path, group=False)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert ckpt.committed_steps(tmp_path) == [1]
    assert torch.equal(_loaded(tmp_path)["w"], torch.ones(9))


@case(
    "NVIDIA-NeMo/Automodel#3261",
    "A save that was interrupted left a folder that looked like a checkpoint; the run resumed from "
    "the folder, and its next save of that step failed on the files in the folder.",
    Edit("ckpt/state_dict/save.py", 'f"{step:08d}-{agreed.token}"', 'f"{step:08d}-save"'),
)
def test_a_step_whose_save_was_interrupted_is_saved_again(tmp_path):
    """After a save that was interrupted the run resumes from the step before, and saves the
    interrupted step again beside what was left of the first save."""
    _save(tmp_path, 1, w=torch.ones(9))
    (process,), _ = start_ranks(save_and_die, 1, tmp_path, group=False)
    process.join(60)
    assert list((tmp_path / "objects").glob("00000002-*"))
    assert torch.equal(_loaded(tmp_path)["w"], torch.ones(9))
    _save(tmp_path, 2, w=torch.full((9,), 3.0))
    assert torch.equal(_loaded(tmp_path)["w"], torch.full((9,), 3.0))


@case(
    "pytorch/torchtitan#4197",
    "The rule that keeps the newest checkpoints counted the folders of abandoned saves, and could "
    "remove checkpoints that were complete in their favour.",
    Edit(
        "ckpt/lifecycle/retention.py",
        "self.steps = committed_steps(store)",
        "self.steps = sorted({int(name[:8]) for name in store.names('objects')})",
    ),
)
def test_retention_counts_complete_checkpoints_only(tmp_path):
    """The rule that keeps the newest two checkpoints keeps two that are complete, however many
    later saves were abandoned."""
    for step in (1, 2, 3):
        _save(tmp_path, step, w=torch.full((9,), float(step)))
    for step in (4, 5):
        (tmp_path / "objects" / f"{step:08d}-abandoned").mkdir()
    assert ckpt.retain(tmp_path, 2) == [1]
    assert ckpt.committed_steps(tmp_path) == [2, 3]
    for step in (2, 3):
        assert torch.equal(_loaded(tmp_path, step)["w"], torch.full((9,), float(step)))


@case(
    "zarr-developers/zarr-python#3682",
    "Several writers changed one shard at the same time; each wrote the entire shard with its own "
    "part, and about a third of the data was lost.",
    Edit("ckpt/write/ownership.py", "% count == index:", "% count >= 0:"),
)
def test_no_two_ranks_write_one_object(tmp_path):
    """Two ranks that hold uneven slices of one array, and copies of another, write objects of one
    writer each, and another reader finds every number."""
    run_ranks(save_rows, 2, str(tmp_path))
    expected = np.arange(ROWS << 18, dtype=np.float32).reshape(ROWS, -1)
    (objects,) = (tmp_path / "objects").glob("00000001-*")
    for name in ("cut", "copied"):
        assert np.array_equal(zarr.open_array(objects / name, mode="r")[:], expected)
    rows = zarr.open_array(objects / "cut", mode="r").shards[0]
    assert 4 % rows == 0, "the first rank has rows 0 to 3, and no object of it has another row"


@case(
    "safetensors/safetensors#825",
    "Arrays whose memory was not in row-major order were written as they lay in memory, so that "
    "what was loaded had every number in another place.",
    Edit(
        "ckpt/local_array.py",
        "out[i, ...] if self.stacked else out, part\n",
        'out[i, ...] if self.stacked else out, part.ravel("K").reshape(part.shape)\n',
    ),
)
def test_tensors_in_any_memory_order_are_saved_as_they_are(tmp_path):
    """Transposed and strided tensors are saved number by number, in checkpoints and in the
    safetensors files that are made from them."""
    grid = torch.arange(24 << 16, dtype=torch.float32).view(1 << 10, -1)
    state = {"transposed": grid.t(), "strided": grid[:, ::2], "flipped": grid[:, :6].t().flip(0)}
    ckpt.save_state_dict(tmp_path / "saves", state, step=1)
    words = [str(tmp_path / "saves"), str(tmp_path / "files"), "--format", "safetensors"]
    assert main("reshard", words) == 0
    loaded = _loaded(tmp_path / "saves")
    file = load_file(next((tmp_path / "files").glob("*.safetensors")))
    for name, value in state.items():
        assert torch.equal(loaded[name], value)
        assert torch.equal(file[name], value)


@case(
    "tracel-ai/burn#5383",
    "A reader of PyTorch's files ignored the strides of tensors, and weights that were saved "
    "transposed loaded scrambled.",
    Edit(
        "ckpt/interop/torch_file.py",
        "order = tuple(sorted(range(len(sizes)), key=lambda d: (sizes[d] > 1, -strides[d], d)))",
        "order, strides = tuple(range(len(sizes))), tuple("
        "int(np.prod(sizes[d + 1 :])) for d in range(len(sizes)))",
    ),
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_of_torch_are_read_by_their_strides(tmp_path):
    """A checkpoint of torch.distributed.checkpoint whose tensors lie transposed in their files is
    read number by number."""
    grid = torch.arange(60, dtype=torch.float32).view(3, 4, 5)
    state = {"plain": grid, "swapped": grid.transpose(0, 2), "turned": grid.permute(1, 2, 0)}
    dcp.save(dict(state), checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert main("reshard", [str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    opened = ckpt.open(tmp_path / "ours")
    for name, value in state.items():
        assert np.array_equal(opened[name][:], value.numpy())
