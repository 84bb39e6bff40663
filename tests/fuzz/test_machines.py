"""A few short sequences of each machine, and all sequences that ever failed.

``make fuzz`` runs the machines for as long as one likes. A machine that sees nothing is worth
nothing: ``python -m tests.fuzz --broken`` breaks the product and counts the examples until each
machine sees it; some of these are here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.broken import BROKEN, examples_until_seen
from tests.fuzz.machine import SEEDS, Seed, explore, replay
from tests.fuzz.worlds import WORLDS

SEED_FILES = sorted(SEEDS.glob("*.json"))


@pytest.mark.parametrize("name", sorted(WORLDS))
def test_every_rule_holds_in_some_short_lives(name):
    tally = explore(WORLDS[name], examples=4, steps=12)
    assert tally.steps >= 12
    assert tally.failed is None


@pytest.mark.parametrize("path", SEED_FILES, ids=[path.stem for path in SEED_FILES])
def test_what_failed_once_holds(path: Path):
    seed = Seed.read(path)
    assert seed.why.strip()
    replay(WORLDS[seed.world], seed.steps)


def test_a_seed_is_a_file_that_a_person_reads_and_a_machine_replays(tmp_path):
    seed = Seed("members", "it shows nothing", [("calm", {}), ("train", {"count": 2})])
    seed.write(tmp_path / "seed.json")
    assert Seed.read(tmp_path / "seed.json") == seed
    assert '  ["train", {"count": 2}]\n' in (tmp_path / "seed.json").read_text()
    world = replay(WORLDS["members"], seed.steps)
    assert [replica.standing.turn for replica in world.alive.values()] == [3] * 4


@pytest.mark.slow
@pytest.mark.parametrize("defect", sorted(BROKEN))
def test_a_machine_sees_what_is_broken_on_purpose(defect):
    assert examples_until_seen(BROKEN[defect], most=400)
