"""What tests of several files about checkpoints start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import memory_folder
from tests.support.writers import own_writers


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_folder() as folder:
        yield Path(folder) / "a run's checkpoints, ünïcode"


@pytest.fixture
def real_writers() -> Iterator[None]:
    """Writer processes are started as in the product, and not forked."""
    with own_writers():
        yield
