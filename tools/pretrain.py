"""Pretrain a mixture-of-experts model as a job spec says.

    python tools/pretrain.py SPEC
    torchrun --nproc-per-node 8 tools/pretrain.py SPEC [--set train.steps=1000]

Exit codes: 0 done; 1 a rank was lost or stuck; 2 bad spec or bad input; 3 the loss diverged; 75
stopped on request after a committed checkpoint. After 1 and 75 the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

# A script's own folder comes first on its path, and tools/pretrain.py has a package's name.
if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from ckpt import CheckpointError, OtherRankError
from pretrain.errors import (
    EXIT_BAD_INPUT,
    EXIT_HEALTH,
    EXIT_LOST,
    HealthError,
    InputError,
    LostRankError,
)
from pretrain.observe import complain, say
from pretrain.runtime import launched_rank, launched_world
from pretrain.spec import load_spec
from pretrain.train import prepare, run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("spec", type=Path, help="a TOML or JSON job spec")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.FIELD=VALUE"
    )
    parser.add_argument("--print-spec", action="store_true", help="show the resolved spec and end")
    parser.add_argument("--prepare", action="store_true", help="prepare the corpus and end")
    parser.add_argument(
        "--reset", action="store_true", help="with --prepare: remove the run's checkpoints and log"
    )
    parser.add_argument(
        "--load-step", type=int, metavar="STEP",
        help="with --prepare: go on from this step, and put later checkpoints aside",
    )  # fmt: skip
    parser.add_argument("--debug", action="store_true", help="show tracebacks of bad input")
    args = parser.parse_args(arguments)
    if args.reset and not args.prepare:
        parser.error("--reset goes with --prepare")
    if args.load_step is not None and (args.reset or not args.prepare):
        parser.error("--load-step goes with --prepare, and without --reset")
    alike = True  # until ranks act for themselves, what is wrong is the same on all
    try:
        spec = load_spec(args.spec, args.overrides)
        if args.print_spec:
            say(json.dumps(spec.as_dict(), indent=1))
            return 0
        if args.prepare:
            prepare(spec, reset=args.reset, load_step=args.load_step)
            return 0
        spec.topology(launched_world())
        alike = False
        return run(spec)
    except KeyboardInterrupt:
        return 130
    except LostRankError as error:
        if args.debug:
            raise
        complain(str(error))
        return EXIT_LOST
    except (InputError, CheckpointError, HealthError) as error:
        if args.debug:
            raise
        alike = alike or isinstance(error, HealthError)
        if launched_rank() == 0 if alike else not isinstance(error, OtherRankError):
            complain(str(error))
        return EXIT_HEALTH if isinstance(error, HealthError) else EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
