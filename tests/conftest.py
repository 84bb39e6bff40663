"""Threads are fixed before torch loads, so that sums have one order; and tests in any order."""

import os
import random
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests import lanes
from tests.support import writers
from tests.support.ranks import end_ranks

writers.serve_writers()
lanes.BEFORE_WORK.append(writers.serve_writers)
lanes.AFTER_WORK.append(writers.end_serving)


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


def pytest_unconfigure() -> None:
    writers.end_serving()


@pytest.fixture(autouse=True)
def _tests_know_nothing_of_each_other() -> Iterator[None]:
    """Random numbers do not depend on what ran before, and no rank outlives its test."""
    torch.manual_seed(0)
    random.seed(0)
    yield
    end_ranks()
