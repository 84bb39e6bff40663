"""Python imports this file when it starts with this folder in PYTHONPATH: the device is there from
the first line of a process, and in all that it starts, as ranks under torchrun.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[4]))

from tests.support.fake_gpu import values

if values.is_wanted():
    values.install()
