"""``convoy reshard``: one checkpoint made of another."""

from __future__ import annotations

import argparse
import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.commands.parsing import STEP, Argument, Command, Group, argument, overrides
from pretrain.errors import InputError
from pretrain.observe import human_bytes, progress_bar, say

if TYPE_CHECKING:
    from ckpt.rewrite import Source, Target
    from parallel.layout import Topology

DTYPES = ("bf16", "fp16", "fp32")
_MUCH_WORK = 128 << 20
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

_CODES = """\
exit codes:
  0   done
  2   a layout, a source or a target that cannot be used
  75  stopped: the same command goes on from there
"""
_EPILOG = f"""\
examples:
  convoy reshard runs/a/checkpoints /scratch/a-8 --layout dp_shard=8,ep=4
  convoy reshard runs/a/checkpoints DIR --format safetensors
  convoy reshard DCP_DIR DST --rename tok_embeddings/=model/embed/
  convoy reshard weights runs/a/checkpoints DST --dtype bf16
  convoy reshard surgery runs/a/checkpoints DST duplicate=2 --set moe.top_k=2

convoy reshard SRC DST is convoy reshard layout SRC DST. SRC is a checkpoint folder or a manifest in
one, a folder that torch.distributed.checkpoint wrote, or a safetensors file or folder. What has
checksums is verified while it is read, and all of DST at the end.

{_CODES}"""


def _reshard(name: str, args: argparse.Namespace) -> int:
    """What the subcommand ``name`` does."""
    from ckpt.format import TREE, manifest_key
    from ckpt.read import verify
    from ckpt.rewrite import CheckpointTarget, rewrite
    from ckpt.store import open_store
    from parallel.layout import parse_topology

    source = _edited(name, args, _source(args))
    if args.layout and TREE in source.info.state:
        raise InputError(
            f"--layout ({args.layout}) is for checkpoints of a run: SRC was saved by "
            f"save_state_dict, and loads on any number of ranks as it is"
        )
    topology = parse_topology(args.layout) if args.layout else source.info.topology
    _check_layout(source, topology)
    memory = parse_bytes(args.memory)
    target = _target(args, source, topology)
    total = sum(piece.nbytes for piece in target.parts())
    with progress_bar(total) as advance:
        new = rewrite(target, memory, args.workers or _workers(memory, total), advance)
    if isinstance(target, CheckpointTarget) and target.manifest is not None:
        with progress_bar(target.manifest.total_bytes) as advance:
            total = verify(target.store, target.manifest, advance)
    before = source.info.topology.describe()
    say(
        f"step {source.info.step}: {before} -> {topology.describe()}, {len(source.arrays)} arrays, "
        f"{human_bytes(total)} {'written' if new else 'were written before'} and verified"
    )
    where = open_store(args.target).where
    say(where(manifest_key(source.info.step)) if args.format == "convoy" else args.target)
    return 0


def _source(args: argparse.Namespace) -> Source:
    """SRC, under the names that the flags give its arrays."""
    from ckpt.format import locate
    from convoy import convert

    rename = {}
    for rule in args.rename:
        old, equals, new = rule.partition("=")
        if not equals or old in rename:
            raise InputError(f"--rename ({rule}) must be OLD=NEW, each OLD once")
        rename[old] = new
    location, step = locate(args.source, args.step)
    source = convert.open_source(str(location), step)
    return convert.with_names(source, rename)


def _edited(name: str, args: argparse.Namespace, source: Source) -> Source:
    """What the subcommand makes of a source."""
    from convoy.convert import in_dtype, weights_only

    if name == "layout":
        return source
    source = weights_only(source)
    if name == "surgery":
        from convoy.convert import operate, parse_surgery

        source, _ = operate(source, parse_surgery(args.surgery), args.overrides, args.noise)
    return in_dtype(source, args.dtype) if args.dtype else source


