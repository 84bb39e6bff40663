"""The version of Convoy. It is known where the packages are importable and not installed, as on a
PYTHONPATH; a test compares the constant with pyproject.toml."""

from __future__ import annotations

VERSION = "0.1.0"
