"""NeMo Automodel: ``epoch_E_step_S`` with ``model``, ``optim`` and ``step_scheduler.pt``.

``model`` has safetensors under the names of Hugging Face, each expert by itself, whole or cut over
ranks; ``optim`` is a torch.distributed.checkpoint folder under the names of Automodel's own
modules, all experts in one parameter. Read from Automodel 0.7: components/checkpoint/
{checkpointing,stateful_wrappers}.py, components/moe/state_dict_mixin.py, components/training/
step_scheduler.py, components/optim/scheduler.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ckpt.interop import (
    DcpSource,
    DcpTarget,
    SafetensorsSource,
    SafetensorsTarget,
    ShardedSafetensorsSource,
    is_dcp,
    is_safetensors,
    read_torch_file,
)
from ckpt.rewrite import CombinedTarget, Selected, Source, Target
from convoy.convert.formats import flat_optimizer
from convoy.convert.formats.deepspeed import saved
from convoy.convert.formats.flat_optimizer import Parameters, value_of
from convoy.convert.formats.links import Link, Linked
from convoy.convert.formats.megatron import SCHEDULE
from convoy.convert.formats.names import AUTOMODEL_EXPERTS, EXPERT_LIST, decoder
from convoy.convert.formats.opened import Declared, Fixed, Opened, Raw, Together, opened
from convoy.convert.formats.rules import Kind, Naming, lay_out
from convoy.convert.formats.state import Training
from parallel.layout import Topology

_MODEL, _OPTIMIZER, _COUNTERS = "model", "optim", "step_scheduler.pt"
_NAMING = Naming(moment="optim.state.{p}.{moment}")
_MOMENT = r"optim\.state\.(.+)\.(?:exp_avg|exp_avg_sq)"
KINDS = {
    "hf": Kind(
        (
            *decoder(),
            *(rule._replace(of="weights") for rule in EXPERT_LIST),
            *(rule._replace(of="moments") for rule in AUTOMODEL_EXPERTS),
        ),
        _NAMING,
    ),
    "native": Kind((*decoder(), *AUTOMODEL_EXPERTS), _NAMING),
}
"""Weights under the names of Hugging Face, or of Automodel's own modules (``torch_save``)."""


class Automodel(Declared):
    """See :class:`convoy.convert.formats.opened.Format`."""

    name, kinds = "automodel", KINDS

    def is_one(self, path: Path) -> bool:
        """See Format."""
        return is_automodel(path)

    def open(self, path: Path, num_heads: int | None, step: int | None = None) -> Opened:
        """See Format."""
        sources: list[tuple[str, Source]] = [("", weights_of(path / _MODEL))]
        optimizer = DcpSource(path / _OPTIMIZER) if is_dcp(path / _OPTIMIZER) else None
        if optimizer is not None:
            names = [name for name in optimizer.arrays if re.fullmatch(_MOMENT, name)]
            sources.append(("", Selected(optimizer, {name: name for name in names})))
        counters = read_torch_file(path / _COUNTERS) if (path / _COUNTERS).is_file() else {}

        def training(links: list[Link]) -> Training:
            return _training(optimizer, counters, links, str(path))

        behind = [name for name in ("dataloader", "rng") if (path / name).exists()]
        raw = Raw(Together(sources, sources[0][1].info), training, behind)
        return opened(self.name, KINDS, raw, str(path), num_heads)

    def target(self, source: Opened, kind: str, folder: Path, num_heads: int | None) -> Target:
        """See Format."""
        layout = lay_out(KINDS[kind], source.arrays, num_heads)
        theirs = Linked(source, layout.links, layout.arrays, "theirs", source.info)
        moments = [name for name in layout.arrays if re.fullmatch(_MOMENT, name)]
        weights = Selected(theirs, {n: n for n in layout.arrays if n not in set(moments)})
        training = source.training
        parameters = Parameters.of(layout.links, _MOMENT)
        steps, objects = flat_optimizer.write("optim", parameters, training, self.name)
        objects |= {f"sched.{word}": value for word, value in _schedule(training).items()}
        parts: list[tuple[str, Source]] = [
            ("", Selected(theirs, {name: name for name in moments})),
            ("", Fixed(steps, f"steps {training.updates}")),
        ]
        model: SafetensorsTarget | DcpTarget
        if kind == "hf":
            model = SafetensorsTarget(weights, folder / _MODEL, Topology(), beside={})
        else:
            model = DcpTarget(weights, folder / _MODEL, Topology(), beside={})
        together = Together(parts, theirs.info)
        optimizer = DcpTarget(together, folder / _OPTIMIZER, Topology(), objects=objects, beside={})
        beside = {_COUNTERS: saved({"step": training.step, "epoch": 0})}
        return CombinedTarget(theirs, folder, {_MODEL: model, _OPTIMIZER: optimizer}, beside)


def is_automodel(path: Path) -> bool:
    """Whether a folder looks like a checkpoint of NeMo Automodel."""
    model = path / _MODEL
    return model.is_dir() and (is_safetensors(model) or is_dcp(model))


def weights_of(model: Path) -> Source:
    """The weights in the folder ``model``: DCP, safetensors, or safetensors that are cut."""
    if is_dcp(model):
        return DcpSource(model)
    if is_safetensors(model / "consolidated"):
        return SafetensorsSource(model / "consolidated")
    return ShardedSafetensorsSource(model)


def _training(
    optimizer: DcpSource | None, counters: Any, links: list[Link], where: str
) -> Training:
    step = int(counters.get("step") or 0) if isinstance(counters, dict) else 0
    if optimizer is None:
        return Training(step)
    parameters = Parameters.of(links, _MOMENT)
    fields = flat_optimizer.read(optimizer, "optim", parameters, where)
    shape = {ours: value_of(optimizer, f"sched.{theirs}") for ours, theirs in SCHEDULE.items()}
    position = value_of(optimizer, "sched.num_steps")
    if not step and fields["updates"]:
        step = fields["updates"]
    return Training(
        step,
        position=None if position is None else int(position),
        schedule={ours: value for ours, value in shape.items() if value is not None},
        **fields,
    )


def _schedule(training: Training) -> dict[str, Any]:
    """The state of OptimizerParamScheduler, which counts steps here."""
    decays = sorted(set(training.decay.values()), reverse=True) or [0.0]
    return {
        **{theirs: training.schedule.get(ours) for ours, theirs in SCHEDULE.items()},
        "num_steps": training.step if training.position is None else training.position,
        "start_wd": decays[0],
        "end_wd": decays[0],
        "wd_incr_style": "constant",
        "wd_incr_steps": 0,
    }
