"""What a case of the museum is: a published defect, a claim on Convoy, and an edit that breaks it.

A case is a test function with :func:`case` above it. Its docstring is the claim, one sentence. The
edits put the defect, or its nearest relative, into Convoy: ``python -m tests.museum --prove`` makes
them in a copy of the repository, and the case must fail there.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).parents[2]
Test = TypeVar("Test", bound=Callable[..., None])
_THREAD = re.compile(r"[\w.-]+/[\w.-]+#\d+")
_ATTRIBUTE = "museum_case"


@dataclass(frozen=True)
class Edit:
    """A change of one file of Convoy that brings a defect in."""

    file: str
    """From the repository's root."""
    old: str
    """Text that is in the file exactly once."""
    new: str

    def apply(self, root: Path) -> None:
        """Change the file under ``root``; ValueError where ``old`` is not there exactly once."""
        path = root / self.file
        text = path.read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has {count} times, and must have once: {self.old!r}")
        path.unlink()  # the file may be a link to another tree's
        path.write_text(text.replace(self.old, self.new))


@dataclass(frozen=True)
class Case:
    """A published defect and what Convoy's test of it is."""

    thread: str
    """``owner/repository#number`` on GitHub."""
    went_wrong: str
    """One sentence."""
    edits: tuple[Edit, ...]
    test: Callable[..., None]

    @property
    def repository(self) -> str:
        """``owner/repository``."""
        return self.thread.partition("#")[0]

    @property
    def url(self) -> str:
        """GitHub leads from an issue's address to a pull request of this number."""
        return f"https://github.com/{self.thread.replace('#', '/issues/')}"

    @property
    def file(self) -> str:
        """The test's file, from the repository's root."""
        return self.test.__module__.replace(".", "/") + ".py"

    @property
    def node(self) -> str:
        """The test as pytest names it."""
        return f"{self.file}::{self.test.__name__}"

    @property
    def claim(self) -> str:
        """What the test holds true of Convoy."""
        return " ".join((inspect.getdoc(self.test) or "").split())


def case(thread: str, went_wrong: str, *edits: Edit) -> Callable[[Test], Test]:
    """Make a test function a case of the museum.

    Args:
        thread: ``owner/repository#number`` of the issue or pull request that has the defect.
        went_wrong: the defect in one sentence of our own words.
        edits: the changes that bring the defect into Convoy; at least one.
    """
    if not _THREAD.fullmatch(thread):
        raise ValueError(f"thread ({thread}) must be owner/repository#number")
    if not edits:
        raise ValueError(f"the case of {thread} must have an edit that brings the defect in")

    def mark(test: Test) -> Test:
        setattr(test, _ATTRIBUTE, Case(thread, went_wrong, edits, test))
        marked: Test = pytest.mark.museum(test)
        return marked

    return mark


def themes() -> dict[str, list[Case]]:
    """The cases by the theme of their files, which is the first line of a file's docstring.

    Files of one theme are one entry. Themes are sorted by the names of their files.
    """
    by_theme: dict[str, list[Case]] = {}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"tests.museum.{path.stem}")
        cases = [
            getattr(value, _ATTRIBUTE)
            for value in vars(module).values()
            if hasattr(value, _ATTRIBUTE) and value.__module__ == module.__name__
        ]
        if cases:
            theme = (module.__doc__ or "").partition("\n")[0].rstrip(".")
            by_theme.setdefault(theme, []).extend(cases)
    return by_theme


def all_cases() -> list[Case]:
    """Every case, theme after theme."""
    return [each_case for cases in themes().values() for each_case in cases]
