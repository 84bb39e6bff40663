"""``convoy inspect``: what is in a checkpoint, whether it is whole, how it differs from another."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from convoy.commands import inspect_doctor, inspect_flight
from convoy.commands.parsing import JSON, STEP, Act, Argument, Command, Group, argument, flag
from convoy.commands.results import say_json
from pretrain.errors import EXIT_BAD_INPUT, InputError
from pretrain.observe import complain, human_bytes, progress_bar, say

if TYPE_CHECKING:
    import ckpt

EXIT_DIFFERS = 1
_GRACE_SECONDS = 86400.0
_LINE = 88  # characters of a value, beside its name
_ROWS = 40  # of a table

_CODES = """\
exit codes:
  0   done
  1   diff: the checkpoints differ; doctor: a known corruption
  2   no checkpoint, or one that is damaged
  75  stopped
"""
_EPILOG = f"""\
examples:
  convoy inspect runs/a/checkpoints
  convoy inspect runs/a/checkpoints/manifests/step-00000240.json
  convoy inspect verify runs/a/checkpoints --step 240
  convoy inspect diff runs/a/checkpoints runs/b/checkpoints
  convoy inspect history s3://bucket/run
  convoy inspect gc runs/a/checkpoints --dry-run
  convoy inspect doctor HF_DIR
  convoy inspect flight runs/a

convoy inspect CKPT is convoy inspect show CKPT. CKPT is a checkpoint folder, s3://BUCKET/PREFIX, or
a manifest in one, which names its step.

