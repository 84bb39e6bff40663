"""Threads are fixed before torch loads, so that sums have one order; and tests in any order."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests import lanes
from tests.support import writers
from tests.support.fake_gpu import build, values
from tests.support.ranks import end_ranks, serve_ranks, share_server

LONG_TESTS = Path(__file__).with_name("long_tests.txt")

writers.serve_writers()
lanes.BEFORE_COLLECTION.append(serve_ranks)
lanes.BEFORE_WORK.append(share_server)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="run files, and the tests in each, in any order"
    )


def pytest_configure() -> None:
    if values.is_wanted() and not values.is_installed():
        if why := build.why_not():
            raise pytest.UsageError(why)
        values.install()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lanes.mark_long(config, items, LONG_TESTS)
    seed = config.getoption("--shuffle")
    if seed is None:
        return
    chooser = random.Random(seed)
    files = sorted({item.path for item in items})
    chooser.shuffle(files)
    chooser.shuffle(items)
    items.sort(key=lambda item: files.index(item.path))  # their fixtures are made once


def pytest_unconfigure() -> None:
    writers.end_serving()


@pytest.fixture(autouse=True)
def _tests_know_nothing_of_each_other() -> Iterator[None]:
    """Random numbers do not depend on what ran before, and no rank outlives its test."""
    torch.manual_seed(0)
    random.seed(0)
    yield
    end_ranks()
