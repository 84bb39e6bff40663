"""Rewrite a checkpoint for another layout, bit by bit.

    python tools/reshard.py SRC DST --layout ep=4 [--step N]
    python tools/reshard.py runs/a/checkpoints /scratch/a-8 --layout dp_shard=8,ep=4

SRC and DST are checkpoint folders, with manifests/ in them. A dp_shard that is left out is the
least that ep needs. The numbers of SRC are verified as they are read, and all of DST at the end.

Exit codes: 0 done; 2 a layout, source or target that cannot be used.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

# A script's own folder comes first on its path, and tools/pretrain.py has a package's name.
if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import ckpt
from parallel import Topology, parse_topology
from pretrain.errors import EXIT_BAD_INPUT
from pretrain.log import complain, human_bytes, say


class Bar:
    """Bytes written and time left, on one line of a terminal; nothing elsewhere."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.began = total, 0, time.monotonic()
        self.shown = sys.stderr.isatty()

    def __call__(self, count: int) -> None:
        """``count`` more bytes are written."""
        self.done += count
        if self.shown:
            share = min(self.done / max(self.total, 1), 1.0)
            left = (time.monotonic() - self.began) * (1 - share) / max(share, 1e-9)
            text = f"{share:6.1%}  {human_bytes(self.done)}  {left:.0f} s left"
            print(f"\r{text:<50}", end="" if share < 1 else "\n", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--layout", required=True, metavar="AXIS=DEGREE,...")
    parser.add_argument("--step", type=int, help="the newest one where it is left out")
    args = parser.parse_args(arguments)
    try:
        topology = parse_topology(args.layout)
        manifest = ckpt.read_manifest(args.source, args.step)
        _check_experts(manifest, topology)
        bar = Bar(manifest.total_bytes)
        made = ckpt.reshard(args.source, manifest, args.target, topology, bar)
        verified = ckpt.verify(args.target, made)
    except (ValueError, ckpt.CheckpointError) as error:
        complain(str(error))
        return EXIT_BAD_INPUT
    say(
        f"step {made.step}: {Topology(**manifest.topology).describe()} -> {topology.describe()}, "
        f"{len(made.arrays)} arrays, {human_bytes(verified)} written and verified"
    )
    say(f"{ckpt.manifest_path(args.target, made.step)}")
    return 0


def _check_experts(manifest: ckpt.Manifest, topology: Topology) -> None:
    """Experts come in whole blocks; other degrees are a matter of who trains with them."""
    experts = (manifest.spec.get("moe") or {}).get("num_experts", topology.ep)
    if experts % topology.ep:
        raise ValueError(
            f"layout ep ({topology.ep}) must divide moe.num_experts ({experts}) of the checkpoint"
        )


if __name__ == "__main__":
    sys.exit(main())
