"""What is theirs: the modules that this folder lacks, such as ``world``."""

import os
from pathlib import Path

from tests.foreign.recorder import SOURCE

__path__.append(str(Path(os.environ[SOURCE]) / "streaming" / "base"))
