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
    trace,
)
from convoy.commands.parsing import Group
from pretrain.observe import say

CONVOY = Group(
    "convoy",
    "Pretrain mixture-of-experts models, and look after their checkpoints.",
    "Each has examples and exit codes. convoy --version prints the version.",
    [
        pretrain.main, launch.main, prepare.main, status.main, report.main, inspect.main,
        reshard.main, convert.main, burnin.main, plan.main, simulate.main, sample.main,
        trace.main, replay.main, audit_data.main, chaos.main,
    ],
)  # fmt: skip


def main(command: str | None = None, arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        command: one of those above. Where it is None, the first of ``arguments`` names the command.
        arguments: what follows on the command line; None takes this process's own.
    """
    words = [] if command is None else [command]
    words += sys.argv[1:] if arguments is None else arguments
    if arguments is None:
        _let_openmp_wait_briefly()
        if words[:1] == ["inspect"]:
            # In a process of its own, a reader that goes away ("| head") is no error.
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if words == ["--version"]:
        from parallel.version import VERSION

        say(VERSION)
        return 0
    return CONVOY(words)


def _let_openmp_wait_briefly() -> None:
    """Let OpenMP's idle threads spin for a fraction of a millisecond, and not for several.

    On cores that other processes use too a spinning thread takes the time of a thread with work: a
    step in two threads beside two busy processes took 6.4 s, and takes 1.9 s. OpenMP of GCC, which
    PyTorch brings along, reads the variable once, when PyTorch is imported.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = "10000"
