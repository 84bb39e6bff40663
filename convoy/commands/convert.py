"""``convoy convert``: checkpoints from and to other projects, and dense models made sparse."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.commands.parsing import STEP, Act, Argument, Command, Group, argument, overrides
from pretrain.observe import human_bytes, say

if TYPE_CHECKING:
    from pretrain.spec import JobSpec

FAMILIES = (
    "qwen3_moe", "olmoe", "mixtral", "deepseek_v3", "deepseek_v2", "dots1", "qwen2_moe", "glm4_moe",
    "glm4_moe_lite", "solar_open", "minimax_m2", "hy_v3", "ernie4_5_moe", "flex_olmo",
    "granitemoe", "granitemoeshared", "mellum", "qwen3", "mistral", "llama", "qwen2", "ernie4_5",
    "olmo2", "granite",
)  # fmt: skip

_CODES = """\
exit codes:
  0   done
  2   the source cannot be used or expressed, or the target cannot be written
  75  stopped: nothing is left of the target, and the same command starts over
"""
_EPILOG = f"""\
examples:
  convoy convert import HF_DIR imported
  convoy convert export runs/stdlib-tiny/checkpoints exported --family qwen3_moe
  convoy convert upcycle HF_DIR_OF_A_DENSE_MODEL grown --num-experts 8 --top-k 2
  convoy convert move outputs/checkpoint/step-1000 moved --to megatron --num-heads 32
  convoy convert certificate moved outputs/checkpoint/step-1000

import and upcycle make a folder with checkpoints/, weights without optimizer state, and spec.toml
to train on with. An existing target is never written to.

{_CODES}"""
FORMATS = ("torchtitan", "megatron", "deepspeed", "automodel", "huggingface", "convoy")
_MOVE_CODES = """\
exit codes:
  0   done, and equal by every hash
  2   the source cannot be used, or the target cannot hold or be written
  75  stopped: the same command goes on from there
"""
_DENSE = "a dense checkpoint (its folder or manifest), or a dense Hugging Face folder"
_CHECKPOINT = "a checkpoint folder, or a manifest in one"


def _import(args: argparse.Namespace) -> int:
    from convoy.convert import import_hf

    _tell(args.source, args.target, *import_hf(args.source, args.target))
    return 0


def _upcycle(args: argparse.Namespace) -> int:
    from convoy.convert import upcycle

    sizes = args.num_experts, args.top_k, args.first_k_dense
    source, step = _located(args.source, args.step)
    _tell(source, args.target, *upcycle(source, args.target, *sizes, args.overrides, step))
    return 0


def _export(args: argparse.Namespace) -> int:
    import torch

    from convoy.convert import export_hf

    source, step = _located(args.source, args.step)
    dtype = getattr(torch, args.dtype)
    family, manifest, written, tokenizer = export_hf(
        source, args.target, step, args.family, dtype, args.max_file_bytes
    )
    say(
        f"step {manifest.step} -> {args.target}: {family.model_type}, {args.dtype}, "
        f"{human_bytes(written)} of weights"
    )
    if tokenizer is None:
        say("no tokenizer is in it: that of the weights was not found where the spec has it")
    else:
        say(f"its tokenizer is that of {tokenizer}")
    return 0


def _move(args: argparse.Namespace) -> int:
    from convoy.commands.reshard import parse_bytes
    from convoy.convert.formats import move

    made = move(
        args.source,
        args.target,
        args.to,
        num_heads=args.num_heads,
        step=args.step,
        spec=args.spec,
        samples=args.samples,
        leave=args.leave,
        memory=parse_bytes(args.memory),
        workers=args.workers,
    )
    source, target = made.source, made.target
    nbytes = sum(array.nbytes for array in target.arrays.values())
    say(
        f"step {target.info.step}: {source.form}:{source.kind} -> {target.form}:{target.kind}, "
        f"{len(target.arrays)} arrays, {human_bytes(nbytes)}, equal by {made.certificate}"
    )
    if made.behind:
        say(f"left behind: {', '.join(made.behind)}")
    return 0


def _certificate(args: argparse.Namespace) -> int:
    from convoy.convert.formats import differences, hashes_of

    first, second = (hashes_of(path, args.num_heads) for path in (args.first, args.second))
    lines = differences(first, second)
    for line in lines[:20]:
        say(line)
    if len(lines) > 20:
        say(f"... and {len(lines) - 20} more")
    if lines:
        say(f"{len(lines)} of {len(first.keys() | second.keys())} pieces differ")
        return 1
    say(f"{args.first} and {args.second}: {len(first)} pieces are equal")
    return 0


def _located(source: Path, step: int | None) -> tuple[Path, int | None]:
    """The checkpoint folder and the step of a path that may be a manifest's."""
    from ckpt.format import locate

    folder, step = locate(source, step)
    assert isinstance(folder, Path)
    return folder, step


