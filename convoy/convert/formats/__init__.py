"""Training checkpoints of other projects, read and written: one file for each format."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
