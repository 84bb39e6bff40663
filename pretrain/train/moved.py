"""What the first step of a tuned run moves: silently frozen parameters end the run."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from moe import ParameterWatch, watch_parameters
from pretrain.errors import InputError
from pretrain.observe import Moved
from pretrain.parallelize import ParallelModel
from pretrain.tune import TuneConfig


class FirstStep:
    """Watches the first step that a start commits; nothing without ``[tune]``.

    Args:
        model: the run's model, with values. Every rank must call :meth:`see`.
        optimizer: of its parameters.
        tune: what learns.
        publish: gets the event.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        tune: TuneConfig | None,
        publish: Callable[[Moved], None],
    ) -> None:
        self._tune, self._publish = tune, publish
        self._whole_model: nn.Module = model.meta_model
        self._watch: ParameterWatch | None = None
        if tune is not None:
            self._watch = watch_parameters(model.local_model, optimizer)

    def see(self, step: int) -> None:
        """Publish what a step has moved, before its gradients are gone.

        Raises InputError on every rank where a parameter that should learn does not.
        """
        watch, self._watch = self._watch, None
        if watch is None or self._tune is None:
            return
        # Of all ranks: a stage of a pipeline has a part of the model.
        group = dist.group.WORLD if dist.is_initialized() else None
        report, tune = watch.report(group), self._tune
        counts = list(report.experts.values())
        self._publish(
            Moved(
                step=step,
                parameters=report.num_parameters,
                moved_parameters=report.num_parameters - len({e.name for e in report.unmoved}),
                experts=sum(total for _, total in counts),
                trained_experts=sum(trained for trained, _ in counts),
                report=str(report).splitlines(),
            )
        )
        # A small rate may round an update away, and some expert may have no token: no errors.
        learning = {name for name, p in self._whole_model.named_parameters() if p.requires_grad}
        wrong = [
            f"{entry.name} ({entry.reason})"
            for entry in report.unmoved
            if entry.is_silent and (entry.name in learning or tune.learns(entry.name))
        ]
        if wrong:
            raise InputError(
                f"tune: {len(wrong)} parameters that should learn do not: {', '.join(wrong[:6])}"
            )
