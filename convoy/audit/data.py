"""The proof of what a run has seen, from its log and its manifests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from corpus.manifest import recorded_manifest
from pretrain.data import Blend, Corpora, data_checksum, kept_samples, read_batch
from pretrain.errors import InputError
from pretrain.observe import (
    DataOpened,
    Event,
    HealthAction,
    Resized,
    StepCommitted,
    StepSkipped,
    read_log,
)
from pretrain.parts.playbook import merged


@dataclass(frozen=True)
class ConsumedStep:
    """A step of the run as it stands: of a step that was taken again, the last time."""

    step: int
    samples: Sequence[int]
    checksum: int | None
    """Of the tokens that the ranks had."""
    opened: DataOpened
    """What the samples were drawn from."""


@dataclass(frozen=True)
class SourceShare:
    """What a run saw of one source."""

    name: str
    fingerprint: str
    samples: int
    epochs: float


@dataclass
class DataAudit:
    """What the log and the manifests of a run prove."""

    steps: list[ConsumedStep] = field(default_factory=list)
    taken: int = 0
    """Commits in the log, those of steps that were taken again included."""
    starts: int = 0
    resizes: int = 0
    left_out: int = 0
    """Samples that the divergence playbook left out."""
    first_step: int = 0
    """The step that the run began after, and ``first_sample`` its first sample."""
    first_sample: int = 0
    shares: list[SourceShare] = field(default_factory=list)
    checked_steps: int = 0
    """Steps whose tokens were read again and compared."""
    problem: str = ""
    """The first step that did not take the samples that it must have, or a manifest that is not
    the run's; empty where there is none."""

    @property
    def step(self) -> int:
        """The number of the newest step."""
        return self.first_step + len(self.steps)

    @property
    def next_sample(self) -> int:
        """The sample after those of the steps."""
        return self.steps[-1].samples[-1] + 1 if self.steps else self.first_sample

    def go_back(self, step: int) -> None:
        """Forget the steps after one."""
        del self.steps[max(step - self.first_step, 0) :]

    @property
    def samples(self) -> int:
        """The samples of all steps."""
        return sum(len(step.samples) for step in self.steps)


class _ProblemError(Exception):
    """What is found first ends an audit."""


def audit_data(run_dir: Path, corpora: Corpora | None = None) -> DataAudit:
    """Which samples each step of a run consumed, over all starts and resizes.

    Each sample must come exactly once and in order, but for those that the log says were left out.
    Between two starts or rollbacks each step must come once.
    A start must draw the samples that were consumed before from the same data. Each fingerprint
    must have a manifest in RUN_DIR/data that gives the number of sequences that the log names.

    Args:
        run_dir: the run's folder.
        corpora: the prepared data of the run; the tokens of every step are then read again and
            compared with the checksum in the log. None compares logs and manifests alone.

    Raises InputError where the run has no log that can be read, or the log does not say what its
    data was.
    """
    path = run_dir / "log.jsonl"
    try:
        log = read_log(path)
    except OSError as error:
        raise InputError(f"RUN_DIR ({run_dir}) must have a log.jsonl: {error.strerror}") from None
    audit = DataAudit()
    try:
        _follow(log.events, path, audit)
        _check_manifests(run_dir, audit)
        if corpora is not None:
            _compare_tokens(audit, corpora)
    except _ProblemError as problem:
        audit.problem = str(problem)
    audit.shares = list(_shares(audit))
    return audit


def _follow(events: Sequence[Event], path: Path, audit: DataAudit) -> None:
    """Go through the log, and keep the steps of the run as it stands."""
    opened: DataOpened | None = None
    checksums: dict[str, int] = {}
    left_out: list[tuple[int, int]] = []
    for event in events:
        if isinstance(event, DataOpened):
            audit.starts += 1
            if opened is None:
                audit.first_step, audit.first_sample = event.first_step, event.first_sample
            audit.go_back(event.step)
            _check_start(opened, event, audit)
            opened = event
        elif isinstance(event, Resized):
            audit.resizes += 1
        elif isinstance(event, StepSkipped | HealthAction) and event.skipped_samples:
            left_out.append((event.skipped_samples[0], event.skipped_samples[1]))
            if isinstance(event, HealthAction) and event.to_step is not None:
                audit.go_back(event.to_step)
        elif isinstance(event, StepCommitted):
            if opened is None:
                raise InputError(
                    f"{path} must have an event data before step {event.step}: the run was begun "
                    f"by a version of Convoy that did not record its data"
                )
            audit.taken += 1
            one = _consumed(event, opened, left_out, audit)
            if one.checksum is not None:
                known = checksums.setdefault(_drawn_from(one), one.checksum)
                if known != one.checksum:
                    raise _ProblemError(
                        f"step {one.step} had other tokens when it was taken again: checksum "
                        f"{one.checksum}, and {known} before"
                    )
            audit.steps.append(one)
    ranges = [range(a.samples[-1] + 1, b.samples[0]) for a, b in pairwise(audit.steps)]
    audit.left_out = sum(map(len, ranges)) + sum(
        step.samples[-1] - step.samples[0] + 1 - len(step.samples) for step in audit.steps
    )
    audit.left_out += audit.steps[0].samples[0] - audit.first_sample if audit.steps else 0


def _drawn_from(one: ConsumedStep) -> str:
    """All that the tokens of a step depend on."""
    phases = [p for p in one.opened.blend if p["from_sample"] <= one.samples[-1]]
    return json.dumps([list(one.samples), one.opened.seed, phases], sort_keys=True)


