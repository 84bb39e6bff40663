"""Convoy's own checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ckpt
from ckpt import CheckpointError
from ckpt.format import FLOATS, locate
from ckpt.rewrite import CheckpointSource, CheckpointTarget, Converted, Described, Selected, Target
from convoy.convert.formats.huggingface import model_of
from convoy.convert.formats.opened import Opened
from convoy.convert.formats.rules import split_slot
from convoy.convert.formats.state import Training
from convoy.convert.grown import weight_arrays
from parallel.layout import Topology
from pretrain.model import is_bias
from pretrain.spec import JobSpec, resolve_spec, stored_spec
from pretrain.state import MODEL

_TRAINING, _MOVED = "training", "moved_from"


class Own:
    """See :class:`convoy.convert.formats.opened.Format`."""

    name = "convoy"
    kinds: Mapping[str, Any] = {"arrays": None}

    def is_one(self, path: Path) -> bool:
        """See Format."""
        try:
            ckpt.read_manifest(*locate(path, None))
        except (CheckpointError, OSError):
            return False
        return True

    def open(self, path: Path, num_heads: int | None, step: int | None = None) -> Opened:
        """See Format."""
        root, step = locate(path, step)
        stored = CheckpointSource(root, ckpt.read_manifest(root, step))
        names = [name for name in stored.arrays if split_slot(name)[0]]
        behind = {name.partition("/")[0] for name in stored.arrays} - {"model", "optimizer"}
        source = Selected(stored, {name: name for name in names})
        info = replace(stored.info, identity=source.info.identity)
        return Opened(source, self.name, "arrays", _training(stored), behind, info)

    def without_place(self, source: Opened, kind: str, num_heads: int | None) -> list[str]:
        """See Format."""
        return []

    def target(self, source: Opened, kind: str, folder: Path, num_heads: int | None) -> Target:
        """See Format: in float32, and for one rank."""
        full = [name for name, a in source.arrays.items() if a.logical_dtype in FLOATS]
        made = Converted(source, full, "float32")
        arrays = dict(made.arrays)
        if source.info.spec.get("model"):
            known = weight_arrays(*model_of(source))
            for name, array in arrays.items():
                weight = known.get(MODEL + split_slot(name)[1])
                if weight is not None and weight.shape == array.shape:
                    arrays[name] = replace(array, splits=weight.splits)
        state = dict(source.info.state)
        if source.form != self.name and state.get("kind") != "training":
            state |= {_MOVED: source.form, _TRAINING: source.training.as_json()}
        info = replace(
            source.info,
            identity=f"{made.info.identity} {source.training}",
            step=source.training.step,
            topology=Topology(),
            state=state,
            save_id=None,
        )
        return CheckpointTarget(Described(made, info, arrays), folder, Topology())


def _training(stored: CheckpointSource) -> Training:
    info = stored.info
    if _TRAINING in info.state:
        return Training.from_json(info.state[_TRAINING])
    if info.state.get("kind") != "training":
        return Training(info.step)
    made = Training(
        info.step,
        updates=info.step
        if any(split_slot(n)[0] not in ("", MODEL) for n in stored.arrays)
        else None,
        tokens=info.state.get("tokens_seen"),
        samples=info.state.get("consumed_samples"),
        position=info.step,
    )
    if not info.spec.get("model"):
        return made
    return with_spec(
        made, resolve_spec(stored_spec(info.spec), "the checkpoint's spec"), stored.arrays
    )


def with_spec(training: Training, spec: JobSpec, arrays: Mapping[str, Any]) -> Training:
    """A state of training with what a spec says of the optimizer and the schedule, where the
    state itself does not say it."""
    own, schedule, steps = spec.optimizer, spec.schedule, spec.train.steps
    lr = own.lr * schedule.ratio(max(training.step - 1, 0), steps)
    optimizer = {"lr": lr, "initial_lr": own.lr, "betas": [own.beta1, own.beta2], "eps": own.eps}
    names = {split_slot(name)[1]: array for name, array in arrays.items()}
    decay = {
        path: 0.0
        if path.endswith(("norm/weight", "expert_bias", "sinks")) or is_bias(path.replace("/", "."))
        else own.weight_decay
        for path in names
    }
    shape: dict[str, Any] = {
        "max_lr": own.lr,
        "min_lr": own.lr * schedule.min_lr_ratio,
        "warmup_steps": schedule.warmup_steps,
        "decay_steps": steps,
        "style": schedule.kind,
    }
    return replace(
        training,
        optimizer={**optimizer, **training.optimizer},
        decay={**decay, **training.decay},
        schedule={**shape, **training.schedule},
    )
