"""Process groups in deep copies and in pickles of the objects that hold them."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, NoReturn, Self


class LostGroup:
    """Stands for the process group of an unpickled object; any use of the group is an error."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            "this layer was unpickled without its process groups, which exist in one process only: "
            "call parallel.apply_expert_parallel(model, ep_mesh) to give it new ones"
        )


class HoldsGroups:
    """A process group is a handle of this process: a deep copy shares it, a pickle leaves it out.

    An unpickled object has a :class:`LostGroup` in the place of each group.
    """

    GROUPS: ClassVar[tuple[str, ...]] = ()
    """The attributes that are process groups or None."""

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self).copy()
        for name in self.GROUPS:
            state[name] = None if state[name] is None else LostGroup()
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        for name, value in vars(self).items():
            vars(new)[name] = value if name in self.GROUPS else copy.deepcopy(value, memo)
        return new
