"""What the first step of a tuned run moves: silently frozen parameters end the run."""

from __future__ import annotations

from collections.abc import Callable

import torch
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
        report, tune = watch.report(), self._tune
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
        frozen = [entry.name for entry in report.unmoved if entry.reason == "frozen"]
        allowed = [name for name in frozen if tune.lora is not None or not tune.learns(name)]
        of_frozen = [name for name in report.experts if not self._experts_learn(name)]
        try:
            report.check([*allowed, *of_frozen])
        except ValueError as error:
            raise InputError(f"tune: {error}") from None

    def _experts_learn(self, name: str) -> bool:
        """Whether anything of a layer's experts was to learn."""
        learning = (n for n, p in self._whole_model.named_parameters() if p.requires_grad)
        return any(parameter.startswith(f"{name}.") for parameter in learning)
