"""Faults on purpose, at the places of a step where they happen.

A fault happens once in a run. A file in ``RUN_DIR/injected`` says so before the fault happens; a
run that is started again does not meet the fault again.
"""

from __future__ import annotations

import os
import signal
import time

from torch import Tensor, nn

from pretrain.observe import Events, FaultInjected
from pretrain.parts.faults import process, tensors
from pretrain.parts.faults.config import FaultConfig
from pretrain.parts.faults.happened import INJECTED
from pretrain.runtime import Runtime
from pretrain.spec import JobSpec

_STEPS, _SLOWDOWN, _SCALE, _BIT = 10, 2.0, 1e4, 30


class Faults:
    """The places in a step where a fault can happen. In this class nothing happens."""

    def before_step(self, step: int) -> None:
        """Before a try of ``step``, which counts from 1; every rank calls."""

    def batches(self, batches: list[Tensor]) -> list[Tensor]:
        """The micro-batches that this rank takes, given those that it should take."""
        return batches

    def gradients(self, model: nn.Module) -> None:
        """After the gradients are summed over ranks, and before the step barrier."""

    def close(self) -> None:
        """End what lasts longer than a step."""


class InjectedFaults(Faults):
    """The faults of a spec; every rank must construct.

    Args:
        spec: the run.
        runtime: this rank.
        events: where each fault is published before it happens.
        writer_process_id: the process that writes this rank's checkpoints.
    """

    def __init__(
        self, spec: JobSpec, runtime: Runtime, events: Events, writer_process_id: int
    ) -> None:
        self.spec, self.runtime, self.events = spec, runtime, events
        self.writer_process_id = writer_process_id
        self.folder = spec.run_path / INJECTED
        self.waiting = self._waiting()
        self.now: list[FaultConfig] = []
        """Of this rank, in the present try of a step."""
        self._pacer: process.Pacer | None = None
        self._ends: dict[str, int] = {}
        """The last step of what lasts, by kind."""
        for fault in self.waiting:
            if fault.rank >= runtime.world:
                events.note(
                    f"inject: {fault.name} does not happen: there are {runtime.world} ranks"
                )

    def _waiting(self) -> list[FaultConfig]:
        """The faults that have not happened yet, equal on all ranks."""
        names = {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()
        own = [(i, 0) for i, fault in enumerate(self.spec.inject) if fault.name in names]
        happened = {i for rank in self.runtime.gather_pairs(own) for i, _ in rank}
        return [fault for i, fault in enumerate(self.spec.inject) if i not in happened]

    def before_step(self, step: int) -> None:
        """Let the faults of the step happen that are no matter of tensors."""
        self._end_what_lasts(step)
        due = [f for f in self.waiting if f.step == step and f.rank < self.runtime.world]
        self.now = [fault for fault in due if fault.rank == self.runtime.rank]
        if not due:
            return
        self.waiting = [fault for fault in self.waiting if fault not in due]
        for fault in due:
            self._publish(fault)
        self.runtime.together(self._record)  # and rank 0 has logged the fault
        for fault in self.now:
            self._happen(fault)

    def batches(self, batches: list[Tensor]) -> list[Tensor]:
        """Random tokens, where it is their step."""
        for fault in self.now:
            if fault.kind == "garbage_tokens":
                batches = tensors.garbage(batches, self.spec.model.vocab_size, fault.step)
        return batches

    def gradients(self, model: nn.Module) -> None:
        """Wrong gradients, where it is their step."""
        for fault in self.now:
            if fault.kind == "nan_gradient":
                tensors.set_nan(model)
            elif fault.kind == "flip_gradient_bit":
                tensors.flip_bit(model, _BIT if fault.bit is None else fault.bit)
            elif fault.kind == "scale_gradient":
                tensors.scale(model, fault.factor or _SCALE)

    def close(self) -> None:
        """End slowness, and let the writer process write."""
        self._end_what_lasts(None)

    def _happen(self, fault: FaultConfig) -> None:
        last = fault.step + (fault.duration_steps or _STEPS) - 1
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                while True:
                    time.sleep(60.0)
            case "drop_network":
                process.shut_down_connections()
            case "slow":
                if self._pacer is not None:
                    self._pacer.end()
                self._pacer = process.Pacer(fault.factor or _SLOWDOWN)
                self._ends["slow"] = last
            case "disk_full":
                process.set_writable(self.writer_process_id, False)
                self._ends["disk_full"] = last

    def _end_what_lasts(self, step: int | None) -> None:
        """End what was to last until before ``step``, or all where None."""
        for kind in [kind for kind, last in self._ends.items() if step is None or step > last]:
            del self._ends[kind]
            if kind == "disk_full":
                process.set_writable(self.writer_process_id, True)
            elif self._pacer is not None:
                self._pacer.end()
                self._pacer = None

    def _record(self) -> None:
        """Durably note that this rank's faults have happened."""
        for fault in self.now:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path, flags in (
                (self.folder / fault.name, os.O_WRONLY | os.O_CREAT),
                (self.folder, os.O_RDONLY),
                (self.folder.parent, os.O_RDONLY),
            ):
                handle = os.open(path, flags, 0o644)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)

    def _publish(self, fault: FaultConfig) -> None:
        text = f"{fault.kind} on rank {fault.rank}"
        event = FaultInjected(step=fault.step - 1, kind=fault.kind, rank=fault.rank, text=text)
        self.events.publish(event)


def faults_of(spec: JobSpec, runtime: Runtime, events: Events, writer_process_id: int) -> Faults:
    """The faults of a spec; every rank must call."""
    if not spec.inject:
        return Faults()
    return InjectedFaults(spec, runtime, events, writer_process_id)
