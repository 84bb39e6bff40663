"""What the ranks of a burn-in tell each other, over the store: a rank that hangs is seen there."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

_POLL_SECONDS = 0.01


class MissingRanksError(RuntimeError):
    """Ranks have not answered in time.

    Args:
        check: the check in which the burn-in ended.
        ranks: those that did not answer.
    """

    def __init__(self, check: str, ranks: Sequence[int]) -> None:
        super().__init__(f"no answer in {check} from ranks {list(ranks)}")
        self.check, self.ranks = check, list(ranks)


class Board:
    """Answers of all ranks, by name of a question. Rank 0 collects them for all.

    Args:
        store: of all ranks, under a prefix that nothing else uses.
        rank: this rank.
        world: the number of ranks.
        seconds: that all ranks may take for each answer.
    """

    def __init__(self, store: Store, rank: int, *, world: int, seconds: float) -> None:
        self.store, self.rank, self.world = store, rank, world
        self.seconds = seconds
        self._asked = 0

    def share(self, check: str, mine: Any) -> list[Any]:
        """The answers of all ranks, on all ranks, in the order of ranks.

        Every rank calls this method with the same ``check``. Answers are JSON.

        Raises MissingRanksError on every rank that has answered, where others have not.
        """
        number, self._asked = self._asked, self._asked + 1
        self.store.set(f"{number}/{self.rank}", json.dumps(mine))
        if self.rank == 0:
            missing, found = self._wait(number), []
            if not missing:
                keys = [f"{number}/{rank}" for rank in range(self.world)]
                found = [json.loads(text) for text in self.store.multi_get(keys)]
            self.store.set(f"{number}/all", json.dumps([missing, found]))
        else:
            self._wait_for_rank_0(f"{number}/all")
        missing, found = json.loads(self.store.get(f"{number}/all"))
        if missing:
            raise MissingRanksError(check, missing)
        return list(found)

    def _wait(self, number: int) -> list[int]:
        """The ranks that have not answered within the limit."""
        left = {f"{number}/{rank}": rank for rank in range(self.world)}
        until = time.monotonic() + self.seconds
        while left and time.monotonic() < until:
            # One question for all first: it is the common case.
            if self.store.check(list(left)):
                return []
            time.sleep(_POLL_SECONDS)
        return sorted(rank for key, rank in left.items() if not self.store.check([key]))

    def _wait_for_rank_0(self, key: str) -> None:
        """Rank 0 answers within its own limit, which may begin as late as this rank's ends."""
        until = time.monotonic() + 3 * self.seconds
        while not self.store.check([key]):
            if time.monotonic() > until:
                raise MissingRanksError("what rank 0 collects", [0])
            time.sleep(_POLL_SECONDS)
