"""Saves that are partial, torn, stale or corrupt.

These are the saves in the background. A save copies first, and says afterwards what became of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ckpt
from parallel import Topology
from tests.museum.cases import Edit, case

_WORDS = 1 << 18
"""Of a tensor with an array of its own: small ones share an array."""


def _loaded(root: Path, step: int) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    ckpt.load_state_dict(root, state, step=step)
    return state


def _trained(steps: int) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _train(model, optimizer, steps)
    return model, optimizer


def _train(model: nn.Linear, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(3, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@contextlib.contextmanager
def _checkpointer(
    root: Path, array: ckpt.LocalArray, keep: int | None = None
) -> Iterator[ckpt.AsyncCheckpointer]:
    tier = ckpt.Tier(name="shared", location=str(root), keep=keep)
    saver = ckpt.AsyncCheckpointer([tier], 0, root.with_name("writer.lock"))
    try:
        saver.ready()
        saver.prepare(Topology(), [array])
        yield saver
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(saver.writer_process_id, signal.SIGCONT)
        saver.close()


def _array(values: Tensor) -> ckpt.LocalArray:
    spec = ckpt.ArraySpec("model/w", tuple(values.shape), values.dtype)
    return ckpt.LocalArray(spec, [((0, values.shape[0]),)], [values])


def _info(step: int) -> ckpt.SaveInfo:
    return ckpt.SaveInfo(f"{step:08d}-a", step, Topology(), state={}, spec={}, spec_hash="")


@case(
    "NVIDIA/nvidia-resiliency-ext#376",
    "The writer of background saves shared the memory of tensors on the CPU with the training, so "
    "that a checkpoint had the optimizer's step count of the step after it.",
    Edit(
        "ckpt/background/checkpointer.py",
        "torch.cuda.is_available() else torch.get_num_threads()",
        "torch.cuda.is_available() else 1",
    ),
    Edit("ckpt/background/checkpointer.py", "            copy(0)\n", "            pass\n"),
    Edit(
        "ckpt/background/checkpointer.py",
        "        self._send(Request(save=request))",
        "        late = lambda: (copy(0), self._send(Request(save=request)))\n"
        '        __import__("threading").Timer(0.5, late).start()',
    ),
)
def test_a_background_save_has_the_counters_and_weights_of_one_step(tmp_path):
    """A background save holds the optimizer's counters, moments and weights of the moment when it
    was asked for, whatever the next steps change in place."""
    model, optimizer = _trained(1)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()["state"]}
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    moment = state["optim"][0]["exp_avg"].clone()
    with ckpt.AsyncSaver(tmp_path / "saves") as saver:
        saver.save(state, step=1)
        _train(model, optimizer, 20)
        saver.wait()
    saved = _loaded(tmp_path / "saves", 1)
    assert saved["optim"][0]["step"].item() == 1
    assert torch.equal(saved["optim"][0]["exp_avg"], moment)
    for name, value in wanted.items():
        assert torch.equal(saved["model"][name], value)


@case(
    "Lightning-AI/pytorch-lightning#21079",
    "A thread in the background wrote live tensors while the training changed them, so that one "
    "checkpoint had tensors of several steps.",
    Edit("ckpt/background/checkpointer.py", "while self._busy:", "while False:"),
)
def test_the_next_save_does_not_change_a_save_that_is_not_yet_written(tmp_path):
    """A save that the writer has not read yet keeps its numbers while the next save begins: the
    next save waits for the writer."""
    values = torch.full((_WORDS,), 1.0)
    root = tmp_path / "saves"
    with _checkpointer(root, _array(values)) as saver:
        writer = saver.writer_process_id
        os.kill(writer, signal.SIGSTOP)
        saver.save(_info(1), [_array(values)])
        values += 1
        threading.Timer(0.4, os.kill, [writer, signal.SIGCONT]).start()
        saver.save(_info(2), [_array(values)])
        events = saver.wait()
    assert [event.what for event in events] == ["committed", "committed"]
    for step in (1, 2):
        stored = ckpt.open(root, step)["model/w"][:]
        assert stored.min() == stored.max() == step


@case(
    "NVIDIA-NeMo/RL#3312",
    "The writer kept handles of the first save's tensors; the training moved its weights to other "
    "memory, and every later checkpoint had the weights of the first.",
    Edit(
        "ckpt/background/checkpointer.py",
        "arrays[one.array].read_into)",
        'self.__dict__.setdefault("kept", list(arrays))[one.array].read_into)',
    ),
)
def test_a_save_reads_weights_that_moved_to_other_memory(tmp_path):
    """Each background save has the weights of its own step, also where the weights lie in other
    memory than at the first save."""
    parameter = nn.Parameter(torch.full((_WORDS,), 1.0))
    with ckpt.AsyncSaver(tmp_path / "saves") as saver:
        for step in (1, 2, 3):
            saver.save({"w": parameter, "bias": parameter[:3]}, step=step)
            parameter.data = parameter.data + 1
    for step in (1, 2, 3):
        saved = _loaded(tmp_path / "saves", step)
        assert torch.equal(saved["w"], torch.full((_WORDS,), float(step)))
        assert torch.equal(saved["bias"], torch.full((3,), float(step)))


@case(
    "KempnerInstitute/KempnerForge#102",
    "A background save moved the link to the newest checkpoint, and removed the one before, when "
    "it had only begun: a kill left nothing to resume from.",
    Edit(
        "ckpt/background/checkpointer.py",
        "        self._pending |= {(info.step, name): info for name in names}",
        "        self._pending |= {(info.step, name): info for name in names}\n"
        '        for old in Path(self.tiers[0].location, "manifests").glob("*.json"):\n'
        "            old.unlink()",
    ),
)
def test_the_newest_checkpoint_is_a_written_one_while_a_save_is_under_way(tmp_path):
    """While a background save is not written, the checkpoint before it stays the newest one, and
    loads, although only one checkpoint is to be kept."""
    values, root = torch.ones(_WORDS), tmp_path / "saves"
    with _checkpointer(root, _array(values), keep=1) as saver:
        saver.save(_info(1), [_array(values)])
        saver.wait()
        os.kill(saver.writer_process_id, signal.SIGSTOP)
        saver.save(_info(2), [_array(values + 1)])
        loaded = torch.zeros(_WORDS)
        manifest = ckpt.read_manifest(root)
        ckpt.load(root, manifest, [_array(loaded)])
        assert manifest.step == 1
        assert torch.equal(loaded, values)
        os.kill(saver.writer_process_id, signal.SIGCONT)
        saver.wait()
    assert ckpt.committed_steps(root) == [2]


@case(
    "google/orbax#605",
    "A save in the background failed, and the training went on without a word of it.",
    Edit(
        "ckpt/state_dict/saver.py", 'if event.what == "failed" and', 'if event.what == "lost" and'
    ),
)
def test_a_background_save_that_fails_is_an_error_of_the_next_call(tmp_path):
    """A background save that could not be written is an error of the next save, which names the
    step, and later saves are written again."""
    root = tmp_path / "saves"
    root.mkdir()
    (root / "objects").write_text("a file is where the folder must be")
    with ckpt.AsyncSaver(root) as saver:
        saver.save({"w": torch.ones(4)}, step=1)
        with pytest.raises(ckpt.CheckpointError, match="step 1 is not saved"):
            saver.wait()
        (root / "objects").unlink()
        saver.save({"w": torch.ones(4)}, step=2)
    assert ckpt.committed_steps(root) == [2]
