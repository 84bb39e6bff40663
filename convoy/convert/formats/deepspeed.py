"""DeepSpeed: a universal checkpoint, what ``ds_to_universal`` makes of ``global_stepN``.

A folder ``zero`` has a folder for each parameter, with ``fp32.pt``, ``exp_avg.pt``,
``exp_avg_sq.pt`` and ``step.pt``; ``zero/optimizer_state.pt`` has the settings, and
``mp_rank_00_model_states.pt`` the counters and the buffers. Read from DeepSpeed 0.19.8:
checkpoint/{ds_to_universal,universal_checkpoint,autoep_universal}.py, runtime/base_optimizer.py,
runtime/engine.py. Parameters are those of Hugging Face models: with all experts in one parameter
(``fused``, transformers from 5), in three (``autoep``), or each expert's own (``list``).
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ckpt.errors import CheckpointError
from ckpt.interop import Numbers, TensorInFile, read_torch_file, write_torch_file
from ckpt.rewrite import (
    Checked,
    Converted,
    FolderTarget,
    Part,
    Receipt,
    Source,
    SourceArray,
    SourceInfo,
    Target,
    row_major_boxes,
)
from convoy.convert.formats.flat_optimizer import (
    Parameters,
    by_matrices,
    one_update,
    settings_of,
)
from convoy.convert.formats.links import Link, Linked
from convoy.convert.formats.names import EXPERT_LIST, FUSED_EXPERTS, GROUPED_EXPERTS, decoder
from convoy.convert.formats.opened import Declared, Opened, Raw, opened
from convoy.convert.formats.rules import Kind, Naming, lay_out
from convoy.convert.formats.state import Training, common
from parallel.layout import Box, Topology

_ZERO, _STATES, _SETTINGS = "zero", "mp_rank_00_model_states.pt", "zero/optimizer_state.pt"
_NAMING = Naming("{p}/fp32", "{p}/{moment}", "{p}/module")
_MOMENT = r"(.+)/(?:exp_avg|exp_avg_sq)"
_VERSION = "0.19.8"
"""Of the DeepSpeed whose layout is written; DeepSpeed refuses older layouts by this number."""
KINDS = {
    "fused": Kind((*decoder(), *FUSED_EXPERTS), _NAMING),
    "autoep": Kind(
        (*decoder("mlp.router.gate", "mlp.router.e_score_correction_bias"), *GROUPED_EXPERTS),
        _NAMING,
    ),
    "list": Kind((*decoder(), *EXPERT_LIST), _NAMING),
}
_EXPERTS = re.compile(r".*\.mlp\.experts\.w[123]")
_BUFFER = re.compile(r".*e_score_correction_bias")


class UniversalFile(NamedTuple):
    """One file of ``zero``."""

    parameter: str
    key: str
    """``fp32``, a moment, or ``step``."""
    value: Any
    """A :class:`ckpt.interop.TensorInFile`; of the key ``step`` it may be a number."""
    stamp: tuple[str, int, int]
    """Differs where the file does."""


def universal_files(folder: Path) -> Iterator[UniversalFile]:
    """The files of ``zero``, in order. Raises CheckpointError, naming the file, for one that cannot
    be read or has no tensor."""
    for path in sorted((folder / _ZERO).glob("*/*.pt")):
        value = read_torch_file(path)
        value = value.get("param") if isinstance(value, dict) else value
        if path.stem != "step" and not isinstance(value, TensorInFile):
            raise CheckpointError(f"{path} has no tensor under the key param")
        parameter, status = path.parent.name, path.stat()
        stamp = f"{parameter}/{path.stem}", status.st_size, status.st_mtime_ns
        yield UniversalFile(parameter, path.stem, value, stamp)


class _Source:
    """The tensors of ``zero``, and the buffers; each is a file, or a part of one."""

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, TensorInFile] = {}
        stamp = []
        self.steps: dict[str, int] = {}
        for file in universal_files(folder):
            stamp.append(file.stamp)
            if file.key == "step":
                number = file.value.item() if isinstance(file.value, TensorInFile) else file.value
                self.steps[file.parameter] = int(number)
            else:
                self.tensors[f"{file.parameter}/{file.key}"] = file.value
        self.states: Mapping[str, Any] = read_torch_file(folder / _STATES)
        for name, tensor in (self.states.get("module") or {}).items():
            if _BUFFER.fullmatch(name) and isinstance(tensor, TensorInFile):
                self.tensors[f"{name}/module"] = tensor
        self.arrays = {
            name: SourceArray(tensor.shape, tensor.logical_dtype)
            for name, tensor in self.tensors.items()
        }
        self.info = SourceInfo(f"deepspeed {stamp}")

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`ckpt.rewrite.Source`."""
        return self.tensors[name].read(box)


