"""Tuning: which parameters of a model learn, and adapters that learn in their place."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
