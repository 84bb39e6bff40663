"""Detection of ranks that are stuck or lost, of faulty devices, and of collectives that differ."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