def _target(args: argparse.Namespace, source: Source, topology: Topology) -> Target:
    from convoy.convert import with_dots

    if args.format == "convoy":
        from ckpt.rewrite import CheckpointTarget

        return CheckpointTarget(source, args.target, topology)
    source = with_dots(source)
    if args.format == "dcp":
        from ckpt.interop import DcpTarget  # here: it imports torch

        return DcpTarget(source, Path(args.target), topology)
    from ckpt.interop import SafetensorsTarget

    return SafetensorsTarget(source, Path(args.target), topology)


def _workers(memory: int, total: int) -> int:
    """As many as cores, memory and bytes allow; one for few bytes: starting processes takes time.

    Args:
        memory: bytes of buffers for all workers together.
        total: bytes to write.
    """
    from ckpt.rewrite import LEAST_MEMORY

    return max(1, min(4, os.cpu_count() or 1, memory // (2 * LEAST_MEMORY), total // _MUCH_WORK))


def parse_bytes(text: str) -> int:
    """Read ``512MiB``, ``2G`` or ``800000``; MB and MiB are both 2^20 bytes. Raises InputError."""
    match = re.fullmatch(r"(\d+)([KMGT]?)(?:i?B)?", text)
    if match is None:
        raise InputError(f"--memory ({text}) must be a size such as 512MiB")
    return int(match[1]) * _UNITS[match[2]]


def _check_layout(source: Source, topology: Topology) -> None:
    """Experts are stored in whole blocks, and a stage without a layer stores nothing. Whether other
    degrees fit is for a run to say."""
    model, moe = (source.info.spec.get(name) or {} for name in ("model", "moe"))
    experts, layers = moe.get("num_experts", topology.ep), model.get("num_layers", topology.pp)
    if experts % topology.ep:
        raise InputError(
            f"--layout ep ({topology.ep}) must divide moe.num_experts ({experts}) of the checkpoint"
        )
    if topology.pp > layers:
        raise InputError(
            f"--layout pp ({topology.pp}) must be at most model.num_layers ({layers}) of the "
            f"checkpoint"
        )


_DTYPE = argument("--dtype", None, "of floating-point weights; as stored", choices=DTYPES)


def _command(name: str, purpose: str, example: str, *arguments: Argument) -> Command:
    prog = f"convoy reshard {name}"
    return Command(
        prog,
        purpose,
        f"example:\n  {prog} {example}\n\n{_CODES}",
        [
            argument("source", "SRC", "the checkpoint to read, or its manifest"),
            argument("target", "DST", "the folder or URL to write"),
            argument("--layout", "AXIS=DEGREE,...", "the new layout; as SRC by default. A missing "
                     "dp_shard is the least that ep needs"),
            STEP,
            argument("--format", None, "of DST", choices=["convoy", "dcp", "safetensors"],
                     default="convoy"),
            argument("--rename", "OLD=NEW", "rename an array; with / at both ends, all arrays "
                     "whose names begin with OLD", action="append", default=[]),
            argument("--memory", "SIZE", "buffers of all workers together, at least 32MiB for "
                     "each; 512MiB by default", default="512MiB"),
            argument("--workers", "N", "processes; up to 4", type=int, choices=range(1, 257)),
            *arguments,
        ],
        partial(_reshard, name),
        stopped="the same command goes on from here",
    )  # fmt: skip


main = Group(
    "convoy reshard",
    "Rewrite a checkpoint for another layout, format or shape, in bounded memory.",
    _EPILOG,
    [
        _command(
            "layout", "Rewrite all arrays of a checkpoint, bit by bit.", "SRC DST --layout ep=4"
        ),
        _command(
            "weights", "Rewrite the weights, without optimizer state, in any dtype.",
            "SRC DST --dtype bf16", _DTYPE,
        ),
        _command(
            "surgery", "Rewrite the weights of a model with other experts or another width.",
            "SRC DST duplicate=2 --noise 0.01 --set moe.top_k=2",
            argument("surgery", "KIND=NUMBERS", "upcycle=8, drop=3,7, duplicate=2 or widen=2"),
            argument("--noise", "STD", "normal noise on copies, as a multiple of a row's root mean "
                     "square; 0", type=float, default=0.0),
            overrides("a field of the new spec"),
            _DTYPE,
        ),
    ],
    default="layout",
)  # fmt: skip
