"""``convoy COMMAND``: the command line as a whole."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from convoy.commands import (
    audit_data,
    burnin,
    chaos,
    convert,
    inspect,
    launch,
    plan,
    prepare,
    pretrain,
    replay,
    report,
    reshard,
    sample,
    simulate,
    status,
)
from convoy.commands.parsing import Parser
from pretrain.observe import say

_COMMANDS = {
    "pretrain": (pretrain.main, "train a model as a job spec says"),
    "launch": (launch.main, "render a run for Slurm, Ray, Kubernetes or torchrun; submit it"),
    "prepare": (prepare.main, "prepare the corpus of a spec; roll a run back; start it afresh"),
    "status": (status.main, "show how a run ended, or that it is running"),
    "report": (report.main, "write what became of runs as one HTML file"),
    "inspect": (inspect.main, "show, verify and compare checkpoints; remove garbage"),
    "reshard": (reshard.main, "rewrite a checkpoint for another layout, format or shape"),
    "convert": (convert.main, "import from and export to Hugging Face; upcycle dense models"),
    "burn-in": (burnin.main, "find slow, broken and wrong machines before a run"),
    "plan": (plan.main, "plan a run: layout, memory, days and dollars, before it starts"),
    "simulate": (simulate.main, "simulate a run under failures, before it starts"),
    "sample": (sample.main, "generate text with a checkpoint, on any ranks"),
    "replay": (replay.main, "take a step of a recorded run again, on any ranks"),
    "audit-data": (audit_data.main, "prove which samples a run consumed"),
    "chaos": (chaos.main, "run a spec under random faults, and say what became of the run"),
}


def main(command: str | None = None, arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        command: one of those above. Where it is None, the first of ``arguments`` names the command.
        arguments: what follows on the command line; None takes this process's own.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if command is None and words and words[0] in _COMMANDS:
        command = words.pop(0)
    if arguments is None:
        _let_openmp_wait_briefly()
    if command == "inspect" and arguments is None:
        # In a process of its own, a reader that goes away ("| head") is no error.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if command is None:
        return _choose(words)
    return _COMMANDS[command][0](words)


def _let_openmp_wait_briefly() -> None:
    """Let OpenMP's idle threads spin for a fraction of a millisecond, and not for several.

    On cores that other processes use too a spinning thread takes the time of a thread with work: a
    step in two threads beside two busy processes took 6.4 s, and takes 1.9 s. OpenMP of GCC, which
    PyTorch brings along, reads the variable once, when PyTorch is imported.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = "10000"


def _choose(words: Sequence[str]) -> int:
    """Answer a command line that names no command."""
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, (_, what) in _COMMANDS.items()]
    parser = Parser(
        "convoy",
        "Pretrain mixture-of-experts models, and look after their checkpoints.",
        "commands:\n" + "\n".join(lines) + "\n\n"
        "convoy COMMAND --help has the arguments, examples and exit codes of each.",
        usage="convoy COMMAND ...",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    named = [word for word in words if not word.startswith("-")]
    if not named and parser.parse_args(words).version:
        from parallel.version import VERSION

        say(VERSION)
        return 0
    wrong = f"{named[0]} is no command" if named else "a command is missing"
    raise parser.refusal(f"{wrong}: the commands are {', '.join(_COMMANDS)}; see convoy --help")
