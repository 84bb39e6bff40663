"""``convoy inspect``, from a checkout."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python searches a script's own folder first, where pretrain.py has the name of the package.
    tools = Path(__file__).resolve().parent
    sys.path[:] = [str(tools.parent), *(p for p in sys.path if Path(p).resolve() != tools)]

    from convoy.commands import main

    raise SystemExit(main("inspect"))
