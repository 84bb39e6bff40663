"""Checkpoints that are several files or folders, as one source of arrays under their own names.

What a converter must refuse, a folder with holes, is opened here all the same. Layouts are those of
DeepSpeed 0.19 (checkpoint/ds_to_universal.py), NeMo Automodel 0.7 (components/checkpoint/) and
megatron-core 0.19 (dist_checkpointing/serialization.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.interop import DcpSource, TensorInFile, is_dcp, read_torch_file
from ckpt.rewrite import Source, SourceArray, SourceInfo
from convoy.convert.formats import common_state, universal_files, weights_of
from parallel.layout import Box

_ZERO, _STATES = "zero", "mp_rank_00_model_states.pt"
_MODEL, _OPTIMIZER, _COUNTERS = "model", "optim", "step_scheduler.pt"


def is_deepspeed(path: Path) -> bool:
    """Whether a folder looks like a universal checkpoint of DeepSpeed."""
    return (path / _ZERO).is_dir()


class DeepSpeedFiles:
    """A :class:`ckpt.rewrite.Source`: ``zero/PARAMETER/KEY`` of each file, ``module/NAME`` of
    buffers. Raises CheckpointError, naming the file, for one that cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._tensors: dict[str, TensorInFile] = {}
        stamps = []
        for file in universal_files(folder):
            if isinstance(file.value, TensorInFile):
                self._tensors[f"{_ZERO}/{file.parameter}/{file.key}"] = file.value
            stamps.append(file.stamp)
        states = read_torch_file(folder / _STATES) if (folder / _STATES).is_file() else {}
        self.states: Mapping[str, Any] = states if isinstance(states, dict) else {}
        for name, tensor in (self.states.get("module") or {}).items():
            if isinstance(tensor, TensorInFile) and f"{_ZERO}/{name}/fp32" not in self._tensors:
                self._tensors[f"module/{name}"] = tensor
        self.arrays = {
            name: SourceArray(tensor.shape, tensor.logical_dtype)
            for name, tensor in self._tensors.items()
        }
        self.info = SourceInfo(f"deepspeed {stamps}")

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`ckpt.rewrite.Source`."""
        return self._tensors[name].read(box)

    def steps(self) -> tuple[int | None, int | None]:
        """The steps of the run, and those in which the optimizer made an update."""
        steps, skipped = self.states.get("global_steps"), self.states.get("skipped_steps") or 0
        return (None, None) if steps is None else (int(steps), int(steps) - int(skipped))


class AutomodelFolders:
    """A :class:`ckpt.rewrite.Source`: the weights of ``model`` and the moments of ``optim``."""

    def __init__(self, folder: Path) -> None:
        sources: list[Source] = [weights_of(folder / _MODEL)]
        if is_dcp(folder / _OPTIMIZER):
            sources.append(DcpSource(folder / _OPTIMIZER))
        self._home = {name: source for source in sources for name in source.arrays}
        self.arrays = {name: source.arrays[name] for name, source in self._home.items()}
        self.info = SourceInfo(" ".join(source.info.identity for source in sources))
        path = folder / _COUNTERS
        counters = read_torch_file(path) if path.is_file() else {}
        step = counters.get("step") if isinstance(counters, dict) else None
        self.step = int(step) if isinstance(step, int | float) else None

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`ckpt.rewrite.Source`."""
        return self._home[name].read_box(name, box)


def megatron_steps(source: DcpSource, folder: Path) -> tuple[int | None, int | None]:
    """The iteration of a Megatron checkpoint, and the updates that its optimizer has counted."""
    state = common_state(source, folder)
    iteration = state.get("iteration")
    counts = _updates(state.get("optimizer"))
    return (
        int(iteration) if isinstance(iteration, int | float) else None,
        max(counts, default=None),
    )


def _updates(optimizer: Any) -> Sequence[int]:
    """Every count of updates in an optimizer's state, chained or not."""
    if not isinstance(optimizer, dict):
        return ()
    counts = []
    for key, value in optimizer.items():
        if key in ("step", "common_step"):
            number = value.item() if isinstance(value, TensorInFile) else value
            counts += [int(number)] if isinstance(number, int | float) else []
        elif key == "param_groups" and isinstance(value, list):
            counts += [count for group in value for count in _updates(group)]
        elif isinstance(value, dict):
            counts += _updates(value)
    return counts
