"""The checks of ``[verify]`` in a run: what is measured, and what is done about a mismatch.

Every rank decides the same from digests that all ranks exchange. A check changes no bit of the
training: random states, gradients and capacity plans are put back.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cluster.members import EXCLUDE_LIST
from parallel import Topology, all_gather_rows, digest, gradients_seen, local_shard
from parallel.layout import count_ranks, name_ranks
from pretrain.checkpoint import Checkpointer
from pretrain.data import Cursor, Loader
from pretrain.errors import CorruptionError, HealthError
from pretrain.job import Job
from pretrain.observe import CorruptionFound, Verified
from pretrain.optim import moments
from pretrain.parallelize import MTPLoss
from pretrain.parts.verify import (
    Finding,
    GradientPass,
    gradients_agree,
    judge_gradients,
    judge_states,
    machine_to_exclude,
    next_shifts,
)
from pretrain.state import Progress, rng_states, set_rng_states

ReadStep = Callable[[Loader], tuple[list[Tensor], Cursor, int]]
"""Gives the micro-batches of the present step, the cursor after the step, and the target tokens
that gradients are divided by."""


class Verifier:
    """Compares parameters and gradients among replicas. Every rank must construct.

    Args:
        job: the run.
        checkpointer: what saves the run.
    """

    def __init__(self, job: Job, checkpointer: Checkpointer) -> None:
        self.job, self.checkpointer, self.config = job, checkpointer, job.spec.verify
        t = job.topology
        self.replicas = t.dp_replicate
        self.rotation = _Rotation.of(job.topology, exact=job.parallel_model.exact is not None)
        """How ranks compute micro-batches of others, where replicas do not."""
        self.judged = t if self.rotation is None else self.rotation.topology
        self.machines = job.machines
        self._tally: _Tally | None = None
        """Of the step's own gradients, in a step with a check."""
        self._read: ReadStep | None = None
        self._scale: float | None = None
        self._mtp = MTPLoss()
        self._random: dict[str, Tensor] = {}
        """Random states of all replicas before the step, [replicas, bytes]."""
        self._first: Tensor | None = None
        self._seconds = 0.0

    def begin(self, progress: Progress) -> Progress:
        """The counters of a start, whose checkpoint is trusted where no check has verified one."""
        if not self.config.gradients_interval_steps or progress.verified_step is not None:
            return progress
        return _verified(progress, progress.step)

    def before_step(self, progress: Progress, read: ReadStep) -> None:
        """Compute the micro-batches of the next replica, where a check is due; every rank must
        call before the step draws random numbers."""
        self._tally, every = None, self.config.gradients_interval_steps
        if not every or (progress.step + 1) % every:
            return
        began = time.perf_counter()
        self._read, self._scale = read, progress.loss_scale
        if self.job.spec.model.num_mtp_layers:
            # Of the step as it is: every pass has the weights of all its micro-batches.
            batches, _, planned = read(self.job.loader)
            self._mtp = self.job.mtp_loss(batches, planned, progress.consumed_samples)
        device, group = self.job.runtime.device, self.job.dims.replicate_group
        if self.rotation is None:
            self._random = {
                name: all_gather_rows(state.to(device), group, "dp").cpu()
                for name, state in rng_states(device).items()
            }
        self._first = self._pass(self._shift)
        self._tally = _Tally(self.job, self.rotation)
        self._seconds = time.perf_counter() - began

    @contextmanager
    def seeing_gradients(self) -> Iterator[None]:
        """Around the step's own forward and backward."""
        if self._tally is None:
            yield
            return
        with self._tally.seeing(sum_replicas=True):
            yield

    def after_backward(self, progress: Progress) -> Progress:
        """Compare the gradients, before anything else is done with them; every rank must call.

        Raises CorruptionError or HealthError on every rank where gradients differ and
        ``verify.on_mismatch`` is ``stop``.
        """
        if self._tally is None:
            return progress
        began = time.perf_counter()
        assert self._first is not None
        own, first = self._tally.row(), self._first
        both = all_gather_rows(torch.cat([own, first])).cpu().tolist()
        n, topology = len(own), self.judged
        passes = [
            GradientPass(0, [row[:n] for row in both]),
            GradientPass(self._shift, [row[n:] for row in both]),
        ]
        self._tally = None
        if gradients_agree(passes, topology):
            seconds = self._seconds + time.perf_counter() - began
            self._publish_verified("gradients", progress.step, seconds)
            return _verified(progress, progress.step + 1)
        for shift in next_shifts(topology):
            rows = all_gather_rows(self._pass(shift)).cpu().tolist()
            passes.append(GradientPass(shift, rows))
        finding = judge_gradients(passes, topology)
        assert finding is not None, "passes that differ"
        self._act("gradients", finding, progress)
        return progress

    def compare_parameters(self, progress: Progress, saves: bool) -> None:
        """Compare parameters and moments, where a check is due; every rank must call.

        Args:
            progress: after a committed step.
            saves: whether the state is saved next.

        Raises CorruptionError on every rank where they differ and ``verify.on_mismatch`` is
        ``stop``.
        """
        every, step = self.config.parameters_interval_steps, progress.step
        if self.replicas == 1 or every == 0:
            return
        if not saves and (every == "save" or step % every):
            return
        began = time.perf_counter()
        model = self.job.model
        state = [*model.parameters(), *model.buffers()]
        for by_name in moments(self.job.optimizer, model).values():
            state += by_name.values()
        row = digest(local_shard(tensor) for tensor in state).to(self.job.runtime.device)
        rows = all_gather_rows(row.view(1)).cpu().tolist()
        finding = judge_states(rows, self.job.topology)
        if finding is None:
            self._publish_verified("parameters", step, time.perf_counter() - began)
        else:
            self._act("parameters", finding, progress)

    def compare_digests(self, rows: list[list[int]], progress: Progress) -> None:
        """Compare what :class:`StepDigests` has exchanged: gradients and parameters of replicas.

        Raises CorruptionError as :meth:`compare_parameters` does.
        """
        if rows and self.replicas > 1 and self.config.parameters_interval_steps != 0:
            finding = judge_states(rows, self.job.topology)
            if finding is not None:
                self._act("parameters", finding, progress)

    def _publish_verified(self, kind: str, step: int, seconds: float) -> None:
        self.job.events.publish(Verified(step=step, kind=kind, seconds=seconds))

    @property
    def _shift(self) -> int:
        """Of the check's own pass."""
        return 1 if self.judged.dp_replicate > 1 else 0

    def _pass(self, shift: int) -> Tensor:
        """Digests of the gradients that this rank computes with the micro-batches of its replica
        plus ``shift``, or under a rotation with one of them; nothing else is changed."""
        job, device, read = self.job, self.job.runtime.device, self._read
        assert read is not None
        rank, t = job.runtime.rank, job.topology
        replica = t.place(rank).dp_replicate
        other = (replica + shift) % self.replicas
        loader = copy.copy(job.loader)
        ahead = (other - replica) * t.dp_shard
        if self.rotation is not None:
            ahead = shift * self.rotation.stride
        loader.dp_rank = (loader.dp_rank + ahead) % loader.dp_size
        parameters = list(job.model.parameters())
        gradients, random = [p.grad for p in parameters], rng_states(device)
        with ExitStack() as after:
            after.callback(self._put_back, parameters, gradients, random)
            for parameter in parameters:
                parameter.grad = None
            # Copies: torch crashes on a state that is a part of a larger tensor.
            states = {name: rows[other].clone() for name, rows in self._random.items()}
            if states:
                set_rng_states(states, device)
            if job.balance is not None:
                stands_for = rank + (other - replica) * t.fsdp_tp
                job.balance.apply(job.routers, stands_for)
            batches, _, planned = read(loader)
            tally = _Tally(job, self.rotation)
            with tally.seeing(sum_replicas=False):
                if self.rotation is not None:
                    batches = batches[:1]
                job.forward_backward(batches, planned, self._scale, self._mtp)
            return tally.row()

    def _put_back(
        self, parameters: list[torch.nn.Parameter], gradients: list[Tensor | None],
        random: dict[str, Tensor],
    ) -> None:  # fmt: skip
        job = self.job
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        set_rng_states(random, job.runtime.device)
        if job.balance is not None:
            job.balance.apply(job.routers, job.runtime.rank)

    def _act(self, kind: str, finding: Finding, progress: Progress) -> None:
        job, step = self.job, progress.step
        what = _in_words(kind, finding, self.machines, step)
        if self.config.on_mismatch == "report":
            self._publish(kind, finding, step, text=what, stops=False)
            return
        # A state is compared before it is saved, so that every checkpoint is verified.
        verified = progress.verified_step if kind == "gradients" else None
        to_step = self.checkpointer.leave_verified(verified)
        machine = machine_to_exclude(finding, self.machines)
        path = job.spec.run_path / EXCLUDE_LIST
        if machine is not None and not job.context.exclude(machine, what):
            machine = None
        fate = f"{machine} is put on {path}" if machine else "no machine is excluded"
        if to_step is None:
            text = (
                f"{what}; {fate}; no checkpoint of step {verified} or before is left, which is the "
                f"newest verified step; test the machines, and go back as far as you trust the run "
                f"with `convoy prepare SPEC --load-step STEP`"
            )
        else:
            whence = f"goes on after step {to_step}" if to_step else "begins anew"
            text = f"{what}; {fate}; the next start of the run {whence}"
        self._publish(kind, finding, step, text=text, excluded=machine, to_step=to_step)
        raise (HealthError if to_step is None else CorruptionError)(text)

    def _publish(
        self,
        kind: str,
        finding: Finding,
        step: int,
        *,
        text: str,
        stops: bool = True,
        excluded: str | None = None,
        to_step: int | None = None,
    ) -> None:
        self.job.events.publish(
            CorruptionFound(
                step=step,
                kind=kind,
                ranks=list(finding.ranks),
                machines=sorted({self.machines[rank] for rank in finding.ranks}),
                certain=finding.certain,
                excluded=excluded,
                stops=stops,
                to_step=to_step,
                text=text,
            )
        )