class DeepSpeed(Declared):
    """See :class:`convoy.convert.formats.opened.Format`."""

    name, kinds = "deepspeed", KINDS

    def is_one(self, path: Path) -> bool:
        """See Format."""
        return (path / _ZERO).is_dir() and (path / _STATES).is_file()

    def open(self, path: Path, num_heads: int | None, step: int | None = None) -> Opened:
        """See Format."""
        source = _Source(path)
        settings = read_torch_file(path / _SETTINGS) if (path / _SETTINGS).is_file() else {}

        def training(links: list[Link]) -> Training:
            states = source.states
            parameters = Parameters.of(links, _MOMENT)
            groups = settings.get("param_groups") or []
            scheduler = states.get("lr_scheduler") or {}
            position = scheduler.get("last_epoch")
            if "last_batch_iteration" in scheduler:
                position = scheduler["last_batch_iteration"] + 1
            return Training(
                int(states.get("global_steps") or 0),
                updates=one_update(source.steps, str(path)),
                samples=states.get("global_samples"),
                position=None if position is None else int(position),
                optimizer=common(groups),
                decay=by_matrices(
                    parameters, [g["weight_decay"] for g in groups if "weight_decay" in g]
                ),
            )

        behind = [
            key
            for key in ("data_sampler", "random_ltd", "loss_scaler")
            if source.states.get(key) is not None or settings.get(key) is not None
        ]
        return opened(self.name, KINDS, Raw(source, training, behind), str(path), num_heads)

    def target(self, source: Opened, kind: str, folder: Path, num_heads: int | None) -> Target:
        """See Format."""
        layout = lay_out(KINDS[kind], source.arrays, num_heads)
        theirs = Converted(
            Linked(source, layout.links, layout.arrays, "theirs", source.info),
            [name for name in layout.arrays if not name.endswith("/module")],
            "float32",
        )
        return UniversalTarget(
            theirs, folder, source.training, Parameters.of(layout.links, _MOMENT)
        )


class UniversalTarget(FolderTarget):
    """A :class:`ckpt.rewrite.Target`: a universal checkpoint; each file of ``zero`` is a part.

    ``latest_universal`` is beside the folder for DeepSpeed to find; it is the caller's to write.
    """

    def __init__(
        self, source: Source, folder: Path, training: Training, parameters: Parameters
    ) -> None:
        self.training, self.parameters = training, parameters
        super().__init__(source, folder, Topology(), f"universal {training}", {})
        if parameters.paths:
            settings_of(training, "deepspeed")  # says now what is missing
        self._of = {_file(name): name for name in source.arrays if not name.endswith("/module")}

    def parts(self) -> Sequence[Part]:
        """See :class:`ckpt.rewrite.Target`."""
        return [Part(file, self.source.arrays[name].nbytes) for file, name in self._of.items()]

    def fill(self, file: Checked, key: str, slab_bytes: int) -> dict[str, Any]:
        """See :class:`ckpt.rewrite.FolderTarget`."""
        name = self._of[key]
        array = self.source.arrays[name]
        value = {"cat_dim": 0, "param": Numbers(array.shape, array.logical_dtype)}
        if _EXPERTS.fullmatch(name.rpartition("/")[0]):
            value |= {"is_expert_param": True, "ep_num_experts": array.shape[0]}

        def numbers() -> Iterator[Any]:
            for box in row_major_boxes(array.shape, array.dtype.itemsize, slab_bytes):
                yield np.ascontiguousarray(self.source.read_box(name, box)).reshape(-1).view("u1")

        write_torch_file(file, value, numbers)
        return {}

    def finish(self, receipts: dict[str, Receipt]) -> None:
        """See :class:`ckpt.rewrite.FolderTarget`."""
        import torch  # here: reading needs no torch

        training, updates = self.training, self.training.updates
        for name in self.parameters.paths:
            step = torch.tensor(float(training.step if updates is None else updates))
            self.put(f"{_ZERO}/{name}/step.pt", saved(step))
        self.put(_SETTINGS, saved(self._settings()))
        buffers = {}
        for name, array in self.source.arrays.items():
            if name.endswith("/module"):
                box = tuple((0, size) for size in array.shape)
                values = torch.from_numpy(np.array(self.source.read_box(name, box)))
                buffers[name.removesuffix("/module")] = values.view(
                    getattr(torch, array.logical_dtype)
                )
        position = training.step if training.position is None else training.position
        states: dict[str, Any] = {
            "module": buffers,
            "buffer_names": sorted(buffers),
            "param_shapes": [{p: torch.Size(shape) for p, shape in _shapes(self.source).items()}],
            "optimizer": None,
            "lr_scheduler": {"last_batch_iteration": position - 1, "last_epoch": position},
            "skipped_steps": 0,
            "global_steps": training.step,
            "dp_world_size": 1,
            "mp_world_size": 1,
            "ds_version": _VERSION,
            "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
        }
        if training.samples is not None:
            states["global_samples"] = training.samples
        self.put(_STATES, saved(states))

    def _settings(self) -> dict[str, Any]:
        state: dict[str, Any] = {"ds_version": _VERSION, "zero_stage": 1, "param_groups": []}
        if not self.parameters.paths:
            return state
        settings = settings_of(self.training, "deepspeed")
        lr, betas, eps = settings["lr"], settings["betas"], settings["eps"]
        for decay in sorted(set(self.training.decay.values()), reverse=True):
            group = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay, "params": []}
            if "initial_lr" in self.training.optimizer:
                group["initial_lr"] = self.training.optimizer["initial_lr"]
            state["param_groups"].append(group)
        return state


def _file(name: str) -> str:
    parameter, _, key = name.rpartition("/")
    return f"{_ZERO}/{parameter}/{key}.pt"


def _shapes(source: Source) -> dict[str, tuple[int, ...]]:
    named: Iterable[tuple[str, SourceArray]] = source.arrays.items()
    return {n.removesuffix("/fp32"): a.shape for n, a in named if n.endswith("/fp32")}


def saved(value: Any) -> bytes:
    """What torch.save writes of a small value."""
    import torch

    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()
