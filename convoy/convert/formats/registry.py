"""The formats, and which of them a folder has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from convoy.convert.formats.automodel import Automodel
from convoy.convert.formats.certificate import carried
from convoy.convert.formats.deepspeed import DeepSpeed
from convoy.convert.formats.huggingface import HuggingFace
from convoy.convert.formats.megatron import Megatron
from convoy.convert.formats.opened import Format, Opened
from convoy.convert.formats.own import Own
from convoy.convert.formats.state import Training
from convoy.convert.formats.torchtitan import Torchtitan
from pretrain.errors import InputError

_ALL: tuple[Format, ...] = (
    Torchtitan(), Megatron(), DeepSpeed(), Automodel(), HuggingFace(), Own(),
)  # fmt: skip
FORMATS: dict[str, Format] = {form.name: form for form in _ALL}


def open_foreign(
    path: Path | str, *, num_heads: int | None = None, step: int | None = None
) -> Opened:
    """A checkpoint of any format that is known, as Convoy's own arrays; the format is told by the
    folder's contents.

    Args:
        path: a folder: of Convoy, torchtitan, megatron-core, DeepSpeed (universal), NeMo Automodel
            or Hugging Face.
        num_heads: query heads (``num_attention_heads``), where a format has queries, keys and
            values in one matrix and no norm of queries tells the size of a head.
        step: of a folder of Convoy's checkpoints; the newest by default.

    Raises InputError or CheckpointError, one line, for a folder that is of no format, and for a
    model that Convoy cannot express.
    """
    folder = Path(path)
    for form in FORMATS.values():
        if form.is_one(folder):
            if step is not None and form.name != "convoy":
                raise InputError(f"--step ({step}) is for Convoy's checkpoints; {folder} has one "
                                 f"step alone")  # fmt: skip
            said = carried(folder)
            if num_heads is None:
                num_heads = (said.get("spec") or {}).get("model", {}).get("num_heads")
            opened = form.open(folder, num_heads, step)
            spec = opened.info.spec or said.get("spec") or {}
            state = opened.info.state or said.get("state") or {}
            training = opened.training
            if said:  # the updates are those of moments, which may have stayed behind
                before = Training.from_json(said["before"]["training"])
                training = training.filled(replace(before, updates=training.updates))
            info = replace(opened.info, spec=spec, state=state)
            return opened.changed(training=training, info=info)
    raise InputError(f"{folder} is a checkpoint of no format that is known: {', '.join(FORMATS)}")
