"""What every optimizer of a run promises, as tests.

A test class of an optimizer inherits :class:`OptimizerContract` and has its config::

    class TestLion(OptimizerContract):
        config = {"kind": "my.optimizers:Lion", "lr": 1e-3}

The class of an optimizer from outside is made as ``Class(model, config, surroundings)``, with the
:class:`pretrain.optim.Surroundings` of the run, and has ``matrix_moments`` and ``other_moments``:
the names of what it keeps in the shape of a hidden matrix and of any other parameter.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from pretrain.optim.config import OptimizerConfig, OptimizerFields, with_kind
from pretrain.optim.registry import build_optimizer
from pretrain.optim.state import moments, set_lr, set_update_count

STEPS = 4


class Small(nn.Module):
    """A model with matrices, a norm and an embedding, under names of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.hidden = nn.Linear(16, 24, bias=False)
        self.back = nn.Linear(24, 16, bias=False)
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens: Tensor) -> Tensor:
        """A loss."""
        x = self.embed(tokens)
        out: Tensor = self.norm(x + self.back(torch.relu(self.hidden(x)))).square().mean()
        return out


class OptimizerContract:
    """Tests of an optimizer; pytest runs them in subclasses."""

    config: ClassVar[dict[str, Any]]
    """The table ``[optimizer]``."""

    def test_moments_are_there_before_the_first_step(self) -> None:
        """A checkpoint has the same arrays at any step."""
        model, optimizer = self._made()
        before = {name: sorted(kept) for name, kept in moments(optimizer, model).items()}
        assert all(
            not t.any() for kept in moments(optimizer, model).values() for t in kept.values()
        )
        self._train(model, optimizer, 1)
        assert {name: sorted(kept) for name, kept in moments(optimizer, model).items()} == before

    def test_moments_are_those_that_the_config_names(self) -> None:
        """The planner counts their memory."""
        model, optimizer = self._made()
        config = self._parsed()
        named = {*config.matrix_moments, *config.other_moments}
        assert set(moments(optimizer, model)) <= named

    def test_a_step_changes_every_parameter_that_has_a_gradient(self) -> None:
        """And a rate of 0 changes none."""
        model, optimizer = self._made()
        before = copy.deepcopy(model)
        set_lr(optimizer, 0.0)
        self._train(model, optimizer, 1)
        assert _equal(model, before)
        set_lr(optimizer, 1e-2)
        self._train(model, optimizer, 1)
        for (name, now), (_, then) in zip(
            model.named_parameters(), before.named_parameters(), strict=True
        ):
            assert not torch.equal(now, then), name

    def test_parameters_and_moments_are_all_that_the_next_step_depends_on(self) -> None:
        """A checkpoint keeps these, and the number of steps."""
        model, optimizer = self._made()
        self._train(model, optimizer, STEPS)
        other, resumed = self._made()
        other.load_state_dict(model.state_dict())
        kept = moments(optimizer, model)
        for moment, by_parameter in moments(resumed, other).items():
            for name, value in by_parameter.items():
                value.copy_(kept[moment][name])
        set_update_count(resumed, STEPS)
        self._train(model, optimizer, STEPS)
        self._train(other, resumed, STEPS)
        assert _equal(model, other)

    def _parsed(self) -> OptimizerFields:
        table = with_kind(self.config)
        parsed: OptimizerFields = TypeAdapter(OptimizerConfig).validate_python(table)
        return parsed

    def _made(self) -> tuple[Small, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Small()
        return model, build_optimizer(model, self._parsed())  # type: ignore[arg-type]

    def _train(self, model: Small, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            tokens = torch.arange(32).roll(step).view(4, 8)
            model(tokens).backward()
            optimizer.step()


def _equal(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)
