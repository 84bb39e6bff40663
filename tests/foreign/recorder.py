"""A plugin of pytest: a line of JSON for each case of another project's suite."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.foreign.exclusions import read_exclusions
from tests.foreign.touching import touches

RECORD = "FOREIGN_RECORD"
"""The environment variable with the file that gets the lines."""
EXCLUSIONS = "FOREIGN_EXCLUSIONS"
SOURCE = "FOREIGN_SOURCE"
_RANK = ["passed", "skipped", "failed"]


class Recorder:
    def __init__(self) -> None:
        self.path = Path(os.environ[RECORD])
        self.outcomes: dict[str, tuple[str, str]] = {}
        self.read = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        unrun = [line for line in read_exclusions(Path(os.environ[EXCLUSIONS])) if not line.run]
        for item in items:
            if any(line.matches(case_of(item)) for line in unrun):
                item.add_marker(pytest.mark.skip("excluded, and not run"))
                item.user_properties.append(("unrun", True))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(
                f"{Path(report.nodeid).name}::collection", "failed", report.longreprtext, {}
            )

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        case = case_of(item)
        self.outcomes[item.nodeid] = "passed", ""
        yield
        outcome, why = self.outcomes.pop(item.nodeid)
        if dict(item.user_properties).get("unrun"):
            outcome = "unrun"
        self.read, touched = touches(self.read)
        self._write(case, outcome, why, touched)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid not in self.outcomes:
            return
        now = self.outcomes[report.nodeid][0]
        outcome = "skipped" if report.skipped else "failed" if report.failed else "passed"
        if _RANK.index(outcome) > _RANK.index(now):
            self.outcomes[report.nodeid] = outcome, _why(report)

    def _write(self, case: str, outcome: str, why: str, touched: dict[str, int]) -> None:
        line = {"case": case, "outcome": outcome, "why": why[-2000:], "touched": touched}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def case_of(item: pytest.Item) -> str:
    """The name of a case: its file within the source where it is the other project's, and what
    pytest calls it there."""
    _, _, rest = item.nodeid.partition("::")
    source = os.environ.get(SOURCE)
    if source and item.path.is_relative_to(source):
        return f"{item.path.relative_to(source).as_posix()}::{rest}"
    return rest


def _why(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return report.longreprtext


def pytest_configure(config: pytest.Config) -> None:
    if RECORD in os.environ:
        config.pluginmanager.register(Recorder(), "foreign recorder")
