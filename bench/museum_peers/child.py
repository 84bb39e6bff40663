"""One case in an interpreter of its own.

    python -m bench.museum_peers.child MODULE FUNCTION ANSWER REQUIREMENT...

The file ANSWER gets ``{"right": ..., "seen": ...}``, or ``{"error": ...}`` where the peer could not
be asked. A wrong answer is what the peer returned, and never an exception.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.museum_peers.frame import Answer


def ask(module: str, function: str, requirements: list[str]) -> dict[str, Any]:
    """The answer of one case, after a look at which versions this interpreter imports."""
    try:
        for requirement in requirements:
            name, _, expected = requirement.partition("==")
            if version(name).partition("+")[0] != expected.partition("+")[0]:
                return {"error": f"{name} {version(name)} is imported instead of {expected}"}
        answer = getattr(importlib.import_module(module), function)()
    except BaseException as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    if not isinstance(answer, Answer):
        return {"error": f"the case returned {type(answer).__name__} instead of an Answer"}
    return {"right": bool(answer.right), "seen": answer.seen}


if __name__ == "__main__":
    module, function, path, *requirements = sys.argv[1:]
    Path(path).write_text(json.dumps(ask(module, function, requirements)))
