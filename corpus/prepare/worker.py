"""``python -m corpus.prepare.worker SETTINGS``: a process that makes parts, or trains a tokenizer.

SETTINGS is a JSON file: ``{"parts": PART_SETTINGS}`` or ``{"tokenizer": TOKENIZER_SETTINGS}``.
Each line of the standard input is a request: ``[NUMBER, UNIT]`` for a part, ``[PATH, UNITS]`` for
the file of a tokenizer. Each line of the standard output is an answer: the counts of a part, ``{}``
for a tokenizer, or ``{"error": TEXT, "errno": NUMBER}``.

The process ends with its input, in the middle of a request too, so that it outlives no preparation,
however that ends.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from corpus.documents import Unit
from corpus.errors import InputError
from corpus.prepare.parts import PartSettings, PartWriter
from corpus.tokenizer import TokenizerSettings, tokenizer_of_units


def main(settings: Path) -> None:
    """Answer the requests of the input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the preparation
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    answer_to = _maker(json.loads(settings.read_text()))
    while True:
        request = json.loads(requests.get())
        try:
            answer = answer_to(*request)
        except InputError as error:
            answer = {"error": str(error)}
        except OSError as error:
            answer = {"error": f"{error.strerror}: {error.filename}", "errno": error.errno or 0}
        print(json.dumps(answer), flush=True)


def _read_requests(requests: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


def _maker(settings: dict[str, Any]) -> Callable[[Any, Any], dict[str, Any]]:
    """What makes the answer to a request."""
    if "tokenizer" in settings:
        trained_with = TokenizerSettings(**settings["tokenizer"])

        def train(path: str, units: list[dict[str, Any]]) -> dict[str, Any]:
            tokenizer = tokenizer_of_units([Unit.from_json(unit) for unit in units], trained_with)
            Path(path).write_bytes(tokenizer.to_str().encode())
            return {}

        return train
    writer = PartWriter(PartSettings(**settings["parts"]))
    return lambda number, unit: asdict(writer.make(number, Unit.from_json(unit)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
