"""In pytest and in each rank that a case starts: torch's checkpoints are Convoy's.

Python imports this module in every process. A rank is a new process that imports the case again.
"""

import os

if "FOREIGN_RECORD" in os.environ:
    from tests.foreign.torch_checkpoints.over_ckpt import replace

    replace()
