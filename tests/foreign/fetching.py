"""Others' tests, from the package registry or from a checkout, into the ignored build/foreign."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from tests.foreign.suites import Suite

BUILD = Path(__file__).parents[2] / "build" / "foreign"


class NotHereError(Exception):
    """Tests that are in no package, and no checkout was given. The message says what to do."""


def source_of(suite: Suite, checkouts: Sequence[Path]) -> Path | None:
    """The folder with a suite's tests; None where they are in an installed package.

    Raises NotHereError where they are in no package, and in none of ``checkouts``.
    """
    if suite.sdist:
        return _sdist(suite.sdist)
    if not suite.repository:
        return None
    for checkout in checkouts:
        if all((checkout / path).exists() for path in suite.files):
            return checkout.resolve()
    raise NotHereError(
        f"{suite.name} must have --source with a checkout of {suite.repository} at {suite.commit}: "
        f"no package has {suite.files[0]}"
    )


def packages_of(suite: Suite) -> Path:
    """A folder with the packages that a suite's tests import beside the installed ones."""
    target = BUILD / "packages" / suite.name
    ready = target / ".ready"
    wanted = "\n".join(suite.wheels)
    if suite.wheels and not (ready.exists() and ready.read_text() == wanted):
        shutil.rmtree(target, ignore_errors=True)
        _pip("install", "--no-deps", "--target", str(target), *suite.wheels)
        ready.write_text(wanted)
    return target


def _sdist(requirement: str) -> Path:
    name, _, version = requirement.partition("==")
    folder = BUILD / f"{name}-{version}"
    if not folder.exists():
        archives = BUILD / "archives"
        _pip("download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation",
             "--dest", str(archives), requirement)  # fmt: skip
        draft = BUILD / f".{name}-{os.getpid()}"
        # An archive may write a name with underscores.
        (path,) = archives.glob(f"{name.replace('-', '[-_]')}-{version}.tar.gz")
        with tarfile.open(path) as archive:
            archive.extractall(draft, filter="data")
        (draft / path.name.removesuffix(".tar.gz")).rename(folder)
        draft.rmdir()
    return folder


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    subprocess.run(command, check=True)
