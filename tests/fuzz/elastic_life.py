"""The elastic life of a run: machines come, leave, die, slow down and are excluded.

A simulated torchrun starts ranks again as machines come and go, and the ranks of
:mod:`tests.fuzz.simulated_run` train on each start's layout. After each action these rules hold:

- Each sample is trained once and in order, but for those that the playbook leaves out.
- A step takes as many samples as its batch says, on any layout, and each micro-batch is read once.
- All ranks decide alike, and have equal counters.
- A layout is one that the spec allows; without one the run waits, and says so in one line.
- A start goes on from the newest step that was committed, and with the weights of that step.
- Nothing starts the ranks again where nothing has happened.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from unittest import mock

from hypothesis import strategies as st
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousError

from cluster.members import exclude, read_exclusions
from cluster.members.rendezvous import SCALE_UP, MembersHandler
from pretrain.checkpoint.rolling_back import roll_back
from tests.fuzz.elastic_steps import (
    MACHINE,
    MACHINES,
    RANKS_PER_NODE,
    VARIANTS,
    ElasticSteps,
    layout_of,
    spec_of,
)
from tests.fuzz.machine import action, check_refusal
from tests.fuzz.simulated_run import Answers, Writers, make_rank


class ElasticLife(ElasticSteps):
    """See the head of the file."""

    name = "elastic"
    STEPS = 25

    # --------------------------------------------------------------------------------------------
    # The launch.

    @action(first=True, variant=st.integers(0, len(VARIANTS) - 1),
            machines=st.integers(1, MACHINES), scale_up=st.sampled_from(SCALE_UP),
            least=st.integers(1, 2))  # fmt: skip
    def begin(self, variant: int, machines: int, scale_up: str, least: int) -> None:
        """A launch on some machines."""
        if self.spec is not None:
            return
        self.variant, self.scale_up, self.least = variant, scale_up, least
        update = {"run_dir": str(self.folder / "run")}
        self.spec = spec_of(variant).model_copy(update=update)
        self.spec.run_path.mkdir()
        self.writers = Writers(self.root)
        for number in range(machines):
            self.alive.add(f"n{number}")
        self.torchrun.waiting = set(self.alive)
        self.restart()

    def restart(self) -> None:
        """All ranks end, machines that are there meet, and ranks start on a new layout."""
        assert self.spec is not None
        self.ranks = []
        while self.writers.queue:
            self.lands()  # writer processes outlive the trainer; a new start waits for them
        self.writers.events = []
        path = self.spec.run_path / "exclude.json"
        names = sorted(self.alive)
        excluded = {one.node for one in read_exclusions(path)}
        joining = [name for name in names if name not in excluded]
        self.torchrun.joining, self.torchrun.store = joining, HashStore()
        self.torchrun.members, self.torchrun.waiting = joining, set()
        places = {name: f"rack{int(name[1:]) % 2}.{name}" for name in names}
        for rank, name in enumerate(joining):
            self.torchrun.store.set(f"node-order/{rank}", f'"{places[name]}"')
        order: dict[int, str] = {}
        for name in names:
            handler = MembersHandler(
                self.torchrun.inner_of(name), self.scale_up, self.spec.run_path, self.root, name
            )
            environment = {"CONVOY_NODE_NAME": name, "CONVOY_NODE_ORDER": places[name]}
            build = "cluster.members.rendezvous.RendezvousStoreInfo.build"
            with mock.patch.dict(os.environ, environment), mock.patch(build):
                try:
                    info = handler.next_rendezvous()
                except RendezvousError as error:
                    check_refusal(error, name in excluded)
                    assert handler.shutdown()
                    continue
            assert name not in excluded, f"{name} is excluded, and joins"
            assert info.rank not in order, "two machines have one number"
            order[info.rank] = name
            self.handlers[name] = handler
        assert sorted(order) == list(range(len(joining)))
        self.alive -= excluded
        ordered = [order[rank] for rank in sorted(order)]
        assert ordered == sorted(joining, key=lambda name: places[name]), "racks stay together"
        self.launch(ordered)

    def launch(self, ordered: Sequence[str]) -> None:
        """Start ranks on the machines of a start, or say why there are none."""
        assert self.spec is not None
        if len(ordered) < self.least:
            self.why_down = f"torchrun waits for {self.least} machines"
            return
        world = len(ordered) * RANKS_PER_NODE
        chosen = layout_of(self.variant, world)
        if isinstance(chosen, str):
            assert "\n" not in chosen
            assert "no layout of at most" in chosen
            self.why_down = chosen
            return
        topology = chosen.topology
        assert topology.world + chosen.spares == world
        assert spec_of(self.variant).fits(topology)
        assert topology.tp <= RANKS_PER_NODE
        self.launches += 1
        machines = [ordered[rank // RANKS_PER_NODE] for rank in range(topology.world)]
        self.answers = Answers()
        self.ranks = [
            make_rank(
                self.spec, topology, rank, machines, self.answers, f"launch{self.launches}",
                self.events.append, lambda left: left >= self.least,
            )
            for rank in range(topology.world)
        ]  # fmt: skip
        newest = max(self.committed, default=0)
        for rank in self.ranks:
            rank.begin(self.writers)
        self.take_up(newest)
        self.why_down = ""

    def take_up(self, newest: int) -> None:
        """What every rank has after a restore: the newest committed step."""
        for rank in self.ranks:
            step = rank.trainer.progress.step
            assert step == newest, f"rank {rank.rank} begins after step {step}, not {newest}"
            weights = {float(w) for row in rank.job.loaded for w in row} or {float(newest)}
            assert weights == {float(newest)}, f"weights of {weights} updates after step {newest}"
            rank.job.optimizer.weight.fill_(float(newest))
        self.history = {step: one for step, one in self.history.items() if step <= newest}

    # --------------------------------------------------------------------------------------------
    # Machines.

    @action(when=lambda world: world.spec is not None, number=MACHINE)
    def machine_comes(self, number: int) -> None:
        """A machine is started, and waits at the rendezvous."""
        name = f"n{number}"
        if self.spec is None or name in self.alive:
            return
        self.alive.add(name)
        self.torchrun.waiting.add(name)
        self.look()

    @action(when=lambda world: world.alive, number=MACHINE, lands=st.booleans())
    def machine_dies(self, number: int, lands: bool) -> None:
        """A machine is gone; a save that was begun may still land, or is lost with it."""
        name = f"n{number}"
        if self.spec is None or name not in self.alive:
            return
        self.alive.discard(name)
        self.noticed.discard(name)
        self.torchrun.waiting.discard(name)
        if self.writers.queue and not lands:
            self.writers.queue.clear()
        if name in self.torchrun.members and self.why_down in ("", self.waiting_words):
            self.restart()

    @property
    def waiting_words(self) -> str:
        return self.why_down if "layout" in self.why_down or "waits" in self.why_down else ""

    @action(when=lambda world: world.running, number=MACHINE,
            percent=st.sampled_from([40, 60, 80, 100]))  # fmt: skip
    def machine_slows(self, number: int, percent: int) -> None:
        """A machine computes at another speed from now on."""
        self.speeds[f"n{number}"] = percent / 100

    @action(when=lambda world: world.running, number=MACHINE)
    def machine_gets_notice(self, number: int) -> None:
        """The cloud will take a machine: the run saves and stops."""
        if self.running and f"n{number}" in {rank.machine for rank in self.ranks}:
            self.noticed.add(f"n{number}")

    @action(when=lambda world: world.spec is not None, number=MACHINE)
    def person_excludes(self, number: int) -> None:
        """A person puts a machine on the exclude list; a member stays until the next start."""
        if self.spec is None:
            return
        path = self.spec.run_path / "exclude.json"
        if len(read_exclusions(path)) < 2:
            exclude(path, f"n{number}", "a person says so")

    @action(when=lambda world: world.torchrun.waiting)
    def look(self) -> None:
        """torchrun asks whether somebody waits, on each machine."""
        if self.spec is None:
            return
        if not self.running:
            if self.why_down and self.waiting_words and self.torchrun.waiting:
                self.restart()
            return
        if any(self.handlers[name].num_nodes_waiting() for name in self.torchrun.members):
            self.restart()

    @action(when=lambda world: world.spec is not None and not world.running,
            back=st.integers(-1, 2))  # fmt: skip
    def person_starts(self, back: int) -> None:
        """The same command again; before it perhaps a roll-back."""
        if self.spec is None or self.running:
            return
        while self.writers.queue:
            self.lands()
        if back >= 0 and self.committed:
            step = self.committed[-1 - back % len(self.committed)]
            roll_back(self.root, step, lambda text: None)
            self.committed = [one for one in self.committed if one <= step]
            self.history = {number: s for number, s in self.history.items() if number <= step}
        self.restart()
