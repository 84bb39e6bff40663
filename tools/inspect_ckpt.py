"""Show what is in a checkpoint, whether it is whole, how it differs from another, where it is from.

    python tools/inspect_ckpt.py RUN_DIR/checkpoints [--step N] [--verify]
    python tools/inspect_ckpt.py s3://bucket/run --lineage
    python tools/inspect_ckpt.py ROOT --diff OTHER [--step N] [--other-step N]
    python tools/inspect_ckpt.py ROOT --gc [--dry-run] [--grace-seconds N] [--unlisted]

All with --json too. --gc removes what no manifest needs: saves that were interrupted, drafts,
marks; with --unlisted also objects whose manifest somebody may have moved away.

Exit codes: 0 done; 2 no checkpoint, or one that is damaged.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

# A script's own folder comes first on its path, and tools/pretrain.py has a package's name.
if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import ckpt
from ckpt.format import manifest_key
from parallel import Topology
from pretrain.errors import EXIT_BAD_INPUT
from pretrain.observe import Bar, complain, human_bytes, say
from pretrain.spec import upgraded

GRACE_SECONDS = 86400.0


def main(arguments: list[str] | None = None) -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # "| head" is no error
    args = _parser().parse_args(arguments)
    try:
        root = ckpt.as_location(args.root)
        if args.gc:
            return collect(root, args)
        if args.lineage:
            return lineage(root, args)
        manifest = ckpt.read_manifest(root, args.step)
        if args.diff is not None:
            return diff(root, manifest, args)
        return contents(root, manifest, args)
    except OSError as error:
        complain(f"{error.filename or args.root} cannot be read: {error.strerror}")
    except (ckpt.CheckpointError, ValueError) as error:
        complain(str(error))
    return EXIT_BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root", help="a folder with manifests/ in it, or s3://bucket/prefix")
    parser.add_argument("--step", type=int, help="the newest one where it is left out")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--verify", action="store_true", help="read every byte and compare")
    modes.add_argument("--diff", metavar="OTHER", help="compare with a checkpoint of this location")
    modes.add_argument("--lineage", action="store_true", help="runs, resizes and spec changes")
    modes.add_argument("--gc", action="store_true", help="remove what no manifest needs")
    parser.add_argument("--other-step", type=int, help="of --diff, the newest where it is left out")
    parser.add_argument("--dry-run", action="store_true", help="of --gc: list alone")
    parser.add_argument(
        "--grace-seconds", type=float, default=GRACE_SECONDS, metavar="N",
        help="of --gc: what is younger stays, it may be a save on its way; a day if left out",
    )  # fmt: skip
    parser.add_argument(
        "--unlisted", action="store_true",
        help="of --gc: objects too that were saved, and are of no manifest that is here",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    return parser


def contents(root: ckpt.Location, manifest: ckpt.Manifest, args: argparse.Namespace) -> int:
    """The summary, and with --verify whatever is damaged."""
    damage = None
    if args.verify:
        damage = ckpt.find_damage(root, manifest, Bar(manifest.total_bytes))
    if args.json:
        verified = manifest.total_bytes if damage == [] else None
        found = summary(root, manifest) | {"verified_bytes": verified}
        say(json.dumps(found if damage is None else found | {"damage": damage}, indent=1))
    else:
        show(root, manifest)
        if damage == []:
            say(f"verified: all {manifest.total_bytes:,} bytes are as they were written")
    for line in damage or []:
        complain(line)
    return EXIT_BAD_INPUT if damage else 0


def summary(root: ckpt.Location, manifest: ckpt.Manifest) -> dict[str, object]:
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
                "bytes": sum(found.bytes for found in objects[record.name]),
            }
            for record in manifest.arrays
        ],
    }


def show(root: ckpt.Location, manifest: ckpt.Manifest) -> None:
    found = summary(root, manifest)
    say(f"{found['checkpoint']}")
    say(f"  step      {manifest.step}, saved {manifest.created}")
    say(f"  topology  {Topology(**manifest.topology).describe()}")
    if manifest.ranks is not None:
        say(f"  ranks     {', '.join(map(str, manifest.ranks))} have their slices here")
    say(f"  spec      {manifest.spec_hash}")
    say(f"  versions  {', '.join(f'{k} {v}' for k, v in manifest.versions.items())}")
    if manifest.parent is not None:
        say(f"  made of   {manifest.parent}")
    for key, value in manifest.state.items():
        say(f"  {key:<9} {value}")
    say(f"  size      {human_bytes(manifest.total_bytes)} in {len(manifest.objects)} objects")
    say(f"  others    steps {ckpt.committed_steps(root)}")
    rows = [("array", "shape", "dtype", "objects", "size")]
    for array in found["arrays"]:  # type: ignore[attr-defined]
        shape = " x ".join(map(str, array["shape"])) or "scalar"
        size = human_bytes(array["bytes"])
        rows.append((array["name"], shape, array["dtype"], str(array["objects"]), size))
    table(rows)


def table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def diff(root: ckpt.Location, manifest: ckpt.Manifest, args: argparse.Namespace) -> int:
    """Arrays and fields of the spec in which two checkpoints differ."""
    there = ckpt.as_location(args.diff)
    other = ckpt.read_manifest(there, args.other_step)
    bar = Bar(sum(manifest.objects[k].bytes for k in manifest.objects if "/c/" in f"/{k}"))
    arrays = ckpt.compare(root, manifest, there, other, bar)
    unlike = [array for array in arrays if array.what != "alike"]
    fields = ckpt.spec_differences(upgraded(manifest.spec), upgraded(other.spec))
    if args.json:
        found = {
            "here": ckpt.open_store(root).where(manifest_key(manifest.step)),
            "there": ckpt.open_store(there).where(manifest_key(other.step)),
            "alike": not unlike and not fields,
            "arrays": [asdict(array) for array in arrays],
            "spec": _changes(fields),
        }
        say(json.dumps(found, indent=1))
        return 0
    for field, before, now in fields:
        say(f"spec: {field} is {before} here, {now} there")
    if unlike:
        rows = [("array", "differs in", "elements", "largest", "relative")]
        table([*rows, *(_row(array) for array in unlike)])
    say(f"{len(arrays) - len(unlike)} of {len(arrays)} arrays are alike, bit by bit")
    return 0


def _row(array: ckpt.ArrayDifference) -> tuple[str, ...]:
    if array.what != "numbers":
        what = array.what + (f": {array.detail}" if array.detail else "")
        return (array.name, what, "", "", "")
    what = f"numbers, {array.not_finite} not finite" if array.not_finite else "numbers"
    share = f"{array.differing:,} of {array.elements:,}"
    figures = (array.max_abs, array.relative_l2)
    return (array.name, what, share, *("" if f is None else f"{f:.3g}" for f in figures))


def _changes(fields: Sequence[tuple[str, Any, Any]]) -> list[dict[str, Any]]:
    return [{"field": field, "before": before, "now": now} for field, before, now in fields]


def lineage(root: ckpt.Location, args: argparse.Namespace) -> int:
    """The steps, oldest first, and what is new in each."""
    links = ckpt.read_lineage(root, upgraded)
    if not links:
        ckpt.read_manifest(root)  # says what is wrong
    if args.json:
        found = [asdict(link) | {"spec_changes": _changes(link.spec_changes)} for link in links]
        say(json.dumps(found, indent=1))
    else:
        for at, link in enumerate(links):
            for line in _told(link, first=at == 0):
                say(line)
    for link in links:
        if link.problem:
            complain(link.problem)
    return EXIT_BAD_INPUT if any(link.problem for link in links) else 0


def _told(link: ckpt.Link, first: bool) -> list[str]:
    if link.problem or link.topology is None:
        return [f"step {link.step:>8}  its manifest is damaged"]
    lines = []
    topology = Topology(**link.topology).describe()
    if first or link.new_run:
        lines.append(f"run {link.run}" + ("" if link.parent is None else f", of {link.parent}"))
    after = "" if link.seconds is None else f", {link.seconds:,.0f} s later"
    resized = f"  resized to {topology}" if link.resized else f"  {topology}" if first else ""
    size = human_bytes(link.bytes)
    lines.append(f"  step {link.step:>8}  saved {link.created}{after}  {size}{resized}")
    for field, before, now in link.spec_changes:
        lines.append(f"    spec: {field} was {before}, is {now}")
    return lines


def collect(root: ckpt.Location, args: argparse.Namespace) -> int:
    """Remove garbage, or with --dry-run list it."""
    found = ckpt.find_garbage(root, args.grace_seconds, args.unlisted)
    removed = [] if args.dry_run else ckpt.remove_garbage(root, found)
    goes = [each for each in found if not each.stays]
    if args.json:
        listed = [asdict(each) | {"removed": each in removed} for each in found]
        total = sum(each.bytes for each in goes)
        say(json.dumps({"dry_run": args.dry_run, "bytes": total, "garbage": listed}, indent=1))
        return 0
    if found:
        rows = [("what", "name", "objects", "size", "")]
        for each in found:
            verdict = f"stays: {each.stays}" if each.stays else "removed" if removed else "would go"
            size = human_bytes(each.bytes)
            rows.append((each.kind, each.name, str(each.objects), size, verdict))
        table(rows)
    what = "would be" if args.dry_run else "were"
    say(f"{human_bytes(sum(each.bytes for each in goes))} in {len(goes)} {what} removed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
