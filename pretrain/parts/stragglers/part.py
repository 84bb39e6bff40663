"""What is done about ranks that are slow as a whole, in stages.

1. Straggler-aware capacity gives a slow rank's experts fewer assignments.
2. A slow rank computes fewer micro-batches of the same global batch (:func:`pretrain.data.divide`).
3. A rank that stays slow is reported for replacement, as an event of stage 3. With
   ``stragglers.replace`` its machine is put on the exclude list, and the run starts again without
   the machine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pretrain.data import Division
from pretrain.model import forward_flops
from pretrain.observe import MicroBatchesPlanned, StragglerEnded, StragglerFound, StragglerGain
from pretrain.parts.step import Part, PartContext, StepFacts, Wish
from pretrain.parts.stragglers.config import StragglersConfig
from pretrain.parts.stragglers.rule import GainMeter, Straggler, Stragglers
from pretrain.spec import JobSpec

CAPACITY, MICRO_BATCHES, REPLACEMENT = 1, 2, 3
"""The stages; 0 stands for a slow rank about which nothing can be done."""


class StragglersPart(Part):
    """Finds slow ranks, divides micro-batches anew, and publishes what was seen, done and gained.

    Args:
        config: what is done.
        context: of the run.
        speeds: of all ranks; None for one rank, and where the times of collectives are not
            measured.
        division: of micro-batches into equal parts.
        capacity_follows_speed: whether slow experts get fewer assignments.
    """

    name = "stragglers"
    of_machines = True

    def __init__(
        self,
        config: StragglersConfig,
        context: PartContext,
        *,
        speeds: Stragglers | None,
        division: Division,
        capacity_follows_speed: bool,
    ) -> None:
        self.config, self.context, self.speeds, self.division = config, context, speeds, division
        self.capacity_follows_speed = capacity_follows_speed
        self.meter = GainMeter()
        self._starts_again = False

    @classmethod
    def of_spec(
        cls,
        spec: JobSpec,
        context: PartContext,
        *,
        timed: bool,
        division: Division,
        capacity_follows_speed: bool,
    ) -> StragglersPart:
        """The part of a run; ``timed`` says whether waits in collectives are measured."""
        speeds = _speeds(spec, context) if timed and context.topology.world > 1 else None
        return cls(
            spec.stragglers,
            context,
            speeds=speeds,
            division=division,
            capacity_follows_speed=capacity_follows_speed,
        )

    def after(self, facts: StepFacts) -> Wish:
        """Wish for another division of micro-batches, or for a start without a slow machine."""
        before = self.division
        self._measure(facts)
        if facts.capacity_changed:
            self.meter.begin(CAPACITY)
        if self.speeds is not None:
            self._answer_all(facts, self.speeds)
        division = None if self.division == before else self.division
        return Wish(division=division, starts_again=self._starts_again)

    def _answer_all(self, facts: StepFacts, speeds: Stragglers) -> None:
        column, step, publish = facts.reports.column, facts.step, self.context.publish
        findings = speeds.after(
            step,
            column("target_tokens"),
            column("expert_rows"),
            column("step_seconds") - column("exposed_seconds"),
        )
        for straggler in findings.ended:
            publish(
                StragglerEnded(
                    step=step,
                    rank=straggler.rank,
                    speed=straggler.speed,
                    since_step=straggler.since_step,
                )
            )
        if findings.changed and self._may_divide:
            self._divide(facts, speeds)
        for straggler in findings.found:
            stage, action = self._answer(straggler, facts, speeds)
            self._publish_found(step, straggler, stage, action)
        for straggler in findings.lasting:
            self._publish_found(step, straggler, REPLACEMENT, self._replace(straggler))

    def _replace(self, straggler: Straggler) -> str:
        """Take the machine of a slow rank out of the run, where the spec says so and the launch can
        go on without the machine; what is done, for people. Every rank must call."""
        context = self.context
        machine = context.machines[straggler.rank]
        left = len(set(context.machines) - {machine})
        if not self.config.replace or not left:
            return "still slow: replace its machine, or take it out of the run"
        if not context.goes_on_without(left):
            return f"still slow: this launch needs {machine}; replace the machine"
        why = f"rank {straggler.rank} had {straggler.speed:.0%} of the speed of the other ranks"
        if not context.exclude(machine, why):
            return f"still slow: {machine} cannot be put on the exclude list"
        self._starts_again = True
        return f"still slow: {machine} is excluded, and the run starts again without it"

    @property
    def _may_divide(self) -> bool:
        return self.config.rebalance and self.context.topology.pp == 1

    def _publish_found(self, step: int, straggler: Straggler, stage: int, action: str) -> None:
        self.context.publish(
            StragglerFound(
                step=step,
                rank=straggler.rank,
                speed=straggler.speed,
                z=straggler.z,
                since_step=straggler.since_step,
                stage=stage,
                action=action,
            )
        )

    def _answer(
        self, straggler: Straggler, facts: StepFacts, speeds: Stragglers
    ) -> tuple[int, str]:
        """The stage that answers a slow rank, and what the stage does, for people."""
        if self._may_divide:
            total, dp_rank = facts.next_micro_batches, speeds.dp_rank(straggler.rank)
            counts = self.division.counts(total)
            if counts[dp_rank] < replace(self.division, speeds=None).counts(total)[dp_rank]:
                return (
                    MICRO_BATCHES,
                    f"the rank computes {counts[dp_rank]} of {total} micro-batches",
                )
            why = (
                f"a step of {total} micro-batches on {len(counts)} ranks has no division that "
                f"saves {self.division.min_gain:.0%} of its time"
            )
        elif self.config.rebalance:
            why = "micro-batches are not divided anew with parallel.pp above 1"
        else:
            why = "stragglers.rebalance is false"
        if self.capacity_follows_speed:
            return CAPACITY, f"the rank's experts get fewer assignments; {why}"
        return 0, f"nothing is done: {why}"

    def _divide(self, facts: StepFacts, speeds: Stragglers) -> None:
        """Divide the micro-batches of the coming steps by the speeds of now."""
        total, levels = facts.next_micro_batches, speeds.dp_speeds
        before = self.division.counts(total)
        self._set_speeds(facts, speeds, None if len(set(levels)) == 1 else levels)
        if self.division.counts(total) != before:
            self.meter.begin(MICRO_BATCHES)

    def _set_speeds(
        self, facts: StepFacts, speeds: Stragglers, levels: tuple[float, ...] | None
    ) -> None:
        speeds.division_speeds = levels
        self.division = replace(self.division, speeds=levels)
        total = facts.next_micro_batches
        self.context.publish(
            MicroBatchesPlanned(
                step=facts.step,
                counts=list(self.division.counts(total)),
                relative_speeds=list(levels or [1.0] * self.division.ranks),
                predicted_gain=self.division.gain(total),
            )
        )

    def _measure(self, facts: StepFacts) -> None:
        """Publish what answers have gained; take back a division that made steps longer."""
        for gain in self.meter.after(facts.decision.step_seconds):
            divided = gain.stage == MICRO_BATCHES and self.division.speeds is not None
            worse = divided and gain.seconds_after > gain.seconds_before
            self.context.publish(
                StragglerGain(
                    step=facts.step,
                    stage=gain.stage,
                    seconds_before=gain.seconds_before,
                    seconds_after=gain.seconds_after,
                    kept=not worse,
                )
            )
            if worse and self.speeds is not None:
                self._set_speeds(facts, self.speeds, None)

    def state(self) -> dict[str, Any] | None:
        """Speeds, slow ranks and the division."""
        return None if self.speeds is None else self.speeds.state()

    def load(self, state: dict[str, Any]) -> Wish | None:
        """Wish for the division of the checkpoint."""
        if self.speeds is None:
            return None
        self.speeds.load(state)
        self.division = replace(self.division, speeds=self.speeds.division_speeds)
        return Wish(division=self.division)


def _speeds(spec: JobSpec, context: PartContext) -> Stragglers:
    """Of all ranks, by the FLOPs of a token and of an assignment to an expert."""
    flops, moe = forward_flops(spec.model, spec.moe, spec.data.seq_len), spec.moe
    layers = 0 if moe is None else len(spec.model.moe_layers)
    if moe is None or not layers:
        return Stragglers(spec.stragglers, context.topology, token_flops=flops.total, row_flops=0.0)
    routed = flops.experts * moe.top_k / (moe.top_k + moe.num_shared_experts)
    return Stragglers(
        spec.stragglers,
        context.topology,
        token_flops=flops.total - routed,
        row_flops=routed / (layers * moe.top_k),
    )
