"""Steps and saves of a simulated run, and what holds after each."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hypothesis import strategies as st
from torch.distributed import HashStore

import ckpt
from cluster.members.rendezvous import MembersHandler
from pretrain.checkpoint import restore
from pretrain.data.order import GlobalOrder
from pretrain.elastic import ChosenLayout, choose_layout
from pretrain.errors import HealthError, InputError
from pretrain.observe import HealthAction, StepSkipped
from pretrain.parts.step import Reports
from pretrain.runtime import StopCause
from pretrain.spec import JobSpec
from pretrain.state import Progress
from tests.fuzz.machine import World, action, check_refusal
from tests.fuzz.simulated_run import SEQUENCES, Answers, Pause, Rank, simulated
from tests.support.checkpoints import memory_folder
from tests.support.jobs import make_spec

MACHINES, RANKS_PER_NODE = 4, 2
VARIANTS: list[dict[str, Any]] = [
    {},
    {"parallel": {"dp_shard": 4, "ep": 2}},
    {"parallel": {"tp": 2, "pp": 2}},
    {
        "parallel": {"dp_replicate": 2, "dp_shard": 2},
        "batch": {"global_batch_size": 10, "micro_batch_size": 3,
                  "stages": [{"from_tokens": 400, "global_batch_size": 14}]},
        "stragglers": {"rebalance": True, "replace": True, "patience_steps": 4},
    },
    {
        "parallel": {"dp_replicate": 3, "dp_shard": -1},
        "batch": {"global_batch_size": 24, "micro_batch_size": 2},
        "stragglers": {"rebalance": True, "patience_steps": 4},
    },
]  # fmt: skip
MACHINE = st.integers(0, MACHINES - 1)


@lru_cache(maxsize=256)
def layout_of(variant: int, world: int) -> ChosenLayout | str:
    """The layout, or why there is none: the function is pure, and takes long."""
    try:
        return choose_layout(spec_of(variant), world, RANKS_PER_NODE)
    except InputError as error:
        return str(error)


@cache
def spec_of(variant: int) -> JobSpec:
    """The spec of a variant."""
    sections = {
        "elastic": {"enabled": True},
        "model": {"d_model": 48},
        "train": {"steps": 60, "log_interval_steps": 1000},
        "eval": {"interval_steps": 0},
        "data": {"seq_len": 8},
        "health": {"window_steps": 4, "skip_steps": 2,
                   "not_finite": {"actions": ["go_back", "go_back", "stop"]}},
    }  # fmt: skip
    with memory_folder() as folder:
        return make_spec(Path(folder), **{**sections, **VARIANTS[variant]})


class Torchrun:
    """The rendezvous of the machines that torchrun runs on."""

    def __init__(self) -> None:
        self.members: list[str] = []
        self.waiting: set[str] = set()
        self.store = HashStore()
        self.joining: list[str] = []

    def inner_of(self, machine: str) -> Any:
        """As one machine's handler sees torchrun's own rendezvous."""

        def join() -> Any:
            return SimpleNamespace(
                store=self.store,
                rank=self.joining.index(machine),
                world_size=len(self.joining),
                bootstrap_store_info=None,
            )

        participants = dict.fromkeys(self.members)
        return SimpleNamespace(
            next_rendezvous=join,
            num_nodes_waiting=lambda: len(self.waiting),
            _state_holder=SimpleNamespace(state=SimpleNamespace(participants=participants)),
            shutdown=lambda: True,
        )


@dataclass
class Step:
    """A committed step of the present history."""

    samples: tuple[int, ...]


def left_out(progress: Progress) -> set[int]:
    """The samples that no step takes."""
    return {n for start, stop in progress.health.skipped_samples for n in range(start, stop)}


class ElasticSteps(World):
    """A run on simulated ranks."""

    def __init__(self) -> None:
        self._memory = memory_folder()
        self.folder = Path(self._memory.name)
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(simulated())
        self.spec: JobSpec | None = None
        self.torchrun = Torchrun()
        self.handlers: dict[str, MembersHandler] = {}
        self.alive: set[str] = set()
        self.speeds: dict[str, float] = {}
        self.noticed: set[str] = set()
        self.ranks: list[Rank] = []
        self.answers = Answers()
        self.why_down = "not begun"
        self.launches = 0
        self.history: dict[int, Step] = {}
        self.committed: list[int] = []
        self.events: list[Any] = []
        self.spiked = False
        self.lost_saves = 0
        self.draws = 0

    def close(self) -> None:
        self.stack.close()
        shutil.rmtree(self._memory.name, ignore_errors=True)
        self._memory.cleanup()

    @property
    def running(self) -> bool:
        return bool(self.ranks)

    @property
    def root(self) -> Path:
        assert self.spec is not None
        return Path(self.spec.checkpoint_path)

    @property
    def asked(self) -> bool:
        """Whether a save is asked for already."""
        return any(rank.stop.save_requested for rank in self.ranks)

    def restart(self) -> None:
        """All ranks end, and those that are there start again."""
        raise NotImplementedError

    # --------------------------------------------------------------------------------------------
    # Steps.

    @action(when=lambda world: world.running, count=st.integers(1, 7))
    def train(self, count: int) -> None:
        """Some ordinary steps."""
        before = self.ranks[0].trainer.progress.step if self.ranks else 0
        for _ in range(count):
            if self.running:
                self.step("")
        if self.running and not self.noticed:
            assert self.ranks[0].trainer.progress.step == before + count, "no progress"

    @action(when=lambda world: world.running, kind=st.sampled_from(["nan", "spike", "inf norm"]),
            rank=st.integers(0, 9), count=st.integers(1, 4))  # fmt: skip
    def bad_steps(self, kind: str, rank: int, count: int) -> None:
        """Steps of which one rank's numbers are bad."""
        for _ in range(count):
            if self.running:
                self.step(kind, rank % len(self.ranks))

    @action(when=lambda world: world.running and not world.asked, rank=st.integers(0, 9))
    def ask_for_a_save(self, rank: int) -> None:
        """SIGUSR1 to one rank."""
        if self.running:
            self.ranks[rank % len(self.ranks)].stop.save_requested = True

    def step(self, kind: str, bad: int = 0) -> None:
        """One try of a step on all ranks."""
        assert self.spec is not None
        attempts = [rank.trainer.read() for rank in self.ranks]
        before = self.ranks[0].trainer.progress
        samples = self.expected_samples(before)
        self.check_batches(samples)
        self.draws += 1
        reports = []
        for rank, attempt in zip(self.ranks, attempts, strict=True):
            tokens = sum(len(batch) for batch in attempt.batches) * self.spec.data.seq_len
            tokens = tokens if rank.job.dims.reads_first else 0
            usual = 2.0 + 0.01 * (self.draws % 3)
            loss = 60.0 if kind == "spike" else usual
            is_nan = kind == "nan" and rank.rank == bad
            attempt.result = SimpleNamespace(
                loss_sum=float("nan") if is_nan else loss * tokens, target_tokens=tokens,
                routing=None, expert_rows=0.0, expert_seconds=0.0, mtp_loss_sums_K=[],
            )  # fmt: skip
            if rank.machine in self.noticed:
                rank.stop.cause = StopCause.NOTICE_FILE
            report = rank.trainer._report(attempt, int(rank.stop.cause))
            own = sum(len(batch) for batch in attempt.batches)
            seconds = (0.1 + own) / self.speeds.get(rank.machine, 1.0)
            square = float("inf") if kind == "inf norm" and rank.rank == bad else 0.01
            reports.append(replace(report, step_seconds=seconds, grad_square_sum=square))
        self.spiked |= bool(kind)
        for rank in self.ranks:
            rank.trainer.rows = (Reports.of(reports), {})
        self.act(samples)

    def act(self, samples: list[int]) -> None:
        """Every rank decides and acts on the step's reports."""
        before = self.ranks[0].trainer.progress
        outcomes: list[Any] = []
        first_event = len(self.events)
        newest_before = max(self.committed, default=0)
        for rank in self.ranks:
            rank.trainer.steps_left = 1
            restored = mock.patch(
                "pretrain.checkpoint.going_back.restore", lambda job, tiers: self._restored(job)
            )
            with restored:
                try:
                    outcomes.append(bool(rank.trainer.train(rank.stop)))
                except Pause:
                    outcomes.append("on")
                except HealthError as error:
                    check_refusal(error, True)
                    outcomes.append("health")
                except ckpt.CheckpointError as error:
                    check_refusal(error, self.lost_saves, "is not saved")
                    outcomes.append("unsaved")
        self.see_saves()
        assert len(set(map(str, outcomes))) == 1, f"ranks go on differently: {outcomes}"
        states = [replace(r.trainer.progress, train_seconds=0.0) for r in self.ranks]
        assert all(state == states[0] for state in states), "ranks have other counters"
        divisions = {rank.job.loader.division for rank in self.ranks}
        assert len(divisions) == 1, "ranks divide differently"
        now = self.ranks[0].trainer.progress
        if now.step == before.step + 1 and now.health.go_backs == before.health.go_backs:
            self.history[now.step] = Step(tuple(samples))
        elif now.health.go_backs > before.health.go_backs:
            self.went_back(now.step, newest_before)
        else:
            assert now.step == before.step, "a try is one step at most"
        self.check_left_out(first_event, before, now)
        self.after_step(outcomes[0])

    def _restored(self, job: Any) -> Any:
        progress = restore(job)
        job.optimizer.weight.fill_(float(progress.step))
        return progress

    def went_back(self, step: int, newest: int) -> None:
        """The playbook has taken the run back to the newest checkpoint."""
        assert step == max(self.committed, default=newest)
        self.history = {number: one for number, one in self.history.items() if number <= step}

    def after_step(self, outcome: Any) -> None:
        """Whether the ranks go on, and how torchrun sees their end."""
        assert self.spec is not None
        cause = self.ranks[0].trainer.stop_cause
        if outcome == "on":
            return
        if outcome == "health":
            self.ranks, self.why_down = [], "the playbook has stopped the run"
            return
        if outcome == "unsaved":
            self.ranks, self.why_down = [], "the save of the last step has failed"
            return
        step = self.ranks[0].trainer.progress.step
        last = [step] if step else []
        assert self.committed[-1:] == last, "a run that ends has committed its last step"
        if outcome is False:
            assert step == self.spec.train.steps
            self.ranks, self.why_down = [], "the run is done"
            return
        self.noticed = set()
        if cause is StopCause.SLOW_MACHINE:
            self.restart()
            return
        self.ranks, self.why_down = [], f"stopped: {cause.label}"

    def check_batches(self, samples: list[int]) -> None:
        """All ranks together read each micro-batch of the step once, in order."""
        assert self.spec is not None
        order, size = GlobalOrder(SEQUENCES, self.spec.train.seed), self.spec.batch.micro_batch_size
        sequences = [order[sample] for sample in samples]
        wanted = [sequences[i : i + size] for i in range(0, len(sequences), size)]
        by_reader: dict[int, list[list[int]]] = {}
        for rank in self.ranks:
            attempt = rank.trainer.attempt
            assert attempt is not None
            rows = [batch[:, 0].tolist() for batch in attempt.batches]
            number = rank.topology.dp_rank(rank.rank)
            assert by_reader.setdefault(number, rows) == rows, "ranks of one reader read alike"
        counts = [[batch for batch in rows if batch] for rows in by_reader.values()]
        read = sorted(batch for rows in counts for batch in rows)
        assert read == sorted(wanted), "each micro-batch of the step is read once"

    def expected_samples(self, progress: Progress) -> list[int]:
        """The samples of the next step, by the spec and the model's history."""
        assert self.spec is not None
        omitted = left_out(progress)
        trained = {sample for step in self.history.values() for sample in step.samples}
        first = 0
        while first in trained or first in omitted:
            first += 1
        batch, tokens = self.spec.batch, first * self.spec.data.seq_len
        size = batch.global_batch_size
        for stage in batch.stages:
            if stage.from_tokens <= tokens:
                size = stage.global_batch_size
        samples, sample = [], first
        while len(samples) < size:
            if sample not in omitted:
                samples.append(sample)
            sample += 1
        return samples

    def check_left_out(self, first_event: int, before: Progress, now: Progress) -> None:
        """What the playbook leaves out was bad, is published, and is more than before: a run that
        leaves out what it has left out already would go in a circle."""
        for event in self.events[first_event:]:
            if isinstance(event, StepSkipped | HealthAction) and event.skipped_samples:
                assert self.spiked, "samples are left out, and no step was bad"
                samples = set(range(*event.skipped_samples))
                assert samples <= left_out(now), "samples are said to be left out, and are not"
                assert left_out(now) > left_out(before), "nothing new is left out"

    # --------------------------------------------------------------------------------------------
    # Saves.

    def lands(self) -> None:
        step = self.writers.land()
        self.note_saved(step)

    def note_saved(self, step: int) -> None:
        assert self.spec is not None
        self.committed.append(step)
        removed = ckpt.retain(self.root, self.spec.checkpoint.retention)
        assert removed == self.committed[:-2], "the two newest stay"
        self.committed = self.committed[-2:]

    def see_saves(self) -> None:
        """Take in what the ranks' own waits have committed, and removed by going back."""
        there = ckpt.committed_steps(self.root)
        self.committed = there
        if len(there) > 2:
            ckpt.retain(self.root, 2)
            self.committed = there[-2:]

    @action(when=lambda world: world.spec is not None and world.writers.queue)
    def save_lands(self) -> None:
        """The writer processes commit."""
        if self.spec is not None and self.writers.queue:
            self.lands()

    @action(when=lambda world: world.spec is not None and world.writers.queue)
    def save_is_lost(self) -> None:
        """The disk is full."""
        if self.spec is not None and self.writers.queue:
            self.writers.lose()
            self.lost_saves += 1

    def check(self) -> None:
        """See the head of elastic_life.py."""
        if self.spec is None:
            return
        if not self.running:
            assert self.why_down, "a run without ranks says why"
        assert ckpt.committed_steps(self.root) == self.committed
        if self.running and not self.torchrun.waiting:
            asked = [self.handlers[name].num_nodes_waiting() for name in self.torchrun.members]
            assert not any(asked), "all would start again, and nobody waits"
        trained = [sample for _, step in sorted(self.history.items()) for sample in step.samples]
        assert trained == sorted(set(trained)), "each sample once, and in order"
        if not self.ranks:
            return
        progress = self.ranks[0].trainer.progress
        skipped = left_out(progress)
        assert not skipped & set(trained), "a sample is trained, and left out"
        taken = sorted([*trained, *(n for n in skipped if n < progress.consumed_samples)])
        assert taken == list(range(progress.consumed_samples)), "a sample is missing"
        assert sorted(self.history) == list(range(1, progress.step + 1))
        for rank in self.ranks:
            weight = float(rank.job.optimizer.weight)
            assert weight == progress.step, "weights of another step"
