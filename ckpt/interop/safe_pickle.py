"""Reading the contents of a pickle without running what the pickle names.

Unpickling runs what the pickle names. Here a class that is on a short list becomes an inert record
of its arguments and its state, and any other name is an error: nothing of an untrusted file is ever
executed or imported.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from ckpt.errors import CheckpointError


class Inert:
    """An object of a pickle: what it was called with, and its state."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Inert:
        """Called by a pickle with the arguments of the class that the record stands for."""
        self = object.__new__(cls)
        self.args, self.state = args, None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str, default: Any = None) -> Any:
        """A field of an object whose state is a table."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


Admit = Callable[[str, str], Any]
"""From a module and a name to the class that stands for them; None where the name is refused."""


def admitted(names: Mapping[str, tuple[str, ...]]) -> Admit:
    """Inert classes of these names, by module."""
    kinds = {(module, name): type(name, (Inert,), {}) for module in names for name in names[module]}
    return lambda module, name: kinds.get((module, name))


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, admit: Admit) -> None:
        super().__init__(io.BytesIO(data))
        self.admit = admit

    def find_class(self, module: str, name: str) -> Any:
        found = self.admit(module, name)
        if found is None:
            raise CheckpointError(f"it names {module}.{name}, which is never run")
        return found

    def persistent_load(self, pid: Any) -> Any:
        return pid


def read_pickle(data: bytes, where: str, *admit: Admit) -> Any:
    """What a pickle holds, with inert objects for the classes that one of ``admit`` knows.

    Raises CheckpointError, beginning with ``where``, for any other class and for what is no pickle.
    """

    def any_of(module: str, name: str) -> Any:
        return next((found for each in admit if (found := each(module, name)) is not None), None)

    try:
        return _Unpickler(data, any_of).load()
    except CheckpointError as error:
        raise CheckpointError(f"{where} is refused: {error}") from None
    except Exception as error:  # whatever a pickle that was made up can bring about
        raise CheckpointError(f"{where} is no pickle of this kind: {error}") from None
