"""The planner's memory is that of recipes at full size on fake GPUs, counted byte by byte.

A case takes 15 to 120 s, and up to 3 GB of the host's memory.
"""

from __future__ import annotations

import pytest

from tests.fake_gpu import recipes
from tests.fake_gpu.measure import measured
from tests.support.fake_gpu.build import why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is a fake GPU"),
]


@pytest.mark.parametrize("name", recipes.CASES)
def test_a_recipe_takes_the_planned_memory(name):
    memory = measured("recipes", [name])[name]["memory"]
    ratio = memory["planned"] / memory["peak"]
    assert 0.96 <= ratio <= 1.13, memory
