"""Resumes that forget, or that need the layout of the save.

These are states of one's own loop: a load fills the state that it is given, or refuses.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckpt
from tests.museum.cases import Edit, case
from tests.museum.shared_resume import load_newest, resume_uneven
from tests.support.ranks import run_ranks


def _made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(6, 5)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Tensor:
    for _ in range(steps):
        model(torch.ones(3, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weight: Tensor = model.weight.detach().clone()
    return weight


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}


@case(
    "KempnerInstitute/KempnerForge#115",
    "A new optimizer has no moments before its first step, so that a resume found nothing to fill, "
    "dropped the saved moments, and began with zeros.",
    Edit("ckpt/state_dict/wanted.py", "if not value or key in value:", "if key in (value or ()):"),
    Edit(
        "ckpt/state_dict/wanted.py",
        "self.unused += self._told(_ends(one, (*path, key)))",
        "pass",
    ),
)
def test_an_optimizer_that_made_no_step_gets_the_saved_moments(tmp_path):
    """A load fills the state of an optimizer that has made no step, and the next steps are those
    of a run that never stopped."""
    model, optimizer = _made(0)
    _learn(model, optimizer, 3)
    ckpt.save_state_dict(tmp_path, _state(model, optimizer), step=3)
    wanted = _learn(model, optimizer, 2)
    model, optimizer = _made(1)
    state = _state(model, optimizer)
    ckpt.load_state_dict(tmp_path, state)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])
    assert torch.equal(_learn(model, optimizer, 2), wanted)


@case(
    "pytorch/pytorch#126881",
    "A load left out, without a warning, what the checkpoint had and the state had not yet, such "
    "as the position of a data loader that makes its state late.",
    Edit(
        "ckpt/state_dict/load.py",
        '_refuse_stray(sorted(nobody), "the state lacks")',
        "pass",
    ),
)
def test_a_saved_value_that_the_state_lacks_is_an_error(tmp_path):
    """A value of the checkpoint that the state has no key for is an error that names the key, and
    nothing is changed; an empty dict in the state takes all of its values."""
    loader = {"position": 7, "order": torch.tensor([2, 0, 1])}
    ckpt.save_state_dict(tmp_path, {"w": torch.ones(3), "loader": {"epoch": 1, **loader}}, step=1)
    state = {"w": torch.zeros(3), "loader": {"epoch": 0}}
    with pytest.raises(ckpt.CheckpointError, match=r"the state lacks .*'order'.* and 1 more"):
        ckpt.load_state_dict(tmp_path, state)
    assert not state["w"].any()
    assert state["loader"] == {"epoch": 0}
    late: dict[str, Any] = {"w": torch.zeros(3), "loader": {}}
    ckpt.load_state_dict(tmp_path, late)
    assert late["loader"]["position"] == 7
    assert torch.equal(late["loader"]["order"], loader["order"])


@case(
    "pytorch/pytorch#126285",
    "A load that was asked to be strict ignored parameters that the checkpoint lacked, and left "
    "them as they were.",
    Edit(
        "ckpt/state_dict/load.py",
        '_refuse_stray(wanted.lacking, "the checkpoint lacks")',
        "pass",
    ),
)
def test_a_parameter_that_the_checkpoint_lacks_is_an_error(tmp_path):
    """A parameter of the state that the checkpoint lacks is an error that names the parameter,
    before any other one is changed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    saved = {name: value for name, value in model.state_dict().items() if name != "1.weight"}
    ckpt.save_state_dict(tmp_path, {"model": saved}, step=1)
    other = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    with pytest.raises(ckpt.CheckpointError, match=r"the checkpoint lacks .*'1\.weight'"):
        ckpt.load_state_dict(tmp_path, {"model": other})
    assert not any(value.any() for value in other.values())


@case(
    "pytorch/torchtitan#647",
    "A load put other objects into the state than the loop trained, so that the next checkpoint "
    "had what was loaded, and a run that was resumed twice lost its steps.",
    Edit(
        "ckpt/state_dict/wanted.py",
        "            return self.tensors[plan.name]",
        "            return self.tensors[plan.name].clone()",
    ),
)
def test_a_save_after_a_resume_has_the_trained_weights(tmp_path):
    """The state that a load has filled stays that of the model: what is saved later from the state
    is what the steps since have made of the weights."""
    model, optimizer = _made(0)
    state = _state(model, optimizer)
    ckpt.save_state_dict(tmp_path, {"model": state["model"]}, step=1)
    ckpt.load_state_dict(tmp_path, {"model": state["model"]})
    trained = _learn(model, optimizer, 2)
    ckpt.save_state_dict(tmp_path, {"model": state["model"]}, step=2)
    again: dict[str, Any] = {"model": {}}
    ckpt.load_state_dict(tmp_path, again, step=2)
    assert torch.equal(again["model"]["weight"], trained)


@case(
    "pytorch/torchtitan#1136",
    "Where the vocabulary was no multiple of the number of ranks, the losses after a resume were "
    "other ones than those of a run that never stopped.",
    Edit(
        "ckpt/state_dict/packing.py",
        "[shard[place] for place in places]",
        "[shard[place] + 0 if shard.ndim and tensor.shape[0] % 2 else shard[place]\n"
        "     for place in places]",
    ),
)
def test_weights_that_ranks_share_unevenly_are_resumed(tmp_path):
    """An embedding of seven rows over two ranks, with its moments, goes on after a resume as it
    would have gone on, bit by bit."""
    for wanted, resumed in run_ranks(resume_uneven, 2, str(tmp_path)):
        assert torch.equal(resumed, wanted)


@case(
    "hiyouga/LlamaFactory#655",
    "Two nodes that kept checkpoints on disks of their own resumed from different steps.",
    Edit(
        "ckpt/state_dict/load.py",
        "return max(common) if common else None",
        "return max(steps) if common else None",
    ),
)
def test_ranks_resume_from_the_newest_step_that_all_of_them_have(tmp_path):
    """Two ranks with folders of their own, one of which has a newer step than the other, load the
    newest step that both have."""
    for rank, steps in enumerate([(1, 2), (1,)]):
        for step in steps:
            state = {"w": torch.full((3,), float(step))}
            ckpt.save_state_dict(tmp_path / f"node-{rank}", state, step=step)
    for step, values in run_ranks(load_newest, 2, str(tmp_path)):
        assert step == 1
        assert torch.equal(values, torch.ones(3))


@case(
    "deepspeedai/DeepSpeed#8499",
    "A load that named an earlier checkpoint, and left the optimizer out, gave that checkpoint's "
    "name and counters, and the weights of the newest one.",
    Edit(
        "ckpt/state_dict/load.py",
        "step = _newest(store, ranks) if step is None else step",
        "step = _newest(store, ranks)",
    ),
)
def test_a_load_without_the_optimizer_takes_the_step_that_it_names(tmp_path):
    """A load that names an earlier step, and leaves the optimizer out, has the weights of that
    step, and returns its number."""
    model, optimizer = _made(0)
    weights = {}
    for step in (1, 2):
        weights[step] = _learn(model, optimizer, 1)
        ckpt.save_state_dict(tmp_path, _state(model, optimizer), step=step)
    for step in (1, 2):
        state: dict[str, Any] = {"model": {}}
        assert ckpt.load_state_dict(tmp_path, state, step=step, ignore=["optim/*"]) == step
        assert torch.equal(state["model"]["weight"], weights[step])
