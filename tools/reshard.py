"""Rewrite a checkpoint for another layout or as another format, bit by bit.

    python tools/reshard.py SRC DST --layout ep=4 [--step N] [--memory 512MiB] [--workers N]
    python tools/reshard.py runs/a/checkpoints /scratch/a-8 --layout dp_shard=8,ep=4
    python tools/reshard.py runs/a/checkpoints DST --weights-only --dtype bf16
    python tools/reshard.py runs/a/checkpoints DIR --format safetensors
    python tools/reshard.py DCP_DIR DST --family torchtitan
    python tools/reshard.py DCP_DIR DST --rename tok_embeddings/=model/embed/
    python tools/reshard.py runs/a/checkpoints DST --surgery duplicate=2 --set moe.top_k=2

SRC is a checkpoint folder, with manifests/ in it, a folder that torch.distributed.checkpoint wrote,
or a safetensors file or folder. A --layout that is left out is the one that SRC was saved under; a
dp_shard that is left out of it is the least that ep needs. What has checksums is verified as it is
read, and all of DST at the end. After a kill the same command goes on from where it was.

Exit codes: 0 done; 2 a layout, source or target that cannot be used; 75 stopped, run it again.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

# A script's own folder comes first on its path, and tools/pretrain.py has a package's name.
if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from ckpt.errors import CheckpointError
from ckpt.format import manifest_key
from ckpt.read import verify
from ckpt.rewrite import LEAST_MEMORY, MEMORY, CheckpointTarget, Source, Target, rewrite
from ckpt.store import open_store
from parallel.layout import Topology, parse_topology
from pretrain.convert import DTYPES, from_titan, in_dtype, open_source, weights_only, with_names
from pretrain.errors import EXIT_BAD_INPUT, EXIT_TRY_AGAIN, InputError
from pretrain.observe import Bar, complain, human_bytes, say

_MUCH_WORK = 128 << 20
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        source = _source(args)
        topology = parse_topology(args.layout) if args.layout else source.info.topology
        _check_experts(source, topology)
        memory = parse_bytes(args.memory)
        target = _target(args, source, topology)
        total = sum(part.nbytes for part in target.parts())
        rewrite(target, memory, args.workers or _workers(memory, total), Bar(total))
        if isinstance(target, CheckpointTarget) and target.manifest is not None:
            total = verify(target.store, target.manifest)
    except (ValueError, CheckpointError) as error:
        complain(str(error))
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        complain("stopped; the same command goes on from here")
        return EXIT_TRY_AGAIN
    before = source.info.topology.describe()
    say(
        f"step {source.info.step}: {before} -> {topology.describe()}, {len(source.arrays)} arrays, "
        f"{human_bytes(total)} written and verified"
    )
    where = open_store(args.target).where
    say(where(manifest_key(source.info.step)) if args.format == "convoy" else args.target)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--layout", metavar="AXIS=DEGREE,...", help="as it was, if left out")
    parser.add_argument("--step", type=int, help="the newest one where it is left out")
    parser.add_argument("--memory", default=f"{MEMORY >> 20}MiB", help="for all workers together")
    parser.add_argument("--workers", type=int, choices=range(1, 257), metavar="N")
    parser.add_argument("--format", choices=["convoy", "dcp", "safetensors"], default="convoy")
    parser.add_argument("--weights-only", action="store_true", help="what init.checkpoint reads")
    parser.add_argument("--dtype", choices=DTYPES, help="of floating weights; with --weights-only")
    parser.add_argument("--family", choices=["torchtitan"], help="whose names and shapes SRC has")
    parser.add_argument(
        "--rename", action="append", default=[], metavar="OLD=NEW",
        help="an array, or with / at both ends all whose names begin so",
    )  # fmt: skip
    parser.add_argument(
        "--surgery", metavar="KIND=NUMBERS", help="upcycle=8, drop=3,7, duplicate=2 or widen=2"
    )
    parser.add_argument("--surgery-noise", type=float, default=0.0, metavar="STD")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.FIELD=VALUE",
        help="of the spec after --surgery",
    )  # fmt: skip
    return parser


def _source(args: argparse.Namespace) -> Source:
    """SRC with everything that is to be changed of it."""
    rename = {}
    for rule in args.rename:
        old, equals, new = rule.partition("=")
        if not equals or old in rename:
            raise InputError(f"--rename ({rule}) must be OLD=NEW, each OLD once")
        rename[old] = new
    source = open_source(args.source, args.step)
    if args.family:
        source = from_titan(source)
    source = with_names(source, rename)
    if args.dtype and not (args.weights_only or args.surgery):
        raise InputError(f"--dtype ({args.dtype}) must be with --weights-only: no run would resume")
    if (args.overrides or args.surgery_noise) and not args.surgery:
        raise InputError("--set and --surgery-noise must be with --surgery")
    if args.weights_only or args.surgery:
        source = weights_only(source)
    if args.surgery:
        from pretrain.convert import (
            operate,  # here: it knows models, with torch
            parse_surgery,  # here: it knows models, with torch
        )

        surgery = parse_surgery(args.surgery)
        source, _ = operate(source, surgery, args.overrides, args.surgery_noise)
    return in_dtype(source, args.dtype) if args.dtype else source


def _target(args: argparse.Namespace, source: Source, topology: Topology) -> Target:
    if args.format == "convoy":
        return CheckpointTarget(source, args.target, topology)
    if args.format == "dcp":
        from ckpt.interop import DcpTarget  # here, for torch's seconds of import

        return DcpTarget(source, Path(args.target), topology)
    from ckpt.interop import SafetensorsTarget

    return SafetensorsTarget(source, Path(args.target), topology)


def _workers(memory: int, total: int) -> int:
    """As many as there are cores, memory and work for; one for little: starting them takes time."""
    return max(1, min(4, os.cpu_count() or 1, memory // (2 * LEAST_MEMORY), total // _MUCH_WORK))


def parse_bytes(text: str) -> int:
    """Read ``512MiB``, ``2G`` or ``800000``; MB and MiB are both of 2^20. Raises InputError."""
    match = re.fullmatch(r"(\d+)([KMGT]?)(?:i?B)?", text)
    if match is None:
        raise InputError(f"--memory ({text}) must be a size such as 512MiB")
    return int(match[1]) * _UNITS[match[2]]


def _check_experts(source: Source, topology: Topology) -> None:
    """Experts come in whole blocks; other degrees are a matter of who trains with them."""
    experts = (source.info.spec.get("moe") or {}).get("num_experts", topology.ep)
    if experts % topology.ep:
        raise ValueError(
            f"layout ep ({topology.ep}) must divide moe.num_experts ({experts}) of the checkpoint"
        )


if __name__ == "__main__":
    sys.exit(main())
