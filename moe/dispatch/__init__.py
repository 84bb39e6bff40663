"""Dispatchers: routed tokens travel to the ranks of their experts, and back."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
