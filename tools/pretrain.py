"""``convoy pretrain``, from a checkout: ``torchrun --nproc-per-node 8 tools/pretrain.py SPEC``."""

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "pretrain":
    # Python searches a script's own folder first. So every script of this folder that imports the
    # package `pretrain` gets this file, which leaves its name to the package: nothing else here
    # has the name of a package.
    sys.path.remove(str(Path(__file__).parent))
    del sys.modules[__name__]
    import_module(__name__)

if __name__ == "__main__":
    from convoy.commands import main

    raise SystemExit(main("pretrain"))
