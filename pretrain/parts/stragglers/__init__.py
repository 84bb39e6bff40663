"""Ranks that are slow as a whole: how they are found, and what is done about them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
