"""A training command on a rank, and what the command says."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence

from convoy.commands.pretrain import main


def pretrain(arguments: Sequence[str]) -> tuple[int, str, str]:
    """The exit code of ``convoy pretrain ARGUMENTS`` in this process, its output and its errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(arguments))
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()
