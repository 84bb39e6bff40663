"""``convoy burn-in``: which machines of a launch are sound, before a run trusts them."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convoy.commands.parsing import (
    Command,
    argument,
    flag,
    is_first_rank,
    json_file,
    overrides,
)
from convoy.commands.results import check_writable, provenance, write_json
from pretrain.errors import EXIT_LOST, InputError
from pretrain.observe import complain, say

if TYPE_CHECKING:
    import torch

    from cluster.burnin import Board, BurnInOptions, ExpectedRates, Verdict

_SLOW_DEVICE, _SLOW_CPU = 10.0, 25.0
"""Percent; a CPU's cores are shared with other processes."""
_QUICK_DIVISOR = 16
_SMALL_STEPS = 3

_EPILOG = """\
examples:
  torchrun --standalone --nproc-per-node 8 -m convoy burn-in
  torchrun --nnodes 16 --nproc-per-node 8 --rdzv-endpoint HOST:29400 --rdzv-backend c10d \\
      -m convoy burn-in spec.toml --exclude-list runs/mine/exclude.json \\
      --json burnin.json --expect h100

torchrun starts the ranks, one for each GPU; every machine of the run takes part. With SPEC the
all-to-all has the rows of the spec's MoE layers, and storage is the spec's run_dir. The launch of a
run leaves out the machines on RUN_DIR/exclude.json. docs/burnin.md has each check.

exit codes:
  0  every machine is sound
  1  a machine is not, or did not answer
  2  an argument or the spec cannot be used
  75 stopped
"""


def _burn_in(args: argparse.Namespace) -> int:
    for option, value, most, rule in (
        ("--slow", args.slow, 100, "between 0 and 100"),
        ("--slow-link", args.slow_link, 100, "between 0 and 100"),
        ("--memory-gib", args.memory_gib, 1e6, "above 0"),
        ("--timeout", args.timeout, 1e6, "above 0"),
    ):
        if value is not None and not 0 < value < most:
            raise InputError(f"{option} ({value:g}) must be {rule}")
    if is_first_rank():  # the rank that writes the file, maybe on a disk of its own
        check_writable("--json", args.json)
    shape = _shape(args)

    from cluster.burnin import BurnIn, MissingRanksError

    options = _options(args, shape)
    board = _join(options.device, args.timeout)
    try:
        verdict = BurnIn(board, options).run(_told)
    except MissingRanksError as error:
        if board.rank == 0:
            complain(str(error))
        _leave(EXIT_LOST)
    if board.rank == 0:
        _show(verdict, args)
    # Rank 0 speaks for all: torchrun prints a report of every rank that fails.
    code = 0 if verdict.is_sound or board.rank else EXIT_LOST
    if verdict.ended_in is not None:
        _leave(code)  # a process group in which something hangs does not end in order
    import torch.distributed as dist

    dist.destroy_process_group()
    return code


def _shape(args: argparse.Namespace) -> dict[str, Any]:
    """What a spec decides: the all-to-all's rows, and the folder."""
    if args.spec is None:
        return {"folder": args.folder}
    from pretrain.spec import load_spec

    spec = load_spec(args.spec, args.overrides)
    settings: dict[str, Any] = {"folder": args.folder or spec.run_path}
    if spec.moe is not None:
        width = 4 if spec.precision.compute == "float32" else 2
        settings["rows"] = spec.batch.micro_batch_size * spec.data.seq_len * spec.moe.top_k
        settings["row_bytes"] = spec.model.d_model * width
    return settings


