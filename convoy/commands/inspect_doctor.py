"""``convoy inspect doctor``: known corruptions in a checkpoint of any trainer, named."""

from __future__ import annotations

import argparse

from convoy.commands.parsing import JSON, STEP, Command, argument
from convoy.commands.results import say_json
from pretrain.observe import progress_bar, say

EXIT_FINDINGS = 1
_CODES = """\
exit codes:
  0   no known corruption
  1   a known corruption, named
  2   the checkpoint cannot be read, or has no experts
  75  stopped
"""


def _examine(args: argparse.Namespace) -> int:
    from convoy.doctor import CHECKS, examine, open_patient, total_bytes
    from pretrain.errors import InputError

    patient = open_patient(args.checkpoint, args.step)
    other = None if args.against is None else open_patient(args.against, args.other_step)
    layers = patient.moe_layers()
    if not layers:
        raise InputError(
            f"{args.checkpoint} has no layer with experts or a router under a name that is known; "
            f"docs/doctor.md has the names"
        )
    with progress_bar(total_bytes(patient)) as advance:
        findings = examine(patient, other, advance)
    experts = max(len(patient.experts(layer, "down")) for layer in layers)
    form = patient.declared.form
    if args.json:
        say_json({
            "checkpoint": args.checkpoint,
            "against": args.against,
            "format": form,
            "layers": list(layers),
            "experts": experts,
            "moments": patient.has_moments(),
            "healthy": not findings,
            "findings": [finding.as_json() for finding in findings],
        })  # fmt: skip
        return EXIT_FINDINGS if findings else 0
    for finding in findings:
        say(finding.line())
    moments = "with" if patient.has_moments() else "without"
    seen = f"{form}, {len(layers)} layers of {experts} experts, {moments} moments"
    if not findings:
        say(f"none of {len(CHECKS)} known corruptions: {seen}")
    else:
        count = "1 known corruption" if len(findings) == 1 else f"{len(findings)} known corruptions"
        say(f"{count}: {seen}")
    return EXIT_FINDINGS if findings else 0


main = Command(
    "convoy inspect doctor",
    "Name known corruptions of experts, routers and moments in a checkpoint of any trainer.",
    "examples:\n"
    "  convoy inspect doctor runs/a/checkpoints\n"
    "  convoy inspect doctor HF_DIR --against runs/a/checkpoints\n\n"
    "Nothing is written. docs/doctor.md says what is looked for, and from which evidence.\n\n"
    f"{_CODES}",
    [
        argument("checkpoint", "FOREIGN", "a checkpoint of Convoy, a Hugging Face folder, or a "
                 "torch.distributed.checkpoint folder of torchtitan, Megatron or Automodel"),
        argument("--against", "OTHER", "a checkpoint of the same run or the one that was "
                 "converted, of any format; more can be decided with it"),
        STEP,
        argument("--other-step", "N", "the step of OTHER; the newest by default", type=int),
        JSON,
    ],
    _examine,
    "nothing was written",
)  # fmt: skip
