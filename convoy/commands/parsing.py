"""What all commands share: reading a command line, and ending with a line and an exit code."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from pretrain.errors import EXIT_BAD_INPUT, EXIT_BROKEN_PIPE, EXIT_TRY_AGAIN, InputError
from pretrain.observe import complain


class Parser(argparse.ArgumentParser):
    """An argument parser that answers what it cannot read with one line and exit code 2.

    Args:
        prog: the command as a person types it, ``convoy reshard``.
        description: one sentence.
        epilog: examples and exit codes, shown as they are.
    """

    def __init__(self, prog: str, description: str, epilog: str, **kwargs: Any) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **kwargs,
        )

    def add_overrides(self, field: str = "a field of the spec") -> None:
        """``--set SECTION.FIELD=VALUE``, any number of times, read into ``overrides``."""
        self.add_argument(
            "--set",
            dest="overrides",
            action="append",
            default=[],
            metavar="SECTION.FIELD=VALUE",
            help=f"override {field}; may be repeated",
        )

    def add_shrink(self) -> None:
        """``--shrink``, for ``load_spec``."""
        self.add_argument(
            "--shrink",
            action="store_true",
            help="make the spec's sizes small: 20 steps, on the standard library's source",
        )

    def add_ranks(self) -> None:
        """``--ranks N``, for ``check_ranks``."""
        self.add_argument(
            "--ranks", type=int, default=1, metavar="N", help="processes of this machine; 1"
        )

    def check_ranks(self, ranks: int) -> None:
        """Refuse a number of processes that cannot be started."""
        if ranks < 1:
            self.error(f"--ranks ({ranks}) must be at least 1")
        if ranks > 1 and "RANK" in os.environ:
            self.error(f"--ranks ({ranks}) must be 1 under torchrun, which starts the ranks")

    def add_debug(self) -> None:
        """``--debug``, for ``ended``."""
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line and end with 2."""
        raise self.refusal(f"{message}; see {self.prog} --help")

    def refusal(self, message: str) -> SystemExit:
        """Print a line, and return the error that ends the process with 2."""
        if is_first_rank():
            complain(message)
        return SystemExit(EXIT_BAD_INPUT)


def subcommands(
    prog: str,
    description: str,
    parsers: Mapping[str, tuple[Parser, str]],
    words: Sequence[str],
    *,
    epilog: str,
    default: str | None = None,
) -> tuple[str, argparse.Namespace]:
    """Choose among ``parsers``, each with a line that says what it is for, and let it read.

    Where the first word names none of them, ``default`` reads all words; a word that is nearly a
    name, and no path, is refused.

    Returns the name of the subcommand and its arguments.
    """
    if words and words[0] in parsers:
        return words[0], parsers[words[0]][0].parse_args(words[1:])
    if default is not None and words and words[0] not in ("-h", "--help"):
        meant = get_close_matches(words[0], parsers, 1, 0.75)
        if meant and not Path(words[0]).exists():
            raise parsers[default][0].refusal(
                f"{words[0]} is no subcommand of {prog} and no path that exists: did you mean "
                f"{meant[0]}?"
            )
        return default, parsers[default][0].parse_args(words)
    width = max(map(len, parsers))
    lines = [f"  {name:<{width}}  {what}" for name, (_, what) in parsers.items()]
    listed = "subcommands:\n" + "\n".join(lines)
    more = f"{prog} SUBCOMMAND --help has the arguments of each."
    parser = Parser(
        prog,
        description,
        f"{listed}\n\n{more}\n\n{epilog}",
        usage=f"{prog} {'[SUBCOMMAND]' if default else 'SUBCOMMAND'} ...",
    )
    if words and words[0] in ("-h", "--help"):
        parser.print_help()
        raise SystemExit(0)
    names = ", ".join(parsers)
    wrong = f"{words[0]} is no subcommand" if words else "arguments are missing"
    raise parser.refusal(f"{wrong}: the subcommands are {names}; see {prog} --help")


def check_writable(flag: str, file: Path | None) -> None:
    """Refuse a file that a command is to write, by InputError, where the file cannot be written."""
    if file is None:
        return
    folder = file.absolute().parent
    if not folder.is_dir():
        raise InputError(f"{flag} ({file}): its folder does not exist")
    if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        raise InputError(f"{flag} ({file}) must be a file that can be written")


def is_first_rank() -> bool:
    """Whether a launcher gave this process rank 0, or there is no launcher."""
    return os.environ.get("RANK", "0") == "0"


def ended(act: Callable[[], int], *, debug: bool, stopped: str) -> int:
    """The exit code of a command that ``act`` carries out.

    Bad input is told in one line and ends with 2; with ``debug`` the error is raised. Ctrl-C or
    SIGTERM lets ``act`` clean up, prints ``stopped`` and ends with 75. Where nobody reads the
    output to its end, the exit code is that of a process that SIGPIPE has ended.
    """
    from ckpt.errors import CheckpointError  # here: importing ckpt takes half a second

    try:
        with _sigterm_as_interrupt():
            code = act()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        complain(f"stopped; {stopped}")
        return EXIT_TRY_AGAIN
    except BrokenPipeError:
        # What reads the output has ended, as `head` does: Python would complain at its end again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if debug:
            raise
        complain(f"{error.filename or 'a file'} cannot be read or written: {error.strerror}")
    except (ValueError, CheckpointError) as error:
        if debug:
            raise
        complain(str(error))
    return EXIT_BAD_INPUT


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM would end the process before it has removed what is half made."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Imports in the ``with`` block take a seventh less time.

    Python's garbage collector would walk through all objects again and again while the modules of
    torch make theirs. What they have made by the end of the block lives as long as the process, and
    no later collection walks through it.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
