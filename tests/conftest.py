"""Threads are fixed before torch loads, so that sums have one order; and tests in any order."""

import os
import random
from collections.abc import Iterator

import pytest

from tests.dist import end_ranks

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="run files, and the tests in each, in any order"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--shuffle")
    if seed is None:
        return
    chooser = random.Random(seed)
    files = sorted({item.path for item in items})
    chooser.shuffle(files)
    chooser.shuffle(items)
    items.sort(key=lambda item: files.index(item.path))  # their fixtures are made once


@pytest.fixture(autouse=True)
def _no_rank_outlives_its_test() -> Iterator[None]:
    yield
    end_ranks()
