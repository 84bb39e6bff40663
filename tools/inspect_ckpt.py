"""Show what is in a checkpoint; with --verify, read every byte of it.

    python tools/inspect_ckpt.py RUN_DIR/checkpoints [--step N] [--verify] [--json]

Exit codes: 0 whole; 2 no checkpoint, or one that is damaged.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

# A script's own folder comes first on its path, and tools/pretrain.py has a package's name.
if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import ckpt
from parallel import Topology
from pretrain.errors import EXIT_BAD_INPUT
from pretrain.log import complain, human_bytes, say


def summary(root: Path, manifest: ckpt.Manifest) -> dict[str, object]:
    objects = {
        record.name: [manifest.objects[key] for key in record.object_keys()]
        for record in manifest.arrays
    }
    return {
        "checkpoint": str(ckpt.manifest_path(root, manifest.step)),
        "step": manifest.step,
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


def show(root: Path, manifest: ckpt.Manifest) -> None:
    found = summary(root, manifest)
    say(f"{found['checkpoint']}")
    say(f"  step      {manifest.step}, saved {manifest.created}")
    say(f"  topology  {Topology(**manifest.topology).describe()}")
    say(f"  spec      {manifest.spec_hash}")
    say(f"  versions  {', '.join(f'{k} {v}' for k, v in manifest.versions.items())}")
    for key, value in manifest.state.items():
        say(f"  {key:<9} {value}")
    say(f"  size      {human_bytes(manifest.total_bytes)} in {len(manifest.objects)} objects")
    say(f"  others    steps {ckpt.committed_steps(root)}")
    rows = [("array", "shape", "dtype", "objects", "size")]
    for array in found["arrays"]:  # type: ignore[attr-defined]
        shape = " x ".join(map(str, array["shape"])) or "scalar"
        size = human_bytes(array["bytes"])
        rows.append((array["name"], shape, array["dtype"], str(array["objects"]), size))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main(arguments: list[str] | None = None) -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # "| head" is no error
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root", type=Path, help="a checkpoint folder, with manifests/ in it")
    parser.add_argument("--step", type=int, help="the newest one where it is left out")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    args = parser.parse_args(arguments)
    try:
        manifest = ckpt.read_manifest(args.root, args.step)
        verified = ckpt.verify(args.root, manifest) if args.verify else None
    except ckpt.CheckpointError as error:
        complain(str(error))
        return EXIT_BAD_INPUT
    if args.json:
        say(json.dumps({**summary(args.root, manifest), "verified_bytes": verified}, indent=1))
        return 0
    show(args.root, manifest)
    if verified is not None:
        say(f"verified: all {verified:,} bytes are as they were written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
