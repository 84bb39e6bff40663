"""The divergence playbook as pure functions: signals, escalation, and what a run remembers."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pretrain.data.skipped import kept_samples
from pretrain.errors import InputError
from pretrain.parts.playbook.config import HealthConfig
from pretrain.parts.playbook.memory import HealthMemory, Occurrence, merged
from pretrain.parts.playbook.rule import (
    after_commit,
    after_going_back,
    after_skip,
    judge,
    routers_are_checked,
)
from pretrain.parts.playbook.signals import Seen, collapse, loss_spike
from pretrain.spec.read import load_spec
from tests.support.jobs import write_spec

HEALTHY = Path(__file__).parent / "data/healthy_run.json"
"""Loss and gradient norm of the 240 steps of tools/recipes/stdlib-tiny.toml."""


def config(**rules: Any) -> HealthConfig:
    """All rules off but those that are given."""
    names = ("loss_spike", "grad_norm_spike", "slow_divergence", "router_collapse")
    off = {name: {"actions": []} for name in names}
    return HealthConfig.model_validate(off | rules)


def run(
    rules: HealthConfig, losses: list[float], norms: list[float] | None = None
) -> tuple[HealthMemory, list[tuple[int, str, str | None]]]:
    """Commit every step; returns the memory, and (step, rule, action) of each signal."""
    memory, found = HealthMemory(), []
    for step, loss in enumerate(losses, 1):
        seen = Seen(step, loss, 1.0 if norms is None else norms[step - 1])
        verdict = judge(rules, memory, seen)
        found += [(step, signal.rule, verdict.action) for signal in verdict.signals]
        memory = after_commit(rules, verdict, seen)
    return memory, found


def noisy(count: int, level: float = 3.0, sigma: float = 0.05) -> list[float]:
    generator = random.Random(1)
    return [generator.gauss(level, sigma) for _ in range(count)]


def test_a_loss_far_above_the_window_is_a_spike_and_nothing_else_is():
    rules = config(window_steps=32, loss_spike={"actions": ["report"]})
    memory, found = run(rules, noisy(200))
    assert found == []
    assert len(memory.losses) == 32
    limit = loss_spike(rules, memory, Seen(201, 9.0, 1.0)).limit
    assert limit == pytest.approx(3.5, abs=0.1), "the least rise is more than six deviations here"
    assert judge(rules, memory, Seen(201, math.nextafter(limit, 9), 1.0)).action == "report"
    assert judge(rules, memory, Seen(201, limit, 1.0)).action is None
    assert judge(rules, memory, Seen(201, 0.0, 1.0)).action is None, "a fall is no spike"

    wide = config(window_steps=32, loss_spike={"actions": ["report"], "threshold": 60.0})
    limit = loss_spike(wide, memory, Seen(201, 9.0, 1.0)).limit
    assert 4.0 < limit < 7.5, "sixty robust deviations of 0.05"
    few = replace(memory, losses=memory.losses[:31])
    assert judge(rules, few, Seen(32, 1e9, 1.0)).action is None, "silent until the window is full"


def test_the_spike_rules_see_no_spike_in_a_healthy_run():
    losses, norms = json.loads(HEALTHY.read_text())
    assert len(losses) == len(norms) == 240
    assert run(HealthConfig(), losses, norms)[1] == []
    # Also where windows are short, and every step after warm-up is judged.
    on = {"actions": ["report"]}
    short = config(window_steps=16, loss_spike=on, grad_norm_spike=on)
    assert run(short, losses, norms)[1] == []
    losses[200], norms[220] = losses[200] + 3.0, norms[220] * 15
    assert [(step, rule) for step, rule, _ in run(HealthConfig(), losses, norms)[1]] == [
        (201, "loss_spike"), (221, "grad_norm_spike"),
    ]  # fmt: skip


def test_a_loss_that_rises_slowly_is_seen_once_a_window():
    rules = config(window_steps=10, slow_divergence={"actions": ["report", "stop"]})
    rising = [2.0 + 0.005 * step + noise for step, noise in enumerate(noisy(200, 0.0, 0.02))]
    found = run(rules, rising)[1]
    assert [action for _, _, action in found] == ["report", "stop"]
    assert [step for step, _, _ in found] == [80, 160], "eight new blocks after a signal"
    assert run(rules, noisy(400, sigma=0.3))[1] == [], "noise is no rise"
    assert run(rules, [5 - 0.01 * step for step in range(300)])[1] == []
    assert run(rules, rising[:79])[1] == []


def test_routers_collapse_where_checks_in_a_row_say_so():
    seldom = config(router_collapse={"actions": ["report"], "patience_steps": 39})
    assert [step for step in range(1, 10) if routers_are_checked(seldom, step)] == [3, 6, 9]
    assert seldom.router_collapse.checks == 13
    by_default = HealthConfig().router_collapse
    assert (by_default.interval_steps, by_default.checks) == (10, 10)
    rules = config(router_collapse={"actions": ["report"], "patience_steps": 2})
    assert not any(routers_are_checked(config(), step) for step in range(1, 10))
    even, one = [[25, 25, 25, 25]], [[25, 25, 25, 25], [97, 1, 1, 1]]
    memory, actions = HealthMemory(), []
    for step, loads in enumerate([one, even, one, None, one, one, one], 1):
        seen = Seen(step, 1.0, 1.0, loads_LE=loads)
        verdict = judge(rules, memory, seen)
        actions.append(verdict.action)
        memory = after_commit(rules, verdict, seen)
    assert actions == [None, None, None, None, "report", None, "report"]
    rule = rules.router_collapse
    assert "MoE layer 2 of 2" in collapse(rule, Seen(1, 1.0, 1.0, loads_LE=one)).text
    dead = Seen(1, 1.0, 1.0, loads_LE=[[30, 30, 30, 0, 0, 0, 0]])
    loose = rule.model_copy(update={"min_entropy_ratio": 0.1})
    assert "have no token" in collapse(loose, dead).text
    assert collapse(rule, Seen(1, 1.0, 1.0, loads_LE=[[39, 0, 0, 0]])) is None, "too few to judge"
    assert collapse(rule, Seen(1, 1.0, 1.0, loads_LE=[[100]])) is None, "one expert"


SPIKES = ["skip", "skip+lower_lr", "go_back", "go_back+lower_lr", "stop"]


def full_window(rules: HealthConfig) -> HealthMemory:
    return run(rules, noisy(8))[0]


def test_occurrences_escalate_until_the_run_is_further():
    rules = config(
        window_steps=8,
        loss_spike={"actions": SPIKES},
        grad_norm_spike={"actions": ["report"]},
    )
    memory, actions = full_window(rules), []
    for step in (510, 510, 1010, 760, 885):  # after going back, steps come again
        verdict = judge(rules, memory, Seen(step, 9.0, 1.0))
        actions.append(verdict.action)
        memory = verdict.memory
    assert actions == SPIKES
    assert judge(rules, memory, Seen(1010, 9.0, 1.0)).action == "stop", "the last one repeats"
    assert judge(rules, memory, Seen(1385, 9.0, 1.0)).action == "go_back", "two are still counted"
    assert judge(rules, memory, Seen(1510, 9.0, 1.0)).action == "skip+lower_lr", "one is"
    assert judge(rules, memory, Seen(1511, 9.0, 1.0)).action == "skip", "none is"
    other = judge(rules, memory, Seen(50, 3.0, 99.0))
    assert (other.action, other.cause.rule) == ("report", "grad_norm_spike")
    both = judge(rules, full_window(rules), Seen(50, 9.0, 99.0))
    assert both.action == "skip", "the more severe of two"
    assert [s.rule for s in both.signals] == ["loss_spike", "grad_norm_spike"]
    assert both.memory.occurrences == (Occurrence("loss_spike", 50),
                                       Occurrence("grad_norm_spike", 50))  # fmt: skip


def test_a_run_that_never_recovers_ends():
    rules = HealthConfig()
    memory = run(rules, noisy(128))[0]
    for tries in range(1, 100):
        verdict = judge(rules, memory, Seen(129, 9.0, 1.0))
        memory = after_skip(verdict.memory, 8 * tries, 8 * tries + 8)
        if verdict.goes_back:
            memory = after_going_back(memory, full_window(rules))
            memory = replace(memory, losses=tuple(noisy(128)))
        if verdict.action == "stop":
            break
    assert tries == len(rules.loss_spike.actions)
    assert memory.skipped_samples == ((8, 8 * tries + 8),)


def test_a_step_that_is_not_finite_is_tried_again_before_a_rule_acts():
    rules = config(not_finite={"actions": ["skip", "stop"]})
    memory = full_window(config())

    def tried(attempts: int, memory: HealthMemory) -> Any:
        seen = Seen(9, math.nan, math.inf, finite=False, attempts=attempts)
        return judge(rules, memory, seen)

    assert tried(2, memory).action is None
    verdict = tried(3, memory)
    assert verdict.action == "skip"
    assert tried(3, verdict.memory).action == "stop"
    assert judge(HealthConfig(), memory, Seen(
        9, math.nan, 1.0, finite=False, attempts=3)).action == "stop"  # fmt: skip


def test_the_learning_rate_is_lowered_for_some_steps():
    rules = config(lr_factor=0.5, window_steps=8, loss_spike={"actions": ["lower_lr"]})
    once = judge(rules, full_window(rules), Seen(10, 9.0, 1.0)).memory
    assert [once.lr_factor_at(step) for step in (10, 509, 510)] == [0.5, 0.5, 1.0]
    twice = judge(rules, once, Seen(12, 9.0, 1.0)).memory
    assert [twice.lr_factor_at(step) for step in (12, 511, 512)] == [0.25, 0.25, 1.0]
    again = judge(rules, twice, Seen(512, 9.0, 1.0)).memory
    assert again.lr_factor_at(512) == 0.5, "what is over does not count"


def test_going_back_keeps_what_was_done_and_takes_the_history_of_then():
    now = replace(
        full_window(config(window_steps=8, loss_spike={"actions": ["stop"]})),
        occurrences=(Occurrence("loss_spike", 8),), skipped_samples=((8, 16),), lr_factor=0.5,
        lr_until_step=9, go_backs=1,
    )  # fmt: skip
    then = HealthMemory(losses=(1.0,), grad_norms=(2.0,), block=(1.0,), collapsed_checks=1)
    found = after_going_back(now, then)
    kept = ("occurrences", "skipped_samples", "lr_factor", "lr_until_step")
    for field, value in asdict(found).items():
        if field == "go_backs":
            assert value == 2
        else:
            assert value == asdict(now if field in kept else then)[field], field


@pytest.mark.parametrize("seed", range(5))
def test_skipped_samples_are_passed_over_and_no_other(seed):
    chooser = random.Random(seed)
    ranges = merged((s, s + chooser.randrange(6)) for s in chooser.sample(range(60), 8))
    assert all(a < b for a, b in ranges)
    assert all(b < c for (_, b), (c, _) in pairwise(ranges))
    allowed = [i for i in range(200) if not any(a <= i < b for a, b in ranges)]
    for start in range(70):
        expected = [i for i in allowed if i >= start][:7]
        assert list(kept_samples(start, 7, ranges)) == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("health.loss_spike.actions=['skip']",
         "health.loss_spike.actions must end with report or lower_lr or stop, and ends with skip"),
        ("health.slow_divergence.actions=['go_back']",
         "health.slow_divergence.actions must end with report or lower_lr or stop"),
        ("health.not_finite.actions=['skip']", "health.not_finite.actions must end with stop"),
        ("health.not_finite.actions=['report']", "health.not_finite.actions.0 ('report')"),
        ("health.slow_divergence.actions=['skip']", "health.slow_divergence.actions.0 ('skip')"),
        ("health.window_steps=1", "health.window_steps (1)"),
        ("health.loss_spikes.actions=[]", "health.loss_spikes: no such field"),
        ("health.lr_factor=1.5", "health.lr_factor (1.5)"),
    ],
)  # fmt: skip
def test_bad_rules_are_refused_in_one_line(override, message, tmp_path):
    with pytest.raises(InputError) as error:
        load_spec(write_spec(tmp_path), [override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
