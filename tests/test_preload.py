"""What ranks fork from has everything: the fork server is silent about a module that is missing."""

from __future__ import annotations

import sys

from tests.support.ranks import run_ranks


def preloaded(rank: int) -> tuple[bool, bool]:
    return "tests.support.preload" in sys.modules, "pretrain.train.entry" in sys.modules


def test_the_server_of_ranks_has_imported_all_it_was_told_to():
    assert run_ranks(preloaded, 1, group=False) == [(True, True)]
