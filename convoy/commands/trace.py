"""``convoy trace``: the routing of a trained model on text, as a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from convoy.commands.parsing import STEP, Command, argument, flag, is_first_rank, overrides
from convoy.commands.results import check_writable
from pretrain.errors import InputError
from pretrain.observe import say

_EPILOG = """\
examples:
  convoy trace runs/stdlib-tiny/checkpoints natural.npz
  convoy trace runs/stdlib-tiny/checkpoints early.npz --step 80 --calls 64 --senders 16
  convoy trace s3://bucket/run routes.npz --routes --set data.path=corpora/other
  torchrun --nproc-per-node 8 -m convoy trace CKPT natural.npz

Forwards of the training samples that come after the checkpoint's step, without training. FILE has
how many tokens of each sender, a data-parallel rank, took each expert in each MoE layer and call;
with --routes also the experts of each token. numpy.load reads it, and moe.read_trace.

exit codes:
  0  the file was written
  2  the checkpoint, the corpus or the layout cannot be used, or the file is there already
  75 stopped
"""


def _check(args: argparse.Namespace) -> None:
    for option, value in (("--calls", args.calls), ("--senders", args.senders)):
        if value < 1:
            raise InputError(f"{option} ({value}) must be at least 1")
    if args.file.suffix != ".npz":
        raise InputError(f"FILE ({args.file}) must end in .npz, by which a trace is known")
    check_writable("FILE", args.file)
    if args.file.exists():
        raise InputError(f"FILE ({args.file}) must not exist: choose another name, or remove it")


def _trace(args: argparse.Namespace) -> int:
    from convoy.tracing import trace_routing
    from moe import write_trace

    trace = trace_routing(
        args.checkpoint,
        calls=args.calls,
        senders=args.senders,
        routes=args.routes,
        step=args.step,
        overrides=args.overrides,
    )
    if is_first_rank():
        write_trace(args.file, trace)
        calls, layers, senders, experts = trace.counts_CLSE.shape
        size = args.file.stat().st_size / 1024
        say(f"{args.file}: step {trace.step_C[0]}, {calls} calls of {senders} senders, {layers} "
            f"MoE layers, {experts} experts; {size:,.0f} KiB")  # fmt: skip
    return 0


main = Command(
    "convoy trace",
    "Record which experts a checkpoint's model chooses.",
    _EPILOG,
    [
        argument("checkpoint", "CKPT", "a checkpoint folder, URL or manifest"),
        argument("file", "FILE", "the file to write, named *.npz", type=Path),
        STEP,
        argument("--calls", "N", "micro-batches of each sender; 32", type=int, default=32),
        argument("--senders", "N", "data-parallel ranks; 8", type=int, default=8),
        flag("--routes", "record the experts of each token too"),
        overrides("a field of the checkpoint's spec"),
    ],
    _trace,
    stopped="nothing was written",
    check=_check,
)
