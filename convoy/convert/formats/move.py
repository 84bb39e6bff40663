"""Moving a checkpoint to another project's format, with what it knows of its training."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt.format import TREE
from ckpt.rewrite import Progress, Selected, rewrite
from convoy.convert.formats.certificate import (
    certificate_of,
    check_equal,
    hashes,
    read_certificate,
    write_certificate,
)
from convoy.convert.formats.opened import Format, Opened
from convoy.convert.formats.own import with_spec
from convoy.convert.formats.registry import FORMATS, open_foreign
from convoy.convert.formats.rules import split_slot
from pretrain.errors import InputError
from pretrain.spec import resolve_spec
from pretrain.state import EXPERT_BIAS, MODEL

LEAVE = ("moments", "expert_bias")
"""What of a checkpoint may be left behind on purpose."""
MEMORY = 256 << 20


@dataclass(frozen=True)
class Move:
    """What was moved."""

    source: Opened
    target: Opened
    certificate: Path
    behind: list[str] = field(default_factory=list)
    """What no format but the source's own can hold, and what was left on purpose."""


def move(
    source: Path,
    folder: Path,
    to: str,
    *,
    num_heads: int | None = None,
    step: int | None = None,
    spec: Path | None = None,
    samples: int | None = None,
    leave: Sequence[str] = (),
    memory: int = MEMORY,
    workers: int = 1,
    progress: Progress = lambda _: None,
) -> Move:
    """Make ``folder`` a checkpoint of another format, and verify it against ``source``.

    Every number of ``folder`` is read again and compared by hashes, which the certificate in
    ``folder`` keeps. After a kill or a full disk the same call goes on.

    Args:
        source: a checkpoint's folder; its contents tell its format.
        folder: does not exist.
        to: a format of :data:`FORMATS`, or ``FORMAT:KIND``; of kinds the first that fits.
        num_heads, step: as in :func:`open_foreign`.
        spec: a spec (TOML), for what ``source`` does not say of its model and its optimizer.
        samples: the sequences that the run has trained on, where ``source`` does not say.
        leave: of :data:`LEAVE`.
        memory: bytes of buffers for all workers together.
        workers: processes.
        progress: called with the bytes that were written since the last call.

    Raises InputError, one line, for what the target cannot hold, and CheckpointError for a source
    that is damaged or a target that cannot be written.
    """
    form, kind = _chosen(to)
    opened = open_foreign(source, num_heads=num_heads, step=step)
    if TREE in opened.info.state:
        raise InputError(f"{source} was saved by save_state_dict: it has no model that is known")
    opened = _completed(opened, spec, samples)
    if num_heads is None:
        num_heads = (opened.info.spec.get("model") or {}).get("num_heads")
    kept, behind = _left(opened, leave)
    kind = kind or _kind_for(form, kept, num_heads)
    _check_holds(form, kind, kept, num_heads)
    rewrite(form.target(kept, kind, folder, num_heads), memory, workers, progress)
    written = open_foreign(folder, num_heads=num_heads)
    before, after = hashes(kept), hashes(written)
    check_equal(before, after, folder)
    path = write_certificate(
        folder, certificate_of(kept, before), certificate_of(written, after), kept
    )
    return Move(opened, written, path, [*opened.behind, *behind])


def _chosen(to: str) -> tuple[Format, str | None]:
    name, colon, kind = to.partition(":")
    if name not in FORMATS:
        raise InputError(f"--to ({to}) must be one of {', '.join(FORMATS)}")
    form = FORMATS[name]
    if colon and kind not in form.kinds:
        raise InputError(
            f"--to ({to}) must be one of {', '.join(f'{name}:{known}' for known in form.kinds)}"
        )
    return form, kind or None


def _completed(opened: Opened, spec: Path | None, samples: int | None) -> Opened:
    """With what a spec and the flags say where the checkpoint does not."""
    training, info = opened.training, opened.info
    if samples is not None:
        if training.samples not in (None, samples):
            raise InputError(
                f"--samples ({samples}) must be left out: SRC says that they are {training.samples}"
            )
        training = replace(training, samples=samples)
    if spec is not None:
        try:
            sections: dict[str, Any] = tomllib.loads(spec.read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"--spec ({spec}) cannot be read: {error}") from None
        resolved = resolve_spec(sections, str(spec))
        if not info.spec.get("model"):
            info = replace(info, spec=resolved.as_dict(), spec_hash=resolved.hash)
        training = with_spec(training, resolved, opened.arrays)
    return opened.changed(training=training, info=info)


def _left(opened: Opened, leave: Sequence[str]) -> tuple[Opened, list[str]]:
    """Without what is left behind on purpose, and what of it there was."""

    def stays(name: str) -> bool:
        moments = "moments" in leave and split_slot(name)[0] != MODEL
        return moments or ("expert_bias" in leave and name == EXPERT_BIAS)

    left = [name for name in opened.arrays if stays(name)]
    if not left:
        return opened, []
    names = {name: name for name in opened.arrays if name not in set(left)}
    training = opened.training
    if "moments" in leave:
        training = replace(training, updates=None)
    behind = [what for what in LEAVE if what in leave]
    return opened.changed(Selected(opened.source, names), training), behind


def _kind_for(form: Format, source: Opened, num_heads: int | None) -> str:
    """The first kind that has a place for every array of the model, and the most moments."""
    best: tuple[int, str] | None = None
    errors: list[InputError] = []
    for kind in form.kinds:
        try:
            lost = form.without_place(source, kind, num_heads)
        except InputError as error:
            errors.append(error)
            continue
        if best is None or len(lost) < best[0]:
            best = len(lost), kind
    if best is None:
        raise errors[0]
    return best[1]


def _check_holds(form: Format, kind: str, source: Opened, num_heads: int | None) -> None:
    """Raises InputError, naming it, for what a kind has no place for."""
    lost = form.without_place(source, kind, num_heads)
    if not lost:
        return
    where = form.name if len(form.kinds) == 1 else f"{form.name}:{kind}"
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    slots = {split_slot(name)[0] for name in lost}
    if lost == [EXPERT_BIAS]:
        how = "the router's bias stays behind with --leave expert_bias"
    elif MODEL not in slots:
        how = "the optimizer's state stays behind with --leave moments"
    else:
        how = "it cannot hold this model"
    raise InputError(f"{where} has no place for {lost[0]}{more}: {how}")


def hashes_of(path: Path, num_heads: int | None = None) -> dict[str, str]:
    """The hashes of a checkpoint of any format, or those that a certificate has of one."""
    if path.is_file() and path.suffix == ".json" and path.parent.name != "manifests":
        known = read_certificate(path)["after"]["sha256"]
        return {str(label): str(value) for label, value in known.items()}
    return hashes(open_foreign(path, num_heads=num_heads))
