"""Worlds and what is done to them: a state machine of hypothesis, and sequences that are replayed.

A world is a plain class. Its actions are methods with :func:`action`, whose arguments are numbers
and words, never objects. So a sequence of actions is plain JSON: hypothesis draws sequences, and a
file replays one without hypothesis. An action that needs what the world does not have does nothing.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

SEEDS = Path(__file__).with_name("seeds")
Step = tuple[str, dict[str, Any]]
"""The name of an action, and its arguments."""
F = TypeVar("F", bound=Callable[..., None])


def action(
    when: Callable[[Any], object] = lambda world: True,
    *,
    first: bool = False,
    **arguments: st.SearchStrategy[Any],
) -> Callable[[F], F]:
    """Mark a method of a world as an action.

    Args:
        when: whether the action does something in a world; otherwise hypothesis draws another one.
        first: whether every sequence begins with the action.
        arguments: what may be drawn for each argument.
    """

    def mark(method: F) -> F:
        method.arguments, method.when, method.first = arguments, when, first  # type: ignore[attr-defined]
        return method

    return mark


def check_refusal(error: Exception, allowed: object, *words: str) -> None:
    """An error that a person gets is one line, has the words, and comes where it is ``allowed``."""
    text = str(error)
    if not allowed or not text.strip() or "\n" in text or any(word not in text for word in words):
        raise AssertionError(f"such an error is not for a person, or not here: {error!r}")


class World:
    """What a sequence acts on. A subclass has actions, and the rules that hold after each."""

    name: ClassVar[str]
    """As the runner and seeds name the world."""
    STEPS: ClassVar[int] = 30
    """Actions of one example, at most."""

    def check(self) -> None:
        """Raises AssertionError where a rule does not hold."""

    def close(self) -> None:
        """Release what the world has."""


def actions_of(world: type[World]) -> dict[str, Any]:
    """The methods that are actions, by name."""
    members = {name: getattr(world, name) for name in dir(world)}
    return {name: member for name, member in members.items() if hasattr(member, "arguments")}


@dataclass
class Tally:
    """What was run."""

    examples: int = 0
    steps: int = 0
    actions: Counter[str] = None  # type: ignore[assignment]
    failed: list[Step] | None = None
    """The last sequence that failed: after hypothesis has shrunk, the shortest."""

    def __post_init__(self) -> None:
        self.actions = Counter()


@contextmanager
def repeatable() -> Iterator[None]:
    """Random numbers of a sequence depend on the sequence alone."""
    state, words = torch.random.get_rng_state(), random.getstate()
    torch.manual_seed(0)
    random.seed(0)
    try:
        yield
    finally:
        torch.random.set_rng_state(state)
        random.setstate(words)


def perform(world: World, step: Step) -> None:
    """One action, and the check after it."""
    name, arguments = step
    with repeatable():
        getattr(world, name)(**arguments)
        world.check()


def machine_of(world_class: type[World], tally: Tally) -> type[RuleBasedStateMachine]:
    """The state machine whose rules are the actions of a world."""

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.world, self.sequence = world_class(), list[Step]()
            tally.examples += 1

        def perform(self, name: str, arguments: dict[str, Any]) -> None:
            self.sequence.append((name, arguments))
            tally.steps += 1
            tally.actions[name] += 1
            try:
                perform(self.world, (name, arguments))
            except Exception:
                tally.failed = list(self.sequence)
                raise

        def teardown(self) -> None:
            self.world.close()

    def rule_of(name: str, method: Any) -> Any:
        def act(self: Machine, **arguments: Any) -> None:
            self.perform(name, arguments)

        act.__name__ = act.__qualname__ = name
        if method.first:
            return initialize(**method.arguments)(act)
        useful = precondition(lambda self: method.when(self.world))
        return useful(rule(**method.arguments)(act))

    for name, method in actions_of(world_class).items():
        setattr(Machine, f"do_{name}", rule_of(name, method))
    Machine.__name__ = Machine.__qualname__ = world_class.__name__
    return Machine


def explore(
    world_class: type[World],
    *,
    examples: int,
    seed: int | None = None,
    steps: int | None = None,
    shrink: bool = True,
    tally: Tally | None = None,
) -> Tally:
    """Run a world's machine; ``failed`` of the tally has the shortest sequence that fails.

    Args:
        world_class: the world.
        examples: the sequences that are drawn.
        seed: of the draws; None for those that every call makes.
        steps: the actions of a sequence, at most.
        shrink: whether a failure is made shorter.
        tally: what is counted further; a new one by default.
    """
    tally = tally or Tally()
    phases = [Phase.generate, *([Phase.shrink] if shrink else [])]
    machine = machine_of(world_class, tally)
    if seed is not None:
        machine._hypothesis_internal_use_seed = seed  # type: ignore[attr-defined]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps or world_class.STEPS,
            deadline=None,
            database=None,
            derandomize=seed is None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
        ),
    )
    return tally


@dataclass(frozen=True)
class Seed:
    """A sequence that is replayed for ever."""

    world: str
    why: str
    """What the sequence shows, in one line."""
    steps: list[Step]

    @staticmethod
    def read(path: Path) -> Seed:
        """From a file of :data:`SEEDS`."""
        body = json.loads(path.read_text())
        return Seed(body["world"], body["why"], [(name, given) for name, given in body["steps"]])

    def write(self, path: Path) -> None:
        """To a file, one action a line."""
        lines = ",\n  ".join(json.dumps(step) for step in self.steps)
        head = f' "world": {json.dumps(self.world)},\n "why": {json.dumps(self.why)},'
        path.write_text(f'{{\n{head}\n "steps": [\n  {lines}\n ]\n}}\n')


def replay(world_class: type[World], steps: list[Step]) -> World:
    """Perform a sequence; returns the world, which is closed."""
    world = world_class()
    try:
        world.check()
        for step in steps:
            perform(world, step)
    finally:
        world.close()
    return world
