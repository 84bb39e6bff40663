"""Import and export Hugging Face checkpoints, and make a MoE of a dense model.

    python tools/convert_hf.py import HF_DIR OUT
    python tools/convert_hf.py export runs/a/checkpoints HF_DIR [--step N] [--family mixtral]
    python tools/convert_hf.py upcycle SRC OUT --num-experts 8 --top-k 2

OUT gets checkpoints/, weights alone, and spec.toml to train on with. SRC is a dense checkpoint
folder, with manifests/ in it, or a dense Hugging Face folder. Nothing is ever overwritten, and what
is interrupted leaves nothing that looks whole.

Exit codes: 0 done; 2 a source that cannot be used or expressed, or a target that cannot be written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# A script's own folder comes first on its path, and tools/pretrain.py has a package's name.
if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from ckpt import CheckpointError
from pretrain.convert import export_hf, import_hf, upcycle
from pretrain.convert.hf import FAMILIES
from pretrain.errors import EXIT_BAD_INPUT, InputError
from pretrain.observe import complain, human_bytes, say
from pretrain.spec import JobSpec


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--debug", action="store_true", help="show tracebacks of bad input")
    commands = parser.add_subparsers(dest="command", required=True)
    importing = commands.add_parser("import", help="safetensors to a checkpoint and a spec")
    importing.add_argument("source", type=Path, help="a folder with config.json and safetensors")
    importing.add_argument("target", type=Path)
    exporting = commands.add_parser("export", help="a checkpoint's weights to safetensors")
    exporting.add_argument("source", type=Path, help="a checkpoint folder, with manifests/ in it")
    exporting.add_argument("target", type=Path)
    exporting.add_argument("--step", type=int, help="the newest one where it is left out")
    exporting.add_argument("--family", choices=list(FAMILIES), help="the first that fits")
    exporting.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    exporting.add_argument("--max-file-bytes", type=int, default=5 * 10**9, metavar="N")
    growing = commands.add_parser("upcycle", help="a dense model to a MoE of copies")
    growing.add_argument("source", type=Path, help="a dense checkpoint or Hugging Face folder")
    growing.add_argument("target", type=Path)
    growing.add_argument("--num-experts", type=int, required=True)
    growing.add_argument("--top-k", type=int, required=True)
    growing.add_argument("--first-k-dense", type=int, default=0, help="layers that stay dense")
    growing.add_argument("--step", type=int, help="the newest one where it is left out")
    growing.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.FIELD=VALUE"
    )
    args = parser.parse_args(arguments)
    try:
        _run(args)
    except (InputError, CheckpointError) as error:
        if args.debug:
            raise
        complain(str(error))
        return EXIT_BAD_INPUT
    return 0


def _run(args: argparse.Namespace) -> None:
    if args.command == "import":
        _tell(args.source, args.target, *import_hf(args.source, args.target))
    elif args.command == "upcycle":
        sizes = args.num_experts, args.top_k, args.first_k_dense
        made = upcycle(args.source, args.target, *sizes, args.overrides, args.step)
        _tell(args.source, args.target, *made)
    else:
        family, manifest, written = export_hf(
            args.source,
            args.target,
            args.step,
            args.family,
            getattr(torch, args.dtype),
            args.max_file_bytes,
        )
        say(
            f"step {manifest.step} -> {args.target}: {family.model_type}, {args.dtype}, "
            f"{human_bytes(written)} of weights"
        )


def _tell(source: Path, target: Path, spec: JobSpec, verified: int) -> None:
    kind = "dense" if spec.moe is None else f"{spec.moe.num_experts} experts"
    say(
        f"{target / 'checkpoints'}: {spec.model.num_layers} layers, {kind}, "
        f"{human_bytes(verified)} written and verified"
    )
    if (source / "tokenizer.json").exists() and spec.data.tokenizer is None:
        say("tokenizer.json stays behind: it is not byte-level, or no token of it ends a document")
    say(f"train on: python tools/pretrain.py {target / 'spec.toml'}")


if __name__ == "__main__":
    sys.exit(main())
