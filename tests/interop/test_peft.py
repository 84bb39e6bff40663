"""The released peft on adopted models, and Convoy's adapters in its files."""

from __future__ import annotations

import pytest

from tests.support.peers import run_script

pytestmark = [pytest.mark.slow, pytest.mark.peers, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("what", "ranks"), [("files", 1), ("loaded", 1), ("attention", 1), ("ranks", 2)]
)
def test_peft(what, ranks, tmp_path):
    run_script("peft_adapters", "peft", what, tmp_path, ranks=ranks)
