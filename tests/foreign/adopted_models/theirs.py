"""The tests of models in the source distribution of transformers, as modules."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.foreign.recorder import SOURCE

NAME = "transformers_tests"
# The distribution has the tests at the top of the folder, and not those in folders below: a class
# without tests stands for each mixin that these would have.
_BELOW = {
    "exporters": {},
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "generation": {},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
}


def model_tester_mixin() -> Any:
    """``ModelTesterMixin``, imported from the source."""
    folder = Path(os.environ[SOURCE]) / "tests"
    package = ModuleType(NAME)
    package.__path__ = [str(folder)]
    sys.modules[NAME] = package
    for name, contents in _BELOW.items():
        if not (folder / name.replace(".", "/")).exists() or "." in name:
            module = ModuleType(f"{NAME}.{name}")
            module.__path__ = []
            vars(module).update(contents)
            sys.modules[module.__name__] = module
    return importlib.import_module(f"{NAME}.test_modeling_common").ModelTesterMixin
