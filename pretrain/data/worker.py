"""``python -m pretrain.data.worker SETTINGS``: a process that makes parts.

SETTINGS is a JSON file. Each line of the standard input is a unit, ``[NUMBER, UNIT]``; each line
of the standard output is its counts, or ``{"error": TEXT, "errno": NUMBER}``. The process ends with
its input, so that it outlives no preparation, however that ends.
"""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from pretrain.data.parts import PartSettings, PartWriter
from pretrain.data.unit import Unit
from pretrain.errors import InputError


def main(settings: Path) -> None:
    """Make the parts that the input names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the preparation
    writer = PartWriter(PartSettings(**json.loads(settings.read_text())))
    for line in sys.stdin:
        number, unit = json.loads(line)
        try:
            answer = asdict(writer.make(number, Unit.from_json(unit)))
        except InputError as error:
            answer = {"error": str(error)}
        except OSError as error:
            answer = {"error": f"{error.strerror}: {error.filename}", "errno": error.errno or 0}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
