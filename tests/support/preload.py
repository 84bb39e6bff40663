"""Imported once by the server that test ranks fork from."""

import tools.pretrain  # noqa: F401 - with all that a rank of a run imports
