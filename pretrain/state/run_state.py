"""The ``state`` of a manifest, typed: what a run's checkpoint holds besides arrays.

In the manifest the fields of :class:`Progress` lie side by side with the others: retention, which
knows no run, finds ``validation`` at the top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from ckpt import CheckpointError, Manifest
from pretrain.data import Blend, Phase
from pretrain.state.progress import Progress


@dataclass(frozen=True)
class RunState:
    """What a checkpoint of a training run says of the run."""

    progress: Progress
    corpus: str
    """Fingerprint of the tokenized corpus."""
    parts: dict[str, dict[str, Any]]
    """The state of each part by its name, see :class:`pretrain.parts.step.Part`."""
    tokenizer: str = ""
    """Fingerprint of the tokenizer, see :func:`corpus.tokenizer.tokenizer_fingerprint`."""
    machines: list[str] = field(default_factory=list)
    """The machine of each rank, whose speeds parts have measured."""
    threads: int | None = None
    """Threads of a process, where the numbers of a run depend on nothing but units and threads;
    otherwise None."""
    sources: dict[str, str] = field(default_factory=dict)
    """The fingerprint of each source by its name."""
    blend: list[dict[str, Any]] | None = None
    """What the run has drawn its samples from, see ``Blend.as_json``; None where the loader has
    none."""
    kind: Literal["training"] = "training"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON, for a manifest."""
        return {
            "kind": self.kind,
            **self.progress.as_dict(),
            "corpus": self.corpus,
            "sources": self.sources,
            "blend": self.blend,
            "tokenizer": self.tokenizer,
            "parts": self.parts,
            "machines": self.machines,
            "threads": self.threads,
        }


def read_run_state(manifest: Manifest) -> RunState | None:
    """The run state of a manifest; None where the checkpoint holds weights only.

    Raises CheckpointError where the state is of neither form, or of another step than the manifest.
    """
    if manifest.state.get("kind") != "training":
        return None
    return parse_run_state(manifest.state, manifest.step)


def parse_run_state(state: Mapping[str, Any], step: int) -> RunState:
    """The run state that :meth:`RunState.as_dict` gave after ``step`` steps.

    Raises CheckpointError where the state is of another form, or of another step.
    """
    names = {each.name for each in fields(Progress)}
    try:
        progress = _PROGRESS.validate_python({k: v for k, v in state.items() if k in names})
        corpus = state["corpus"]
        # Checkpoints of before have the states of these two parts side by side with the others.
        before = {name: state[name] for name in ("capacity", "stragglers") if state.get(name)}
        parts = state.get("parts", before)
        if not isinstance(parts, Mapping) or not all(
            isinstance(p, Mapping) for p in parts.values()
        ):
            raise TypeError("parts must be an object of objects")
        threads = state.get("threads")
        sources, blend = state.get("sources", {}), state.get("blend")
        machines = state.get("machines", [])
        if not isinstance(sources, Mapping) or not isinstance(blend, list | None):
            raise TypeError("sources must be an object, and blend a list or null")
        if not isinstance(machines, list) or not all(isinstance(one, str) for one in machines):
            raise TypeError("machines must be a list of texts")
        if not isinstance(corpus, str) or not isinstance(threads, int | None):
            raise TypeError("corpus must be text, and threads a number or null")
    except (ValidationError, KeyError, TypeError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise CheckpointError(
            f"the state of the checkpoint of step {step} cannot be read: {first}"
        ) from None
    if progress.step != step:
        raise CheckpointError(
            f"state.step ({progress.step}) must be the step of the manifest ({step})"
        )
    return RunState(
        progress,
        corpus,
        {name: dict(part) for name, part in parts.items()},
        machines=machines,
        threads=threads,
        sources=dict(sources),
        blend=blend,
    )


def tokenizer_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """What the state of a checkpoint says of the tokenizer, for the state of weights made of it."""
    return {"tokenizer": state["tokenizer"]} if "tokenizer" in state else {}


def run_id_of(manifest: Manifest) -> str:
    """The run that a checkpoint is of, or ``""`` where the manifest does not say."""
    found = manifest.state.get("run_id")
    return found if isinstance(found, str) else ""


_PROGRESS = TypeAdapter(Progress)


def blend_of(state: RunState) -> Blend:
    """What a run has drawn its samples from."""
    if state.blend is None:
        return Blend((Phase.of(0, {state.corpus: 1}),))
    return Blend.from_json(state.blend)
