"""``convoy pretrain``, from a checkout: ``torchrun --nproc-per-node 8 tools/pretrain.py SPEC``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python searches a script's own folder first, where pretrain.py has the name of the package.
    tools = Path(__file__).resolve().parent
    sys.path[:] = [str(tools.parent), *(p for p in sys.path if Path(p).resolve() != tools)]

    from convoy.commands import main

    raise SystemExit(main("pretrain"))