def _options(args: argparse.Namespace, shape: dict[str, Any]) -> BurnInOptions:
    from datetime import timedelta

    from cluster.burnin import BurnInOptions
    from pretrain.runtime import rank_device

    device = rank_device()
    expected = None if args.expect is None else _expected_rates(args.expect, device)
    slow = args.slow or (_SLOW_CPU if device.type == "cpu" else _SLOW_DEVICE)
    options = BurnInOptions(
        device=device,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_world=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        timeout=timedelta(seconds=args.timeout),
        slow=slow / 100,
        slow_link=1 - args.slow_link / 100,
        memory_bytes=int(args.memory_gib * 2**30),
        training_step=small_steps,
        expected=expected,
        **shape,
    )
    if not args.quick:
        return options
    from dataclasses import replace

    sizes = ("link_bytes", "reduce_bytes", "memory_bytes", "storage_bytes")
    return replace(options, **{k: getattr(options, k) // _QUICK_DIVISOR for k in sizes})


def small_steps(device: torch.device) -> str:
    """Train a mixture-of-experts decoder for three steps; returns a hash of its parameters.

    Equal devices have equal bits: every number that goes in comes from a generator on the CPU.

    Raises ValueError where the loss is not finite.
    """
    import torch
    from torch.nn import functional as F

    from moe import MoEConfig
    from pretrain.model import Decoder, ModelConfig

    shape = ModelConfig(
        vocab_size=512, d_model=128, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=256
    )
    model = Decoder(shape, MoEConfig(d_model=128, d_ff=128, num_experts=8, top_k=2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02, generator=generator)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for _ in range(_SMALL_STEPS):
        tokens_BS = torch.randint(shape.vocab_size, (4, 65), generator=generator).to(device)
        logits = model(tokens_BS[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens_BS[:, 1:].flatten())
        if not bool(loss.isfinite()):
            raise ValueError(f"the loss of a training step is {loss.item()}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _expected_rates(name_or_file: str, device: torch.device) -> ExpectedRates:
    """What a cluster file says that a rank and a link reach, with its shares of the peaks.

    Raises InputError where the file cannot be used, or has no peak for the dtype of the products.
    """
    from cluster.burnin import ExpectedRates, product_shape
    from convoy.plan import load_cluster

    cluster = load_cluster(name_or_file, "--expect")
    size, torch_dtype = product_shape(device)
    peaks = cluster.chip.peak_teraflops
    dtype = next((dtype for dtype in peaks if f"torch.{dtype}" == str(torch_dtype)), None)
    if dtype is None:
        raise InputError(
            f"--expect ({name_or_file}): chip.peak_teraflops has {', '.join(peaks)}, and must have "
            f"{str(torch_dtype).removeprefix('torch.')}, in which this device computes the products"
        )
    seconds = cluster.chip.gemm_seconds(size, size, size, dtype)
    links = {True: cluster.intra_node.rate, False: cluster.inter_node.rate}
    return ExpectedRates(products=2 * size**3 / seconds, links=links)


def _join(device: torch.device, timeout: float) -> Board:
    """The board of the ranks that torchrun has started; without torchrun, of one rank."""
    import torch.distributed as dist

    from cluster.burnin import Board
    from cluster.detect import open_store
    from pretrain.runtime import join_ranks

    # An operation of NCCL that times out then fails in this thread, and does not end the process.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    join_ranks(device, timeout)
    rank, world = dist.get_rank(), dist.get_world_size()
    # Ranks that wait for a lost one answer after one or two time-outs of the process group.
    return Board(open_store("burn-in"), rank, world=world, seconds=3 * timeout)


def _told(check: str) -> None:
    if is_first_rank():
        say(f"{check} ...")


def _show(verdict: Verdict, args: argparse.Namespace) -> None:
    from cluster.members import exclude

    for line in verdict.lines():
        say(line)
    write_json(args.json, provenance("torch") | verdict.as_dict())
    if args.exclude_list is not None:
        for node, reason in verdict.bad_nodes.items():
            exclude(args.exclude_list, node, reason)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


main = Command(
    "convoy burn-in",
    "Find slow, broken and wrong machines among those that torchrun has started.",
    _EPILOG,
    [
        argument("spec", "SPEC", "a job spec", nargs="?", type=Path),
        overrides(),
        argument("--exclude-list", "FILE", "put bad machines on this list", type=Path),
        json_file("verdict"),
        argument("--folder", "DIR", "to write and read; made if missing; by default the run_dir of "
                 "SPEC", type=Path),
        argument("--slow", "PERCENT", f"a rank is slow so far below the median, or more: "
                 f"{_SLOW_DEVICE:g} on GPUs, {_SLOW_CPU:g} on CPUs", type=float),
        argument("--slow-link", "PERCENT", "a link is slow so far below the median, or more: 50",
                 type=float, default=50.0),
        argument("--expect", "NAME|FILE", "a cluster file of `convoy plan`: ranks and links so far "
                 "below its rates are slow too"),
        argument("--memory-gib", "N", "to test on a CPU: 1; on a GPU 90 %% of what is free",
                 type=float, default=1.0),
        argument("--timeout", "S", "seconds that one operation may take: 60", type=float,
                 default=60.0),
        flag("--quick", "smaller transfers"),
    ],
    _burn_in,
    stopped="no machine was judged",
)  # fmt: skip