@dataclass(frozen=True)
class _Rotation:
    """How ranks of an exact run compute micro-batches of others: rank r those of rank r + stride.

    Exact sums give a micro-batch's gradient the same bits on every rank, so that no replicas are
    needed, and one micro-batch of a rank is enough. A stride of ``ep`` gives each expert group the
    micro-batches of another group, and each rank the rows that its place in that group had. In a
    single expert group experts' gradients are left out: a rank's experts have rows of all ranks.
    """

    stride: int
    topology: Topology
    """One in which the ranks that are compared are replicas."""
    experts: bool

    @classmethod
    def of(cls, t: Topology, *, exact: bool) -> _Rotation | None:
        if not exact or t.dp_shard == 1 or t.pp * t.cp * t.tp > 1:
            return None
        dp = t.dp_replicate * t.dp_shard
        stride = t.ep if dp > t.ep else 1
        alike = Topology(dp_replicate=dp // stride, dp_shard=stride)
        return cls(stride, alike, experts=dp > t.ep)


class _Tally:
    """The digests of this rank's gradients in one pass; under a rotation those of the first
    micro-batch, before any sum over ranks."""

    def __init__(self, job: Job, rotation: _Rotation | None) -> None:
        self.job, self.rotation = job, rotation
        self.summed_by_fsdp = job.topology.dp_replicate > 1 and job.compressed is None
        self._within: list[Tensor] = []
        self._over: list[Tensor] = []

    @contextmanager
    def seeing(self, *, sum_replicas: bool) -> Iterator[None]:
        """Around the pass."""
        with ExitStack() as stack:
            for stage in self.job.parallel_model.stages.values():
                stack.enter_context(
                    gradients_seen(
                        stage,
                        within=lambda one: self._within.append(digest([one])),
                        over=lambda one: self._over.append(digest([one])),
                        sum_replicas=sum_replicas,
                        first_unit=self.rotation is not None,
                        experts=self.rotation is None or self.rotation.experts,
                    )
                )
            yield

    def row(self) -> Tensor:
        """int64 [2]: before the sum over the ranks of a replica, and after that sum.

        Must be called before gradients are changed.
        """
        over = self._over
        if self.rotation is not None:
            over = []
        elif not self.summed_by_fsdp:
            found = (p.grad for p in self.job.model.parameters())
            over = [digest([local_shard(one)]) for one in found if one is not None]
        device = self.job.runtime.device
        return torch.stack([digest(self._within).to(device), digest(over).to(device)])


def _verified(progress: Progress, step: int) -> Progress:
    return replace(progress, verified_step=step)


def _in_words(kind: str, finding: Finding, machines: Sequence[str], step: int) -> str:
    names = ", ".join(sorted({machines[rank] for rank in finding.ranks}))
    who = f"{name_ranks(finding.ranks)} on {names}"
    if kind == "parameters":
        if finding.certain:
            return f"after step {step}, {who} had other parameters or moments than other replicas"
        return (
            f"after step {step}, replicas had different parameters or moments, and no majority "
            f"says which are wrong: {who}"
        )
    if finding.certain:
        return f"in step {step + 1}, {who} computed wrong gradients"
    text = f"in step {step + 1}, equal micro-batches gave different gradients on {who}"
    if len(finding.ranks) == len(machines) > 1:
        text += f", which are all {count_ranks(len(machines))}: kernels may not be deterministic"
    return text
