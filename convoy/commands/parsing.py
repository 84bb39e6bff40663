"""What all commands share: reading a command line, and ending with a line and an exit code."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from pretrain.errors import EXIT_BAD_INPUT, EXIT_BROKEN_PIPE, EXIT_TRY_AGAIN, InputError
from pretrain.observe import complain

Act = Callable[[argparse.Namespace], int]


class Argument(NamedTuple):
    """What :meth:`argparse.ArgumentParser.add_argument` is told of one argument."""

    name: str
    options: dict[str, Any]


class OneOf(NamedTuple):
    """Arguments of which a command line has at most one."""

    arguments: tuple[Argument, ...]
    required: bool = False
    """Whether it must have one."""


def argument(name: str, metavar: str | None, text: str | None, **options: Any) -> Argument:
    """An argument with a value; ``text`` is its help."""
    return Argument(name, {"metavar": metavar, "help": text, **options})


def flag(name: str, text: str) -> Argument:
    """An argument without a value, false where it is left out."""
    return Argument(name, {"action": "store_true", "help": text})


def overrides(field: str = "a field of the spec") -> Argument:
    """``--set SECTION.FIELD=VALUE``, any number of times, read into ``overrides``."""
    return argument(
        "--set", "SECTION.FIELD=VALUE", f"override {field}; may be repeated",
        dest="overrides", action="append", default=[],
    )  # fmt: skip


SPEC = argument("spec", "SPEC", "a job spec, in TOML or JSON", type=Path)
SHRINK = flag("--shrink", "make the spec's sizes small: 20 steps, on the standard library's source")
RANKS = argument("--ranks", "N", "processes of this machine; 1", type=int, default=1)
STEP = argument("--step", "N", "the checkpoint of step N; the newest by default", type=int)
JSON = flag("--json", "print JSON")


def json_file(what: str = "results") -> Argument:
    """``--json FILE``."""
    return argument("--json", "FILE", f"write the {what} as JSON too", type=Path)


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

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line and end with 2."""
        raise self.refusal(f"{message}; see {self.prog} --help")

    def refusal(self, message: str) -> SystemExit:
        """Print a line, and return the error that ends the process with 2."""
        if is_first_rank():
            complain(message)
        return SystemExit(EXIT_BAD_INPUT)


@dataclass(frozen=True)
class Command:
    """One command: called with the words behind its name, it returns its exit code."""

    name: str
    """As a person types it, ``convoy reshard layout``."""
    purpose: str
    """One sentence."""
    epilog: str
    """Examples and exit codes, shown as they are."""
    arguments: Sequence[Argument | OneOf]
    """All but ``--debug``, which every command has."""
    act: Act
    stopped: str = "nothing was changed"
    """What Ctrl-C and SIGTERM leave, for people; may name arguments, ``{target}``."""
    check: Callable[[argparse.Namespace], None] = lambda args: None
    """Refuses arguments by InputError before the command acts."""
    ends_itself: bool = False
    """Whether ``act`` answers signals and errors, and not :func:`ended`."""

    def __call__(self, words: Sequence[str]) -> int:
        """Read the words, which ``act`` finds as they are in ``args.words``, and act."""
        parser = Parser(self.name, self.purpose, self.epilog)
        for given in (*self.arguments, flag("--debug", "show the traceback of an error")):
            if isinstance(given, OneOf):
                group = parser.add_mutually_exclusive_group(required=given.required)
                for name, options in given.arguments:
                    group.add_argument(name, **options)
            else:
                parser.add_argument(given.name, **given.options)
        args = parser.parse_args(words, argparse.Namespace(words=list(words)))
        try:
            self.check(args)
        except InputError as error:
            parser.error(str(error))
        if self.ends_itself:
            return self.act(args)
        stopped = self.stopped.format(**vars(args))
        return ended(lambda: self.act(args), debug=args.debug, stopped=stopped)


@dataclass(frozen=True)
class Group:
    """Commands under one name: called with words, of which the first names a command."""

    name: str
    purpose: str
    epilog: str
    commands: Sequence[Command | Group]
    default: str | None = None
    """The command that takes the words where the first names none."""

    @cached_property
    def by_word(self) -> dict[str, Command | Group]:
        """Each command by the word that names it, the last of its name."""
        return {command.name.rpartition(" ")[2]: command for command in self.commands}

    def __call__(self, words: Sequence[str]) -> int:
        """Let the command that is named, or ``default``, take the words."""
        if words and words[0] in self.by_word:
            return self.by_word[words[0]](words[1:])
        kind = "subcommand" if " " in self.name else "command"
        parser = Parser(
            self.name,
            self.purpose,
            self._listing(kind),
            usage=f"{self.name} {f'[{kind.upper()}]' if self.default else kind.upper()} ...",
        )
        if words and words[0] in ("-h", "--help"):
            parser.print_help()
            raise SystemExit(0)
        if words and self.default is not None:
            self._check_is_path(words[0], parser)
            return self.by_word[self.default](words)
        wrong = "a command is missing" if kind == "command" else "arguments are missing"
        if words:
            wrong = f"{words[0]} is no {kind}"
        raise parser.refusal(
            f"{wrong}: the {kind}s are {', '.join(self.by_word)}; see {self.name} --help"
        )

    def _listing(self, kind: str) -> str:
        width = max(map(len, self.by_word))
        lines = [f"  {word:<{width}}  {command.purpose}" for word, command in self.by_word.items()]
        more = f"{self.name} {kind.upper()} --help has the arguments of each."
        return "\n".join([f"{kind}s:", *lines, "", more, "", self.epilog])

    def _check_is_path(self, word: str, parser: Parser) -> None:
        """Refuse a word that is nearly the name of a command, and no path."""
        meant = get_close_matches(word, self.by_word, 1, 0.75)
        if meant and not Path(word).exists():
            raise parser.refusal(
                f"{word} is no subcommand of {self.name} and no path that exists: did you mean "
                f"{meant[0]}?"
            )


def check_ranks(args: argparse.Namespace) -> None:
    """Refuse a number of processes, ``--ranks``, that cannot be started."""
    if args.ranks < 1:
        raise InputError(f"--ranks ({args.ranks}) must be at least 1")
    if args.ranks > 1 and "RANK" in os.environ:
        raise InputError(f"--ranks ({args.ranks}) must be 1 under torchrun, which starts the ranks")


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