{_CODES}"""


def _read(location: str, step: int | None) -> tuple[ckpt.Location, ckpt.Manifest]:
    """The checkpoint folder and the manifest that an argument and its step flag name."""
    from ckpt.format import locate, read_manifest

    root, step = locate(location, step)
    return root, read_manifest(root, step)


def _show(args: argparse.Namespace) -> int:
    root, manifest = _read(args.checkpoint, args.step)
    if args.json:
        say_json(summary(root, manifest))
    else:
        show(root, manifest, whole=args.all)
    return 0


def _verify(args: argparse.Namespace) -> int:
    """The summary, and a line for each damaged object."""
    import ckpt

    root, manifest = _read(args.checkpoint, args.step)
    with progress_bar(manifest.total_bytes) as advance:
        damage = ckpt.find_damage(root, manifest, advance)
    if args.json:
        verified = None if damage else manifest.total_bytes
        say_json(summary(root, manifest) | {"verified_bytes": verified, "damage": damage})
    else:
        show(root, manifest, whole=args.all)
        if not damage:
            say(f"verified: all {manifest.total_bytes:,} bytes are as they were written")
    for line in damage:
        complain(line)
    return EXIT_BAD_INPUT if damage else 0


def summary(root: ckpt.Location, manifest: ckpt.Manifest) -> dict[str, object]:
    """What ``convoy inspect show --json`` prints."""
    import ckpt
    from ckpt.format import manifest_key
    from parallel.layout import Topology

    objects = {
        record.name: [manifest.objects[k] for k in record.object_keys() if k in manifest.objects]
        for record in manifest.arrays
    }
    return {
        "checkpoint": ckpt.open_store(root).where(manifest_key(manifest.step)),
        "step": manifest.step,
        "save_id": manifest.save_id,
        "parent": manifest.parent,
        "created": manifest.created,
        "topology": manifest.topology,
        "ranks": Topology(**manifest.topology).world,
        "spec_hash": manifest.spec_hash,
        "versions": manifest.versions,
        "state": manifest.state,
        "bytes": manifest.total_bytes,
        "objects": len(manifest.objects),
        "arrays": [
            {
                "name": record.name,
                "shape": list(record.shape),
                "dtype": record.logical_dtype,
                "object_shape": list(record.shard_shape),
                "chunk_shape": list(record.chunk_shape),
                "objects": len(objects[record.name]),
                "bytes": sum(status.bytes for status in objects[record.name]),
            }
            for record in manifest.arrays
        ],
        "packed": [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "dtype": packed.logical_dtype,
                "pack": tensor.pack,
            }
            for packed in manifest.packs.values()
            for tensor in [packed.tensor]
        ],
    }


def show(root: ckpt.Location, manifest: ckpt.Manifest, *, whole: bool = False) -> None:
    """Print a checkpoint for people; ``whole`` prints long values and long tables too."""
    import ckpt
    from ckpt.format import TREE
    from parallel.layout import Topology, count_ranks

    fields = summary(root, manifest)
    say(f"{fields['checkpoint']}")
    say(f"  step      {manifest.step}, saved {manifest.created}")
    topology = Topology(**manifest.topology)
    of_state_dict = TREE in manifest.state
    layout = count_ranks(topology.world) if of_state_dict else topology.describe()
    say(f"  layout    {layout}")
    if manifest.ranks is not None:
        say(f"  ranks     only the slices of {', '.join(map(str, manifest.ranks))} are here")
    if manifest.spec_hash:
        say(f"  spec      {manifest.spec_hash}")
    say(f"  versions  {', '.join(f'{k} {v}' for k, v in manifest.versions.items())}")
    if manifest.parent is not None:
        say(f"  made of   {manifest.parent}")
    for key, value in manifest.state.items():
        if key == TREE:
            value = f"saved by save_state_dict, {len(manifest.tensors)} tensors"
        say(f"  {key:<9} {value if whole else _short(value)}")
    say(f"  size      {human_bytes(manifest.total_bytes)} in {len(manifest.objects)} objects")
    steps = ", ".join(map(str, ckpt.committed_steps(root)))
    say(f"  steps     {steps if whole else _short(steps)}")
    rows = [("array", "shape", "dtype", "objects", "size")]
    for array in fields["arrays"]:  # type: ignore[attr-defined]
        shape = " x ".join(map(str, array["shape"])) or "scalar"
        size = human_bytes(array["bytes"])
        rows.append((array["name"], shape, array["dtype"], str(array["objects"]), size))
    for tensor in fields["packed"]:  # type: ignore[attr-defined]
        shape = " x ".join(map(str, tensor["shape"])) or "scalar"
        rows.append((tensor["name"], shape, tensor["dtype"], f"in {tensor['pack']}", ""))
    _print_table(rows, whole=whole)


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _LINE else f"{text[: _LINE - 4]} ..."


def _print_table(rows: Sequence[tuple[str, ...]], *, whole: bool = True) -> None:
    """Print rows under the first one; without ``whole`` only as many as a screen has room for."""
    left = 0 if whole else max(0, len(rows) - 1 - _ROWS)
    rows = rows[: len(rows) - left]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if left:
        say(f"... and {left} more; --all shows them")


def _diff(args: argparse.Namespace) -> int:
    """The arrays and the fields of the spec in which two checkpoints differ."""
    import ckpt
    from ckpt.format import manifest_key

    root, manifest = _read(args.checkpoint, args.step)
    other_root, other = _read(args.other, args.other_step)
    stored = sum(record.total_bytes for record in manifest.stored)
    with progress_bar(stored) as advance:
        arrays = ckpt.compare(root, manifest, other_root, other, advance)
    differing = [array for array in arrays if array.what != "alike"]
    fields = ckpt.lifecycle.spec_differences(manifest.spec, other.spec)
    code = EXIT_DIFFERS if differing or fields else 0
    if args.json:
        say_json({
            "here": ckpt.open_store(root).where(manifest_key(manifest.step)),
            "there": ckpt.open_store(other_root).where(manifest_key(other.step)),
            "alike": code == 0,
            "arrays": [asdict(array) for array in arrays],
            "spec": _changes(fields),
        })  # fmt: skip
        return code
    for field, before, now in fields:
        say(f"spec: {field} is {before} in CKPT, {now} in OTHER")
    if differing:
        rows = [("array", "differs in", "elements", "largest", "relative")]
        _print_table([*rows, *(_row(array) for array in differing)], whole=args.all)
    say(f"{len(arrays) - len(differing)} of {len(arrays)} arrays are identical, bit by bit")
    return code


def _row(array: ckpt.read.ArrayDifference) -> tuple[str, ...]:
    if array.what != "numbers":
        what = array.what + (f": {array.detail}" if array.detail else "")
        return (array.name, what, "", "", "")
    what = f"numbers, {array.not_finite} not finite" if array.not_finite else "numbers"
    share = f"{array.differing:,} of {array.elements:,}"
    figures = (array.max_abs, array.relative_l2)
    return (array.name, what, share, *("" if f is None else f"{f:.3g}" for f in figures))


def _changes(fields: Sequence[tuple[str, Any, Any]]) -> list[dict[str, Any]]:
    return [{"field": field, "before": before, "now": now} for field, before, now in fields]


def _history(args: argparse.Namespace) -> int:
    """The steps, oldest first, and what changed in each."""
    import ckpt
    from ckpt.format import locate

    root = locate(args.checkpoint)[0]
    links = ckpt.read_lineage(root)
    if not links:
        ckpt.read_manifest(root)  # raises the error that says why there are none
    if args.json:
        say_json([asdict(link) | {"spec_changes": _changes(link.spec_changes)} for link in links])
    else:
        for number, link in enumerate(links):
            for line in _told(link, first=number == 0):
                say(line)
    for link in links:
        if link.problem:
            complain(link.problem)
    return EXIT_BAD_INPUT if any(link.problem for link in links) else 0


def _told(link: ckpt.lifecycle.Link, first: bool) -> list[str]:
    from parallel.layout import Topology

    if link.problem or link.topology is None:
        return [f"step {link.step:>8}  its manifest is damaged"]
    lines = []
    topology = Topology(**link.topology).describe()
    if first or link.new_launch:
        origin = "" if link.parent is None else f", of {link.parent}"
        lines.append(f"launch {link.launch}{origin}")
    after = "" if link.seconds is None else f", {link.seconds:,.0f} s later"
    resized = f"  resized to {topology}" if link.resized else f"  {topology}" if first else ""
    size = human_bytes(link.bytes)
    lines.append(f"  step {link.step:>8}  saved {link.created}{after}  {size}{resized}")
    for field, before, now in link.spec_changes:
        lines.append(f"    spec: {field} was {before}, is {now}")
    return lines


def _gc(args: argparse.Namespace) -> int:
    """Remove garbage; with ``--dry-run`` list it."""
    import ckpt
    from ckpt.format import locate

    if args.grace_seconds < 0:
        raise InputError(f"--grace-seconds ({args.grace_seconds:g}) must be 0 or more")
    root = locate(args.checkpoint)[0]
    garbage = ckpt.find_garbage(root, args.grace_seconds, args.unlisted)
    removed = [] if args.dry_run else ckpt.remove_garbage(root, garbage)
    goes = [item for item in garbage if not item.stays]
    total = sum(item.bytes for item in goes)
    if args.json:
        listed = [asdict(item) | {"removed": item in removed} for item in garbage]
        say_json({"dry_run": args.dry_run, "bytes": total, "garbage": listed})
        return 0
    if garbage:
        rows = [("what", "name", "objects", "size", "")]
        for item in garbage:
            verdict = f"stays: {item.stays}" if item.stays else "removed" if removed else "would go"
            size = human_bytes(item.bytes)
            rows.append((item.kind, item.name, str(item.objects), size, verdict))
        _print_table(rows)
    what = "would be" if args.dry_run else "were"
    entries = "1 entry" if len(goes) == 1 else f"{len(goes)} entries"
    say(f"{human_bytes(total)} in {entries} {what} removed")
    return 0


_ALL = flag("--all", f"all rows and whole values; {_ROWS} rows by default")


def _command(
    act: Act, name: str, purpose: str, example: str, *arguments: Argument,
    stopped: str = "nothing was changed",
) -> Command:  # fmt: skip
    name = f"convoy inspect {name}"
    checkpoint = argument("checkpoint", "CKPT", "a checkpoint folder or URL, or a manifest in one")
    epilog = f"example:\n  {name} {example}\n\n{_CODES}"
    return Command(name, purpose, epilog, [checkpoint, JSON, *arguments], act, stopped)


main = Group(
    "convoy inspect",
    "Show, verify and compare checkpoints; remove garbage.",
    _EPILOG,
    [
        _command(
            _show, "show", "Show what is in a checkpoint: step, layout, size and arrays.",
            "runs/a/checkpoints", _ALL, STEP,
        ),
        _command(
            _verify, "verify", "Show a checkpoint, and verify every byte.", "runs/a/checkpoints",
            _ALL, STEP,
        ),
        _command(
            _diff, "diff",
            "Compare two checkpoints, of any layouts. Ends with 1 where they differ.",
            "runs/a/checkpoints runs/b/checkpoints", _ALL,
            argument("other", "OTHER", "the other checkpoint, as CKPT"),
            STEP,
            argument("--other-step", "N", "the step of OTHER; the newest by default", type=int),
        ),
        _command(
            _history, "history",
            "Show the steps of a checkpoint folder, oldest first, and what changed in each.",
            "runs/a/checkpoints",
        ),
        _command(
            _gc, "gc",
            "Remove interrupted saves, temporary files, and marks of deleted checkpoints.",
            "runs/a/checkpoints --dry-run",
            flag("--dry-run", "list what would be removed"),
            argument(
                "--grace-seconds", "N", "keep what is younger, which may be a save in progress; a "
                "day by default", type=float, default=_GRACE_SECONDS,
            ),
            flag("--unlisted", "also remove whole saves without a manifest here, such as those "
                 "rolled back to away/"),
            stopped="the same command goes on",
        ),
        inspect_doctor.main,
        inspect_flight.main,
    ],
    default="show",
)  # fmt: skip
