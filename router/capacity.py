"""Capacity: how many assignments an expert or a rank takes, and what happens to the others.

Legend: T tokens, K top_k, E experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from router.config import CAPACITY, CapacityConfig, CapacityTraits, OtherCapacityConfig
from router.placement import Placement


class Assignments(NamedTuple):
    """What a policy places."""

    expert_indices_TK: Tensor
    """[T, K] the chosen experts, no expert twice for a token; E stands for no expert."""
    choice_TE: Tensor
    """[T, E] the values of the choice; minus infinity for experts that a token must not take."""
    scores_TE: Tensor
    """[T, E] the scores; the lowest scores give way."""
    training: bool = True
    """Whether the bounds on ranks apply; evaluation has no step to keep short."""
    num_tokens: Tensor | None = None
    """Scalar int64, the tokens that a capacity is computed from, where some of the T rows are no
    tokens; None where all are."""


class NoOptions(BaseModel):
    """The options of a policy from outside that has none."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class CapacityPolicy(ABC):
    """Places the chosen assignments within a capacity.

    ``moe.capacity.policy`` names a policy: by its line in :data:`router.config.CAPACITIES`, or as
    ``package.module:Class``. Each passes :class:`router.testing.CapacityPolicyContract`.

    Args:
        config: the policy's options: its config model, or for a class from outside its ``Options``.
        num_experts: E.
        top_k: K.
    """

    traits: ClassVar[CapacityTraits] = CapacityTraits()
    Options: ClassVar[type[BaseModel]] = NoOptions
    """Of a class from outside: the fields of ``[moe.capacity]`` beside ``policy``."""

    def __init__(self, config: Any, *, num_experts: int, top_k: int) -> None:
        self.config, self.num_experts, self.top_k = config, num_experts, top_k
        self.has_copies = False
        """Whether copies of experts balance ranks: a bound on ranks then moves no assignment."""

    def use_expert_group(self, group: dist.ProcessGroup) -> None:
        """Set the ranks that hold the experts, in equal blocks; most policies need not know."""
        del group

    @property
    def shares(self) -> Sequence[int] | None:
        """The shares of all assignments that ranks should compute, in any unit; None for equal
        ones."""
        return None

    def max_assignments_per_expert(self, num_tokens: int) -> list[int] | None:
        """[E] the most assignments of each expert in a call of up to ``num_tokens`` tokens; None
        for no bound."""
        del num_tokens
        return None

    @abstractmethod
    def placed(self, asked: Assignments) -> Placement:
        """Place every assignment or drop it, the same way for equal arguments."""


Tokens = TypeVar("Tokens", int, Tensor)
"""A number of tokens: an int, or a scalar int64 on its device."""


def expert_capacity(
    num_tokens: Tokens, top_k: int, num_experts: int, capacity_factor: float
) -> Tokens:
    """ceil(T·K / E · capacity_factor), exactly: 1.1 counts as 11/10 (GShard, arXiv 2006.16668)."""
    factor = Fraction(str(capacity_factor))
    return -(-num_tokens * top_k * factor.numerator // (num_experts * factor.denominator))


def capacity_policy(config: CapacityConfig, *, num_experts: int, top_k: int) -> CapacityPolicy:
    """The policy that a config describes, for ``num_experts`` experts and ``top_k`` choices."""
    options = config.options if isinstance(config, OtherCapacityConfig) else config
    kind = CAPACITY.load(config.policy)
    policy: CapacityPolicy = kind(options, num_experts=num_experts, top_k=top_k)
    return policy
