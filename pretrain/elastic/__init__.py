"""The same run on other ranks: layouts for the ranks that there are, and spares."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