def _check_start(before: DataOpened | None, now: DataOpened, audit: DataAudit) -> None:
    """A start must go on where the steps before it end, with their data."""
    where = f"the start after step {now.step}"
    if audit.step != now.step or now.sample < audit.next_sample:
        raise _ProblemError(
            f"{where} goes on with sample {now.sample}; the log has {len(audit.steps)} steps "
            f"before it, up to sample {audit.next_sample}"
        )
    if before is None:
        return
    for name in ("seed", "seq_len"):
        was, there = getattr(before, name), getattr(now, name)
        if was != there:
            raise _ProblemError(f"{where} has {name} {there}, and {was} before")
    for key in set(before.sources) & set(now.sources):
        if before.sources[key]["sequences"] != now.sources[key]["sequences"]:
            raise _ProblemError(f"{where} has another number of sequences of source {key[:12]}")
    # What steps took already must come from the blend that they were drawn from.
    drawn = audit.steps[-1].opened.blend if audit.steps else now.blend
    past = [phase for phase in drawn if phase["from_sample"] < now.sample]
    kept = [phase for phase in now.blend if phase["from_sample"] < now.sample]
    if past != kept:
        raise _ProblemError(f"{where} has another blend for samples before {now.sample}")


def _consumed(
    event: StepCommitted,
    opened: DataOpened,
    left_out: Sequence[tuple[int, int]],
    audit: DataAudit,
) -> ConsumedStep:
    """The samples of a committed step. Raises _ProblemError where they are not the next ones."""
    # A start and a rollback have removed the steps that they take again.
    if event.step <= audit.step:
        raise _ProblemError(
            f"step {event.step} comes again after step {audit.step}, without a start or a "
            f"rollback between the two"
        )
    if audit.step != event.step - 1:
        raise _ProblemError(f"step {event.step} comes after step {audit.step}: a step is missing")
    at = audit.next_sample
    count = event.samples or event.target_tokens // opened.seq_len
    # The playbook may leave out more later: what a range says holds from its line on.
    expected = kept_samples(at, count, merged(left_out))
    for samples in (range(at, at + count), expected):
        if samples[-1] + 1 == event.consumed_samples:
            return ConsumedStep(event.step, samples, event.data_checksum, opened)
    raise _ProblemError(
        f"step {event.step} took {count} samples and ended at sample {event.consumed_samples}; "
        f"from sample {at} it must end at {expected[-1] + 1}"
    )


def _check_manifests(run_dir: Path, audit: DataAudit) -> None:
    sources: dict[str, dict[str, Any]] = {}
    for step in audit.steps:
        sources = {**step.opened.sources, **sources}
    for key, source in sources.items():
        manifest = recorded_manifest(run_dir, key)
        where = run_dir / "data" / f"{key}.json"
        if manifest is None or not manifest.is_sealed or manifest.fingerprint != key:
            raise _ProblemError(f"{where} must be the manifest of source {source['name']}")
        if manifest.train_tokens != source["tokens"]:
            raise _ProblemError(
                f"source {source['name']} has {manifest.train_tokens} tokens in {where}, and "
                f"{source['tokens']} in the log"
            )


def _compare_tokens(audit: DataAudit, corpora: Corpora) -> None:
    """Read the tokens of every step again."""
    sequences = corpora.train_sequences()
    for step in audit.steps:
        blend = Blend.from_json(step.opened.blend)
        missing = set(Blend.from_json(_phases_at(step)).sources) - {
            corpus.manifest.fingerprint for corpus in corpora.sources
        }
        if missing:
            name = step.opened.sources[min(missing)]["name"]
            raise InputError(
                f"step {step.step} drew from source {name} ({min(missing)[:12]}), which the spec "
                f"does not have; leave --tokens out, or give the spec of then"
            )
        order = corpora.order(blend, sequences, step.opened.seed)
        rows = read_batch(sequences, order.many(np.array(step.samples, np.int64)))
        if step.checksum is None:
            continue
        checksum = data_checksum([rows])
        if checksum != step.checksum:
            raise _ProblemError(
                f"step {step.step} had tokens with the checksum {step.checksum}; those of samples "
                f"{step.samples[0]} to {step.samples[-1]} have {checksum}"
            )
        audit.checked_steps += 1


def _phases_at(step: ConsumedStep) -> list[dict[str, object]]:
    """The phases that a step draws from, as a blend of their own."""
    phases = step.opened.blend
    begun = [p for p in phases if p["from_sample"] <= step.samples[0]][-1:]
    begun += [p for p in phases if step.samples[0] < p["from_sample"] <= step.samples[-1]]
    return [{**begun[0], "from_sample": 0}, *begun[1:]]


def _shares(audit: DataAudit) -> Iterator[SourceShare]:
    """What the steps saw of each source."""
    counts: dict[str, int] = {}
    known: dict[str, dict[str, object]] = {}
    blends: dict[int, Blend] = {}
    for step in audit.steps:
        known |= step.opened.sources
        blend = blends.setdefault(id(step.opened), Blend.from_json(step.opened.blend))
        for key, places, _ in blend.draw(np.array(step.samples, np.int64)):
            counts[key] = counts.get(key, 0) + len(places)
    for key, samples in sorted(counts.items(), key=lambda item: -item[1]):
        source = known.get(key, {"name": key[:12], "sequences": 0})
        there = source["sequences"]
        assert isinstance(there, int)
        yield SourceShare(str(source["name"]), key, samples, samples / there if there else 0.0)