def _tell(source: Path, target: Path, spec: JobSpec, verified: int) -> None:
    kind = "dense" if spec.moe is None else f"{spec.moe.num_experts} experts"
    say(
        f"{target / 'checkpoints'}: {spec.model.num_layers} layers, {kind}, "
        f"{human_bytes(verified)} written and verified"
    )
    path = (target / "spec.toml").absolute()
    if (source / "config.json").exists():
        needed = "data.source" if spec.data.tokenizer else "data.source and data.tokenizer"
        say(f"set {needed} in {path}")
    say(f"train on: convoy pretrain {shlex.quote(str(path))}")


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"({text}) must be a whole number of at least 1")
    return int(text)


def _command(
    act: Act, name: str, purpose: str, example: str, source: str, *arguments: Argument
) -> Command:
    name = f"convoy convert {name}"
    return Command(
        name,
        purpose,
        f"example:\n  {name} {example}\n\n{_CODES}",
        [
            argument("source", "SRC", source, type=Path),
            argument("target", "DST", "a folder that does not exist", type=Path),
            *arguments,
        ],
        act,
        stopped="nothing of {target} has been made",
    )


_HEADS = argument(
    "--num-heads", "N", "query heads, where neither a spec nor a norm of queries says", type=int
)
_CERTIFICATE = Command(
    "convoy convert certificate",
    "Compare two checkpoints of any formats, each expert's matrices by their hashes.",
    "example:\n  convoy convert certificate moved runs/a/checkpoints\n\n"
    "exit codes:\n  0   equal\n  1   something differs\n  2   one of them cannot be read\n",
    [
        argument("first", "A", "a checkpoint's folder, or a certificate.json", type=Path),
        argument("second", "B", "the other", type=Path),
        _HEADS,
    ],
    _certificate,
    stopped="nothing was written",
)

main = Group(
    "convoy convert",
    "Checkpoints from and to other projects; make a MoE of a dense model.",
    _EPILOG,
    [
        _command(
            _import, "import", "Make a checkpoint and a spec of a Hugging Face folder.",
            "HF_DIR imported", "a folder with config.json and safetensors files",
        ),
        _command(
            _export, "export", "Write the weights of a checkpoint as a Hugging Face folder.",
            "runs/stdlib-tiny/checkpoints exported --dtype bfloat16", _CHECKPOINT,
            STEP,
            argument("--family", "FAMILY", f"{', '.join(FAMILIES)}; by default the first that fits",
                     choices=FAMILIES),
            argument("--dtype", None, "of the weights; float32 by default",
                     choices=["float32", "bfloat16"], default="float32"),
            argument("--max-file-bytes", "N", "the most bytes of one safetensors file; "
                     "5,000,000,000 by default", type=_at_least_one, default=5 * 10**9),
        ),
        _command(
            _upcycle, "upcycle", "Make a MoE of a dense model: each expert is a copy of its MLP.",
            "runs/dense/checkpoints grown --num-experts 8 --top-k 2", _DENSE,
            argument("--num-experts", "N", None, type=int, required=True),
            argument("--top-k", "N", None, type=int, required=True),
            argument("--first-k-dense", "N", "layers that stay dense; 0", type=int, default=0),
            STEP,
            overrides("a field of the new spec"),
        ),
        Command(
            "convoy convert move",
            "Make a checkpoint of another project's format, with its moments, and verify it.",
            f"example:\n  convoy convert move SRC DST --to torchtitan\n\n{_MOVE_CODES}",
            [
                argument("source", "SRC", f"a checkpoint of {', '.join(FORMATS)}", type=Path),
                argument("target", "DST", "a folder that does not exist", type=Path),
                argument("--to", "FORMAT[:KIND]", ", ".join(FORMATS), required=True),
                _HEADS,
                STEP,
                argument("--spec", "FILE", "a spec, for what SRC does not say of its model and its "
                         "optimizer", type=Path),
                argument("--samples", "N", "sequences that the run has trained on, where SRC does "
                         "not say", type=_at_least_one),
                argument("--leave", None, "what may stay behind", choices=["moments",
                         "expert_bias"], action="append", default=[]),
                argument("--memory", "SIZE", "buffers of all workers together; 256MiB by default",
                         default="256MiB"),
                argument("--workers", "N", "processes; 1 by default", type=int,
                         choices=range(1, 257), default=1),
            ],
            _move,
            stopped="the same command goes on from here",
        ),
        _CERTIFICATE,
    ],
)  # fmt: skip
